"""Events on the wire are those of vLLM, and what was missed can be had again."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from connector.simulated.events import Chain, Numbers, cleared, put, removed, stored
from connector.simulated.publisher import END, Publisher
from tests.connector.peer import free_port

from .conftest import BLOCK, OnePool, Run

CHAIN = Chain(
    hashes=[bytes([1] * 32), bytes([2] * 32)],
    parent=None,
    tokens=list(range(32)),
    block_size=16,
    extra_keys=[("salt",), None],
)


@asynccontextmanager
async def subscribed(numbers: Numbers | None = None) -> AsyncIterator[tuple[Publisher, zmq.asyncio.Socket]]:
    port, replay = free_port(), free_port()
    publisher = Publisher(f"tcp://*:{port}", f"tcp://127.0.0.1:{replay}", lambda: 12.5, numbers or Numbers())
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    async with publisher:
        socket.connect(f"tcp://127.0.0.1:{port}")
        await asyncio.sleep(0.2)  # a subscription tells nobody when it has arrived
        yield publisher, socket
    context.destroy(linger=0)


async def heard(socket: zmq.asyncio.Socket) -> tuple[int, list[Any]]:
    async with asyncio.timeout(5):
        topic, number, payload = await socket.recv_multipart()
    assert topic == b""
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)


async def replayed(publisher: Publisher, first: int) -> list[tuple[bytes, int]]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(str(publisher.replay))
    await socket.send_multipart([b"", struct.pack(">Q", first)])
    answers = []
    async with asyncio.timeout(5):
        while True:
            _, topic, number, payload = await socket.recv_multipart()
            assert topic == b""
            if number == END:
                break
            answers.append((payload, int.from_bytes(number, "big")))
    context.destroy(linger=0)
    return answers


async def test_a_batch_is_an_array_and_each_event_a_map() -> None:
    async with subscribed() as (publisher, socket):
        publisher.publish([stored(CHAIN, publisher.numbers), removed(bytes([9] * 32), publisher.numbers)])
        publisher.publish([])
        publisher.publish([cleared()])
        number, (time, (first, second), rank) = await heard(socket)
        assert (number, time, rank) == (0, 12.5, 0)
        assert list(first.items()) == [
            ("type", "BlockStored"),
            ("block_hashes", [bytes([1] * 32), bytes([2] * 32)]),
            ("parent_block_hash", None),
            ("token_ids", list(range(32))),
            ("block_size", 16),
            ("lora_id", None),
            ("medium", "GPU"),
            ("lora_name", None),
            ("extra_keys", [["salt"], None]),
            ("group_idx", 0),
            ("kv_cache_spec_kind", "full_attention"),
        ]
        assert second == {"type": "BlockRemoved", "block_hashes": [bytes([9] * 32)], "medium": "GPU", "group_idx": 0}
        assert await heard(socket) == (1, [12.5, [{"type": "AllBlocksCleared"}], 0])


async def test_what_is_buffered_can_be_had_again() -> None:
    async with subscribed() as (publisher, _):
        for _ in range(5):
            publisher.publish([cleared()])
        assert [number for _, number in await replayed(publisher, 2)] == [2, 3, 4]
        assert [number for _, number in await replayed(publisher, 99)] == []


async def test_hashes_can_be_numbers() -> None:
    digest = bytes(range(32))
    assert Numbers(whole=False).of(digest) == int.from_bytes(digest, "big") & (2**64 - 1)
    assert Numbers().of(digest) == digest


def test_blocks_that_are_put_are_told_one_by_one() -> None:
    first, second = put(CHAIN, Numbers())
    assert (first["block_hashes"], first["parent_block_hash"]) == ([CHAIN.hashes[0]], None)
    assert (second["block_hashes"], second["parent_block_hash"]) == ([CHAIN.hashes[1]], CHAIN.hashes[0])
    assert (second["token_ids"], second["medium"]) == (list(range(16, 32)), "cpu")
    assert list(second) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "group_idx",
    ]


async def test_an_engine_tells_all_that_it_stores_and_gives_up(run: Run) -> None:
    async with subscribed() as (publisher, socket), run(events=publisher, pool=OnePool(), blocks=16) as (client, _):
        body = {"prompt": list(range(20, 20 + 70)), "max_tokens": 30, "ignore_eos": True, "cache_salt": "s"}
        answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
        choice = answer.json()["choices"][0]
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        told: list[Any] = []
        while sum(len(event["block_hashes"]) for event in told if event["medium"] == "GPU") < (70 + 29) // BLOCK:
            told += (await heard(socket))[1][1]
        gpu = [event for event in told if event["medium"] == "GPU"]
        assert gpu[0]["extra_keys"] == [["s"], None, None, None]
        assert [token for event in gpu for token in event["token_ids"]] == tokens[: (70 + 29) // BLOCK * BLOCK]
        assert gpu[1]["parent_block_hash"] == gpu[0]["block_hashes"][-1]

        await client.post("/v1/completions", json={"prompt": list(range(400, 400 + 200)), "max_tokens": 1})
        while not any(event["type"] == "BlockRemoved" for event in told):
            told += (await heard(socket))[1][1]
        put_there = [event["block_hashes"][0] for event in told if event["medium"] == "cpu"]
        assert put_there[:4] == gpu[0]["block_hashes"]


async def test_an_adapter_is_named(run: Run) -> None:
    async with subscribed() as (publisher, socket), run(events=publisher) as (client, _):
        body = {"model": "legal", "prompt": list(range(20, 60)), "max_tokens": 1, "cache_salt": "s"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        (event,) = (await heard(socket))[1][1]
        assert (event["lora_id"], event["lora_name"]) == (1, "legal")
        assert event["extra_keys"] == [["legal", "s"], ["legal"]]
