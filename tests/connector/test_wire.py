"""HTTP/1.1 to one origin, against a peer that says exactly what it is told, on both event loops."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

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
