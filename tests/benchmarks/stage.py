"""What the benchmarks stand on: an upstream and the gateway as children, and what /proc says of them."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.simulated.model import make
from gateway.processes import Child, free_port

ROOT = Path(__file__).parents[2]
LAST = b"\r\n0\r\n\r\n"
"""The end of an answer in chunks, with the line before it: a head may end with 0 as well."""
KEY = "key-of-the-benchmark"
TENANT = {"name": "t", "keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Relay:
    """A process that relays, and the port it listens on."""

    port: int
    child: Child

    def cpu(self) -> float:
        """User and system seconds of the process and its children so far."""
        fields = [_proc(pid, "stat").rpartition(")")[2].split() for pid in self.child.members]
        return sum(int(each[11]) + int(each[12]) for each in fields if each) / _TICKS

    def rss(self) -> float:
        """Resident MB of the process and its children."""
        lines = [line for pid in self.child.members for line in _proc(pid, "status").splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


class Stage:
    """Starts children, all of which end with it."""

    def __init__(self, folder: Path, stop: ExitStack) -> None:
        self._folder = folder
        self._stop = stop
        self._model: Path | None = None

    @property
    def model(self) -> Path:
        """A folder with a tokenizer."""
        if self._model is None:
            self._model = make(self._folder / "moongate-sim")
        return self._model

    def upstream(self, events: int, pause: float) -> str:
        """The URL of an engine and master whose streams have so many events with so many seconds between them."""
        port = str(free_port())
        relay = self.module("upstream", "/health", "tests.benchmarks.upstream", port, str(events), str(pause))
        return f"http://127.0.0.1:{relay.port}"

    def gateway(self, name: str, engine: str, model: Path | None = None, **sections: Any) -> Relay:
        """A gateway before one engine, whose URL is the pool's master as well; sections add to its configuration."""
        port = free_port()
        path = self._folder / f"{name}.yaml"
        path.write_text(json.dumps({**settings(port, engine, model), **sections}))
        return self.start(name, port, "/ready", [sys.executable, "-m", "gateway", "serve", "--config", path])

    def module(self, name: str, health: str, module: str, port: str, *arguments: str) -> Relay:
        """A module of the project that takes its port first."""
        return self.start(name, int(port), health, [sys.executable, "-m", module, port, *arguments])

    def start(self, name: str, port: int, health: str, command: Sequence[str | Path]) -> Relay:
        """Any command, once its health path answers."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        child = self._stop.enter_context(Child(name, command, self._folder, environment))
        child.wait_for(f"http://127.0.0.1:{port}{health}", 60)
        return Relay(port, child)


@contextmanager
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stop:
        yield Stage(Path(folder), stop)


def settings(port: int, engine: str, model: Path | None) -> Mapping[str, object]:
    return {
        "listen": {"port": port},
        "secret": "a secret",
        "pools": {"main": {"admin": [engine], "deadline_ms": 200}},
        "models": [{"name": "tiny", "pool": "main", "tokenizer": str(model) if model else None}],
        "engines": {"static": [{"url": engine, "model": "tiny"}]},
        "tenants": [TENANT],
        "self_check": {"audit_every": 0, "calibrate": False},  # the upstream tells no ids
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def say(text: str) -> None:
    """Tell of progress."""
    print(text, file=sys.stderr, flush=True)


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # it has ended
        return ""
