"""A model folder without weights, made once, and engines over it in this process."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector.blocks import Adapter, Algorithm, HashScheme
from connector.simulated.app import Api
from connector.simulated.engine import Engine, Events, Pool, Settings
from connector.simulated.metrics import Metrics
from connector.simulated.model import NAME, make
from connector.simulated.serving import Flags, Model
from connector.simulated.timing import Speed

BLOCK = 16
NO_TOOLS = Flags(parses_tools=False)
ADAPTER = Adapter("legal", "/adapters/legal")

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def sim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="session")
def sim_model(sim_folder: Path) -> Model:
    """Served as `tiny`, with 8192 tokens of context."""
    return Model.load(sim_folder, names=("tiny",), max_model_len=8192, adapters=(ADAPTER,))


@pytest.fixture
def run(sim_model: Model) -> Run:
    """Open an engine that takes no time; answers a client of its HTTP side, and the engine."""

    @asynccontextmanager
    async def opened(
        *,
        pool: Pool | None = None,
        events: Events | None = None,
        speed: Speed | None = None,
        sources: dict[str, object] | None = None,
        flags: Flags = NO_TOOLS,
        **changes: Any,
    ) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
        scheme = HashScheme(Algorithm.SHA256_CBOR, BLOCK)
        settings = Settings(scheme=scheme, eos=sim_model.eos, speed=speed or Speed(), blocks=1024, time_scale=0.0)
        settings = replace(settings, **changes)
        metrics = Metrics("tiny", BLOCK, settings.blocks, scheme.algorithm)
        async with Engine(settings, metrics, pool=pool, events=events) as engine:
            transport = httpx.ASGITransport(Api(sim_model, engine, sources, flags).app())
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                yield client, engine

    return opened


class OnePool:
    """A pool in memory: `there` can be shared by engines."""

    def __init__(self, there: set[bytes] | None = None) -> None:
        self.there = set() if there is None else there

    async def run(self, hashes: Sequence[bytes]) -> int:
        for count, block in enumerate(hashes):
            if block not in self.there:
                return count
        return len(hashes)

    async def put(self, hashes: Sequence[bytes]) -> list[int]:
        new = [place for place, block in enumerate(hashes) if block not in self.there]
        self.there.update(hashes)
        return new

    async def clear(self) -> bool:
        self.there.clear()
        return True
