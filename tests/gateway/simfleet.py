"""Simulated engines over a real Mooncake master, for gateways in the test's own process."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector.simulated.model import NAME, make
from gateway import commands
from gateway.processes import Child
from policies.interface import Role
from tests.gateway.house import settings
from tests.real.stack import Master, free_port, inherited, killed_unless_ready, start_master


@dataclass
class Fleet:
    """Simulated engines over one pool."""

    folder: Path
    logs: Path
    master: Master
    _stack: ExitStack = field(repr=False)
    _children: dict[str, tuple[Child, Sequence[str | Path]]] = field(default_factory=dict, repr=False)

    def engine(self, *flags: str, events: bool = False, replay: bool = False, role: Role = "both") -> dict[str, Any]:
        """Start one; what a configuration says of it."""
        (found,) = self.engines(1, *flags, events=events, replay=replay, role=role)
        return found

    def engines(
        self, count: int, *flags: str, events: bool = False, replay: bool = False, role: Role = "both"
    ) -> list[dict[str, Any]]:
        """Start several, side by side."""
        found = [self._engine(flags, events=events, replay=replay, role=role) for _ in range(count)]
        for engine in found:
            self._ready(engine["url"])
        return found

    def stop(self, engine: dict[str, Any]) -> None:
        """End an engine at once."""
        self._children[engine["url"]][0].kill()

    def restart(self, engine: dict[str, Any], *flags: str) -> None:
        """End an engine at once and start it anew, in its place; `flags` come after those that it had."""
        self.stop(engine)
        self._start(engine["url"], [*self._children[engine["url"]][1], *flags])
        self._ready(engine["url"])

    def terminate(self) -> None:
        """Ask all engines to end, side by side."""
        for child, _ in self._children.values():
            child.terminate()

    def _engine(self, flags: Sequence[str], *, events: bool, replay: bool, role: Role) -> dict[str, Any]:
        port, events_port, replay_port = free_port(), free_port() if events else None, free_port() if replay else None
        command = commands.simulated(
            commands.EngineFlags(
                model=self.folder,
                name="tiny",
                port=port,
                master=self.master.rpc,
                role=role,
                block_size=16,
                events_port=events_port,
                replay_port=replay_port,
                more=("--time-scale", "0", *flags),
            )
        )
        found: dict[str, Any] = {"url": f"http://127.0.0.1:{port}", "model": "tiny", "role": role}
        self._start(found["url"], command)
        if events:
            found["kv_events"] = {"connect": f"tcp://127.0.0.1:{events_port}"}
        if replay:
            found["kv_events"]["replay"] = f"tcp://127.0.0.1:{replay_port}"
        return found

    def _start(self, url: str, command: Sequence[str | Path]) -> None:
        child = Child(f"engine-{url.rpartition(':')[2]}", command, self.logs, inherited())
        self._stack.callback(child.stop)
        self._children[url] = child, command

    def _ready(self, url: str) -> None:
        child = self._children[url][0]
        with killed_unless_ready(child):
            child.wait_for(f"{url}/health", 60)

    def tree(self, *engines: dict[str, Any], **model: Any) -> dict[str, Any]:
        """A configuration over these engines; `model` is added to what is said of their model."""
        return settings(
            *engines,
            models=[{"name": "tiny", "tokenizer": str(self.folder), "pool": "main", **model}],
            pools={"main": {"admin": [self.master.admin], "deadline_ms": 1000}},
            telemetry={"expose_routing": True},
            self_check={"audit_every": 5},
            policy={"use": "cache_aware"},
        )

    def other_template(self) -> Path:
        """The model's folder with another template."""
        folder = self.logs / "other" / NAME
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text().replace("'<|im_end|>\\n'", "'<|im_end|>\\n\\n'"))
        return folder


@contextmanager
def simulated_fleet(logs: Path) -> Iterator[Fleet]:
    """A fleet without engines yet."""
    with ExitStack() as stack:
        master = start_master(logs)
        stack.callback(master.stop)
        fleet = Fleet(make(logs / NAME), logs, master, stack)
        try:
            yield fleet
        finally:
            fleet.terminate()
