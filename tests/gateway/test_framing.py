"""What stands around a body: the request line, the header, the lengths. A doubt is refused, once, and the line closed.

Where two readers of the same bytes could see two different requests, nothing is guessed: 400, and whatever
follows on the connection is nobody's request.
"""

import asyncio
from typing import Any

import orjson
import pytest

from tests.double import CHAT, Call, Engine, chunk, completed, whole
from tests.gateway.heard import Heard, hear, last_words, refusal, refused, serves_on
from tests.gateway.house import KEY, House, Raw, Street, chat

pytestmark = pytest.mark.usefixtures("calm")

BODY = orjson.dumps(chat())
LINE = f"POST {CHAT} HTTP/1.1"
HOST = "host: gateway"
AUTH = f"authorization: Bearer {KEY}"
LENGTH = f"content-length: {len(BODY)}"
CHUNKED = "transfer-encoding: chunked"
IN_CHUNKS = chunk(BODY) + b"0\r\n\r\n"
SECOND = f"GET /metrics HTTP/1.1\r\n{HOST}\r\n\r\n".encode()


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def opened(street: Street, **sections: Any) -> tuple[Engine, House, Raw]:
    """An engine, a gateway before it, and a connection to that."""
    engine = await street.engine()
    house = await street.house(engine, **sections)
    return engine, house, await street.raw(house)


async def is_refused(street: Street, request: bytes) -> None:
    """The request is answered with 400 and what stands behind it not at all."""
    engine, house, client = await opened(street)
    client.send(request + SECOND)
    await refused(client)
    assert not engine.asked
    await serves_on(house)


# Which length


ENCODINGS = [
    "transfer-encoding: identity",
    "transfer-encoding: chunked, identity",
    "transfer-encoding: identity, chunked",
    "transfer-encoding: gzip, chunked",
    "transfer-encoding: chunked, chunked",
    "transfer-encoding: chunked,",
    "transfer-encoding: ,chunked",
    "transfer-encoding: xchunked",
    "transfer-encoding: chunkedx",
    "transfer-encoding: chunked;q=1",
    "transfer-encoding: chunked\x0b",
    "transfer-encoding: \x0cchunked",
    "transfer-encoding: chunked\xa0",
    'transfer-encoding: "chunked"',
    "transfer-encoding: cow",
    "transfer-encoding:",
    "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked\r\ntransfer-encoding: identity",
    "transfer-encoding: identity\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked\r\nTransfer-Encoding: cow",
    "transfer-encoding:\r\n chunked",
    "transfer-encoding: chun\r\n\tked",
    "transfer-encoding : chunked",
    " transfer-encoding: chunked",
    "transfer-encoding\t: chunked",
    "x: y\rtransfer-encoding: chunked",
]


@pytest.mark.parametrize("line", ENCODINGS)
async def test_any_transfer_encoding_but_one_chunked_is_refused(street: Street, line: str) -> None:
    await is_refused(street, head(LINE, HOST, AUTH, line) + IN_CHUNKS)


@pytest.mark.parametrize("first", ["length", "encoding"])
@pytest.mark.parametrize("line", [CHUNKED, "Transfer-Encoding: identity", "TRANSFER-ENCODING: Chunked"])
@pytest.mark.parametrize("length", [0, 4, len(BODY), len(IN_CHUNKS)])
async def test_a_length_beside_a_transfer_encoding_is_refused(
    street: Street, length: int, line: str, first: str
) -> None:
    lines = [f"content-length: {length}", line]
    await is_refused(street, head(LINE, HOST, AUTH, *(lines if first == "length" else lines[::-1])) + IN_CHUNKS)


@pytest.mark.parametrize("line", [CHUNKED, "transfer-encoding: identity"])
async def test_http_1_0_knows_no_transfer_encoding(street: Street, line: str) -> None:
    await is_refused(street, head(LINE.replace("1.1", "1.0"), HOST, AUTH, line) + IN_CHUNKS)


@pytest.mark.parametrize("line", ["Transfer-Encoding: Chunked", "TRANSFER-ENCODING:chunked", f"{CHUNKED}  "])
async def test_one_chunked_is_understood_however_it_is_written(street: Street, line: str) -> None:
    engine, house, client = await opened(street)
    client.send(head(LINE, HOST, AUTH, line) + IN_CHUNKS)
    assert (await hear(client)).status == 200
    assert len(engine.asked) == 1
    await house.idle()


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "+{0}", "-{0}", "-1", "0x{0:x}", "{0} {0}", "{0}, {0}", "{0},{0}", "{0},", ",{0}", "{0};", "{0}.0"),
        *("{0}e0", "1_0", "\xb2", "\xd9\xa5", "{0}\x0b", "{0}\xa0", "9" * 19, "9" * 30, "18446744073709551616", "five"),
        *("{0}\r\ncontent-length: {0}", "{0}\r\ncontent-length: 1", "1\r\nContent-Length: {0}", "\r\n {0}"),
    ],
)
async def test_a_length_that_is_no_number_once_is_refused(street: Street, value: str) -> None:
    """Or, where it is one that nobody sends, too large."""
    engine, house, client = await opened(street)
    client.send(head(LINE, HOST, AUTH, f"content-length: {value.format(len(BODY))}") + BODY + SECOND)
    await refused(client, {400, 413} if value.isdecimal() else 400)
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize(
    "broken",
    [
        b"x\r\n" + BODY,
        b"\r\n" + BODY,
        b"-1\r\n" + BODY,
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5_0\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5\x0b\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\rhello\r\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhelloGET / HTTP/1.1\r\n\r\n",
        b"10000000000000005\r\nhello\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"0\r\nX Y: z\r\n\r\n",
        b"0\r\n: z\r\n\r\n",
    ],
)
async def test_chunks_that_are_none_are_refused(street: Street, broken: bytes) -> None:
    await is_refused(street, head(LINE, HOST, AUTH, CHUNKED) + broken)


@pytest.mark.parametrize(
    "line",
    [
        *("no colon", ": no name", "a b: c", "a\x00b: c", "a: b\x00c", "a: b\rc", "a\x7f: b", "\xe9: b", "a(b): c"),
        *("\x0ba: b", f"content-length\x0b: {len(BODY)}", "a: \x01", "a: \x7f"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["first", "last"])
async def test_header_lines_that_are_none_are_refused(street: Street, line: str, where: str) -> None:
    good = [HOST, AUTH, LENGTH]
    await is_refused(street, head(LINE, *([line, *good] if where == "first" else [*good, line])) + BODY)


@pytest.mark.parametrize("ending", [b"\n", b"\r"])
async def test_lines_end_in_crlf_or_the_engine_is_not_asked_for_what_hides_behind_them(
    street: Street, ending: bytes
) -> None:
    """A reader may take a bare LF for an end of line, but then in all of the head: one request, or none."""
    engine, house, client = await opened(street)
    client.send(head(LINE, HOST, AUTH, LENGTH, f"x: y{ending.decode()}{CHUNKED}") + IN_CHUNKS + SECOND)
    await refused(client)
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize("first", [BODY, IN_CHUNKS], ids=["length", "chunked"])
async def test_a_second_request_is_answered_as_its_own_or_not_at_all(street: Street, first: bytes) -> None:
    engine, house, client = await opened(street)
    engine.script = lambda call: whole(200, completed(call.json()["messages"][0]["content"]))
    second = orjson.dumps(chat("second"))
    client.send(
        head(LINE, HOST, AUTH, LENGTH if first == BODY else CHUNKED)
        + first
        + head(LINE, HOST, AUTH, f"content-length: {len(second)}")
        + second
    )
    assert said(await hear(client)) == "Tell me of the pool."
    try:
        assert said(await hear(client)) == "second"
    except (asyncio.IncompleteReadError, ConnectionResetError):
        assert client.reader.at_eof() or client.reader.exception() is not None
    assert len(engine.asked) <= 2
    await serves_on(house)


async def test_one_connection_carries_many_requests(street: Street) -> None:
    engine, house, client = await opened(street)
    for number in range(5):
        client.ask(orjson.dumps(chat(str(number), stream=number % 2 == 0)))
        assert (await hear(client)).status == 200
    assert [call.json()["messages"][0]["content"] for call in engine.asked] == list("01234")
    await house.idle()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_wants_to_close_is_closed(street: Street, version: str) -> None:
    _, house, client = await opened(street)
    client.send(head(f"POST {CHAT} HTTP/{version}", HOST, AUTH, LENGTH, "connection: close") + BODY)
    heard = await hear(client)
    assert (heard.status, await last_words(client)) == (200, b"")
    await house.idle()


async def test_http_1_0_gets_a_stream_without_chunks(street: Street) -> None:
    _, house, client = await opened(street)
    body = orjson.dumps(chat(stream=True))
    client.send(head(f"POST {CHAT} HTTP/1.0", AUTH, f"content-length: {len(body)}") + body)
    whole_answer = await last_words(client)
    raw_head, _, answer = whole_answer.partition(b"\r\n\r\n")
    assert raw_head.split(b" ")[1] == b"200"
    assert b"chunked" not in raw_head.lower()
    assert answer.startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")
    await house.idle()


def said(heard: Heard) -> Any:
    assert heard.status == 200
    return heard.json()["choices"][0]["message"]["content"]


async def test_a_client_that_sends_half_a_request_and_leaves_is_forgotten(street: Street) -> None:
    engine, house, _ = await opened(street)
    request = head(LINE, HOST, AUTH, LENGTH) + BODY
    for end in range(1, len(request), 7):
        client = await street.raw(house)
        client.send(request[:end])
        await client.writer.drain()
        client.writer.close()
    await serves_on(house)
    assert not engine.asked


# Chunked bodies


@pytest.mark.parametrize(
    "sent",
    [
        b"".join(chunk(BODY[at : at + 1]) for at in range(len(BODY))) + b"0\r\n\r\n",
        b'%x;ext=1;other="a;b"\r\n%b\r\n0;last\r\n\r\n' % (len(BODY), BODY),
        b"000%X\r\n%b\r\n000\r\n\r\n" % (len(BODY), BODY),
        chunk(BODY) + b"0\r\nX-Trailer: canary\r\nX-Other: canary\r\n\r\n",
    ],
    ids=["bytewise", "extensions", "zeros", "trailers"],
)  # fmt: skip
async def test_chunked_bodies_reach_the_engine_whole_and_with_a_length(street: Street, sent: bytes) -> None:
    engine, house, client = await opened(street)
    plain = await house.client.post(CHAT, content=BODY)
    client.send(head(LINE, HOST, AUTH, CHUNKED, "trailer: X-Trailer") + sent)
    assert (await hear(client)).status == plain.status_code == 200
    first, second = engine.asked
    assert second.body == first.body
    assert second.headers("content-length") == [str(len(second.body))]
    for gone in ("transfer-encoding", "trailer", "x-trailer"):
        assert not second.headers(gone)
    assert b"canary" not in second.head
    client.ask(BODY)
    assert (await hear(client)).status == 200, "the connection is in step"
    await house.idle()


async def test_chunks_may_come_one_byte_at_a_time(street: Street) -> None:
    engine, house, client = await opened(street)
    for byte in head(LINE, HOST, AUTH, CHUNKED) + IN_CHUNKS:
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await hear(client)).status == 200
    assert len(engine.asked) == 1
    await house.idle()


@pytest.mark.parametrize("size", [1, 100, 5_000])
async def test_chunks_are_counted_as_they_come(street: Street, size: int) -> None:
    """The answer comes while the client could still send: nobody waits for the last chunk."""
    engine, house, client = await opened(street, listen={"port": 0, "max_body_bytes": 20_000})
    client.send(head(LINE, HOST, AUTH, CHUNKED))
    for _ in range(21_000 // size + 1):
        client.send(chunk(b" " * size))
    refusal(await hear(client), 413)
    assert not engine.asked
    await serves_on(house)


# Host and target


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["host: gateway", "host: gateway"],
        ["host: gateway", "Host: other"],
        ["host: user@gateway"],
        ["host: gate way"],
        ["host: gateway, other"],
        ["host: gateway/path"],
        ["host: gateway?x"],
        ["host: gateway#x"],
        ["host: http://gateway"],
        ["host: gateway\\other"],
        ["host: gateway:port"],
        ["host: gateway:80:80"],
        ["host: gateway:-1"],
        ["host: [::1"],
        ["host: <gateway>"],
        ["host: gate\tway"],
        ["host: \xe9"],
    ],
)
async def test_a_host_that_is_missing_doubled_or_none_is_refused(street: Street, lines: list[str]) -> None:
    await is_refused(street, head(LINE, *lines, AUTH, LENGTH) + BODY)


@pytest.mark.parametrize("host", ["gateway", "GATEWAY:8000", "10.0.0.1", "[::1]:8000", "a-b.example.com", "a_b"])
async def test_the_engine_gets_a_host_of_its_own(street: Street, host: str) -> None:
    engine, house, client = await opened(street)
    client.send(head(LINE, f"host: {host}", AUTH, LENGTH) + BODY)
    assert (await hear(client)).status == 200
    assert engine.asked[0].headers("host") == [f"127.0.0.1:{engine.port}"]
    await house.idle()


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://other", "gateway"),
        ("http://gateway:81", "gateway"),
        ("http://gateway.", "gateway"),
        ("http://user@gateway", "gateway"),
        ("http://127.0.0.1", "gateway"),
        ("http://", "gateway"),
    ],
)
async def test_a_target_that_names_another_host_is_refused(street: Street, target: str, host: str) -> None:
    await is_refused(street, head(f"POST {target}{CHAT} HTTP/1.1", f"host: {host}", AUTH, LENGTH) + BODY)


@pytest.mark.parametrize("host", ["gateway", "gateway:8000"])
async def test_a_target_may_name_the_same_host(street: Street, host: str) -> None:
    engine, house, client = await opened(street)
    client.send(head(f"POST http://{host}{CHAT} HTTP/1.1", f"host: {host}", AUTH, LENGTH) + BODY)
    assert (await hear(client)).status == 200
    assert engine.asked[0].target == CHAT
    await house.idle()


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../v1/chat/completions",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions/..",
        "/v1/chat/completions%2f",
        "/v1/chat/completions;x",
        "/V1/chat/completions",
        "/x/v1/chat/completions",
        "/metrics/../v1/chat/completions",
        "/load_lora_adapter",
        "/sleep",
        "/",
    ],
)
async def test_a_path_that_is_not_ours_is_404_and_reaches_no_engine(street: Street, target: str) -> None:
    engine, house, client = await opened(street)
    before = len(engine.calls)
    client.send(head(f"POST {target} HTTP/1.1", HOST, AUTH, LENGTH) + BODY)
    refusal(await hear(client), 404, "invalid_request_error")
    assert len(engine.calls) == before
    await serves_on(house)


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT engine:80 HTTP/1.1",
        "TRACE / HTTP/1.1",
        "POST HTTP/1.1",
        f"POST {CHAT} x HTTP/1.1",
        f"POST {CHAT}",
        f"PO ST {CHAT} HTTP/1.1",
        f"POST {CHAT} HTTP/1.1 ",
        f"POST {CHAT} HTTP/2.0",
        f"POST {CHAT} HTTP/1.2345",
        f"POST {CHAT} HTTX/1.1",
        f"POST {CHAT}\x00 HTTP/1.1",
        f"POST {CHAT}\x7f HTTP/1.1",
        f"POST {CHAT}\t HTTP/1.1",
        f"post {CHAT} HTTP/1.1",
        f"(POST) {CHAT} HTTP/1.1",
    ],
)
async def test_a_request_line_that_is_none_is_refused(street: Street, line: str) -> None:
    engine, house, client = await opened(street)
    client.send(head(line, HOST, AUTH, LENGTH) + BODY)
    refusal(await hear(client), {400, 404, 405, 501, 505})
    assert not engine.asked
    await serves_on(house)


# Expect


async def headed(street: Street, *lines: str, **sections: Any) -> tuple[Engine, House, Raw]:
    """A client that has sent its head with an expectation, and no byte of its body."""
    engine, house, client = await opened(street, **sections)
    client.send(head(LINE, *lines, "expect: 100-continue"))
    return engine, house, client


@pytest.mark.parametrize("length", [len(BODY), 2_000_000, 12_000_000])
async def test_a_client_that_waits_is_told_to_go_on(street: Street, length: int) -> None:
    body = BODY[:-1] + b" " * (length - len(BODY)) + b"}"
    engine, house, client = await headed(street, HOST, AUTH, f"content-length: {length}")
    assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert not engine.asked
    client.send(body)
    assert (await hear(client)).status == 200
    assert not engine.asked[0].headers("expect")
    assert engine.asked[0].json()["messages"] == chat()["messages"]
    await house.idle()


async def test_a_client_that_waits_may_send_chunks(street: Street) -> None:
    _, house, client = await headed(street, HOST, AUTH, CHUNKED)
    assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(IN_CHUNKS)
    assert (await hear(client)).status == 200
    await house.idle()


async def test_a_client_that_expects_and_does_not_wait_is_answered(street: Street) -> None:
    engine, house, client = await opened(street)
    client.ask(BODY, "expect: 100-continue")
    heard = await hear(client)
    if heard.status == 100:
        heard = await hear(client)
    assert heard.status == 200
    assert len(engine.asked) == 1
    await house.idle()


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
@pytest.mark.parametrize("credentials", ["authorization: Bearer wrong", "x: no key", "authorization: Basic eDp5"])
async def test_a_bad_key_is_told_before_a_byte_of_the_body(street: Street, credentials: str, framing: str) -> None:
    engine, house, client = await headed(street, HOST, credentials, framing)
    heard = await refused(client, 401)
    assert heard.header("www-authenticate")
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize("length", [1_001, 12_000_000, 10**15])
async def test_a_body_too_large_is_told_before_a_byte_of_it(street: Street, length: int) -> None:
    listen = {"port": 0, "max_body_bytes": 1_000}
    engine, house, client = await headed(street, HOST, AUTH, f"content-length: {length}", listen=listen)
    await refused(client, 413)
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize("lines", [[], ["host: a@b"], ["host: a", "host: b"]])
async def test_a_bad_head_is_told_before_a_byte_of_the_body(street: Street, lines: list[str]) -> None:
    _, house, client = await headed(street, *lines, AUTH, LENGTH)
    await refused(client)
    await serves_on(house)


@pytest.mark.parametrize("expectation", ["200-maybe", "100-continue, other", "", "\xff"])
async def test_an_expectation_that_nobody_knows_is_refused_or_ignored(street: Street, expectation: str) -> None:
    engine, house, client = await opened(street)
    client.ask(BODY, f"expect: {expectation}")
    heard = await hear(client)
    if heard.status == 100:
        heard = await hear(client)
    assert heard.status in (200, 400, 417)
    assert not [call for call in engine.asked if call.headers("expect")]
    await serves_on(house)


# Other languages on the port

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex(
    "00001204000000000000030000006400040000ffff000500004000"
)
TLS_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2
WEBSOCKET = ["connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA=="]


@pytest.mark.parametrize(
    "words",
    [
        H2_PREFACE,
        TLS_HELLO,
        TLS_HELLO[:11],
        b"GET /\r\n\r\n",
        b"GET /\r\n",
        f"GET {CHAT}\r\n\r\n".encode(),
        b"GET / HTTP/0.9\r\nhost: a\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"EHLO example.com\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"\x00" * 64,
        b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00",
        b"RTSP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"\xff\xfe" * 100 + b"\r\n\r\n",
    ],
)
async def test_another_protocol_is_closed_at_once(street: Street, words: bytes) -> None:
    engine, house, client = await opened(street)
    client.send(words)
    answer = await last_words(client)
    if answer:
        assert int(answer.split(b" ", 2)[1]) in (400, 404, 405, 426, 431, 501, 505)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/health", "/nowhere"])
async def test_a_websocket_is_refused_and_closed(street: Street, path: str) -> None:
    engine, house, client = await opened(street)
    client.send(head(f"GET {path} HTTP/1.1", HOST, AUTH, *WEBSOCKET))
    heard = await hear(client)
    refusal(heard, {400, 404, 405, 426, 501})
    assert await last_words(client) == b""
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize(
    "lines",
    [
        ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"],
        ["connection: upgrade", "upgrade: h2c"],
        ["upgrade: h2c"],
        ["connection: upgrade", "upgrade: TLS/1.0"],
        ["connection: keep-alive, upgrade", "upgrade: foo/2, bar"],
        ["connection: upgrade", "upgrade: websocket"],
        ["connection: upgrade"],
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_offer_to_upgrade_is_ignored_or_refused(street: Street, lines: list[str], streamed: bool) -> None:
    engine, house, client = await opened(street)
    client.ask(orjson.dumps(chat(stream=streamed)), *lines)
    heard = await hear(client)
    if heard.status == 200:
        assert len(engine.asked) == 1
        _plain(engine.asked[0])
    else:
        refusal(heard, {400, 405, 426, 501})
    await serves_on(house)


def _plain(call: Call) -> None:
    for name in ("upgrade", "http2-settings", "connection"):
        assert "upgrade" not in ",".join(call.headers(name)).lower()
        assert name != "http2-settings" or not call.headers(name)


# Methods


@pytest.mark.parametrize("path", ["/v1/models", "/health", CHAT])
async def test_a_head_request_gets_no_body_and_keeps_the_connection_in_step(street: Street, path: str) -> None:
    engine, house, client = await opened(street)
    client.send(head(f"HEAD {path} HTTP/1.1", HOST, AUTH))
    heard = await hear(client, bodiless=True)
    assert heard.status in ({405} if path == CHAT else {200, 405})
    assert heard.status == 200 or heard.header("allow")
    assert heard.header("x-request-id")
    client.ask(BODY)
    assert (await hear(client)).status == 200
    assert len(engine.asked) == 1
    await house.idle()
