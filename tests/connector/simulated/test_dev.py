"""What an engine in dev mode lets anybody do."""

import asyncio
from typing import Any

import httpx
import pytest

from connector.simulated.events import Numbers
from connector.simulated.serving import Flags

from .conftest import OnePool, Run
from .exchanges import COMPLETIONS, completion

DEV = Flags(dev_mode=True)
PROMPT = list(range(100, 170))


class Told:
    """Events, as a publisher is given them."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events += events


async def cached(client: httpx.AsyncClient) -> int:
    answer = (await client.post(COMPLETIONS, json=completion(prompt=PROMPT, max_tokens=1))).json()
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/is_sleeping", "/server_info"])
async def test_without_dev_mode_there_is_none_of_it(run: Run, path: str) -> None:
    async with run() as (client, _):
        for method in ("GET", "POST"):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


async def test_the_cache_is_emptied_and_the_event_waits_for_the_next_step(run: Run) -> None:
    told = Told()
    async with run(flags=DEV, events=told) as (client, _):
        await cached(client)
        assert await cached(client) == 64
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert not any(event["type"] == "AllBlocksCleared" for event in told.events)
        assert await cached(client) == 0
        kinds = [event["type"] for event in told.events]
        assert kinds.count("AllBlocksCleared") == 1
        assert kinds.index("AllBlocksCleared") < len(kinds) - 1, "what was stored since comes behind it"
        assert (await client.get("/reset_prefix_cache")).status_code == httpx.codes.METHOD_NOT_ALLOWED


async def test_the_pool_is_emptied_for_everybody(run: Run) -> None:
    pool = OnePool()
    async with run(flags=DEV, pool=pool) as (client, _):
        await cached(client)
        while not pool.there:  # noqa: ASYNC110 -- nobody tells when a put is over
            await asyncio.sleep(0.01)
        pool.there.add(b"another's")
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert pool.there
        assert (await client.post("/reset_prefix_cache?reset_external=true")).json() == {"success": True}
        assert not pool.there


async def test_blocks_in_use_are_not_forgotten(run: Run) -> None:
    async with run(flags=DEV, time_scale=1.0) as (client, engine):
        asked = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=5000, ignore_eos=True)))
        while not engine.cache.usage:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": False}
        asked.cancel()
        await asyncio.wait({asked})


async def test_its_settings_are_told(run: Run) -> None:
    async with run(flags=DEV, events=Told(), sources={"endpoint": "tcp://*:5557"}) as (client, _):
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        info = (await client.get("/server_info?config_format=json")).json()
        assert info["vllm_config"]["cache_config"]["prefix_caching_hash_algo"] == "sha256_cbor"
        assert info["vllm_config"]["kv_events_config"] == {"endpoint": "tcp://*:5557"}
        assert info["vllm_config"]["kv_transfer_config"] is None
        assert info["vllm_env"] == {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": False, "VLLM_SERVER_DEV_MODE": True}
        assert "block_size" in (await client.get("/server_info")).json()["vllm_config"]
        assert (await client.get("/server_info?config_format=xml")).status_code == httpx.codes.BAD_REQUEST
