import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from gateway.errors import BadRequest, BodyTooLarge, BodyTooSlow, ClientLeft
from gateway.exchange import Exchange, request_id


class Client:
    """The ASGI side of a client: what it sends stands in a queue, what it gets in a list."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.got: list[MutableMapping[str, Any]] = []

    def body(self, piece: bytes, *, more: bool = False) -> None:
        self.says.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def leave(self) -> None:
        self.says.put_nowait({"type": "http.disconnect"})

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.got.append(message)

    def exchange(self, *headers: tuple[bytes, bytes]) -> Exchange:
        scope = {"type": "http", "path": "/v1/chat/completions", "headers": list(headers)}
        return Exchange(scope, self.says.get, self.send)


@pytest.fixture
def client() -> Client:
    return Client()


async def test_a_body_in_pieces(client: Client) -> None:
    client.body(b"ab", more=True)
    client.body(b"", more=True)
    client.body(b"c")
    assert await client.exchange().body(3, 1) == b"abc"


async def test_a_declared_length_is_refused_before_a_byte_is_read(client: Client) -> None:
    with pytest.raises(BodyTooLarge):
        await client.exchange((b"content-length", b"11")).body(10, 1)


async def test_an_undeclared_length_is_refused_where_it_passes_the_limit(client: Client) -> None:
    for _ in range(3):
        client.body(b"12345", more=True)
    with pytest.raises(BodyTooLarge):
        await client.exchange().body(10, 1)
    assert client.says.empty()


async def test_the_limit_itself_is_allowed(client: Client) -> None:
    client.body(b"1234567890")
    assert await client.exchange((b"content-length", b"10")).body(10, 1) == b"1234567890"


@pytest.mark.parametrize("length", [b"-1", b"+5", b"1e9", b"", b"\xd9\xa1"])
async def test_a_strange_length_is_only_a_header(client: Client, length: bytes) -> None:
    client.body(b"{}")
    assert await client.exchange((b"content-length", length)).body(10, 1) == b"{}"


async def test_a_body_that_does_not_come(client: Client) -> None:
    client.body(b"{", more=True)
    with pytest.raises(BodyTooSlow):
        await client.exchange().body(10, 0.01)


async def test_a_client_that_leaves_in_its_body(client: Client) -> None:
    client.body(b"{", more=True)
    client.leave()
    with pytest.raises(ClientLeft):
        await client.exchange().body(10, 1)


async def test_leaving_cancels_what_runs(client: Client) -> None:
    exchange = client.exchange()
    ran: list[str] = []

    async def serve() -> None:
        async with exchange.present():
            client.leave()
            try:
                await asyncio.Event().wait()
            finally:
                ran.append("cancelled")

    with pytest.raises(ClientLeft):
        await serve()
    assert ran == ["cancelled"]
    assert not exchange.started
    await asyncio.sleep(0)  # not cancelled any more


async def test_leaving_is_noticed_inside_a_timeout(client: Client) -> None:
    client.leave()
    with pytest.raises(ClientLeft):
        async with client.exchange().present(), asyncio.timeout(10):
            await asyncio.Event().wait()


async def test_a_client_that_left_before(client: Client) -> None:
    client.leave()
    with pytest.raises(ClientLeft):
        async with client.exchange().present():
            await asyncio.Event().wait()


async def test_more_body_is_no_leaving(client: Client) -> None:
    async with client.exchange().present():
        client.body(b"more")
        await asyncio.sleep(0.01)


async def test_the_end_of_the_answer_is_no_leaving(client: Client) -> None:
    exchange = client.exchange()
    async with exchange.present():
        await exchange.answer(200, [], b"ok")
        client.leave()
        await asyncio.sleep(0.01)


async def test_a_shutdown_is_no_leaving(client: Client) -> None:
    async def serve() -> None:
        async with client.exchange().present():
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_pass_through_and_the_listening_ends(client: Client) -> None:
    before = asyncio.all_tasks()

    async def serve() -> None:
        async with client.exchange().present():
            await asyncio.sleep(0)
            raise BadRequest("no")

    with pytest.raises(BadRequest):
        await serve()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_an_answer_has_its_length_and_the_request_id(client: Client) -> None:
    exchange = client.exchange((b"x-request-id", b"mine-1"))
    await exchange.answer(201, [(b"a", b"b")], b"body")
    head, body = client.got
    assert exchange.started
    assert head["status"] == 201
    assert head["headers"] == [(b"a", b"b"), (b"content-length", b"4"), (b"x-request-id", b"mine-1")]
    assert body["body"] == b"body"
    assert not body.get("more_body", False)


async def test_a_stream_goes_out_piece_by_piece(client: Client) -> None:
    exchange = client.exchange()
    await exchange.start(200, [])
    await exchange.write(b"a")
    await exchange.finish(b"b")
    assert [(m["body"], m.get("more_body", False)) for m in client.got[1:]] == [(b"a", True), (b"b", False)]


async def test_a_refusal(client: Client) -> None:
    await client.exchange().refuse(BadRequest("no"))
    head, body = client.got
    assert head["status"] == 400
    assert (b"content-type", b"application/json") in head["headers"]
    assert b'"no"' in body["body"]


@pytest.mark.parametrize("name", [b"a", b"A.b_c:d-9", b"x" * 128])
def test_a_well_formed_request_id_is_kept(name: bytes) -> None:
    assert request_id([(b"x-request-id", name)]) == name.decode()


@pytest.mark.parametrize(
    "name", [b"", b"x" * 129, b"a b", b"a\nb", b'{"level":"error"}', b"\x1b[31m", "é".encode(), b"a\n"]
)
def test_any_other_is_replaced(name: bytes) -> None:
    made = request_id([(b"x-request-id", name)])
    assert len(made) == 32
    assert made != request_id([(b"x-request-id", name)])


def test_headers_are_found_by_their_first(client: Client) -> None:
    exchange = client.exchange((b"a", b"1"), (b"a", b"2"))
    assert exchange.header(b"a") == b"1"
    assert exchange.header(b"b") is None
