"""`moongate up` as a user runs it: what it prints, and that nothing of it is left, however it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway import commands
from gateway.commands import NotInstalled
from gateway.processes import free_port
from gateway.up import CannotStart, Wanted, check

MOONGATE = [sys.executable, "-m", "gateway", "up"]
GONE = 10.0
"""Seconds within which everything must be gone."""


def installed() -> bool:
    try:
        commands.master(1, 2)
    except NotInstalled:
        return False
    return True


needs_a_master = pytest.mark.skipif(not installed(), reason="mooncake_master is not installed (the extra `pool`)")


def listeners() -> dict[str, int]:
    """Ports that anybody on this machine listens on, by the socket's inode."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


class Up:
    """A run of `moongate up`, and every process that bears its mark."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log = folder / f"up-{uuid.uuid4().hex}.log"
        self._mark = f"MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*MOONGATE, "--port", str(self.port), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, name: value, "TMPDIR": str(folder)},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """Those that run with this run's mark in their environment."""
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in environment.read_bytes():
                    found.append(int(environment.parent.name))
            except OSError:
                continue
        return found

    def ports(self) -> set[int]:
        """Ports that its processes listen on."""
        inodes = listeners()
        found = set()
        for pid in self.processes():
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    target = str(link.readlink())
                except OSError:
                    continue
                if (inode := re.fullmatch(r"socket:\[(\d+)\]", target)) and inode[1] in inodes:
                    found.add(inodes[inode[1]])
        return found

    def assert_gone(self, ports: set[int]) -> None:
        end = time.monotonic() + GONE
        while self.processes() or ports.intersection(listeners().values()):
            assert time.monotonic() < end, (self.processes(), self.said)
            time.sleep(0.05)
        self.process.wait(GONE)


@needs_a_master
def test_the_demo_predicts_every_turn_and_keeps_tenants_apart(tmp_path: Path) -> None:
    up = Up(tmp_path, "--demo")
    assert up.process.wait(120) == 0, up.said
    assert up.said.count("team-a ") == up.said.count("team-b ") == 10, up.said
    assert "20 of 20 turns exactly as predicted" in up.said
    assert "team-b's first turn, with the same system prompt, found 0 tokens of team-a's" in up.said
    assert re.search(r"[1-9]\d* from the pool", up.said)
    up.assert_gone({up.port})


@needs_a_master
def test_prefill_and_decode_apart(tmp_path: Path) -> None:
    up = Up(tmp_path, "--demo", "--prefill", "1", "--decode", "1")
    assert up.process.wait(120) == 0, up.said
    assert "20 of 20 turns exactly as predicted" in up.said
    assert "engine-1 > engine-2" in up.said


@needs_a_master
def test_what_it_prints_works_and_a_signal_ends_it(tmp_path: Path) -> None:
    up = Up(tmp_path, "--engines", "3")
    up.wait_for("Ctrl-C ends everything")
    curl = up.said[up.said.index("curl") :].partition("\n\n")[0]
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60)
    assert '"finish_reason"' in answer.stdout
    assert httpx.get(f"http://127.0.0.1:{up.port}/ready", trust_env=False).json()["engines"] == {"moongate-sim": 3}
    ports = up.ports()
    assert len(ports) > 5
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(GONE) == 0
    assert up.said.rstrip().endswith("ended")
    up.assert_gone(ports)


@needs_a_master
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["at once", "master", "engine-1", "gateway", "Ctrl-C ends everything"])
def test_a_kill_at_any_moment_leaves_nothing(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    up = Up(tmp_path)
    if moment == "at once":
        time.sleep(0.4)
    else:
        up.wait_for(moment)
    ports = up.ports() | {up.port}
    up.process.send_signal(number)
    up.assert_gone(ports)
    if number is not signal.SIGKILL and moment != "at once":
        assert not list(tmp_path.glob("moongate-*")), "its folder is gone as well"


@needs_a_master
def test_a_dead_engine_is_told_of_and_the_others_go_on(tmp_path: Path) -> None:
    up = Up(tmp_path)
    up.wait_for("Ctrl-C ends everything")
    engine = next(pid for pid in up.processes() if b"connector.simulated" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(engine, signal.SIGKILL)
    up.wait_for("the others go on", GONE)
    url = f"http://127.0.0.1:{up.port}"
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    up.process.terminate()
    up.assert_gone({up.port})


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*MOONGATE, "--port", str(port)], capture_output=True, text=True, timeout=60, check=False
        )
    assert ended.returncode == 1
    assert f"port {port} of 127.0.0.1: Address already in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Wanted(prefill=1), "--prefill and --decode go together"),
        (Wanted(decode=1), "--prefill and --decode go together"),
        (Wanted(engines=0), "at least one engine"),
        (Wanted(kind="vllm"), "need a model"),
        (Wanted(model=Path("/nowhere")), "has no tokenizer.json"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(wanted: Wanted, why: str) -> None:
    with pytest.raises(CannotStart, match=re.escape(why)):
        check(replace(wanted, port=free_port()))
