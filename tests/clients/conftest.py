"""Fleets as their users start them, by `moongate up`, for clients that know nothing of Moongate.

Where no Mooncake master is installed every test here is skipped.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway import commands
from gateway.commands import NotInstalled
from gateway.processes import free_port

HERE = Path(__file__).resolve().parent
READY = 150.0
"""Seconds, more than `moongate up` itself gives its processes."""
ENDS = 30.0
MODEL = "moongate-sim"

Kill = Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What `moongate up` has printed of a fleet that is up."""

    url: str
    key: str
    other_key: str
    """Another tenant's."""
    folder: Path

    @property
    def openai(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    try:
        commands.master(1, 2)
    except NotInstalled as error:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    for reason in sorted({report.longrepr[2] for report in skipped if "tests/clients/" in report.nodeid}):
        terminalreporter.write_line(f"tests/clients was skipped in part: {reason}")


@contextlib.contextmanager
def up(folder: Path, *arguments: str) -> Iterator[Fleet]:
    """A fleet, for as long as the block runs."""
    port = free_port()
    log = folder / "up.log"
    command = [sys.executable, "-m", "gateway", "up", "--port", str(port), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder)}
        )
    try:
        end = time.monotonic() + READY
        while "Ctrl-C ends everything" not in (said := log.read_text()):
            assert process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.05)
        keys = re.findall(r"^  team-\w: (sk-\w+)$", said, re.MULTILINE)
        place = re.search(r"logs are in (\S+)", said)
        assert place is not None, said
        yield Fleet(f"http://127.0.0.1:{port}", keys[0], keys[1], Path(place[1]))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(ENDS) == 0, log.read_text()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two quick engines that everybody shares."""
    quick = ("--engine-arg=--time-scale", "--engine-arg=0.2")
    with up(tmp_path_factory.mktemp("fleet"), *quick) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Engines, as slow as real ones, for tests that end one each."""
    with up(tmp_path_factory.mktemp("doomed"), "--engines", "7") as fleet:
        yield fleet


@pytest.fixture(scope="session")
def kill() -> Kill:
    """End an engine at once: the one that an answer's x-moongate-route names."""

    def end(route: str | None) -> None:
        found = re.match(r"engine=127\.0\.0\.1:(\d+);", route or "")
        assert found is not None, route
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = place.read_bytes().split(b"\0")
                if b"connector.simulated" in words and found[1].encode() in words and words[0] != b"/bin/sh":
                    os.kill(int(place.parent.name), signal.SIGKILL)
                    return
        pytest.fail(f"no process of {route} was found")

    return end
