"""Child processes that never outlive their parent.

Each child is a session of its own, on a leash: a shell that blocks on a pipe which only the parent
holds open, and kills the whole session when the pipe closes, be it by SIGKILL of the parent. So an
engine's workers go as well, which no signal to the engine alone would reach.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

_LEASH = 'exec 3<&0; (cat <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'


class NotReady(Exception):
    """A process died or took too long before it could serve; the message ends with its log."""


class StillAlive(Exception):
    """Processes of a session outlived SIGKILL."""


class Child:
    """One command and whatever it starts. Its output goes into `folder`/`name`.log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start it; `environment` is all that it gets."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        self._ended = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603
                ["/bin/sh", "-c", _LEASH, name, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def members(self) -> list[int]:
        """The pids of the command and all that it started, the leash included."""
        return [] if self._ended else session_members(self.process.pid)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_for(self, url: str, deadline: float) -> None:
        """Poll until the URL answers 200. Raises `NotReady` if the process dies or the time is up."""
        end = time.monotonic() + deadline
        while not answers(url):
            if (code := self.process.poll()) is not None:
                raise NotReady(f"{self.name} exited with {code}; its log ends:\n{self.tail()}")
            if time.monotonic() > end:
                raise NotReady(f"{url} not ready after {deadline:.0f} s; the log of {self.name} ends:\n{self.tail()}")
            time.sleep(0.1)

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        if not self._ended:
            self.process.terminate()

    def stop(self, grace: float = 15) -> None:
        """Ask it to end; after the grace, and for whatever is left, SIGKILL."""
        if self._ended:
            return
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()

    def kill(self, deadline: float = 10) -> None:
        """SIGKILL the whole session and see that nothing is left of it. Raises `StillAlive`."""
        if self._ended:
            return
        end = time.monotonic() + deadline
        while members := self.members:
            if time.monotonic() > end:
                raise StillAlive(f"{self.name}: {members} outlived SIGKILL by {deadline:.0f} s")
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        self._ended = True


def session_members(session: int) -> list[int]:
    """The pids of a session, without those that are dead and only wait to be reaped."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def answers(url: str) -> bool:
    """Whether a GET of the URL is answered with 200."""
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def cannot_listen(host: str, port: int) -> str | None:
    """Why one cannot listen there; None if one can."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return error.strerror or str(error)
