"""One exchange, between a line that remembers what it was told and a handler."""

import asyncio
import re
from dataclasses import dataclass, field

import pytest

from gateway.errors import BadRequest, BodyTooLarge, BodyTooSlow, Unauthorized, Unavailable
from gateway.exchange import AHEAD, JOINED, Exchange, Pairs, request_id
from gateway.limits import Bytes

PLENTY = 1 << 30


@dataclass
class Line:
    """The connection's side."""

    sent: list[bytes] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    full: bool = False

    def send(self, *pieces: bytes) -> None:
        self.sent += pieces

    def read_on(self, *, wanted: bool) -> None:
        self.told.append("read" if wanted else "wait")

    def over(self, *, close: bool) -> None:
        self.told.append("close" if close else "keep")

    def drop(self) -> None:
        self.told.append("drop")

    @property
    def text(self) -> bytes:
        return b"".join(self.sent)


@pytest.fixture
def line() -> Line:
    return Line()


def asked(
    line: Line,
    *pieces: bytes,
    declared: int | None = None,
    whole: bool = True,
    chunks: bool = True,
    persistent: bool = True,
    more: Pairs | None = None,
    **fields: str,
) -> Exchange:
    """An exchange of which these pieces of the body have come."""
    names = {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}
    exchange = Exchange(
        line, "POST", "/x", "", names, declared=declared, chunks=chunks, persistent=persistent, more=more
    )
    for piece in pieces:
        exchange.feed(piece)
    if whole:
        exchange.complete()
    return exchange


# The request's body


@pytest.mark.parametrize("pieces", [[], [b"abc"], [b"ab", b"", b"c"]])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_in_pieces(line: Line, pieces: list[bytes], declared: bool) -> None:
    body = b"".join(pieces)
    exchange = asked(line, *pieces, declared=len(body) if declared else None)
    assert await exchange.body(3, 1, Bytes(3)) == body
    assert line.told == []


async def test_a_body_that_comes_later(line: Line) -> None:
    exchange = asked(line, b"a", whole=False)
    waiting = asyncio.create_task(exchange.body(10, 1, Bytes(10)))
    await asyncio.sleep(0)
    assert line.told == ["read"]
    exchange.feed(b"b")
    await asyncio.sleep(0)
    assert not waiting.done()
    exchange.complete()
    assert await waiting == b"ab"


async def test_a_declared_length_is_refused_before_a_byte_is_read(line: Line) -> None:
    with pytest.raises(BodyTooLarge):
        await asked(line, declared=11, whole=False, expect="100-continue").body(10, 1, Bytes(PLENTY))
    assert not line.sent, "nor is it asked for"
    assert not line.told


@pytest.mark.parametrize("before", [True, False])
async def test_an_undeclared_length_is_refused_where_it_passes_the_limit(line: Line, before: bool) -> None:
    exchange = asked(line, *([b"12345"] * 3 if before else []), whole=False)
    waiting = asyncio.create_task(exchange.body(10, 1, Bytes(PLENTY)))
    for _ in range(3):
        await asyncio.sleep(0)
        exchange.feed(b"12345")
    with pytest.raises(BodyTooLarge):
        await waiting


async def test_the_limit_itself_is_allowed(line: Line) -> None:
    assert await asked(line, b"1234567890").body(10, 1, Bytes(10)) == b"1234567890"


async def test_a_body_that_does_not_come(line: Line) -> None:
    with pytest.raises(BodyTooSlow):
        await asked(line, b"{", whole=False).body(10, 0.01, Bytes(10))


@pytest.mark.parametrize(("expect", "come", "asks"), [("100-continue", b"", True), ("100-Continue", b"", True),
                                                      ("100-continue", b"a", False), ("", b"", False),
                                                      ("200-ok", b"", False)])  # fmt: skip
async def test_who_waits_to_be_asked_is_asked(line: Line, expect: str, come: bytes, asks: bool) -> None:
    exchange = asked(line, *([come] if come else []), whole=False, expect=expect)
    waiting = asyncio.create_task(exchange.body(10, 1, Bytes(10)))
    await asyncio.sleep(0)
    assert line.text == (b"HTTP/1.1 100 Continue\r\n\r\n" if asks else b"")
    exchange.complete()
    assert await waiting == come


async def test_little_is_taken_in_that_nobody_asked_for(line: Line) -> None:
    exchange = asked(line, b"x" * AHEAD, whole=False)
    assert line.told == []
    exchange.feed(b"x")
    assert line.told == ["wait"]
    waiting = asyncio.create_task(exchange.body(PLENTY, 1, Bytes(PLENTY)))
    await asyncio.sleep(0)
    assert line.told == ["wait", "read"]
    exchange.complete()
    assert len(await waiting) == AHEAD + 1


async def test_a_body_that_is_broken_is_told_so(line: Line) -> None:
    exchange = asked(line, b"{", whole=False)
    waiting = asyncio.create_task(exchange.body(10, 1, Bytes(10)))
    await asyncio.sleep(0)
    exchange.spoil(BadRequest("no"))
    exchange.feed(b"more")
    with pytest.raises(BadRequest):
        await waiting


# The bytes of all requests


@pytest.mark.parametrize("declared", [6, None])
async def test_all_bodies_together_are_bounded(line: Line, declared: int | None) -> None:
    held = Bytes(10)
    first = asked(line, b"123456", declared=declared)
    await first.body(10, 1, held)
    second = asked(line, b"123456", declared=declared)
    with pytest.raises(Unavailable):
        await second.body(10, 1, held)
    second.release()
    assert await asked(line, b"1234", declared=4).body(10, 1, held) == b"1234"
    for _ in range(2):
        first.release()
    assert held.take(6)
    assert not held.take(1), "no byte is given back twice"


async def test_a_body_that_grows_beyond_what_is_free_is_refused_as_it_comes(line: Line) -> None:
    held = Bytes(10)
    exchange = asked(line, whole=False)
    waiting = asyncio.create_task(exchange.body(PLENTY, 1, held))
    await asyncio.sleep(0)
    exchange.feed(b"123456")
    exchange.feed(b"123456")
    with pytest.raises(Unavailable):
        await waiting
    exchange.release()
    assert held.take(10)


async def test_a_body_counts_as_large_as_it_is_decoded(line: Line) -> None:
    held = Bytes(10)
    exchange = asked(line, b"123")
    await exchange.body(10, 1, held)
    exchange.grow(2)
    exchange.grow(9)
    assert held.take(1)
    with pytest.raises(Unavailable):
        exchange.grow(10)
    exchange.release()
    assert held.take(9)
    assert not held.take(1)


# The client


async def test_leaving_cancels_the_task_that_answers(line: Line) -> None:
    exchange = asked(line)
    exchange.task = task = asyncio.create_task(asyncio.sleep(60))
    exchange.lost()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert exchange.left


async def test_leaving_behind_the_answer_cancels_nothing(line: Line) -> None:
    exchange = asked(line)
    exchange.task = task = asyncio.create_task(asyncio.sleep(0.01))
    exchange.answer(200, [], b"")
    exchange.lost()
    await task


def test_who_reads_too_slowly_holds_the_engine_up(line: Line) -> None:
    exchange, held = asked(line), list[bool]()
    exchange.paused(True)
    exchange.throttle(held.append)
    assert held == [True], "also where it was slow before"
    exchange.paused(False)
    exchange.paused(True)
    assert held == [True, False, True]


# The answer


def test_an_answer_has_its_length_and_the_request_id(line: Line) -> None:
    exchange = asked(line, x_request_id="mine-1", more=[(b"c", b"d")])
    exchange.answer(201, [(b"a", b"b")], b"body")
    assert line.text == (
        b"HTTP/1.1 201 Created\r\na: b\r\ncontent-length: 4\r\nx-request-id: mine-1\r\nc: d\r\n\r\nbody"
    )
    assert len(line.sent) == 1, "one write"
    assert line.told == ["keep"]
    assert exchange.started
    assert exchange.finished


@pytest.mark.parametrize("size", [0, JOINED, JOINED + 1])
def test_an_answer_of_any_size_is_whole(line: Line, size: int) -> None:
    asked(line).answer(200, [], b"x" * size)
    head, _, body = line.text.partition(b"\r\n\r\n")
    assert b"content-length: %d" % size in head
    assert len(body) == size


@pytest.mark.parametrize("status", [200, 418, 499, 599])
def test_a_status_may_have_no_name(line: Line, status: int) -> None:
    asked(line).answer(status, [], b"")
    assert re.match(rb"HTTP/1\.1 %d [^\r\n]*\r\n" % status, line.text)


@pytest.mark.parametrize(("last", "end"), [(b"c", b"1\r\nc\r\n0\r\n\r\n"), (b"", b"0\r\n\r\n")])
def test_a_stream_goes_out_piece_by_piece(line: Line, last: bytes, end: bytes) -> None:
    exchange = asked(line)
    exchange.start(200, [])
    assert b"transfer-encoding: chunked\r\n" in line.sent[0]
    exchange.write(b"a" * 17)
    exchange.finish(last)
    assert line.sent[1:] == [b"11\r\n" + b"a" * 17 + b"\r\n", end]
    assert line.told == ["keep"]


def test_a_client_of_http_1_0_gets_no_chunks(line: Line) -> None:
    exchange = asked(line, chunks=False, persistent=False)
    exchange.start(200, [])
    exchange.write(b"a")
    exchange.finish(b"b")
    head, _, body = line.text.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"ab"
    assert line.told == ["close"]


def test_a_stream_of_known_length_has_no_chunks(line: Line) -> None:
    exchange = asked(line)
    exchange.start(200, [], 2)
    exchange.write(b"a")
    exchange.finish(b"b")
    head, _, body = line.text.partition(b"\r\n\r\n")
    assert b"content-length: 2" in head
    assert body == b"ab"
    assert line.told == ["keep"]


@pytest.mark.parametrize("how", ["not persistent", "body unread"])
def test_a_connection_that_cannot_go_on_says_so(line: Line, how: str) -> None:
    asked(line, persistent=how != "not persistent", whole=how != "body unread").answer(200, [], b"")
    assert b"\r\nconnection: close\r\n" in line.text
    assert line.told == ["close"]


def test_a_refusal(line: Line) -> None:
    asked(line, more=[(b"vary", b"origin")]).refuse(Unauthorized("no"))
    for part in (b"HTTP/1.1 401", b"content-type: application/json", b"www-authenticate: Bearer", b"vary: origin"):
        assert part in line.text
    assert b'"no"' in line.text


def test_what_is_dropped_is_over(line: Line) -> None:
    exchange = asked(line)
    exchange.start(200, [])
    exchange.drop()
    assert line.told == ["drop"]
    assert exchange.finished


# The request's id


@pytest.mark.parametrize("name", [b"a", b"A.b_c:d-9", b"x" * 128])
def test_a_well_formed_request_id_is_kept(name: bytes) -> None:
    assert request_id({b"x-request-id": name}) == name


@pytest.mark.parametrize(
    "name", [b"", b"x" * 129, b"a b", b"a\nb", b'{"level":"error"}', b"\x1b[31m", "é".encode(), b"a\n", None]
)
def test_any_other_is_replaced(name: bytes | None) -> None:
    fields = {b"x-request-id": name} if name is not None else {}
    made = request_id(fields)
    assert re.fullmatch(rb"[0-9a-f]{32}", made)
    assert made != request_id(fields)
