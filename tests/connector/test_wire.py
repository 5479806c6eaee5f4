"""HTTP/1.1 to one origin, against a peer that says exactly what it is told, on both event loops."""

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trustme

from connector import wire as module
from connector.errors import BadAnswer, Disconnected, TimedOut, Unreachable
from connector.wire import HIGH_WATER, MAX_HEAD, Answer, Timeouts, Wire
from tests.connector.peer import Line, Peer, Script, answers, free_port, hold, listen, ok, once, until

PLENTY = 1 << 30
SHORT = 0.03
HI = ok(b"hi")
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1;x=y\r\n!\r\n0\r\ntrailer: t\r\n\r\n"
CLOSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhi"


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No future whose error nobody saw, no socket that nobody closed."""
    yield
    gc.collect(1)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@asynccontextmanager
async def wired(*scripts: Script, timeouts: Timeouts | None = None) -> AsyncIterator[tuple[Wire, Peer]]:
    """A wire to a peer. Behind the block nothing of it may be busy."""
    async with listen(*scripts) as peer:
        wire = Wire(peer.url, timeouts)
        try:
            yield wire, peer
            await until(lambda: wire.busy == 0)
        finally:
            wire.close()
            await until(lambda: not wire._open)


async def fetch(wire: Wire, target: str = "/") -> bytes:
    return await (await wire.send("GET", target)).body(PLENTY)


# bodies and heads


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (HI, b"hi"),
        (ok(b""), b""),
        (CHUNKED, b"hi!"),
        (CHUNKED.replace(b"chunked", b"Chunked"), b"hi!"),
        (CLOSE, b"hi"),
        (CLOSE.replace(b"connection: close\r\n", b""), b"hi"),
        (CLOSE.replace(b"HTTP/1.1", b"HTTP/1.0"), b"hi"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + HI, b"hi"),
    ],
)
async def test_a_body_ends_where_its_head_says(said: bytes, body: bytes) -> None:
    async with wired(once(said)) as (wire, _):
        answer = await wire.send("GET", "/")

        assert await answer.body(PLENTY) == body
        assert answer.done
        assert await answer.read() == b"", "an end stays an end"
        assert answer.header(b"link") is None, "what an interim answer says is not the answer's"


@pytest.mark.parametrize("said", [HI, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + HI])
async def test_an_answer_may_be_cut_anywhere(said: bytes) -> None:
    """Two writes for each cut, the second only when the first was read."""

    async def script(line: Line) -> None:
        for cut in range(1, len(said)):
            await line.request()
            await line.send(said[:cut])
            await asyncio.sleep(0.0002)
            await line.send(said[cut:])

    async with wired(script) as (wire, peer):
        for _ in range(1, len(said)):
            assert await fetch(wire) == (b"hi!" if said is CHUNKED else b"hi")
        assert len(peer.lines) == 1


async def test_a_byte_at_a_time() -> None:
    async def script(line: Line) -> None:
        await line.request()
        for byte in CHUNKED:
            await line.send(bytes([byte]))
            await asyncio.sleep(0)

    async with wired(script) as (wire, _):
        assert await fetch(wire) == b"hi!"


async def test_pieces_arrive_as_they_come() -> None:
    said = asyncio.Event()

    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhi")
        await said.wait()
        await line.send(b"ho")

    async with wired(script) as (wire, _):
        answer = await wire.send("GET", "/")
        assert await answer.read() == b"hi"
        assert not answer.done
        said.set()
        assert await answer.read() == b"ho"
        assert await answer.read() == b""


async def test_a_request_is_what_was_asked_for() -> None:
    async with wired(answers(HI)) as (wire, peer):
        small, large = b"x" * 100, b"y" * (module.JOINED + 1)
        await (await wire.send("POST", "/v1/x?y=%20", [(b"content-type", b"a/b")], small)).body(PLENTY)
        await (await wire.send("POST", "/", [], large)).body(PLENTY)
        await (await wire.send("POST", "/")).body(PLENTY)
        await (await wire.send("GET", "/")).body(PLENTY)

        first, second, empty, get = peer.requests
        assert (first.method, first.target, first.body) == ("POST", "/v1/x?y=%20", small)
        assert first.headers == {"host": wire.origin, "content-type": "a/b", "content-length": "100"}
        assert second.body == large
        assert empty.headers["content-length"] == "0"
        assert "content-length" not in get.headers


async def test_status_and_headers_are_the_peers() -> None:
    said = b"HTTP/1.1 429 Slow Down\r\nRetry-After: 3\r\nx-a: 1\r\nX-A: 2\r\ncontent-length: 0\r\n\r\n"
    async with wired(answers(said)) as (wire, _):
        answer = await wire.send("GET", "/")

        assert answer.status == 429
        assert answer.headers[:3] == [(b"retry-after", b"3"), (b"x-a", b"1"), (b"x-a", b"2")]
        assert answer.header(b"x-a") == b"1"


async def test_a_body_above_its_limit_is_given_up() -> None:
    async with wired(answers(ok(b"12345"))) as (wire, _):
        with pytest.raises(BadAnswer, match="larger than 4"):
            await (await wire.send("GET", "/")).body(4)
        assert await (await wire.send("GET", "/")).body(5) == b"12345"


@pytest.mark.parametrize("size", [1, module.JOINED - 2, module.JOINED - 1, 10 * module.JOINED])
async def test_a_body_may_come_in_parts(size: int) -> None:
    async with wired(answers(HI)) as (wire, peer):
        await (await wire.send("POST", "/", [], [b"{", b"", b"x" * size, b"}"])).body(PLENTY)
        await (await wire.send("POST", "/", [], ())).body(PLENTY)

        assert [request.body for request in peer.requests] == [b"{" + b"x" * size + b"}", b""]
        assert len(peer.lines) == 1


async def test_a_body_in_parts_is_sent_again_whole() -> None:
    async def dies_on_the_second(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await line.request()
        line.reset()

    async with wired(dies_on_the_second, answers(HI)) as (wire, peer):
        for _ in range(2):
            await (await wire.send("POST", "/", [], [b"a" * module.JOINED, b"b"])).body(PLENTY)
        assert {request.body for request in peer.requests} == {b"a" * module.JOINED + b"b"}


# poured on


def in_turn(gates: list[asyncio.Event], *pieces: bytes) -> Script:
    """A body of known length, each piece of it when its gate opens; then the connection stays."""

    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % sum(map(len, pieces)))
        for gate, piece in zip(gates, pieces, strict=True):
            await gate.wait()
            await line.send(piece)

    return script


async def test_a_sink_is_called_with_each_piece_the_moment_it_is_there() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    async with wired(in_turn(gates, b"a", b"b", b"c")) as (wire, _):
        answer = await wire.send("GET", "/")
        got: list[bytes] = []
        pouring = asyncio.create_task(answer.pour(got.append))
        for number, gate in enumerate(gates):
            assert got == [b"a", b"b", b"c"][:number]
            assert not pouring.done()
            gate.set()
            await until(lambda: len(got) > number)  # noqa: B023 - called within this turn
        await pouring
        assert got == [b"a", b"b", b"c"]
        assert answer.done
        assert await answer.read() == b""


@pytest.mark.parametrize("said", [HI, CHUNKED, CLOSE, ok(b"")])
async def test_what_has_come_before_is_poured_too(said: bytes) -> None:
    async with wired(once(said)) as (wire, _):
        answer = await wire.send("GET", "/")
        await until(lambda: answer.done)
        got: list[bytes] = []
        await answer.pour(got.append)
        assert b"".join(got) == {HI: b"hi", CHUNKED: b"hi!", CLOSE: b"hi"}.get(said, b"")
        assert all(got), "no piece is empty"


async def test_pouring_goes_on_where_reading_ended() -> None:
    gates = [asyncio.Event() for _ in range(2)]
    async with wired(in_turn(gates, b"a", b"b")) as (wire, _):
        answer = await wire.send("GET", "/")
        gates[0].set()
        assert await answer.read() == b"a"
        gates[1].set()
        got: list[bytes] = []
        await answer.pour(got.append)
        assert got == [b"b"]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", Disconnected),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\nzz", BadAnswer),
    ],
)
async def test_what_came_before_a_break_is_poured_and_the_break_is_told(said: bytes, error: type[Exception]) -> None:
    async with wired(once(said)) as (wire, _):
        answer = await wire.send("GET", "/")
        got: list[bytes] = []
        with pytest.raises(error):
            await answer.pour(got.append)
        assert b"".join(got) == b"hi"


class Full(Exception):
    """What a sink raises here."""


def raising(_: bytes) -> None:
    raise Full


async def test_a_sink_that_raises_ends_the_exchange() -> None:
    gates = [asyncio.Event() for _ in range(2)]
    async with wired(in_turn(gates, b"a", b"b")) as (wire, peer):
        answer = await wire.send("GET", "/")
        pouring = asyncio.create_task(answer.pour(raising))
        await asyncio.sleep(0)
        gates[0].set()
        with pytest.raises(Full):
            await pouring
        await until(lambda: wire.busy == 0)
        gates[1].set()
        await until(peer.lines[0].ended.is_set)


async def test_a_sink_that_raises_at_the_end_breaks_off_nobody_else() -> None:
    """By then the connection may be another's."""
    tell = asyncio.Event()

    async def script(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await line.request()
        await tell.wait()
        await line.send(HI)

    async with wired(script) as (wire, peer):
        first = await wire.send("GET", "/")
        await until(lambda: first.done)
        second = asyncio.create_task(fetch(wire))
        await until(lambda: len(peer.requests) == 2)
        with pytest.raises(Full):
            await first.pour(raising)
        tell.set()
        assert await second == b"hi"
        assert len(peer.lines) == 1


async def test_whoever_pours_can_be_cancelled() -> None:
    async with wired(in_turn([asyncio.Event()], b"a")) as (wire, _):
        answer = await wire.send("GET", "/")
        pouring = asyncio.create_task(answer.pour(raising))
        await asyncio.sleep(0)
        pouring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pouring
        answer.close()
        await until(lambda: not wire._open)


async def test_a_sink_that_cannot_keep_up_holds_the_peer_up() -> None:
    size = 20 * 1024 * 1024
    sent = 0

    async def script(line: Line) -> None:
        nonlocal sent
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            await line.send(b"x" * (1 << 20))
            sent += 1 << 20

    async with wired(script) as (wire, _):
        answer = await wire.send("GET", "/")
        got = 0

        def sink(piece: bytes) -> None:
            nonlocal got
            got += len(piece)
            answer.pause()

        pouring = asyncio.create_task(answer.pour(sink))
        await until(lambda: got)
        before = got
        await asyncio.sleep(0.02)
        assert sent < size, "the peer is held up"
        assert got - before <= HIGH_WATER, "one piece more at most"
        while not pouring.done():
            answer.resume()
            await asyncio.sleep(0)
        await pouring
        assert got == size


# connections, kept and lost


async def test_a_connection_is_used_again() -> None:
    async with wired(answers(HI, CHUNKED, HI)) as (wire, peer):
        assert [await fetch(wire) for _ in range(3)] == [b"hi", b"hi!", b"hi"]
        assert len(peer.lines) == 1


@pytest.mark.parametrize("said", [CLOSE, HI.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), b"HTTP/1.0" + HI[8:]])
async def test_a_connection_that_closes_is_not(said: bytes) -> None:
    async with wired(once(said)) as (wire, peer):
        assert [await fetch(wire) for _ in range(2)] == [b"hi", b"hi"]
        assert len(peer.lines) == 2


async def test_a_connection_is_not_used_again_before_its_answer_is_complete() -> None:
    async with wired(answers(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")) as (wire, peer):
        first = await wire.send("GET", "/")
        second = await wire.send("GET", "/")

        assert len(peer.lines) == wire.busy == 2
        first.close()
        second.close()


async def test_a_closed_answer_takes_its_connection_along() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")
        await line.left()

    async with wired(script) as (wire, peer):
        answer = await wire.send("GET", "/")
        answer.close()

        await until(peer.lines[0].ended.is_set)
        assert await answer.read() == b"hi", "what had come stays readable"
        with pytest.raises(Disconnected):
            await answer.read()


async def test_closing_a_complete_answer_keeps_its_connection() -> None:
    async with wired(answers(HI)) as (wire, peer):
        for _ in range(2):
            answer = await wire.send("GET", "/")
            await answer.body(PLENTY)
            answer.close()
        assert len(peer.lines) == 1


@pytest.mark.parametrize("end", [Line.close, Line.reset])
async def test_a_kept_connection_that_dies_silently_is_replaced_once(end: Script) -> None:
    async def dies_on_the_second(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await line.request()
        end(line)

    async with wired(dies_on_the_second, answers(HI)) as (wire, peer):
        await fetch(wire, "/first")
        await fetch(wire, "/second")

        assert [request.target for request in peer.requests] == ["/first", "/second", "/second"]
        assert len(peer.lines) == 2


async def test_it_is_replaced_only_once() -> None:
    async def dies_on_the_second(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await line.request()
        line.close()

    async with wired(dies_on_the_second, once()) as (wire, peer):
        await fetch(wire)
        with pytest.raises(Disconnected):
            await fetch(wire)
        assert len(peer.requests) == 3


async def test_a_fresh_connection_that_dies_is_not_replaced() -> None:
    async with wired(once()) as (wire, peer):
        with pytest.raises(Disconnected):
            await fetch(wire)
        assert len(peer.requests) == 1


@pytest.mark.parametrize("word", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_kept_connection_that_began_to_answer_is_not_replaced(word: bytes) -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await line.request()
        await line.send(word)
        line.close()

    async with wired(script) as (wire, peer):
        await fetch(wire)
        with pytest.raises(Disconnected):
            await fetch(wire)
        assert len(peer.requests) == 2


async def test_a_kept_connection_that_is_only_slow_is_not_replaced() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await hold(line)

    async with wired(script, timeouts=Timeouts(head=SHORT)) as (wire, peer):
        await fetch(wire)
        with pytest.raises(TimedOut):
            await fetch(wire)
        assert len(peer.requests) == 2


async def test_connections_that_the_peer_closed_meanwhile_are_forgotten() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(HI)
        line.close()

    async with wired(script) as (wire, peer):
        await fetch(wire)
        await until(lambda: not wire._open)
        assert await fetch(wire) == b"hi"
        assert len(peer.requests) == 2


async def test_connections_idle_for_too_long_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with wired(answers(HI)) as (wire, peer):
        await fetch(wire)
        monkeypatch.setattr(module, "IDLE_KEPT", -1.0)
        await fetch(wire)
        assert len(peer.lines) == 2
        monkeypatch.undo()
        await fetch(wire)
        assert len(peer.lines) == 2


async def test_connections_idle_for_too_long_close_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines close them after 5 s; a request that meets such a close would have to be sent again."""
    monkeypatch.setattr(module, "IDLE_KEPT", 0.05)
    async with wired(answers(HI), timeouts=Timeouts(idle=0.1)) as (wire, _):
        await asyncio.gather(*(fetch(wire) for _ in range(5)))
        assert wire._open
        await until(lambda: not wire._open)
        assert await fetch(wire) == b"hi"


@pytest.mark.parametrize("said", [HI, CHUNKED])
@pytest.mark.parametrize("surplus", [b"H", HI, b"garbage", b"\x00"])
async def test_bytes_behind_an_answer_never_meet_the_next_request(said: bytes, surplus: bytes) -> None:
    async with wired(answers(said + surplus), answers(ok(b"mine"))) as (wire, peer):
        await fetch(wire)
        assert await fetch(wire) == b"mine"
        assert len(peer.lines) == 2


@pytest.mark.parametrize("surplus", [b"H", HI, b"garbage"])
async def test_nor_do_bytes_that_come_later(surplus: bytes) -> None:
    tell = asyncio.Event()

    async def script(line: Line) -> None:
        await line.request()
        await line.send(HI)
        await tell.wait()
        await line.send(surplus)
        await line.left()

    async with wired(script, answers(ok(b"mine"))) as (wire, peer):
        await fetch(wire)
        tell.set()
        await until(peer.lines[0].ended.is_set)
        assert await fetch(wire) == b"mine"


async def test_concurrent_requests_have_a_connection_each() -> None:
    async def script(line: Line) -> None:
        while True:
            request = await line.request()
            await until(lambda: len(peer.lines) == 100)
            await line.send(ok(request.target.encode()))

    async with wired(script) as (wire, peer):
        for _ in range(2):
            bodies = await asyncio.gather(*(fetch(wire, f"/{number}") for number in range(100)))
            assert bodies == [b"/%d" % number for number in range(100)]
            assert wire.busy == 0
            assert len(peer.lines) == 100


# ends that are none


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nconte",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_a_head_that_is_cut_short(said: bytes) -> None:
    async with wired(once(said)) as (wire, _):
        with pytest.raises(Disconnected):
            await wire.send("GET", "/")


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
    ],
)
async def test_a_body_that_is_cut_short_is_no_end(said: bytes) -> None:
    async with wired(once(said)) as (wire, _):
        answer = await wire.send("GET", "/")

        assert await answer.read() == b"hi"
        for _ in range(2):
            with pytest.raises(Disconnected):
                await answer.read()
        assert not answer.done


async def test_a_reset_is_no_end_of_a_body_that_ends_with_its_connection() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(CLOSE)
        await until(lambda: heard)
        line.reset()

    heard: list[bytes] = []
    async with wired(script) as (wire, _):
        answer = await wire.send("GET", "/")
        heard.append(await answer.read())
        with pytest.raises(Disconnected):
            await answer.read()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/1.1 banana\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * (MAX_HEAD + 1) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * MAX_HEAD,
    ],
    ids=lambda said: said[:40].decode("latin-1"),
)
async def test_what_is_no_http_answer(said: bytes) -> None:
    async with wired(once(said)) as (wire, _):
        with pytest.raises(BadAnswer):
            await wire.send("GET", "/")


async def test_a_chunk_that_is_none() -> None:
    async with wired(once(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\nzz")) as (wire, _):
        answer = await wire.send("GET", "/")
        assert await answer.read() == b"hi"
        with pytest.raises(BadAnswer):
            await answer.read()


@pytest.mark.parametrize("piece", [b"a" * 4096, b": b\r\na" * 512, b"\r\n\r\nHTTP/1.1 100 Continue" * 64])
async def test_a_head_without_an_end(piece: bytes) -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 100 Continue\r\na" if piece[:1] != b"\r" else b"HTTP/1.1 100 Continue")
        while True:
            await line.send(piece)

    async with wired(script) as (wire, _):
        with pytest.raises(BadAnswer, match="larger than"):
            await wire.send("GET", "/")


# no connection


async def test_refused() -> None:
    wire = Wire(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unreachable) as caught:
        await wire.send("GET", "/")
    assert caught.value.detail
    assert caught.value.origin == wire.origin
    assert wire.busy == 0


async def test_refused_on_every_address() -> None:
    with pytest.raises(Unreachable, match=r"Connect call failed|refused"):
        await Wire(f"http://localhost:{free_port()}").send("GET", "/")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64 + ".invalid"])
async def test_a_name_that_nobody_has(host: str) -> None:
    with pytest.raises(Unreachable):
        await Wire(f"http://{host}:80").send("GET", "/")


async def test_an_ipv6_address() -> None:
    async with listen(answers(HI), host="::1") as peer:
        wire = Wire(peer.url)
        assert await fetch(wire) == b"hi"
        assert peer.requests[0].headers["host"] == f"[::1]:{peer.port}" == wire.origin
        wire.close()


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://", "http:///path", "//x"])
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        Wire(url)


def test_ports_that_go_without_saying() -> None:
    assert Wire("http://h").origin == "h:80"
    assert Wire("https://h").origin == "h:443"


async def test_tls_to_a_peer_that_has_none() -> None:
    async def script(line: Line) -> None:
        await line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with listen(script) as peer:
        wire = Wire(peer.url.replace("http", "https"))
        with pytest.raises(Unreachable):
            await wire.send("GET", "/")
        assert wire.busy == 0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def serving_as(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize("size", [2, HIGH_WATER * 4])
async def test_tls_to_a_peer_that_an_authority_vouches_for(authority: trustme.CA, size: int) -> None:
    async with listen(answers(ok(b"x" * size)), tls=serving_as(authority, "127.0.0.1")) as peer:
        wire = Wire(peer.url, tls=trusting(authority))
        for _ in range(2):
            assert len(await (await wire.send("POST", "/", [], b"y" * size)).body(PLENTY)) == size
        assert [len(request.body) for request in peer.requests] == [size, size]
        assert len(peer.lines) == 1, "it is kept"
        wire.close()
        await until(lambda: not wire._open)


@pytest.mark.parametrize("fault", ["another authority", "the system's authorities", "another name"])
async def test_tls_to_a_peer_that_nobody_vouches_for(authority: trustme.CA, fault: str) -> None:
    """And not a byte of the request, which may hold a key, is sent there."""
    name = "engine.example" if fault == "another name" else "127.0.0.1"
    async with listen(answers(HI), tls=serving_as(authority, name)) as peer:
        trust = {"another authority": trusting(trustme.CA()), "another name": trusting(authority)}.get(fault)
        wire = Wire(peer.url, tls=trust)
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await wire.send("GET", "/", [(b"authorization", b"Bearer k")])
        assert peer.requests == []
        await until(lambda: not wire._open)


async def test_a_name_that_points_elsewhere_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    if "uvloop" in type(asyncio.get_running_loop()).__module__:
        pytest.skip("uvloop asks the system itself, which cannot be told another answer here")
    async with listen(answers(ok(b"old"))) as old, listen(answers(ok(b"new"))) as new:
        now = old

        def found(*_: object, **__: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (now.host, now.port))]

        monkeypatch.setattr(socket, "getaddrinfo", found)
        monkeypatch.setattr(module, "IDLE_KEPT", 0.05)
        wire = Wire("http://engine.example:8000", Timeouts(idle=0.1))
        assert await fetch(wire) == b"old"
        now = new
        await until(lambda: not wire._open)
        assert await fetch(wire) == b"new"
        assert new.requests[0].headers["host"] == "engine.example:8000"
        wire.close()


async def test_proxies_of_the_environment_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    async with wired(answers(HI)) as (wire, _):
        assert await fetch(wire) == b"hi"


# limits of time


async def test_a_connection_that_does_not_come_about() -> None:
    """Nobody accepts TLS behind this port, so connecting takes for ever."""
    async with listen(Line.left) as peer:
        wire = Wire(peer.url.replace("http", "https"), Timeouts(connect=SHORT))
        with pytest.raises(TimedOut) as caught:
            await wire.send("GET", "/")
        assert (caught.value.phase, caught.value.limit) == ("connect", SHORT)
        assert wire.busy == 0


@pytest.mark.parametrize("word", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_head_that_does_not_come(word: bytes) -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(word)
        await line.left()

    async with wired(script, timeouts=Timeouts(head=SHORT, idle=9)) as (wire, peer):
        with pytest.raises(TimedOut) as caught:
            await wire.send("GET", "/")
        assert (caught.value.phase, caught.value.limit) == ("head", SHORT)
        await until(peer.lines[0].ended.is_set)


@pytest.mark.parametrize("how", ["read", "pour"])
async def test_a_head_without_a_body_is_still_prefilling(how: str) -> None:
    """An engine may send its header at once and then compute for minutes: that is no silence."""
    gate = asyncio.Event()
    async with wired(in_turn([gate], b"hi"), timeouts=Timeouts(head=9, idle=SHORT)) as (wire, _):
        answer = await wire.send("GET", "/")
        got: list[bytes] = []
        waiting = asyncio.create_task(answer.pour(got.append) if how == "pour" else answer.body(PLENTY))
        await asyncio.sleep(3 * SHORT)
        assert not waiting.done()
        gate.set()
        assert await waiting in {None, b"hi"}


@pytest.mark.parametrize("how", ["read", "pour"])
async def test_a_head_without_a_body_has_the_heads_limit(how: str) -> None:
    async with wired(in_turn([asyncio.Event()], b"hi"), timeouts=Timeouts(head=SHORT, idle=9)) as (wire, _):
        answer = await wire.send("GET", "/")
        with pytest.raises(TimedOut) as caught:
            await (answer.pour(raising) if how == "pour" else answer.read())
        assert (caught.value.phase, caught.value.limit) == ("head", SHORT)
        await until(lambda: not wire._open)


@pytest.mark.parametrize("word", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
@pytest.mark.parametrize("given", [True, False], ids=["a deadline", "the total"])
async def test_an_exchange_is_over_at_its_deadline_whatever_it_does(word: bytes, given: bool) -> None:
    async def script(line: Line) -> None:
        await line.request()
        while True:
            await line.send(word + b"." if word else b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.005)

    limits = Timeouts(head=9, idle=9, total=9 if given else SHORT)
    async with wired(script, timeouts=limits) as (wire, _):
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(TimedOut) as caught:
            await (await wire.send("GET", "/", deadline=start + SHORT if given else None)).body(PLENTY)
        assert caught.value.phase == "total"
        assert SHORT * 0.9 <= loop.time() - start < 1.5, "kept to a fifth of the shortest limit, or to a second"
        await until(lambda: not wire._open)


async def test_a_deadline_bounds_connecting_as_well() -> None:
    async with listen(Line.left) as peer:
        wire = Wire(peer.url.replace("http", "https"), Timeouts(connect=9))
        with pytest.raises(TimedOut) as caught:
            await wire.send("GET", "/", deadline=asyncio.get_running_loop().time() + SHORT)
        assert caught.value.phase == "total"


@pytest.mark.parametrize("how", ["read", "pour"])
async def test_a_reader_that_leaves_an_answer_unread_for_too_long(how: str) -> None:
    body = ok(b"x" * (64 * HIGH_WATER))
    async with wired(answers(body), timeouts=Timeouts(idle=9, reader=SHORT)) as (wire, _):
        answer = await wire.send("GET", "/")

        async def left_alone() -> None:
            if how == "pour":
                await answer.pour(lambda _: answer.pause())
            await until(lambda: answer._error)
            while await answer.read():
                pass

        with pytest.raises(TimedOut) as caught:
            await left_alone()
        assert (caught.value.phase, caught.value.limit) == ("reader", SHORT)
        await until(lambda: not wire._open)


async def test_a_reader_that_takes_something_now_and_then_is_none() -> None:
    body = ok(b"x" * (16 * HIGH_WATER))
    async with wired(answers(body), timeouts=Timeouts(idle=9, reader=0.2)) as (wire, _):
        answer = await wire.send("GET", "/")
        got = 0
        while piece := await answer.read():
            got += len(piece)
            await asyncio.sleep(0.03)
        assert got == 16 * HIGH_WATER


async def test_a_body_that_falls_silent() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi")
        await line.left()

    async with wired(script, timeouts=Timeouts(head=9, idle=SHORT)) as (wire, peer):
        answer = await wire.send("GET", "/")
        assert await answer.read() == b"hi"
        with pytest.raises(TimedOut) as caught:
            await answer.read()
        assert (caught.value.phase, caught.value.limit) == ("idle", SHORT)
        await until(peer.lines[0].ended.is_set)


async def test_a_body_that_dribbles_is_not_silent() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.02)
            await line.send(b".")

    async with wired(script, timeouts=Timeouts(idle=0.1)) as (wire, _):
        assert await fetch(wire) == b"." * 8


async def test_a_reader_that_is_slow_itself_is_no_silence() -> None:
    size = 8 * 1024 * 1024
    async with wired(answers(ok(b"x" * size)), timeouts=Timeouts(idle=SHORT)) as (wire, _):
        answer = await wire.send("GET", "/")
        await until(lambda: answer._connection._paused)
        await asyncio.sleep(2 * SHORT)
        assert len(await answer.body(PLENTY)) == size


# giving up, and being given too much


async def test_whoever_waits_for_a_head_can_be_cancelled() -> None:
    async with wired(hold) as (wire, peer):
        waiting = asyncio.create_task(wire.send("GET", "/"))
        await until(lambda: peer.requests)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(peer.lines[0].ended.is_set)


async def test_whoever_waits_for_a_body_can_be_cancelled() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
        await line.left()

    async with wired(script) as (wire, peer):
        answer = await wire.send("GET", "/")
        waiting = asyncio.create_task(answer.read())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        answer.close()
        await until(peer.lines[0].ended.is_set)


async def test_whoever_waits_for_a_whole_body_leaves_no_connection_behind() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await line.send(b".")
            await asyncio.sleep(0.001)

    async with wired(script) as (wire, peer):
        answer = await wire.send("GET", "/")
        waiting = asyncio.create_task(answer.body(PLENTY))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(peer.lines) == 1


async def test_whoever_waits_for_a_connection_can_be_cancelled() -> None:
    async with listen(Line.left) as peer:
        wire = Wire(peer.url.replace("http", "https"))
        waiting = asyncio.create_task(wire.send("GET", "/"))
        await until(lambda: peer.lines)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(peer.lines[0].ended.is_set)
        assert wire.busy == 0


async def test_closing_a_wire_ends_what_is_under_way() -> None:
    async with wired(hold) as (wire, peer):
        waiting = asyncio.create_task(wire.send("GET", "/"))
        await until(lambda: peer.requests)
        wire.close()
        with pytest.raises(Disconnected):
            await waiting


def unread(answer: Answer) -> int:
    return sum(map(len, answer._pieces))


async def test_a_peer_that_sends_more_than_is_read_is_paused() -> None:
    size = 50 * 1024 * 1024
    sent = 0

    async def script(line: Line) -> None:
        nonlocal sent
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        piece = b"x" * (1 << 20)
        while sent < size:
            await line.send(piece)
            sent += len(piece)

    async with wired(script) as (wire, _):
        answer = await wire.send("GET", "/")
        await until(lambda: answer._connection._paused)
        await asyncio.sleep(0.02)

        assert sent < size, "the peer is held up"
        assert unread(answer) <= 2 * HIGH_WATER, "a piece of the socket's size above the mark at most"
        received = 0
        while piece := await answer.read():
            received += len(piece)
            assert len(piece) <= 2 * HIGH_WATER
        assert received == sent == size


async def test_a_paused_connection_is_read_again_when_it_is_used_again() -> None:
    large = ok(b"x" * (HIGH_WATER + 1))
    async with wired(answers(large, HI)) as (wire, peer):
        first = await wire.send("GET", "/")
        await until(lambda: first.done)
        assert await fetch(wire) == b"hi"
        assert len(await first.body(PLENTY)) == HIGH_WATER + 1
        assert len(peer.lines) == 1
