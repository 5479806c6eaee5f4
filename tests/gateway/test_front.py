"""What a stranger may send before a body, and how long it may take."""

import asyncio

import pytest

from gateway import front
from tests.double import CHAT, End, delta, stream
from tests.gateway.house import KEY, Raw, Street

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n".encode()


async def closed(client: Raw, flood: bytes, times: int) -> None:
    """Send until the gateway closes; it must do so before all of it is taken."""

    async def pour() -> None:
        for _ in range(times):
            client.send(flood)
            await client.writer.drain()
            await asyncio.sleep(0)

    async with asyncio.timeout(20):
        with pytest.raises(ConnectionError):
            await pour()


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n",
        HEAD,
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    ],
    ids=["no key", "a key", "trailers"],
)
async def test_lines_that_never_end_are_cut_off(street: Street, start: bytes) -> None:
    house = await street.house(await street.engine())
    client = await street.raw(house)
    client.send(start)
    await closed(client, b"a: b\r\n" * 2000, 20_000)
    assert (await house.client.get("/health")).status_code == 200


async def test_one_line_that_never_ends_is_cut_off(street: Street) -> None:
    house = await street.house(await street.engine())
    client = await street.raw(house)
    client.send(b"GET / HTTP/1.1\r\na: ")
    await closed(client, b"b" * 20_000, 20_000)


async def test_a_connection_that_says_nothing_is_closed(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "HEAD_SECONDS", 0.05)
    house = await street.house(await street.engine())
    silent, slow = await street.raw(house), await street.raw(house)
    slow.send(b"GET /hea")
    assert await silent.rest() == b""
    assert await slow.rest() == b""


async def test_a_request_in_time_is_not_bounded_by_the_heads_limits(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "HEAD_SECONDS", 0.05)
    house = await street.house(await street.engine())
    client = await street.raw(house)
    body = b'{"model": "tiny", "messages": [], "x": "' + b"y" * 500_000 + b'"}'
    client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body))
    for at in range(0, len(body), 50_000):
        client.send(body[at : at + 50_000])
        await asyncio.sleep(0.01)
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_header_line_that_looks_like_a_request_is_a_header_line(street: Street) -> None:
    house = await street.house(await street.engine())
    client = await street.raw(house)
    client.send(b"GET /health HTTP/1.1\r\nhost: gateway\r\nx-said: ")
    await asyncio.sleep(0.02)
    client.send(b"GET foo\r\n")
    await asyncio.sleep(0.02)
    client.send(b"\r\n")
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_query_in_any_bytes_reaches_the_engine_or_is_refused(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    for query in (b"?beta=true", b"?q=%E4%BD%A0", b"?q=\xe4\xbd\xa0"):
        client = await street.raw(house)
        body = b'{"model": "tiny", "messages": []}'
        client.send(
            HEAD.replace(b" HTTP/1.1", query + b" HTTP/1.1", 1) + b"content-length: %d\r\n\r\n" % len(body) + body
        )
        assert int((await client.until(b"\r\n")).split()[1]) in {200, 400}
    assert engine.asked[0].target.endswith("?beta=true")
    assert "%E4%BD%A0" in engine.asked[1].target


async def test_a_gateway_that_is_stopped_ends_a_stream_with_an_error(street: Street) -> None:
    engine = await street.engine()
    engine.always(*stream(delta("a"), End.SILENCE))
    house = await street.house(engine)
    client = await street.raw(house)
    client.ask(b'{"model": "tiny", "messages": [], "stream": true}')
    await client.until(delta("a"))
    for task in tuple(house.tasks):
        task.cancel()
    said = await client.until(b"data: [DONE]\n\n")
    assert b'"error"' in said
    await asyncio.wait_for(engine.asked[0].closed.wait(), 5)
