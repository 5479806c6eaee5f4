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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from connector.simulated.model import make as make_model
from gateway import commands
from gateway.processes import Child, NotReady, cannot_listen, free_port
from policies.interface import Role
from policies.load import load as load_policy

Say = Callable[[str], None]

QUESTION = (
    "Here is a paragraph that is long enough for a few blocks of the cache. A block is what an engine keeps "
    "of a prompt, so many tokens at a time, and what it can take up again when the same words come back. "
    "Which of these blocks does the engine have to compute when I ask you the very same thing once more?"
)
TENANTS = ("team-a", "team-b")
MASTER_SECONDS = 20.0
ENGINE_SECONDS = {"simulated": 60.0, "vllm": 900.0}
GATEWAY_SECONDS = 60.0
COMPARE_SECONDS = 60.0
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
    """None: disaggregated where there are prefill engines, else cost."""
    python: Path = Path(sys.executable)
    """The interpreter that has vLLM."""
    engine_arguments: Sequence[str] = ()

    @property
    def chosen_policy(self) -> str:
        return self.policy or ("disaggregated" if self.prefill else "cost")

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
    policy: str
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
    """Refuse what cannot work, before anything is started. Raises `CannotStart` or `BadPolicy`."""
    if (wanted.prefill == 0) != (wanted.decode == 0):
        raise CannotStart("--prefill and --decode go together: at least one engine of each is needed")
    if not wanted.roles:
        raise CannotStart("at least one engine is needed")
    if trouble := cannot_listen(wanted.host, wanted.port):
        raise CannotStart(f"cannot listen on port {wanted.port} of {wanted.host}: {trouble}; try another --port")
    load_policy(wanted.chosen_policy, {})
    if wanted.kind == "vllm" and wanted.model is None:
        raise CannotStart("real vLLM engines need a model: --model FOLDER")
    if wanted.kind == "vllm" and not _has_vllm(wanted.python):
        raise CannotStart(f"{wanted.python} has no vllm; name an interpreter that has, with --vllm-python")
    if wanted.model is not None and not (wanted.model / "tokenizer.json").is_file():
        raise CannotStart(f"{wanted.model} is no model folder: it has no tokenizer.json")


def _has_vllm(python: Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", code], check=False, stdin=subprocess.DEVNULL).returncode == 0  # noqa: S603


@contextlib.contextmanager
def running(wanted: Wanted, say: Say) -> Iterator[Running]:
    """Start a fleet, and end it with the block. `say` is told of the progress.

    Raises `CannotStart`, `BadPolicy`, `NotInstalled` or `NotReady`; a signal raises `Stopped`, at any moment. The
    logs are kept only where something went wrong.
    """
    check(wanted)
    folder = Path(tempfile.mkdtemp(prefix="moongate-"))
    start = _Start(wanted, folder, say)
    with _signals():
        try:
            yield start.everything()
        except (CannotStart, NotReady):
            say(f"the logs are in {folder}")
            start.keep_logs = True
            raise
        finally:
            start.undo()


def welcome(fleet: Running) -> str:
    """What to do with a fleet that is up."""
    keys = "\n".join(f"  {tenant}: {key}" for tenant, key in fleet.keys.items())
    engines = "\n".join(f"  {fleet.names[engine]}: {url}" for engine, url in fleet.engines.items())
    body = {"model": fleet.model, "messages": [{"role": "user", "content": QUESTION}]}
    return f"""
Moongate is up at {fleet.url}, with the policy {fleet.policy}, over these engines:
{engines}

API keys of two tenants:
{keys}

Ask twice, and see x-moongate-route (what was predicted) and cached_tokens (what was found):

  curl -si {fleet.url}/v1/chat/completions \\
    -H 'Authorization: Bearer {next(iter(fleet.keys.values()))}' \\
    -d '{json.dumps(body)}'

The configuration and the logs are in {fleet.folder} until it ends. Ctrl-C ends everything."""


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


class _Start:
    """Starts the processes of a fleet, and ends them."""

    def __init__(self, wanted: Wanted, folder: Path, say: Say) -> None:
        self._wanted = wanted
        self._folder = folder
        self._say = say
        self._children: list[Child] = []
        self._began: dict[str, float] = {}
        self.keep_logs = False

    def everything(self) -> Running:
        """Start all of it, each when what it needs is there."""
        wanted = self._wanted
        master, admin = self._master()
        model = wanted.model or make_model(self._folder / "moongate-sim")
        engines = self._engines(model, master)
        keys = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in TENANTS}
        url = self._gateway(_config(wanted, model, list(engines.values()), admin, keys))
        self._compare(url, len(engines))
        addresses = {name: f"127.0.0.1:{flags.port}" for name, flags in engines.items()}
        return Running(
            url=url,
            model=model.name,
            policy=wanted.chosen_policy,
            keys=keys,
            engines={address: f"http://{address}" for address in addresses.values()},
            names={address: name for name, address in addresses.items()},
            children=tuple(self._children),
            folder=self._folder,
        )

    def undo(self) -> None:
        """End all children, the gateway first and the master last, however many signals come meanwhile."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        last_first = self._children[::-1]
        for child in last_first:
            child.terminate()
        end = time.monotonic() + GRACE
        for child in last_first:
            child.stop(max(0.0, end - time.monotonic()))
        if not self.keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _master(self) -> tuple[str, str]:
        """The address of its RPC and the URL of its HTTP side."""
        rpc, admin = free_port(), free_port()
        url = f"http://127.0.0.1:{admin}"
        self._ready(self._child("master", commands.master(rpc, admin)), f"{url}/health", MASTER_SECONDS)
        return f"127.0.0.1:{rpc}", url

    def _engines(self, model: Path, master: str) -> dict[str, commands.EngineFlags]:
        """What each engine was started with, by name. They warm up side by side."""
        started: dict[str, tuple[commands.EngineFlags, Child]] = {}
        for number, role in enumerate(self._wanted.roles, 1):
            flags = commands.EngineFlags(
                model=model,
                name=model.name,
                port=free_port(),
                master=master,
                role=role,
                block_size=self._wanted.block_size,
                events_port=free_port(),
                replay_port=free_port(),
                more=self._wanted.engine_arguments,
            )
            started[f"engine-{number}"] = flags, self._engine(f"engine-{number}", flags)
        for flags, child in started.values():
            self._ready(child, f"http://127.0.0.1:{flags.port}/health", ENGINE_SECONDS[self._wanted.kind])
        return {name: flags for name, (flags, _) in started.items()}

    def _engine(self, name: str, flags: commands.EngineFlags) -> Child:
        if self._wanted.kind == "simulated":
            return self._child(name, commands.simulated(flags))
        store = commands.write_mooncake(self._folder / f"{name}.mooncake.json", flags.master)
        command = commands.vllm(flags, self._wanted.python, lookup_port=free_port())
        return self._child(name, command, commands.VLLM_ENVIRONMENT | {"MOONCAKE_CONFIG_PATH": str(store)})

    def _gateway(self, config: Mapping[str, Any]) -> str:
        """The URL that it listens on."""
        path = self._folder / "moongate.yaml"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config))
        host = f"[{self._wanted.host}]" if ":" in self._wanted.host else self._wanted.host
        url = f"http://{host}:{self._wanted.port}"
        self._ready(self._child("gateway", commands.gateway(path)), f"{url}/ready", GATEWAY_SECONDS)
        return url

    def _compare(self, url: str, engines: int) -> None:
        """Wait until the gateway has compared ids, hashes and keys with those of all engines; tell how it went."""
        end = time.monotonic() + COMPARE_SECONDS
        results: set[str] = set()
        compared = 0.0
        while compared < engines and time.monotonic() < end:
            time.sleep(0.05)
            checks = list(_checks(url))
            compared = sum(times for check, _, times in checks if check == "keys")
            results = {result for _, result, _ in checks}
        differ = ", ".join(sorted(results - {"agrees", "not_asked"}))
        self._say("compared   token ids, block hashes and keys: " + (differ or "all engines agree"))

    def _child(self, name: str, command: commands.Command, extra: Mapping[str, str] | None = None) -> Child:
        """Start a child, without this shell's MOONGATE_ variables: its configuration is all in the file."""
        self._began[name] = time.monotonic()
        ours = {key: value for key, value in environ.items() if not key.startswith("MOONGATE_")}
        child = Child(name, command, self._folder, {**ours, **(extra or {})})
        self._children.append(child)
        return child

    def _ready(self, child: Child, url: str, seconds: float) -> None:
        child.wait_for(url, seconds)
        self._say(f"{child.name:<10} ready after {time.monotonic() - self._began[child.name]:.1f} s")


def _checks(url: str) -> Iterator[tuple[str, str, float]]:
    """Which of the gateway's checks came to which result, and how often."""
    try:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
    except httpx.HTTPError:  # it has ended, which is told elsewhere
        return
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "moongate_agreement_checks_total":
                yield sample.labels["check"], sample.labels["result"], sample.value


def _config(
    wanted: Wanted, model: Path, flags: Sequence[commands.EngineFlags], admin: str, keys: Mapping[str, str]
) -> dict[str, Any]:
    """The gateway's configuration for this fleet."""
    return {
        "listen": {"host": wanted.host, "port": wanted.port},
        "secret": secrets.token_hex(32),
        "pools": {"main": {"admin": [admin], "deadline_ms": 250}},
        "models": [{"name": model.name, "tokenizer": str(model), "pool": "main"}],
        "engines": {
            "static": [
                {
                    "url": f"http://127.0.0.1:{flag.port}",
                    "model": flag.name,
                    "role": flag.role,
                    "kv_events": {
                        "connect": f"tcp://127.0.0.1:{flag.events_port}",
                        "replay": f"tcp://127.0.0.1:{flag.replay_port}",
                    },
                }
                for flag in flags
            ]
        },
        "policy": {"use": wanted.chosen_policy},
        "tenants": [
            {"name": tenant, "keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]}
            for tenant, key in keys.items()
        ],
        "telemetry": {"expose_routing": True},
    }


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
