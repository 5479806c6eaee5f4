"""Clients that leave at random moments: nothing of them stays. tests/benchmarks/cancels.py sends thousands."""

from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from tests.benchmarks.cancels import Storm
from tests.gateway.house import KEY, Street, digest

CONCURRENT = 40


async def storm(tokenizer: Path) -> Storm:
    async with AsyncExitStack() as stack:
        street = Street(stack)
        engine, master = await street.engine(), await street.master()
        house = await street.house(
            engine,
            pools={"main": {"admin": [master.url], "deadline_ms": 500}},
            models=[{"name": "tiny", "tokenizer": str(tokenizer), "pool": "main"}],
            policy={"use": "cache_aware"},
            tenants=[{"name": "team-a", "keys": [{"sha256": digest(KEY)}], "concurrent": CONCURRENT}],
        )
        made = Storm(house.port, KEY, engine)
        await made.rage(300, CONCURRENT // 2)
        await made.calm()
        await made.refill(CONCURRENT)
        return made


def test_nothing_of_a_client_that_left_stays(tokenizer_folder: Path) -> None:
    """On uvloop, as the gateway is served: it cancels a connect otherwise than asyncio's own loop does."""
    made = uvloop.run(storm(tokenizer_folder))
    assert not made.faults
    assert made.told["answered"] == 150
