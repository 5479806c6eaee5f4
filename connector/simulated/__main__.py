"""One simulated engine as a process: `python -m connector.simulated --help`."""

import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import uvicorn

from connector.blocks import Adapter, Algorithm, HashScheme
from connector.errors import ConnectorError
from connector.keys import KeyScheme
from connector.simulated.app import Api
from connector.simulated.engine import Engine, Role, Settings
from connector.simulated.events import Numbers
from connector.simulated.metrics import Metrics
from connector.simulated.model import NAME, make
from connector.simulated.serving import VERSION, Flags, Model
from connector.simulated.timing import Speed

ROLES: dict[str, Role] = {
    "both": "kv_both",
    "prefill": "kv_producer",
    "decode": "kv_consumer",
    "kv_both": "kv_both",
    "kv_producer": "kv_producer",
    "kv_consumer": "kv_consumer",
}
SPEED = Speed()
EXAMPLE = """
\b
Example: two engines that share a pool, with a master on port 50051:
    mooncake_master --rpc_port=50051 --metrics_port=9003 &
    python -m connector.simulated --port 8101 --master 127.0.0.1:50051 &
    python -m connector.simulated --port 8102 --master 127.0.0.1:50051 &
"""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where this engine listens, and the pool's master. No port, no events; no master, no pool."""

    host: str
    port: int
    events_port: int | None
    replay_port: int | None
    whole_hashes: bool
    master: str | None


@click.command(epilog=EXAMPLE, context_settings={"show_default": True, "max_content_width": 110})
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="Folder with tokenizer.json. Without it, a small model is made.",
)
@click.option("--served-model-name", "names", multiple=True, help="Name to serve it under; may be given several times.")
@click.option("--host", default="127.0.0.1")
@click.option("--port", default=8000)
@click.option("--block-size", default=16, help="Tokens in a block.")
@click.option("--blocks", default=4096, help="Blocks in the engine's own cache.")
@click.option(
    "--max-model-len", type=int, default=None, help="Tokens of a prompt and its answer.  [default: the model's]"
)
@click.option("--master", default=None, metavar="HOST:PORT", help="RPC side of a Mooncake master. Without it, no pool.")
@click.option("--cache-prefix", default=None, help="What every key in the pool begins with.")
@click.option(
    "--prefix-caching-hash-algo",
    "algorithm",
    type=click.Choice([one.value for one in Algorithm]),
    default="sha256_cbor",
)
@click.option("--hash-seed", default=None, help="PYTHONHASHSEED of the engines that it shares blocks with.")
@click.option("--kv-events-port", "events_port", type=int, default=None, help="Publish KV events there.")
@click.option("--replay-port", type=int, default=None, help="Answer there for KV events that were missed.")
@click.option("--int-block-hashes", is_flag=True, help="Write hashes in KV events as 64-bit numbers, vLLM's default.")
@click.option("--role", type=click.Choice(list(ROLES)), default="both")
@click.option("--lora", "adapters", multiple=True, metavar="NAME=PATH", help="An adapter; may be given several times.")
@click.option(
    "--tool-parser/--no-tool-parser", default=True, help="Call tools, or refuse as vLLM without a parser does."
)
@click.option(
    "--chat-template",
    "template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="File with another chat template than the model folder's.",
)
@click.option("--enable-scale-out", "scale_out", is_flag=True, help="Serve the render endpoints.")
@click.option("--dev-mode", is_flag=True, help="Serve what vLLM serves with VLLM_SERVER_DEV_MODE=1.")
@click.option(
    "--vllm-version",
    "version",
    default=VERSION,
    help="Version that it says it is. Below 0.31 extra keys bear no tags, below 0.29 each engine draws its root.",
)
@click.option("--time-scale", default=1.0, help="Real seconds for a simulated one; 0: as fast as it goes.")
@click.option("--seed", default=0, help="Another seed, other words.")
@click.option("--prefill-tokens-per-second", default=SPEED.prefill_tokens_per_second)
@click.option("--decode-step-seconds", default=SPEED.decode_step_seconds)
@click.option("--decode-seconds-per-request", default=SPEED.decode_seconds_per_request)
@click.option("--load-bytes-per-second", default=SPEED.load_bytes_per_second)
@click.option("--load-latency-seconds", default=SPEED.load_latency_seconds)
@click.option("--kv-bytes-per-token", default=SPEED.kv_bytes_per_token)
@click.option("--max-batched-tokens", default=SPEED.max_batched_tokens, help="Tokens in a step.")
@click.option("--max-running", default=SPEED.max_running, help="Requests in a step.")
def main(**options: Any) -> None:
    """Run an engine that behaves like vLLM on the wire, without a GPU."""
    listen = Listen(
        options["host"],
        options["port"],
        options["events_port"],
        options["replay_port"],
        not options["int_block_hashes"],
        options["master"],
    )
    flags = Flags(options["version"], options["tool_parser"], options["scale_out"], options["dev_mode"])
    try:
        with _folder(options["model"]) as folder:
            model = _model(folder, options)
            settings = _settings(model, options)
            pool_name = "@".join(filter(None, (options["cache_prefix"], folder.name)))
            asyncio.run(_serve(model, settings, listen, flags, KeyScheme.of(pool_name)))
    except ConnectorError as error:
        raise click.ClickException(str(error)) from error
    sys.stdout.flush()
    sys.stderr.flush()
    # The native client's threads may hang on a master that is gone, and would keep the process.
    os._exit(0)


async def _serve(model: Model, settings: Settings, listen: Listen, flags: Flags, keys: KeyScheme) -> None:
    scheme = settings.scheme
    metrics = Metrics(model.names[0], scheme.block_size, settings.blocks, scheme.algorithm)
    async with AsyncExitStack() as stack:
        pool = events = None
        if listen.events_port is not None:
            from connector.simulated.publisher import Publisher  # noqa: PLC0415 -- pyzmq is not always there

            replay = f"tcp://{listen.host}:{listen.replay_port}" if listen.replay_port else None
            publisher = Publisher(f"tcp://*:{listen.events_port}", replay, time.time, Numbers(listen.whole_hashes))
            events = await stack.enter_async_context(publisher)
        if listen.master is not None:
            from connector.simulated.store import Store  # noqa: PLC0415 -- nor is Mooncake

            pool = await stack.enter_async_context(Store(listen.master, keys))
        engine = await stack.enter_async_context(Engine(settings, metrics, pool=pool, events=events))
        sources = events.settings() if events else None
        app = Api(model, engine, sources, flags).app()
        config = uvicorn.Config(
            app, host=listen.host, port=listen.port, log_level="warning", timeout_graceful_shutdown=1, lifespan="off"
        )
        await Server(config, engine).serve()


class Server(uvicorn.Server):
    """Ends at the first signal: what is being answered is cut short, as by vLLM."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True
        self._engine.abort()


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """The model's folder; one that is made goes with the process."""
    if given is not None:
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="moongate-") as scratch:
        yield make(Path(scratch) / NAME)


def _model(folder: Path, options: dict[str, Any]) -> Model:
    limit = options["max_model_len"]
    model = Model.load(
        folder,
        names=options["names"] or (folder.name,),
        max_model_len=limit,
        adapters=[_adapter(text) for text in options["adapters"]],
        seed=options["seed"],
        template=None if options["template"] is None else options["template"].read_text(encoding="utf-8"),
    )
    room = options["blocks"] * options["block_size"]
    if model.max_model_len > room and limit is None:
        raise click.UsageError(
            f"{options['blocks']} blocks hold {room} tokens, the model takes {model.max_model_len}: "
            "give more --blocks or a smaller --max-model-len"
        )
    if model.max_model_len > room:
        raise click.UsageError(f"--max-model-len {limit} is more than {options['blocks']} blocks hold ({room} tokens)")
    return model


def _settings(model: Model, options: dict[str, Any]) -> Settings:
    fields = Speed.__dataclass_fields__
    return Settings(
        scheme=_scheme(options),
        eos=model.eos,
        speed=Speed(**{field: options[field] for field in fields}),
        blocks=options["blocks"],
        role=ROLES[options["role"]],
        time_scale=options["time_scale"],
    )


def _scheme(options: dict[str, Any]) -> HashScheme:
    """How it hashes. Where engines without a seed draw their root, so does this one."""
    parts = options["version"].split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise click.UsageError(f"--vllm-version takes a version such as {VERSION}, not {options['version']}")
    version = (int(parts[0]), int(parts[1]))
    scheme = HashScheme(
        Algorithm(options["algorithm"]),
        options["block_size"],
        options["hash_seed"],
        tagged=version >= (0, 31),
        fixed_root=version >= (0, 29),
    )
    return scheme if scheme.exact else replace(scheme, seed=secrets.token_hex(32))


def _adapter(text: str) -> Adapter:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise click.UsageError(f"--lora takes NAME=PATH, not {text}")
    return Adapter(name, path)


if __name__ == "__main__":
    main()
