"""Start and stop the real things: a Mooncake master, vLLM engines that share it, the gateway.

Everything listens on free ports of the loopback and writes its log into a folder that the caller
gives. `start_engine` returns at once, so that several engines can warm up side by side (each takes
about 20 s); `ready()` waits. Nothing here knows pytest: benchmarks use it too.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from gateway import commands
from gateway.processes import Child
from policies.interface import Role

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
INSTALLED = ROOT / ".venv-vllm" / "installed"
MASTER = Path(sys.executable).parent / "mooncake_master"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
MEMORY = 6 * 1024**3
CLIENT_TTL = 60
"""Seconds without a sign of life after which a master drops an engine's part of the store. The default of 10
is too little where engines share two cores with their tests."""
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_given_ports: set[int] = set()


def missing() -> str | None:
    """Why real engines cannot run here, in one sentence; None if they can."""
    if not sys.platform.startswith("linux"):
        return "real engines need Linux."
    if not INSTALLED.exists():
        return "vLLM is not installed: run python tests/real/install_vllm.py .venv-vllm."
    if not MASTER.exists():
        return f"{MASTER.name} is not installed beside {sys.executable}."
    for library in LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"the shared library {library} is missing."
    if (free := free_memory()) < MEMORY:
        return f"only {free / 1024**3:.1f} GiB of memory are free, {MEMORY // 1024**3} are needed."
    return None


def free_memory() -> int:
    """Bytes that new processes can have without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def free_port() -> int:
    """A port of the loopback that nobody listens on and that this process has not given before."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def shared_memory(pid: int) -> set[Path]:
    """The named shared memory that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(path) for path in re.findall(r" (/dev/shm/psm_\w+)$", maps, re.MULTILINE)}


def inherited() -> dict[str, str]:
    """Our environment without what would change a child's behaviour from run to run."""
    dropped = ("PYTHONHASHSEED", "PYTHONPATH", "VIRTUAL_ENV")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith(("VLLM_", "MOONCAKE_", "MOONGATE_", "MC_"))
    }


def tiny_model() -> Path:
    """A model that vLLM can serve, made once and kept in `.model`, until make_model.py changes."""
    recipe = Path(__file__).with_name("make_model.py")
    model = recipe.parent / ".model" / "tiny"
    stamp = model.with_suffix(".recipe")
    made_by = hashlib.sha256(recipe.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != made_by:
        shutil.rmtree(model, ignore_errors=True)
        subprocess.run([ENGINE_PYTHON, recipe, model], check=True)
        stamp.write_text(made_by)
    return model


class Master(Child):
    """A Mooncake master: `admin` is its HTTP side, `rpc` what engines connect to."""

    def __init__(self, folder: Path, rpc_port: int, admin_port: int, *extra: str) -> None:
        self.rpc_port = rpc_port
        self.rpc = f"127.0.0.1:{rpc_port}"
        self.admin_port = admin_port
        self.admin = f"http://127.0.0.1:{admin_port}"
        command = commands.master(rpc_port, admin_port, f"--client_ttl={CLIENT_TTL}", *extra)
        super().__init__("master", command, folder, inherited())

    def keys(self) -> list[str]:
        """The keys of every object in the store."""
        return httpx.get(f"{self.admin}/get_all_keys", trust_env=False).text.split()


def start_master(
    folder: Path,
    rpc_port: int | None = None,
    admin_port: int | None = None,
    extra_args: Sequence[str] = (),
) -> Master:
    """A master that is ready. Give the ports of a lost one to replace it; it then knows no keys."""
    master = Master(folder, rpc_port or free_port(), admin_port or free_port(), *extra_args)
    with killed_unless_ready(master):
        master.wait_for(f"{master.admin}/health", 15)
    return master


@contextlib.contextmanager
def killed_unless_ready(child: Child) -> Iterator[None]:
    try:
        yield
    except BaseException:
        child.kill()
        raise


class Engine(Child):
    """A vLLM engine.

    If it publishes KV events, `events` is where to subscribe and `replay` where to ask for those that
    were missed.
    """

    def __init__(
        self,
        name: str,
        port: int,
        command: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.ports: tuple[int, ...] = (port,)
        self.events: str | None = None
        self.replay: str | None = None
        # Unix sockets go here: their paths may not exceed about 100 characters.
        self._scratch = tempfile.mkdtemp(prefix="vllm-")
        places = {"VLLM_RPC_BASE_PATH": self._scratch, "TMPDIR": self._scratch}
        super().__init__(name, command, folder, inherited() | dict(environment) | places)

    def ready(self, deadline: float = 180) -> Self:
        """Wait until it serves; it is killed if it does not."""
        with killed_unless_ready(self):
            self.wait_for(f"{self.url}/health", deadline)
        return self

    def kill(self, deadline: float = 10) -> None:
        """As for any child; and remove the shared memory that killed processes leave behind."""
        shared = {path for pid in self.members for path in shared_memory(pid)}
        super().kill(deadline)
        for path in shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by its name and labels as they are written there."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        return {sample: float(value) for sample, _, value in (line.rpartition(" ") for line in lines)}

    def count(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name (with or without `vllm:`) that bear these labels."""
        wanted = name if ":" in name else f"vllm:{name}"
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == wanted and labels.items() <= dict(LABEL.findall(sample)).items()
        )


def start_engine(
    model_folder: Path,
    name: str,
    master: Master,
    *,
    folder: Path,
    role: Role = "both",
    block_size: int = 32,
    algorithm: str = "sha256_cbor",
    hash_seed: int | None = None,
    events: bool = False,
    served_name: str = "tiny",
    extra_args: Sequence[str] = (),
    extra_config: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    instead_of: Engine | None = None,
) -> Engine:
    """An engine that warms up; call `ready()` before use.

    With `events` it publishes KV events on a free port. `extra_config` adds to the settings of the
    store connector; `extra_args` and `environment` override what is set here. `instead_of` is an engine
    that ended, whose ports this one has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ports = instead_of.ports if instead_of is not None else tuple(free_port() for _ in range(3))
    flags = commands.EngineFlags(
        model=model_folder,
        name=served_name,
        port=ports[0],
        master=master.rpc,
        role=role,
        block_size=block_size,
        events_port=ports[1] if events else None,
        replay_port=ports[2] if events else None,
        more=("--enforce-eager", "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "16", *extra_args),
    )
    command = commands.vllm(flags, ENGINE_PYTHON, lookup_port=free_port(), algorithm=algorithm, connector=extra_config)
    variables = {
        **commands.VLLM_ENVIRONMENT,
        **CPU_ENVIRONMENT,
        "MOONCAKE_CONFIG_PATH": str(commands.write_mooncake(folder / f"{name}.mooncake.json", master.rpc)),
        **({} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}),
        **(environment or {}),
    }
    engine = Engine(name, flags.port, command, folder, variables)
    engine.ports = ports
    if events:
        engine.events = f"tcp://127.0.0.1:{flags.events_port}"
        engine.replay = f"tcp://127.0.0.1:{flags.replay_port}"
    return engine


CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Pool:
    """One master and the engines that share its store; stop() ends all of them."""

    master: Master
    engines: tuple[Engine, ...]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        with contextlib.ExitStack() as stops:
            for child in (self.master, *self.engines):
                stops.callback(child.stop)
            for engine in self.engines:
                engine.process.terminate()


def start_pool(model_folder: Path, folder: Path, engines: int = 2) -> Pool:
    """A master and so many alike engines, all ready."""
    with contextlib.ExitStack() as undo:
        master = undo.enter_context(start_master(folder))
        started = tuple(
            undo.enter_context(start_engine(model_folder, f"engine-{n}", master, folder=folder))
            for n in range(1, engines + 1)
        )
        for engine in started:
            engine.ready()
        undo.pop_all()
    return Pool(master, started)


class Gateway(Child):
    """The gateway as a user runs it; `config` is the file that it was given."""

    def __init__(self, config: Path, port: int, folder: Path) -> None:
        self.config = config
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        super().__init__("gateway", commands.gateway(config), folder, inherited())


def start_gateway(config: Mapping[str, object], folder: Path, deadline: float = 30) -> Gateway:
    """A gateway that is ready. It listens where the config says, else on a free port.

    The file is JSON, which is YAML as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listen = {"host": "127.0.0.1", "port": free_port(), **section(config, "listen")}
    path = folder / "gateway.yaml"
    path.write_text(json.dumps({**config, "listen": listen}, indent=2))
    gateway = Gateway(path, int(str(listen["port"])), folder)
    with killed_unless_ready(gateway):
        gateway.wait_for(f"{gateway.url}/ready", deadline)
    return gateway


def section(config: Mapping[str, object], name: str) -> dict[str, object]:
    value = config.get(name, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {value!r}")
    return dict(value)
