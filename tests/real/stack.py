"""Start and stop the real things: a Mooncake master, vLLM engines that share it, the gateway.

Everything listens on free ports of the loopback and writes its log into a folder that the caller
gives. `start_engine` returns at once, so that several engines can warm up side by side (each takes
about 20 s); `ready()` waits. Nothing here knows pytest: benchmarks use it too.

Why each process sits in a session of its own, on a leash: when the API process of vLLM is killed,
its engine core lives on and keeps its store segment mounted, so a stop must reach every process of
the session. The leash does the same when the test run itself is killed: it blocks on a pipe that
only the test process holds open, and kills the group when the pipe closes.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import httpx

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
INSTALLED = ROOT / ".venv-vllm" / "installed"
MASTER = Path(sys.executable).parent / "mooncake_master"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
MEMORY = 6 * 1024**3
LEASH = 'exec 3<&0; (cat <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Role = Literal["kv_both", "kv_producer", "kv_consumer"]

_given_ports: set[int] = set()


class NotReady(Exception):
    """A process died or took too long before it could serve; the message ends with its log."""


class StillAlive(Exception):
    """Processes of a session outlived SIGKILL."""


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


def shared_memory(pid: int) -> set[Path]:
    """The named shared memory that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(path) for path in re.findall(r" (/dev/shm/psm_\w+)$", maps, re.MULTILINE)}


class Child:
    """One command and whatever it starts."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        self._ended = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", LEASH, name, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**inherited(), **(environment or {})},
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
        """Poll until the URL answers 200; NotReady if the process dies or the time is up."""
        end = time.monotonic() + deadline
        while not answers(url):
            if (code := self.process.poll()) is not None:
                raise NotReady(f"{self.name} exited with {code}; its log ends:\n{self.tail()}")
            if time.monotonic() > end:
                raise NotReady(f"{url} not ready after {deadline:.0f} s; the log of {self.name} ends:\n{self.tail()}")
            time.sleep(0.1)

    def stop(self, grace: float = 15) -> None:
        """Ask it to end; after the grace, and for whatever is left, SIGKILL."""
        if self._ended:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()

    def kill(self, deadline: float = 10) -> None:
        """SIGKILL the whole session and see that nothing is left of it."""
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


def inherited() -> dict[str, str]:
    """Our environment without what would change a child's behaviour from run to run."""
    dropped = ("PYTHONHASHSEED", "PYTHONPATH", "VIRTUAL_ENV")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith(("VLLM_", "MOONCAKE_", "MOONGATE_", "MC_"))
    }


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


class Master(Child):
    """A Mooncake master: `admin` is its HTTP side, `rpc` what engines connect to."""

    def __init__(self, folder: Path, rpc_port: int, admin_port: int, *extra: str) -> None:
        self.rpc_port = rpc_port
        self.rpc = f"127.0.0.1:{rpc_port}"
        self.admin_port = admin_port
        self.admin = f"http://127.0.0.1:{admin_port}"
        command: list[str | Path] = [
            MASTER,
            f"--rpc_port={rpc_port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={admin_port}",
            "--metrics_host=127.0.0.1",
            *extra,
        ]
        super().__init__("master", command, folder)

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

    If it publishes KV events, `events` is where to subscribe (None if the engine connects to an
    address that somebody else binds) and `replay` where to ask for those that were missed.
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
        self.events: str | None = None
        self.replay: str | None = None
        # Unix sockets go here: their paths may not exceed about 100 characters.
        self._scratch = tempfile.mkdtemp(prefix="vllm-")
        places = {"VLLM_RPC_BASE_PATH": self._scratch, "TMPDIR": self._scratch}
        super().__init__(name, command, folder, {**environment, **places})

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
    role: Role = "kv_both",
    block_size: int = 32,
    algorithm: str = "sha256_cbor",
    hash_seed: int | None = None,
    kv_events: str | None = None,
    served_name: str = "tiny",
    port: int | None = None,
    extra_args: Sequence[str] = (),
    extra_config: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Engine:
    """An engine that warms up; call `ready()` before use.

    `kv_events` is "bind" for an engine that publishes on a free port of its own, or the address
    that the engine shall connect to and somebody else binds. `extra_config` adds to the settings of
    the store connector; `extra_args` and `environment` override what is set here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    events = Events.of(kv_events)
    command: list[str | Path] = [
        *(ENGINE_PYTHON, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model_folder, "--served-model-name", served_name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "16"),
        *("--block-size", str(block_size), "--prefix-caching-hash-algo", algorithm),
        *("--kv-transfer-config", json.dumps(store_settings(role, extra_config or {}))),
        *("--enable-prompt-tokens-details", "--enable-request-id-headers"),
        *("--enable-server-load-tracking", "--shutdown-timeout", "2"),
        *(events.flags() if events else ()),
        *extra_args,
    ]
    variables = {
        **ENGINE_ENVIRONMENT,
        "MOONCAKE_CONFIG_PATH": str(write_client(folder / f"{name}.mooncake.json", master)),
        **({} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}),
        **(environment or {}),
    }
    engine = Engine(name, port, command, folder, variables)
    if events:
        engine.events = events.connect
        engine.replay = events.replay
    return engine


ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def store_settings(role: Role, extra: Mapping[str, object]) -> dict[str, object]:
    """The store connector's settings.

    A look-up port of its own for each engine: engines of one host would otherwise share a socket
    path. `recompute`, because the default answers 500 when a block can not be loaded.
    """
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lookup_rpc_port": free_port(),
            "lookup_async": True,
            **extra,
        },
    }


@dataclass(frozen=True)
class Events:
    """Where an engine publishes KV events: vLLM binds an address with `*`, connects to others."""

    endpoint: str
    connect: str | None
    replay: str

    @classmethod
    def of(cls, kv_events: str | None) -> "Events | None":
        if kv_events is None:
            return None
        replay = f"tcp://127.0.0.1:{free_port()}"
        if kv_events != "bind":
            return cls(kv_events, None, replay)
        port = free_port()
        return cls(f"tcp://*:{port}", f"tcp://127.0.0.1:{port}", replay)

    def flags(self) -> list[str]:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay,
        }
        return ["--kv-events-config", json.dumps(config)]


def write_client(path: Path, master: Master) -> Path:
    """How an engine's Mooncake client reaches the master, and the small segment that it adds."""
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.rpc,
        "global_segment_size": "512MB",
        "local_buffer_size": "128MB",
        "protocol": "tcp",
        "device_name": "",
    }
    path.write_text(json.dumps(config))
    return path


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
        command: list[str | Path] = [sys.executable, "-m", "gateway", "serve", "--config", config]
        super().__init__("gateway", command, folder)


def start_gateway(config: Mapping[str, object], folder: Path, deadline: float = 30) -> Gateway:
    """A gateway that is ready. It listens where the config says, else on a free port.

    The file is JSON, which is YAML as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listen = {"host": "127.0.0.1", "port": free_port(), **section(config, "listen")}
    admin = {"host": "127.0.0.1", "port": free_port(), **section(config, "admin")}
    path = folder / "gateway.yaml"
    path.write_text(json.dumps({**config, "listen": listen, "admin": admin}, indent=2))
    gateway = Gateway(path, int(str(listen["port"])), folder)
    with killed_unless_ready(gateway):
        gateway.wait_for(f"{gateway.url}/ready", deadline)
    return gateway


def section(config: Mapping[str, object], name: str) -> dict[str, object]:
    value = config.get(name, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {value!r}")
    return dict(value)
