"""How the processes of a fleet are started: commands, environments and the files they read.

Real vLLM engines get the settings without which they lose requests or keys beside a shared pool:

- `kv_load_failure_policy: recompute`; the default answers 500 when a block cannot be loaded
- a `lookup_rpc_port` of its own, since engines of one host would share a socket path
- `lookup_async`, so that a slow master holds up one request and not the scheduler
- sha256_cbor, whose hashes do not depend on Python's pickle, and full hashes in KV events
- `--enable-prompt-tokens-details`, without which answers do not say what was cached
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.interface import Role

_KV_ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}

VLLM_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Command = list[str | Path]


class NotInstalled(Exception):
    """A program is missing; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What an engine of either kind is started with."""

    model: Path
    name: str
    """The name it serves the model under."""
    port: int
    master: str
    """host:port of the master's RPC."""
    role: Role = "both"
    block_size: int = 32
    events_port: int | None = None
    """Port on which it publishes KV events."""
    replay_port: int | None = None
    more: Sequence[str] = ()
    """Further arguments, as they stand."""


def master(rpc_port: int, admin_port: int, *more: str) -> Command:
    """A Mooncake master on the loopback. Raises `NotInstalled`."""
    beside = Path(sys.executable).parent / "mooncake_master"
    program = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if program is None:
        raise NotInstalled("mooncake_master is not installed; run: pip install 'moongate[pool]'")
    return [
        program,
        f"--rpc_port={rpc_port}",
        "--rpc_address=127.0.0.1",
        f"--metrics_port={admin_port}",
        "--metrics_host=127.0.0.1",
        *more,
    ]


def simulated(flags: EngineFlags) -> Command:
    """A simulated engine."""
    return [
        *(sys.executable, "-m", "connector.simulated"),
        *("--model", flags.model, "--served-model-name", flags.name),
        *("--host", "127.0.0.1", "--port", str(flags.port), "--master", flags.master),
        *("--block-size", str(flags.block_size), "--role", flags.role),
        *(("--kv-events-port", str(flags.events_port)) if flags.events_port else ()),
        *(("--replay-port", str(flags.replay_port)) if flags.replay_port else ()),
        *flags.more,
    ]


def vllm(
    flags: EngineFlags,
    python: Path,
    *,
    lookup_port: int,
    algorithm: str = "sha256_cbor",
    connector: Mapping[str, object] | None = None,
) -> Command:
    """A real vLLM engine, by the interpreter that has vLLM. `connector` adds to the store connector's settings."""
    transfer = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": _KV_ROLES[flags.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_rpc_port": lookup_port, "lookup_async": True, **(connector or {})},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{flags.events_port}",  # with `*` the engine binds, else it would connect
        "replay_endpoint": f"tcp://127.0.0.1:{flags.replay_port}",
    }
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", flags.model, "--served-model-name", flags.name),
        *("--host", "127.0.0.1", "--port", str(flags.port)),
        *("--block-size", str(flags.block_size), "--prefix-caching-hash-algo", algorithm),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--enable-prompt-tokens-details", "--enable-request-id-headers"),
        *("--enable-server-load-tracking", "--shutdown-timeout", "2"),
        *(("--kv-events-config", json.dumps(events)) if flags.events_port else ()),
        *flags.more,
    ]


def write_mooncake(path: Path, master_rpc: str, *, segment: str = "512MB", buffer: str = "128MB") -> Path:
    """The file that MOONCAKE_CONFIG_PATH names: how an engine reaches the master, and what memory it adds."""
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master_rpc,
        "global_segment_size": segment,
        "local_buffer_size": buffer,
        "protocol": "tcp",
        "device_name": "",
    }
    path.write_text(json.dumps(config))
    return path


def gateway(config: Path) -> Command:
    """The gateway itself."""
    return [sys.executable, "-m", "gateway", "serve", "--config", config]
