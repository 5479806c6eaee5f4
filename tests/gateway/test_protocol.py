"""OpenAI's protocol as a client sees it: the engine's words unchanged, and the gateway's own in the same form."""

import asyncio
import gzip
import hashlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import httpx
import openai
import orjson
import pytest
import zstandard

from tests.double import (
    CHAT,
    COMPLETIONS,
    DONE,
    LAST_CHUNK,
    End,
    Engine,
    Framing,
    Script,
    Step,
    bytewise,
    completed,
    delta,
    event,
    refused,
    stream,
    usage,
    usage_event,
    whole,
)
from tests.gateway.heard import Heard, hear, refusal, serves_on
from tests.gateway.house import KEY, OTHER_KEY, House, Street, chat, digest, events, eventually
from tests.gateway.sending import saying

pytestmark = pytest.mark.usefixtures("calm")


# Streams are bytes

SEPARATORS = "\u2028\u2029\u0085\u000b\u000c\u001c\u001d\u001e"
TOLD = {
    "many alphabets": delta("你好🦀é ﷽ 👩‍👩‍👧 \u0301"),
    "line separators": b'data: {"choices":[{"index":0,"delta":{"content":"a%bz"}}]}\n\n' % SEPARATORS.encode(),
    "escapes": b'data: {"choices":[{"index":0,"delta":{"content":"\\u4f60\\ud83e\\udd80\\n\\\\n"}}]}\n\n',
    "no space": b'data:{"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    "numbers": b'data: {"choices":[{"index":0,"logprobs":-Infinity,"x":1e2,"y":1.0,"z":NaN}]}\n\n',
    "comments": b": ping\n\n" + delta("a") + b":\n\n",
    "other fields": b"event: message\nid: 7\nretry: 10\ndata: {}\n\n",
    "two data lines": b'data: {"choices":\ndata: []}\n\n',
    "no data": b"event: nothing\n\n\n\n",
    "crlf": b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\n\r\n',
    "cr": b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\r',
    "no json": b"data: {nonsense\n\n",
    "words of the gateway's": delta('"usage": {"error": [DONE] "finish_reason": "abort"'),
}
WAYS: dict[str, Callable[[bytes], list[bytes]]] = {
    "one piece": lambda data: [data],
    "byte by byte": bytewise,
    "threes": lambda data: [data[at : at + 3] for at in range(0, len(data), 3)],
    "cut in every mark": lambda data: [part for part in re.split(rb"(?<=da)|(?<=data: \[D)|(?<=\n)", data) if part],
}


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TOLD)
async def test_a_stream_is_the_same_to_the_byte_however_it_is_cut(
    street: Street, kind: str, way: str, framing: Framing
) -> None:
    said = delta("") + TOLD[kind] + delta("z", "stop") + usage_event() + DONE
    _, house = await saying(street, *stream(*WAYS[way](said), framing=framing))
    answer = await house.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status_code == 200
    assert hashlib.sha256(answer.content).digest() == hashlib.sha256(said).digest()
    assert b"\xef\xbf\xbd" not in answer.content
    assert await house.metric("completion_tokens_total") == 6
    assert await house.metric("engine_failures_total") == 0


@pytest.mark.parametrize("at", range(1, 60, 3))
async def test_a_stream_may_be_cut_anywhere(street: Street, at: int) -> None:
    said = delta("é", "stop") + usage_event() + DONE
    _, house = await saying(street, *stream(said[:-at], said[-at:]))
    answer = await house.chat(stream=True)
    assert answer.content == delta("é", "stop") + DONE
    assert await house.metric("completion_tokens_total") == 6


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("text", [SEPARATORS, "你好🦀", "\ufffd", "\u0000", "a" * 100_000])
async def test_a_whole_answer_is_the_same_to_the_byte(street: Street, text: str, framing: Framing) -> None:
    said = orjson.dumps(completed(text))
    _, house = await saying(street, *whole(200, said, framing=framing))
    answer = await house.chat()
    assert answer.content == said
    assert await house.metric("completion_tokens_total") == 6


NUMBERS = [b"-Infinity", b"Infinity", b"NaN", b"1e400", b"-0.0", b"12345678901234567890123", b"1E5", b"0.10"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_number_is_passed_on_as_it_is_written(street: Street, number: bytes, streamed: bool) -> None:
    logprobs = b'{"choices":[{"index":0,"logprobs":{"content":[{"logprob":%b}]},"finish_reason":"stop"}]' % number
    counted = b',"usage":{"prompt_tokens":29,"completion_tokens":6,"x":%b}}' % number
    data = logprobs + counted
    said = b"data: " + data + b"\n\n" + DONE if streamed else data
    steps = stream(*bytewise(said)) if streamed else whole(200, data)
    _, house = await saying(street, *steps)
    answer = await house.chat(stream=streamed, stream_options={"include_usage": True})
    assert (answer.status_code, answer.content) == (200, said)


PIECES: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"content": "one"},
    {"content": ""},
    {"reasoning_content": "hm"},
    {"content": None},
    {},
]
TOP = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -9999.0}]}]


def tool(index: int, arguments: str, **first: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}} | first]}


TOOLS = [
    tool(0, "", id="call_a", type="function", name="f"),
    *(tool(0, piece) for piece in ('{"city', '": "', "\\u00", "e9", '"}')),
    tool(1, "", id="call_b", type="function", name="g"),
    *(tool(1, piece) for piece in ("{", '"a"', ": ", "[1,", " 2]", "}")),
]


def chunks(deltas: list[dict[str, Any]], **more: Any) -> list[bytes]:
    return [event({"id": "c", "choices": [{"index": 0, "delta": one, **more}]}) for one in deltas]


@pytest.mark.parametrize(
    "said",
    [
        chunks(PIECES),
        chunks(PIECES[1:3]),
        chunks(PIECES, logprobs={"content": TOP}),
        [*chunks(PIECES[:1]), *chunks([{}], finish_reason="stop"), *chunks([{}], finish_reason="length")],
        chunks(TOOLS),
        chunks(TOOLS[::-1], finish_reason=None),
        [event({"id": "cmpl", "choices": [{"index": n, "text": "x", "logprobs": TOP}]}) for n in (1, 0, 1)],
    ],
    ids=["pieces", "no role", "logprobs", "two ends", "tools", "tools backwards", "completions"],
)
async def test_events_are_neither_made_up_nor_left_out(street: Street, said: list[bytes]) -> None:
    _, house = await saying(street, *stream(*said, DONE))
    answer = await house.chat(stream=True, logprobs=True, top_logprobs=2)
    assert answer.content == b"".join([*said, DONE])


async def test_each_event_arrives_before_the_next_is_written(street: Street) -> None:
    """Each is written only when the client has the one before it, and the gateway asked for the usage."""
    gates = [asyncio.Event() for _ in TOOLS]
    said = chunks(TOOLS)
    steps: list[Step] = [step for pair in zip(said, gates, strict=True) for step in pair]
    _, house = await saying(street, *stream(*steps, usage_event(), DONE))
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=True)))
    for one, gate in zip(said, gates, strict=True):
        await client.until(one)
        gate.set()
    await client.until(DONE)
    await client.until(b"\r\n" + LAST_CHUNK)


async def test_the_openai_sdk_rebuilds_parallel_tool_calls(street: Street) -> None:
    _, house = await saying(street, *stream(*chunks(TOOLS), *chunks([{}], finish_reason="tool_calls"), DONE))
    arguments = {0: "", 1: ""}
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=0) as sdk:
        got = await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        async for one in got:
            for call in one.choices[0].delta.tool_calls or ():
                assert call.function is not None
                arguments[call.index] += call.function.arguments or ""
    assert [orjson.loads(one) for one in arguments.values()] == [{"city": "é"}, {"a": [1, 2]}]


async def test_logprobs_of_a_completion_pass(street: Street) -> None:
    body = {"choices": [{"text": "ab", "logprobs": {"token_logprobs": [None, -1.5], "tokens": ["a", "b"]}}]}
    _, house = await saying(street, *whole(200, body))
    asked = {"model": "tiny", "prompt": "a", "logprobs": 2, "echo": True}
    assert (await house.client.post(COMPLETIONS, json=asked)).json() == body


# Usage


def last(*, asked: bool) -> list[bytes]:
    return [delta("a"), delta("b", "stop"), *([usage_event(cached=7)] if asked else ()), DONE]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("given", [True, False])
async def test_a_usage_that_nobody_asked_for_is_counted_and_not_shown(
    street: Street, options: dict[str, Any] | None, given: bool
) -> None:
    engine, house = await saying(street, *stream(*last(asked=True)))
    fields: dict[str, Any] = {"stream_options": options} if given else {}
    answer = await house.chat(stream=True, **fields)
    assert engine.asked[0].json()["stream_options"]["include_usage"] is True
    assert answer.content == delta("a") + delta("b", "stop") + DONE
    assert await house.metric("completion_tokens_total", tenant="team-a") == 6
    assert await house.metric("prompt_tokens_total", tenant="team-a") == 29


@pytest.mark.parametrize("way", WAYS)
async def test_a_usage_that_was_asked_for_is_the_engines_own_once_before_done(street: Street, way: str) -> None:
    _, house = await saying(street, *stream(*WAYS[way](b"".join(last(asked=True)))))
    answer = await house.chat(stream=True, stream_options={"include_usage": True})
    shown = events(answer.content)
    assert [number for number, one in enumerate(shown) if one != "[DONE]" and "usage" in one] == [len(shown) - 2]
    assert shown[-2]["choices"] == []
    assert shown[-2]["usage"] == usage(cached=7)
    assert shown[-3]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("asked", [True, False])
async def test_a_usage_in_every_event_is_shown_to_those_who_asked(street: Street, asked: bool) -> None:
    """VLLM sends it so with continuous_usage_stats."""
    running = event({"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage(completion=1)})
    _, house = await saying(street, *stream(running, *last(asked=True)))
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    fields: dict[str, Any] = options if asked else {}
    answer = await house.chat(stream=True, **fields)
    assert all(one == "[DONE]" or one["choices"] or asked for one in events(answer.content))
    assert not asked or answer.content == running + b"".join(last(asked=True))
    assert await house.metric("completion_tokens_total") == 6, "the last one counts, and only once"


# Refusals

SHAPES: dict[str, tuple[str, bytes]] = {
    "openai": ("application/json", b'{"error": {"message":"canary", "type" : "X", "param":null, "code":1e2}}'),
    "flat": ("application/json", b'{"object":"error","message":"canary","code":400}'),
    "detail": ("application/json", b'{"detail":[{"loc":["body"],"msg":"canary"}]}'),
    "error in an error": ("application/json", b'{"error":{"message":"{\\"error\\":{\\"message\\":\\"canary\\"}}"}}'),
    "html": ("text/html", b"<html><h1>canary</h1></html>"),
    "text": ("text/plain; charset=latin-1", b"canary \xe9"),
    "no json": ("application/json", b"{'error': 'canary'}"),
    "nothing": ("application/json", b""),
    "a list": ("application/json", b'["canary"]'),
}
REFUSALS = [400, 402, 404, 405, 408, 409, 410, 413, 415, 418, 422, 429, 451, 499, 500, 501, 505]


@pytest.mark.parametrize("status", REFUSALS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_engines_refusal_passes_once_and_unchanged(street: Street, shape: str, status: int) -> None:
    content_type, body = SHAPES[shape]
    pieces = [body[:3], body[3:10], body[10:]] if body else []
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(*stream(*pieces, status=status, content_type=content_type, headers=[("retry-after", "7")]))
    house = await street.house(first, second)
    for streamed in (True, False):
        answer = await house.chat(stream=streamed)
        assert (answer.status_code, answer.content) == (status, body)
        assert answer.headers["content-type"] == content_type
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-request-id"]
    assert len(first.asked) + len(second.asked) == 2
    await house.idle()


@pytest.mark.parametrize("status", [502, 503, 504])
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_the_last_engine_says_passes_unchanged(street: Street, shape: str, status: int) -> None:
    content_type, body = SHAPES[shape]
    _, house = await saying(street, *whole(status, body, content_type=content_type))
    answer = await house.chat()
    assert (answer.status_code, answer.content) == (status, body)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_engine_that_refuses_the_gateways_key_is_a_bad_gateway(
    street: Street, shape: str, status: int, streamed: bool
) -> None:
    content_type, body = SHAPES[shape]
    headers = [("www-authenticate", 'Bearer realm="canary"')]
    _, house = await saying(street, *whole(status, body, content_type=content_type, headers=headers))
    answer = await house.chat(stream=streamed)
    refusal(answer, 502, "server_error")
    assert "canary" not in answer.text + str(answer.headers)


@pytest.mark.parametrize("code", [400, 404, 422, 429, 500])
@pytest.mark.parametrize("cut", WAYS)
async def test_a_stream_that_begins_with_an_error_is_a_status(street: Street, cut: str, code: int) -> None:
    error = {"message": "too long", "type": "BadRequestError", "param": None, "code": code}
    _, house = await saying(street, *stream(*WAYS[cut](event({"error": error}) + DONE)))
    answer = await house.chat(stream=True)
    assert (answer.status_code, answer.headers["content-type"]) == (code, "application/json")
    assert answer.json() == {"error": error}


# Streams that break off

BREAKS: dict[str, tuple[list[Step], str | None]] = {
    "reset": ([End.RST], None),
    "closed": ([End.FIN], None),
    "ended without DONE": ([], None),
    "half an event": ([b'data: {"choices": [{"delta'], None),
    "half an event, reset": ([b'data: {"choi', End.RST], None),
    "an error": ([event({"error": {"message": "dead", "type": "x", "param": None, "code": 500}}), DONE], "dead"),
    "an error and no DONE": ([event({"error": {"message": "dead", "type": "x", "param": None, "code": 500}})], "dead"),
    "an abort": ([delta("", "abort"), DONE], None),
    "silence": ([End.SILENCE], None),
}


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fault", BREAKS)
async def test_a_stream_that_breaks_off_ends_in_one_error_and_done(
    street: Street, fault: str, path: str, number: int
) -> None:
    rest, message = BREAKS[fault]
    gate = asyncio.Event()
    engine, house = await saying(
        street, *stream(*[delta("Hel")] * number, gate, *rest), timeouts={"head": 5, "idle": 0.3}
    )
    client = await street.raw(house)
    body = {"model": "tiny", "prompt": "x", "messages": [], "stream": True}
    client.ask(orjson.dumps(body), path=path)
    seen = b""
    for _ in range(number):
        seen += await client.until(delta("Hel"))
    gate.set()
    seen += await client.until(b"\r\n" + LAST_CHUNK)
    answer = dechunked(seen)
    *before, error, done = events(answer)
    assert done == "[DONE]"
    assert before == events(delta("Hel") * number)
    assert error.keys() == {"error"}
    assert error["error"].keys() == {"message", "type", "param", "code"}
    assert error["error"]["message"] == message or message is None
    assert "127.0.0.1" not in answer.decode()
    assert str(engine.port) not in error["error"]["message"]
    assert await house.metric("engine_failures_total") == 1
    await house.idle()


def dechunked(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest and not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize("rest", [[End.RST], [], [event({"error": {"message": "dead", "code": 500}}), DONE]])
async def test_the_openai_sdk_raises_rather_than_return_a_short_answer(street: Street, rest: list[Step]) -> None:
    gate = asyncio.Event()
    _, house = await saying(street, *stream(delta("Hel"), gate, *rest))
    asyncio.get_running_loop().call_later(0.1, gate.set)

    async def read() -> None:
        async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=0) as sdk:
            message: Any = {"role": "user", "content": "x"}
            async for _ in await sdk.chat.completions.create(model="tiny", messages=[message], stream=True):
                pass

    with pytest.raises(openai.APIError):
        await read()


# Other content, other codings


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize(
    "content_type",
    [
        "audio/wav",
        "application/octet-stream",
        "text/plain; charset=latin-1",
        "text/event-stream",
        'text/event-stream; charset="utf-8"',
        "TEXT/Event-Stream;charset=UTF-8",
        "application/x-ndjson",
        "image/png",
    ],
)
async def test_content_keeps_its_name_and_bytes(street: Street, content_type: str, framing: Framing) -> None:
    streamed = "stream" in content_type.lower() and "octet" not in content_type
    body = delta("é", "stop") + DONE if streamed else bytes(range(256)) * 50
    steps = stream(body[:7], body[7:], content_type=content_type, framing=framing)
    _, house = await saying(street, *steps)
    answer = await house.chat(stream=streamed)
    assert answer.content == body
    assert answer.headers.get_list("content-type") == [content_type]


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "GZIP": gzip.compress,
    "identity": bytes,
}
WISHES = [None, "gzip", "identity", "br, gzip;q=0.5, *;q=0", ""]


async def ask(street: Street, house: House, *headers: str, streamed: bool) -> Heard:
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=streamed)), *headers)
    return await hear(client)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("coding", PACK)
async def test_a_compressed_answer_is_read_by_every_client(
    street: Street, coding: str, streamed: bool, wish: str | None
) -> None:
    """The engine compresses although it was asked not to."""
    said = delta("你好") + delta("", "stop") + usage_event() + DONE if streamed else orjson.dumps(completed("你好"))
    packed = PACK[coding](said)
    pieces = [packed[at : at + 5] for at in range(0, len(packed), 5)]
    headers = [("content-encoding", coding)]
    content_type = "text/event-stream" if streamed else "application/json"
    engine, house = await saying(street, *stream(*pieces, content_type=content_type, headers=headers))
    heard = await ask(street, house, *([f"accept-encoding: {wish}"] if wish is not None else []), streamed=streamed)
    assert engine.asked[0].headers("accept-encoding") == ["identity"]
    assert heard.status == 200
    assert not heard.headers("content-encoding")
    assert heard.body == said.replace(usage_event(), b"")
    assert await house.metric("completion_tokens_total") == 6


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_compressed_refusal_is_read(street: Street, status: int, framing: Framing) -> None:
    body = gzip.compress(b'{"error":{"message":"canary"}}')
    _, house = await saying(street, *whole(status, body, headers=[("content-encoding", "gzip")], framing=framing))
    answer = await house.chat()
    assert (answer.status_code, answer.json()) == (status, {"error": {"message": "canary"}})
    assert "content-encoding" not in answer.headers


async def test_compressed_events_arrive_one_by_one(street: Street) -> None:
    gates = [asyncio.Event() for _ in range(4)]
    packing = zlib.compressobj(wbits=31)
    steps: list[Step] = []
    for number, gate in enumerate(gates):
        steps += [packing.compress(delta(str(number))) + packing.flush(zlib.Z_SYNC_FLUSH), gate]
    steps.append(packing.compress(DONE) + packing.flush())
    _, house = await saying(street, *stream(*steps, headers=[("content-encoding", "gzip")]))
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=True)))
    for number, gate in enumerate(gates):
        await client.until(delta(str(number)))
        gate.set()
    await client.until(DONE)
    await client.until(b"\r\n" + LAST_CHUNK)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
@pytest.mark.parametrize("cut", [0.0, 0.5])
async def test_a_compressed_answer_that_is_spoiled_is_the_engines_failure(
    street: Street, coding: str, cut: float
) -> None:
    packed = PACK[coding](orjson.dumps(completed("x" * 500)))
    spoiled = packed[: int(len(packed) * cut)] or b"\xff" * 30
    _, house = await saying(street, *whole(200, spoiled, headers=[("content-encoding", coding)]))
    refusal(await house.chat(), 502, "server_error")
    await serves_on(house)


# The gateway's own errors


def limited(**limits: int) -> list[dict[str, Any]]:
    return [{"name": "team-a", "keys": [{"sha256": digest(KEY)}], **limits}]


OWN: dict[str, tuple[str, str, dict[str, Any], int, str, str | None]] = {
    "unknown path": ("POST", "/v1/nowhere", {}, 404, "invalid_request_error", None),
    "unknown path, GET": ("GET", "/nowhere", {}, 404, "invalid_request_error", None),
    "wrong method": ("GET", CHAT, {}, 405, "invalid_request_error", "allow"),
    "wrong method, cold": ("POST", "/v1/models", {}, 405, "invalid_request_error", "allow"),
    "no body": ("POST", CHAT, {"content": b""}, 400, "invalid_request_error", None),
    "no model": ("POST", CHAT, {"json": {"messages": []}}, 400, "invalid_request_error", None),
    "unknown model": ("POST", CHAT, {"json": {"model": "x"}}, 404, "invalid_request_error", None),
    "too large": ("POST", CHAT, {"content": b" " * 2_000}, 413, "invalid_request_error", None),
    "bad key": ("POST", CHAT, {"headers": {"authorization": "Bearer x"}}, 401, "authentication_error",
                "www-authenticate"),
    "no key": ("POST", CHAT, {"headers": {"authorization": ""}}, 401, "authentication_error", "www-authenticate"),
    "bad key, cold": ("GET", "/v1/models", {"headers": {"authorization": "Bearer x"}}, 401, "authentication_error",
                      "www-authenticate"),
}  # fmt: skip


@pytest.mark.parametrize("what", OWN)
async def test_the_gateways_own_errors_have_openais_form(street: Street, what: str) -> None:
    method, path, request, status, kind, header = OWN[what]
    engine = await street.engine()
    house = await street.house(engine, listen={"port": 0, "max_body_bytes": 1_000})
    answer = await house.client.request(method, path, **request)
    refusal(answer, status, kind)
    assert header is None or answer.headers[header]
    assert not engine.asked
    await serves_on(house)


async def test_too_many_requests_and_no_engine_say_when_to_come_back(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine, tenants=limited(requests_per_minute=1))
    assert (await house.chat()).status_code == 200
    answer = await house.chat()
    refusal(answer, 429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    engine.health = 503
    alone = await street.house(engine)
    answer = await alone.chat()
    refusal(answer, 503, "server_error")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("script", "tries"),
    [
        *((refused(status, "no"), 1) for status in (400, 404, 405, 413, 415, 422, 401)),
        *((refused(status, "no"), 2) for status in (408, 409, 429, 500, 503)),
    ],
    ids=["400", "404", "405", "413", "415", "422", "401", "408", "409", "429", "500", "503"],
)
async def test_the_openai_sdk_tries_again_only_where_that_helps(street: Street, script: Script, tries: int) -> None:
    """An engine's 401 is a 502 to the client, which its SDK tries again."""
    engine = await street.engine()
    engine.script = lambda _: script
    house = await street.house(engine)
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=1) as sdk:
        with pytest.raises(openai.APIStatusError) as told:
            await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert told.value.request_id
    tries = 2 if told.value.status_code == 502 else tries
    assert len(engine.asked) == tries


# Request ids


@pytest.mark.parametrize("given", ["mine-1", "A.b_c:d", "", "a b", "x" * 200, None])
@pytest.mark.parametrize("streamed", [True, False])
async def test_engine_and_client_see_the_same_request_id(street: Street, given: str | None, streamed: bool) -> None:
    first, second = await street.engines(2)
    first.always(*refused(503, "full"))
    second.always(*refused(503, "full"))
    house = await street.house(first, second)
    headers = {"x-request-id": given} if given is not None else {}
    answer = await house.client.post(CHAT, json=chat(stream=streamed), headers=headers)
    name = answer.headers.get_list("x-request-id")
    assert len(name) == 1
    calls = first.asked + second.asked
    assert calls
    assert [call.headers("x-request-id") for call in calls] == [name] * len(calls)
    assert (name == [given]) == (given in {"mine-1", "A.b_c:d"})


# CORS

APP = "https://app.example"
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


def with_cors(origins: Any) -> dict[str, Any]:
    return {"listen": {"port": 0, "cors": {"origins": origins}}}


async def crossing(street: Street, origins: Any, **sections: Any) -> tuple[Engine, House]:
    engine = await street.engine()
    return engine, await street.house(engine, **with_cors(origins), **sections)


def allowed(answer: httpx.Response) -> list[str]:
    return answer.headers.get_list("access-control-allow-origin")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", "/v1/embeddings", "/v1/responses"])
@pytest.mark.parametrize("origins", [[APP], ["https://other.example", APP], "*"])
async def test_a_preflight_needs_no_key_and_asks_no_engine(street: Street, origins: Any, path: str) -> None:
    engine, house = await crossing(street, origins)
    before = len(engine.calls)
    async with httpx.AsyncClient(base_url=house.url, trust_env=False) as stranger:
        answer = await stranger.options(path, headers=PREFLIGHT)
    assert (answer.status_code, answer.content) == (204, b"")
    assert allowed(answer) in ([[APP]] if origins != "*" else [["*"], [APP]])
    assert "POST" in answer.headers["access-control-allow-methods"]
    names = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert names >= {"authorization", "content-type", "x-stainless-os"} or names == {"*", "authorization"}
    assert answer.headers["x-request-id"]
    assert len(engine.calls) == before


FOREIGN = [
    "https://evil.example",
    "http://app.example",
    f"{APP}.evil.example",
    f"{APP}:8443",
    "null",
    "",
    "app.example",
]


@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_foreign_origin_is_told_nothing(street: Street, origin: str) -> None:
    _, house = await crossing(street, [APP])
    for answer in (
        await house.client.options(CHAT, headers=PREFLIGHT | {"origin": origin}),
        await house.client.post(CHAT, json=chat(), headers={"origin": origin}),
    ):
        assert not allowed(answer)


CROSSING: dict[str, tuple[Script | None, dict[str, Any], int]] = {
    "an answer": (None, {"json": chat()}, 200),
    "a stream": (None, {"json": chat(stream=True)}, 200),
    "a refusal": (refused(400, "no"), {"json": chat()}, 400),
    "an engine's failure": ([End.RST], {"json": chat()}, 502),
    "a bad key": (None, {"json": chat(), "headers": {"authorization": "Bearer x"}}, 401),
    "no request": (None, {"content": b"{"}, 400),
    "an unknown model": (None, {"json": {"model": "x"}}, 404),
    "too large": (None, {"content": b" " * 40_000_000}, 413),
}


@pytest.mark.parametrize("what", CROSSING)
@pytest.mark.parametrize("theirs", [(), ("*",), ("https://evil.example",)])
async def test_every_answer_may_be_read_by_the_page_that_asked(street: Street, what: str, theirs: Any) -> None:
    """An engine's own word on it, if it has one, does not count."""
    script, request, status = CROSSING[what]
    engine, house = await crossing(street, [APP])
    headers = [("access-control-allow-origin", origin) for origin in theirs]
    if script is not None:
        engine.script = lambda _: script
    elif what == "an answer":
        engine.always(*whole(200, completed(), headers=headers))
    elif what == "a stream":
        engine.always(*stream(delta("a"), DONE, headers=headers))
    sent = {**request, "headers": {"origin": APP, **request.get("headers", {})}}
    answer = await house.client.post(CHAT, **sent)
    assert answer.status_code == status
    assert allowed(answer) == [APP]
    assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1/models", CHAT])
async def test_errors_of_every_route_may_be_read(street: Street, path: str) -> None:
    _, house = await crossing(street, [APP])
    for method in ("GET", "PUT"):
        answer = await house.client.request(method, path, headers={"origin": APP})
        assert allowed(answer) == [APP]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_without_cors_nothing_is_said_of_it(street: Street, path: str, streamed: bool) -> None:
    engine, house = await saying(
        street, *whole(200, completed(), headers=[("Access-Control-Allow-Origin", "*"), ("x-passes", "yes")])
    )
    answer = await house.client.options(path, headers=PREFLIGHT)
    refusal(answer, 405)
    assert answer.headers["allow"]
    real = await house.client.post(CHAT, json=chat(stream=streamed), headers={"origin": APP})
    assert real.headers["x-passes"] == "yes"
    for one in (answer, real, await house.client.get("/v1/models", headers={"origin": APP})):
        assert not [name for name in one.headers if name.startswith("access-control")]
    assert len(engine.asked) == 1


# Models


async def two_models(street: Street, **sections: Any) -> tuple[Engine, Engine, House]:
    first, second = await street.engine("tiny"), await street.engine("other")
    for number, engine in enumerate((first, second)):
        engine.cards[0] |= {"max_model_len": 4096 + number, "permission": [{"id": f"perm-{number}"}], "zz": {"b": 1.0}}
    static = [{"url": first.url, "model": "tiny"}, {"url": second.url, "model": "other"}]
    house = await street.house(
        *static,
        models=[{"name": "tiny", "aliases": ["alias-x"]}, {"name": "other"}],
        tenants=[
            {"name": "team-a", "keys": [{"sha256": digest(KEY)}], "models": ["tiny"]},
            {"name": "team-b", "keys": [{"sha256": digest(OTHER_KEY)}]},
        ],
        **sections,
    )
    return first, second, house


def listed(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200
    return {card["id"] for card in answer.json()["data"]}


OTHER = {"authorization": f"Bearer {OTHER_KEY}"}


async def test_a_tenant_sees_and_uses_only_its_models(street: Street) -> None:
    _, second, house = await two_models(street)
    assert "other" not in listed(await house.client.get("/v1/models"))
    assert listed(await house.client.get("/v1/models", headers=OTHER)) >= {"tiny", "other"}
    refusal(await house.client.get("/v1/models/other"), 404)
    assert (await house.client.get("/v1/models/other", headers=OTHER)).status_code == 200
    body = chat() | {"model": "other"}
    hidden = await house.client.post(CHAT, json=body)
    unknown = await house.client.post(CHAT, json=body | {"model": "nobody"})
    assert (hidden.status_code, hidden.content) == (404, unknown.content), "it cannot be told from one that is not"
    assert not second.asked
    assert (await house.client.post(CHAT, json=body, headers=OTHER)).status_code == 200


@pytest.mark.parametrize("name", ["tiny", "alias-x"])
async def test_a_tenants_model_is_its_under_every_name(street: Street, name: str) -> None:
    _, _, house = await two_models(street)
    assert (await house.client.post(CHAT, json=chat() | {"model": name})).status_code == 200


async def test_what_engines_say_of_their_models_is_kept(street: Street) -> None:
    first, second, house = await two_models(street)
    cards = {card["id"]: card for card in (await house.client.get("/v1/models", headers=OTHER)).json()["data"]}
    for engine in (first, second):
        card = cards[engine.cards[0]["id"]]
        assert card == card | engine.cards[0]


@pytest.mark.parametrize("fault", ["stopped", "silent"])
async def test_models_are_listed_without_asking_the_engines(street: Street, fault: str) -> None:
    first, second = await street.engines(2)
    house = await street.house(first, second)
    if fault == "stopped":
        await first.stop()
    else:
        first.everywhere = [End.SILENCE]
    before = len(first.calls) + len(second.calls)
    for _ in range(5):
        assert listed(await house.client.get("/v1/models")) == {"tiny"}
    assert len(first.calls) + len(second.calls) == before


async def test_an_engine_that_is_down_takes_only_its_own_models_away(street: Street) -> None:
    first, second = await street.engine("tiny"), await street.engine("other")
    static = [{"url": first.url, "model": "tiny"}, {"url": second.url, "model": "other"}]
    models = [{"name": "tiny"}, {"name": "other"}]
    house = await street.house(engines={"static": static, "poll_seconds": 0.05}, models=models)
    assert listed(await house.client.get("/v1/models")) == {"tiny", "other"}
    await second.stop()

    async def gone() -> bool:
        return listed(await house.client.get("/v1/models")) == {"tiny"}

    await eventually(gone)
