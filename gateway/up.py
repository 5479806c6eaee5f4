"""`moongate up`: a whole fleet from one command, and nothing of it left afterwards.

A Mooncake master, engines and the gateway, each a child process on the loopback. Whatever ends this
process, SIGKILL included, ends all of them.
"""

import contextlib
import hashlib
import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any, Literal

import yaml

from connector.simulated.model import make as make_model
from gateway import commands
from gateway.processes import Child, NotReady, free_port, is_free
from policies.interface import Role

Say = Callable[[str], None]

TENANTS = ("team-a", "team-b")
MASTER_SECONDS = 20.0
ENGINE_SECONDS = {"simulated": 60.0, "vllm": 900.0}
GATEWAY_SECONDS = 60.0
GRACE = 4.0
"""Seconds for a child to end by itself, before SIGKILL."""


class CannotStart(Exception):
    """The fleet cannot be started; the message says why and what to do."""


class Stopped(BaseException):
    """A signal asked for the end."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What fleet is wanted."""

    kind: Literal["simulated", "vllm"] = "simulated"
    engines: int = 2
    prefill: int = 0
    decode: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    model: Path | None = None
    """Folder of the model; a simulated engine makes a small one if there is none."""
    block_size: int = 32
    policy: str | None = None
    """None: disaggregated where there are prefill engines, else cache_aware."""
    python: Path = Path(sys.executable)
    """The interpreter that has vLLM."""
    engine_arguments: Sequence[str] = ()
    expose_routing: bool = False

    @property
    def roles(self) -> list[Role]:
        """One role for each engine."""
        roles: list[tuple[Role, int]] = [("both", self.engines)]
        if self.prefill or self.decode:
            roles = [("prefill", self.prefill), ("decode", self.decode)]
        return [role for role, count in roles for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Running:
    """A fleet that is up."""

    url: str
    model: str
    keys: Mapping[str, str]
    """API keys by tenant."""
    engines: Mapping[str, str]
    """URLs by engine id."""
    names: Mapping[str, str]
    """The processes' names by engine id."""
    children: tuple[Child, ...]
    folder: Path
    """Logs and configuration."""


def check(wanted: Wanted) -> None:
    """Refuse what cannot work, before anything is started. Raises `CannotStart`."""
    if (wanted.prefill == 0) != (wanted.decode == 0):
        raise CannotStart("--prefill and --decode go together: at least one engine of each is needed")
    if not wanted.roles:
        raise CannotStart("at least one engine is needed")
    if not is_free(wanted.host, wanted.port):
        raise CannotStart(f"port {wanted.port} of {wanted.host} is taken; choose another with --port")
    if wanted.kind == "vllm" and wanted.model is None:
        raise CannotStart("real vLLM engines need a model: --model FOLDER")
    if wanted.model is not None and not (wanted.model / "tokenizer.json").is_file():
        raise CannotStart(f"{wanted.model} is no model folder: it has no tokenizer.json")


@contextlib.contextmanager
def running(wanted: Wanted, say: Say) -> Iterator[Running]:
    """Start a fleet, and end it with the block. `say` is told of the progress.

    Raises `CannotStart`, `NotInstalled` or `NotReady`; a signal raises `Stopped`, at any moment. The
    logs are kept only where something went wrong.
    """
    check(wanted)
    children: list[Child] = []
    with _signals():
        folder = Path(tempfile.mkdtemp(prefix="moongate-"))
        try:
            yield _start(wanted, folder, children, say)
        except (CannotStart, NotReady):
            say(f"the logs are in {folder}")
            raise
        except BaseException:
            _stop(children)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        else:
            _stop(children)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            _stop(children)


def welcome(fleet: Running) -> str:
    """What to do with a fleet that is up."""
    tenant, key = next(iter(fleet.keys.items()))
    body = {"model": fleet.model, "messages": [{"role": "user", "content": "Hello"}]}
    return f"""
Moongate is up at {fleet.url}, with {len(fleet.engines)} engines; its logs are in {fleet.folder}

API key of {tenant}: {key}

  curl -s {fleet.url}/v1/chat/completions \\
    -H 'Authorization: Bearer {key}' \\
    -d '{json.dumps(body)}'

Ctrl-C ends everything."""


def wait(fleet: Running, say: Say) -> None:
    """Stay until a signal comes. Raises `CannotStart` when the gateway or the master has died."""
    dead: set[str] = set()
    while True:
        for child in fleet.children:
            code = child.process.poll()
            if code is None or child.name in dead:
                continue
            dead.add(child.name)
            if child.name in ("gateway", "master"):
                raise CannotStart(f"{child.name} exited with {code}; its log ends:\n{child.tail()}")
            say(f"{child.name} exited with {code}; the others go on")
        time.sleep(0.2)


def _start(wanted: Wanted, folder: Path, children: list[Child], say: Say) -> Running:
    """Start everything, each child on `children` from its first moment."""
    began: dict[str, float] = {}

    def child(name: str, command: commands.Command, extra: Mapping[str, str] | None = None) -> Child:
        began[name] = time.monotonic()
        started = Child(name, command, folder, {**environ, **(extra or {})})
        children.append(started)
        return started

    def ready(started: Child, url: str, seconds: float) -> None:
        started.wait_for(url, seconds)
        say(f"{started.name:<10} ready after {time.monotonic() - began[started.name]:.1f} s")

    rpc, admin = free_port(), free_port()
    master = child("master", commands.master(rpc, admin))
    ready(master, f"http://127.0.0.1:{admin}/health", MASTER_SECONDS)

    model = wanted.model or make_model(folder / "moongate-sim")
    flags = [
        commands.EngineFlags(
            model=model,
            name=model.name,
            port=free_port(),
            master=f"127.0.0.1:{rpc}",
            role=role,
            block_size=wanted.block_size,
            events_port=free_port(),
            replay_port=free_port(),
            more=wanted.engine_arguments,
        )
        for role in wanted.roles
    ]
    engines = []
    for number, flag in enumerate(flags, 1):
        name = f"engine-{number}"
        if wanted.kind == "simulated":
            engines.append(child(name, commands.simulated(flag)))
        else:
            store = commands.write_mooncake(folder / f"{name}.mooncake.json", flag.master)
            variables = commands.VLLM_ENVIRONMENT | {"MOONCAKE_CONFIG_PATH": str(store)}
            command = commands.vllm(flag, wanted.python, lookup_port=free_port())
            engines.append(child(name, command, variables))
    for engine, flag in zip(engines, flags, strict=True):
        ready(engine, f"http://127.0.0.1:{flag.port}/health", ENGINE_SECONDS[wanted.kind])

    keys = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in TENANTS}
    config = folder / "moongate.yaml"
    config.write_text(yaml.safe_dump(_config(wanted, model, flags, f"http://127.0.0.1:{admin}", keys)))
    config.chmod(0o600)
    url = f"http://{wanted.host}:{wanted.port}"
    ready(child("gateway", commands.gateway(config)), f"{url}/ready", GATEWAY_SECONDS)
    return Running(
        url=url,
        model=model.name,
        keys=keys,
        engines={f"127.0.0.1:{flag.port}": f"http://127.0.0.1:{flag.port}" for flag in flags},
        names={f"127.0.0.1:{flag.port}": engine.name for flag, engine in zip(flags, engines, strict=True)},
        children=tuple(children),
        folder=folder,
    )


def _config(
    wanted: Wanted, model: Path, flags: Sequence[commands.EngineFlags], admin: str, keys: Mapping[str, str]
) -> dict[str, Any]:
    """The gateway's configuration for this fleet."""
    return {
        "listen": {"host": wanted.host, "port": wanted.port},
        "secret": secrets.token_hex(32),
        "pools": {"main": {"admin": [admin], "deadline_ms": 50}},
        "models": [{"name": model.name, "tokenizer": str(model), "pool": "main"}],
        "engines": {
            "static": [
                {
                    "url": f"http://127.0.0.1:{flag.port}",
                    "model": flag.name,
                    "role": flag.role,
                    "kv_events": {"connect": f"tcp://127.0.0.1:{flag.events_port}"},
                }
                for flag in flags
            ]
        },
        "policy": {"use": wanted.policy or ("disaggregated" if wanted.prefill else "cache_aware")},
        "tenants": [
            {"name": tenant, "keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]}
            for tenant, key in keys.items()
        ],
        "telemetry": {"expose_routing": wanted.expose_routing},
    }


def _stop(children: list[Child]) -> None:
    """End all children, the gateway first and the master last, however many signals come meanwhile."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    last_first = children[::-1]
    for child in last_first:
        child.terminate()
    end = time.monotonic() + GRACE
    for child in last_first:
        child.stop(max(0.0, end - time.monotonic()))
    children.clear()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Signals raise `Stopped` wherever this process stands."""

    def stop(number: int, _: object) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
