"""What one client may make the gateway hold or do, and what of it others feel."""

import asyncio
import gzip

import orjson
import pytest

from gateway.encodings import decoded
from gateway.errors import BadRequest
from gateway.exchange import PIECES, Exchange
from gateway.limits import Bytes
from tests.double import (
    CHAT,
    DONE,
    LAST_CHUNK,
    Engine,
    chunk,
    completed,
    delta,
    event,
    head,
    stream,
    whole,
)
from tests.gateway.house import KEY, House, Street, chat, digest
from tests.gateway.test_exchange import Line

BODY = orjson.dumps(chat())


async def limited(street: Street, engine: Engine, **limits: int) -> House:
    return await street.house(engine, tenants=[{"name": "team-a", "keys": [{"sha256": digest(KEY)}], **limits}])


async def test_a_stream_behind_another_request_is_not_cut(street: Street) -> None:
    """Uvicorn closes a connection some time after an answer of its own, whatever goes on there by then."""
    engine = await street.engine()
    gate = asyncio.Event()
    engine.always(*stream(delta("a"), gate, delta("b", "stop"), DONE))
    house = await street.house(engine)
    client = await street.raw(house)
    client.ask(b"", path="/v1/models", method="GET")
    await client.until(b"0\r\n\r\n") if b"chunked" in await client.until(b"\r\n\r\n") else None
    client.ask(orjson.dumps(chat(stream=True)))
    await client.until(delta("a"))
    await asyncio.sleep(1.3)
    gate.set()
    await client.until(DONE)


async def test_a_cold_request_whose_body_drips_is_not_waited_for(street: Street) -> None:
    house = await street.house(await street.engine())
    client = await street.raw(house)
    client.send(b"GET /health HTTP/1.1\r\nhost: gateway\r\ncontent-length: 900000000\r\n\r\n")
    assert b"HTTP/1.1 200" in await client.rest()


def test_a_body_of_many_empty_members_is_refused_at_once() -> None:
    with pytest.raises(BadRequest):
        decoded(gzip.compress(b"") * 100_000, b"gzip", 1 << 25)
    assert decoded(gzip.compress(b"a") * 1000, b"gzip", 1 << 25) == b"a" * 1000


async def test_answers_that_nobody_takes_do_not_pile_up(street: Street) -> None:
    engine = await street.engine()
    engine.always(*whole(200, completed("x" * 2_000_000)))
    house = await street.house(engine)
    client = await street.raw(house)
    for _ in range(20):
        client.ask(BODY)
        await asyncio.sleep(0.02)
    assert len(engine.asked) <= 8, "kernels hold some megabytes of them, the gateway no more than one"


async def test_a_body_with_more_members_than_anybody_means_is_refused(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    many = b'{"model":"tiny","kv_transfer_params":null,"messages":[]' + b',"a":0' * 200_000 + b"}"
    deep = b'{"model":"tiny","kv_transfer_params":null,"messages":[' + b"[]," * 600_000 + b"0]}"
    for body in (many, deep):
        assert (await house.client.post(CHAT, content=body)).status_code == 400
    assert not engine.asked


async def test_a_form_of_countless_parts_is_refused(street: Street) -> None:
    house = await street.house(await street.engine())
    kind = {"content-type": "multipart/form-data; boundary=b"}
    body = b"--b\r\na:b\r\n\r\n\r\n" * 5000 + b"--b--\r\n"
    answer = await house.client.post("/v1/audio/transcriptions", content=body, headers=kind)
    assert answer.status_code == 400


async def test_tiny_pieces_are_copied_together() -> None:
    exchange = Exchange(Line(), "POST", CHAT, "", {})
    pieces = [bytes([at % 256]) for at in range(5000)]
    for piece in pieces:
        exchange.feed(piece)
    exchange.complete()
    assert len(exchange._pieces) <= PIECES
    assert await exchange.body(10_000, 1, Bytes(10_000)) == b"".join(pieces)


async def test_bodies_that_are_only_announced_keep_nobody_out(street: Street) -> None:
    house = await street.house(await street.engine(), listen={"port": 0, "max_held_bytes": 2000})
    for _ in range(5):
        client = await street.raw(house)
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n".encode())
        client.send(b"content-length: 1900\r\n\r\n")
    await asyncio.sleep(0.05)
    assert (await house.chat()).status_code == 200


async def test_a_slot_is_free_when_the_client_has_its_answer(street: Street) -> None:
    engine = await street.engine()
    gate = asyncio.Event()
    house = await limited(street, engine, concurrent=1)
    client = await street.raw(house)
    for _ in range(3):
        engine.always(*stream(delta("a"), DONE, gate))
        client.ask(orjson.dumps(chat(stream=True)))
        said = await client.until(b"\r\n" + LAST_CHUNK)
        assert said.startswith(b"HTTP/1.1 200")
    gate.set()
    await house.idle()


async def test_who_leaves_an_answer_pays_for_its_prompt(street: Street) -> None:
    engine = await street.engine()
    start = event({"type": "message_start", "message": {"usage": {"input_tokens": 500, "output_tokens": 0}}})
    engine.always(*stream(start, event({"type": "content_block_delta"}), asyncio.Event()))
    house = await limited(street, engine, tokens_per_minute=1000)
    for _ in range(2):
        client = await street.raw(house)
        client.ask(orjson.dumps(chat(stream=True)), path="/v1/messages")
        await client.until(b"content_block_delta")
        client.leave()
        await house.idle()
    assert await house.metric("prompt_tokens_total") == 1000
    assert (await house.chat()).status_code == 429


async def test_trailers_are_no_headers(street: Street) -> None:
    engine = await street.engine()
    kind = [("content-type", "application/json"), ("transfer-encoding", "chunked")]
    engine.always(head(200, kind), chunk(orjson.dumps(completed())), b"0\r\nx-secret: 1\r\n\r\n")
    answer = await (await street.house(engine)).chat()
    assert answer.status_code == 200
    assert "x-secret" not in answer.headers


async def test_http_1_0_gets_no_interim_answer(street: Street) -> None:
    house = await street.house(await street.engine())
    client = await street.raw(house)
    client.send(f"POST {CHAT} HTTP/1.0\r\nauthorization: Bearer {KEY}\r\nexpect: 100-continue\r\n".encode())
    client.send(b"content-length: %d\r\n\r\n" % len(BODY))
    await asyncio.sleep(0.05)
    client.send(BODY)
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
