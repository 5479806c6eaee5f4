"""The failure table, row by row, through the whole gateway: what the client gets, what engines see."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.double import (
    CHAT,
    DONE,
    LAST_CHUNK,
    End,
    Framing,
    Script,
    answered,
    bytewise,
    chunk,
    completed,
    delta,
    event,
    head,
    refused,
    stream,
    usage,
    usage_event,
    whole,
)
from tests.gateway.house import KEY, Street, chat, digest, events, eventually

ENGINE_ERROR = event({"error": {"message": "EngineCore died", "type": "server_error", "param": None, "code": 500}})
SHORT = {"body": 5, "connect": 1, "head": 0.1, "idle": 0.1, "total": 5}


def told(answer: httpx.Response) -> Any:
    """The error object of an answer that is the gateway's own error."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def broke_off(body: bytes) -> Any:
    """The error of a stream that ended in one error event and [DONE]."""
    *before, error, done = events(body)
    assert done == "[DONE]"
    assert error.keys() == {"error"}
    assert error["error"].keys() == {"message", "type", "param", "code"}
    assert all("error" not in one and one != "[DONE]" for one in before)
    return error["error"]


def text(body: bytes) -> str:
    """What the model said, before any error."""
    return "".join(
        choice["delta"].get("content", "")
        for one in events(body)
        if isinstance(one, dict)
        for choice in one.get("choices", ())
    )


# Bytes go through


async def test_a_stream_goes_through_byte_for_byte(street: Street) -> None:
    engine = await street.engine()
    said = [delta("你好🦀é"), delta("\u2028\u2029\u0085\u000b\u000c\u001c"), b": ping\n\n", delta("", "stop"), DONE]
    for framing in ("chunked", "close", "length"):
        engine.scripts.append(stream(*said, framing=framing))
    engine.scripts.append(stream(*bytewise(b"".join(said))))
    house = await street.house(engine)
    for _ in range(4):
        answer = await house.chat(stream=True)
        assert answer.status_code == 200
        assert answer.content == b"".join(said)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    await house.idle()


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b'{"logprobs": -Infinity, "b":1.0, "a":1e2, "usage": {"prompt_tokens": 1}}'),
        ("application/json", orjson.dumps(completed("\u2028🦀"))),
        ("application/json", b"{not json"),
        ("application/json", b"[1, 2]"),
        ("application/json", b""),
        ("text/plain; charset=latin-1", b"\xe9"),
        ("application/octet-stream", bytes(range(256))),
        ("audio/wav", b"RIFF" * 1000),
    ],
)
async def test_a_whole_answer_goes_through_byte_for_byte(
    street: Street, framing: Framing, content_type: str, body: bytes
) -> None:
    engine = await street.engine()
    engine.always(*whole(200, body, content_type=content_type, framing=framing))
    answer = await (await street.house(engine)).chat()
    assert answer.status_code == 200
    assert answer.content == body
    assert answer.headers["content-type"] == content_type


async def test_events_arrive_as_they_are_written(street: Street) -> None:
    engine, gate = await street.engine(), asyncio.Event()
    engine.always(*stream(delta("a"), gate, delta("b"), DONE))
    house = await street.house(engine)
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=True)))
    assert delta("a").strip() in await client.until(delta("a"))
    gate.set()
    assert delta("b") in await client.until(b"\r\n" + LAST_CHUNK)


async def test_the_head_waits_for_the_first_byte_of_the_body(street: Street) -> None:
    engine, gate = await street.engine(), asyncio.Event()
    engine.always(*stream(gate, delta("a"), DONE))
    house = await street.house(engine)
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=True)))
    await engine.arrival(CHAT)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.reader.readexactly(1)
    gate.set()
    await client.until(b"\r\n" + LAST_CHUNK)


async def test_headers_of_the_connection_do_not_cross(street: Street) -> None:
    engine = await street.engine()
    mine = [("set-cookie", "canary=1"), ("www-authenticate", "canary"), ("keep-alive", "timeout=5"), ("te", "x")]
    engine.always(*whole(200, completed(), headers=[*mine, ("x-request-id", "canary"), ("x-passes", "yes")]))
    house = await street.house(engine)
    sent = {"connection": "keep-alive, x-drop", "x-drop": "canary", "cookie": "canary", "x-api-key": "canary"}
    answer = await house.client.post(CHAT, json=chat(), headers={**sent, "x-request-id": "mine"})
    assert "canary" not in str(answer.headers.raw)
    assert answer.headers["x-passes"] == "yes"
    assert answer.headers["x-request-id"] == "mine"
    (call,) = engine.asked
    assert b"canary" not in call.head
    assert KEY.encode() not in call.head
    assert call.header("x-request-id") == "mine"
    assert call.header("accept-encoding") == "identity"
    assert call.headers("content-length") == [str(len(call.body))]


# The engine refuses


@pytest.mark.parametrize("status", [400, 404, 405, 408, 409, 413, 415, 422, 429, 499, 500, 501])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_refusal_is_the_clients_once_and_unwrapped(street: Street, status: int, streamed: bool) -> None:
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(*refused(status, f"canary {status}"))
    house = await street.house(first, second)
    answer = await house.chat(stream=streamed)
    assert answer.status_code == status
    assert answer.json() == {
        "error": {"message": f"canary {status}", "type": "BadRequestError", "param": None, "code": status}
    }
    assert len(first.asked) + len(second.asked) == 1
    await house.idle()


@pytest.mark.parametrize("body", [b"<html>no</html>", b"", b'{"detail": "flat"}', b"\xff\xfe"])
async def test_a_refusal_in_any_shape_goes_through(street: Street, body: bytes) -> None:
    engine = await street.engine()
    pieces = [body[:1], body[1:2], body[2:]] if len(body) > 2 else [body] if body else []
    engine.always(*stream(*pieces, status=422, content_type="text/html"))
    answer = await (await street.house(engine)).chat()
    assert (answer.status_code, answer.content) == (422, body)
    assert len(engine.asked) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_the_gateways_own_key_failed(street: Street, status: int) -> None:
    engine = await street.engine()
    engine.always(*whole(status, {"error": "canary"}, headers=[("www-authenticate", "canary")]))
    answer = await (await street.house(engine)).chat()
    assert answer.status_code == 502
    assert told(answer)["type"] == "server_error"
    assert "canary" not in answer.text + str(answer.headers)


async def test_an_error_as_the_first_event_is_a_status(street: Street) -> None:
    engine = await street.engine()
    refusal = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    engine.always(*stream(event({"error": refusal}), DONE))
    answer = await (await street.house(engine)).chat(stream=True)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"error": refusal}


@pytest.mark.parametrize("code", [None, "x", 200, 99, 600, 1e9, True])
async def test_a_first_error_without_a_status_is_500(street: Street, code: object) -> None:
    engine = await street.engine()
    engine.always(*stream(event({"error": {"message": "m", "code": code}}), DONE))
    answer = await (await street.house(engine)).chat(stream=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "m"


# Before the first byte

BEFORE: dict[str, Script] = {
    "502": refused(502, "bad"),
    "503": refused(503, "full"),
    "504": refused(504, "late"),
    "draining": refused(500, "cannot schedule new futures after shutdown"),
    "fin": [End.FIN],
    "rst": [End.RST],
    "half a head": [b"HTTP/1.1 200 OK\r\ncontent-", End.FIN],
    "no http": [b"SSH-2.0-OpenSSH\r\n\r\n", End.FIN],
    "head only": stream(End.RST),
    "head and fin": stream(End.FIN),
    "empty stream": stream(),
    "half an event": stream(b'data: {"choices": [', End.FIN),
    "half an event, ended": stream(b'data: {"choices": ['),
    "half a body": [*whole(200, completed())[:1], b"{", End.RST],
    "first event an error 503": stream(event({"error": {"message": "m", "code": 503}}), DONE),
    "stream aborted": stream(delta("", "abort"), DONE),
    "whole aborted": whole(200, completed(finish="abort")),
    "engine's key": refused(401, "no"),
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("fault", BEFORE)
async def test_a_spare_takes_what_failed_before_its_first_byte(street: Street, fault: str, streamed: bool) -> None:
    first, second = await street.engines(2)
    house = await street.house(first, second)
    for engine in (first, second):
        engine.scripts.append(BEFORE[fault])  # whoever is asked first fails
    second.scripts.clear() if first.port < second.port else first.scripts.clear()
    answer = await house.chat(stream=streamed)
    assert answer.status_code == 200
    assert (text(answer.content) if streamed else answer.json()["choices"][0]["message"]["content"]) == "LYRA"
    assert (len(first.asked), len(second.asked)) == (1, 1)
    assert first.asked[0].body == second.asked[0].body
    assert await house.metric("retries_total") == 1
    assert await house.metric("engine_failures_total") == 1
    await house.idle()


async def test_a_refused_connection_goes_to_a_spare_and_makes_a_suspect(street: Street) -> None:
    first, second = await street.engines(2)
    house = await street.house(first, second)
    await first.stop()
    for _ in range(3):
        assert (await house.chat()).status_code == 200
    assert len(second.asked) == 3
    assert await house.metric("engine_failures_total", cause="unreachable") == 1
    assert await house.metric("engine_up", engine=f"127.0.0.1:{first.port}") == 0
    await house.idle()


@pytest.mark.parametrize(
    ("fault", "status"),
    [(f, 502) for f in BEFORE if f not in ("502", "503", "504", "draining", "first event an error 503")],
)
async def test_where_no_engine_can_the_last_error_is_told(street: Street, fault: str, status: int) -> None:
    engines = await street.engines(3)
    for engine in engines:
        engine.always(*BEFORE[fault])
    house = await street.house(*engines)
    answer = await house.chat(stream=True)
    assert answer.status_code == status
    assert told(answer)["type"] == "server_error"
    assert "127.0.0.1" not in answer.text
    assert sum(len(engine.asked) for engine in engines) == 2  # retries.attempts
    await house.idle()


@pytest.mark.parametrize("fault", ["502", "503", "504", "draining"])
async def test_an_engines_own_failure_is_passed_on_by_the_last(street: Street, fault: str) -> None:
    engines = await street.engines(2)
    for engine in engines:
        engine.always(*BEFORE[fault])
    house = await street.house(*engines)
    answer = await house.chat()
    assert answer.status_code == (500 if fault == "draining" else int(fault))
    assert answer.json()["error"]["type"] == "BadRequestError"
    await house.idle()


async def test_all_connections_refused_is_502_then_503(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    await engine.stop()
    assert (await house.chat()).status_code == 502
    answer = await house.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    told(answer)
    await house.idle()


async def test_one_attempt_means_one(street: Street) -> None:
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(End.RST)
    house = await street.house(first, second, retries={"attempts": 1})
    assert (await house.chat()).status_code == 502
    assert len(first.asked) + len(second.asked) == 1


async def test_a_kept_connection_that_died_is_sent_once_more(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    assert (await house.chat()).status_code == 200
    engine.scripts.append([End.FIN])
    assert (await house.chat()).status_code == 200
    assert [call.connection for call in engine.asked] == [
        engine.asked[0].connection,
        engine.asked[0].connection,
        engine.connections - 1,
    ]
    assert await house.metric("engine_failures_total") == 0


async def test_surplus_bytes_meet_nobody(street: Street) -> None:
    """An engine that answers twice must not answer the next tenant."""
    engine = await street.engine()
    canary = b"".join(step for step in whole(200, completed("canary")) if isinstance(step, bytes))
    engine.scripts.append([b"".join(s for s in whole(200, completed("mine")) if isinstance(s, bytes)) + canary])
    house = await street.house(engine)
    answers = [(await house.chat()).text for _ in range(5)]
    assert "mine" in answers[0]
    assert "canary" not in "".join(answers)
    await house.idle()


# Time

LATE: dict[str, tuple[Script, str]] = {
    "head": ([End.SILENCE], "head_timeout"),
    "first event": (stream(End.SILENCE), "head_timeout"),
    "half a body": ([head(200, [("content-length", "10")]), b"{", End.SILENCE], "idle_timeout"),
}


@pytest.mark.parametrize("phase", LATE)
async def test_silence_before_the_first_byte_is_504(street: Street, phase: str) -> None:
    script, code = LATE[phase]
    engine = await street.engine()
    engine.always(*script)
    house = await street.house(engine, timeouts=SHORT)
    answer = await house.chat(stream=True)
    assert answer.status_code == 504
    assert (told(answer)["type"], told(answer)["code"]) == ("timeout", code)
    assert await house.metric("engine_failures_total", cause=code) == 1
    await asyncio.wait_for(engine.asked[0].closed.wait(), 1)
    await house.idle()


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_total_is_a_bound_of_its_own_and_no_reason_for_a_spare(street: Street, streamed: bool) -> None:
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(End.SILENCE)
    house = await street.house(first, second, timeouts={"total": 0.1})
    answer = await house.chat(stream=streamed)
    assert answer.status_code == 504
    assert await house.metric("retries_total") == 0
    assert told(answer)["code"] == "total_timeout"
    assert len(first.asked) + len(second.asked) == 1
    await house.idle()


async def test_silence_in_the_middle_ends_with_an_error_event(street: Street) -> None:
    engine = await street.engine()
    engine.always(*stream(delta("a"), End.SILENCE))
    house = await street.house(engine, timeouts=SHORT)
    answer = await house.chat(stream=True)
    assert answer.status_code == 200
    assert text(answer.content) == "a"
    error = broke_off(answer.content)
    assert (error["type"], error["code"]) == ("timeout", "idle_timeout")
    await asyncio.wait_for(engine.asked[0].closed.wait(), 1)
    await house.idle()


async def test_the_total_ends_a_stream_that_goes_on(street: Street) -> None:
    engine, never = await street.engine(), asyncio.Event()
    engine.always(*stream(delta("a"), never, DONE))
    house = await street.house(engine, timeouts={"total": 0.1})
    assert broke_off((await house.chat(stream=True)).content)["code"] == "total_timeout"
    await asyncio.wait_for(engine.asked[0].closed.wait(), 1)
    await house.idle()


# After the first byte

AFTER: dict[str, tuple[Script, str]] = {
    "rst": (stream(delta("Hel"), End.RST), "broken"),
    "fin": (stream(delta("Hel"), End.FIN), "broken"),
    "bad chunk": ([head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]),
                   chunk(delta("Hel")), b"zz\r\n"], "broken"),
    "no done": (stream(delta("Hel")), "no_done"),
    "no done, by close": (stream(delta("Hel"), framing="close"), "no_done"),
    "half an event": (stream(delta("Hel"), b'data: {"choi'), "no_done"),
    "half an event, rst": (stream(delta("Hel"), b'data: {"choi', End.RST), "broken"),
    "abort": (stream(delta("Hel"), delta("", "abort"), DONE), "aborted"),
    "abort in the same piece": (stream(delta("Hel"), delta("x") + delta("", "abort") + DONE), "aborted"),
}  # fmt: skip


@pytest.mark.parametrize("fault", AFTER)
async def test_after_the_first_byte_one_error_event_and_done(street: Street, fault: str) -> None:
    script, cause = AFTER[fault]
    gate = asyncio.Event()
    first, second = await street.engines(2)
    house = await street.house(first, second)
    steps = list(script)
    at = next(n for n, step in enumerate(steps) if isinstance(step, bytes) and b"Hel" in step) + 1
    for engine in (first, second):
        engine.always(*steps[:at], gate, *steps[at:])
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=True)))
    await client.until(delta("Hel"))
    gate.set()
    rest = await client.until(b"\r\n" + LAST_CHUNK)
    body = b"".join(part for part in rest.split(b"\r\n") if part.startswith((b"data:", b'{"')))
    assert body.count(b'"error"') == 1
    assert broke_off(body)["type"] == "server_error"
    assert len(first.asked) + len(second.asked) == 1
    assert await house.metric("engine_failures_total", cause=cause) == 1
    assert await house.metric("requests_total", status=cause) == 1
    await house.idle()


async def test_an_error_event_of_the_engines_own_is_the_only_one(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    for ending in ([DONE], [], [End.RST]):
        engine.always(*stream(delta("Hel"), soon(), ENGINE_ERROR, *ending))
        answer = await house.chat(stream=True)
        assert broke_off(answer.content)["message"] == "EngineCore died"
    assert await house.metric("engine_failures_total") == 3
    await house.idle()


def soon() -> asyncio.Event:
    """A gate that opens a little later, so that what stands before it has been read."""
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, gate.set)
    return gate


@pytest.mark.parametrize("end", [End.RST, End.FIN])
async def test_an_answer_is_whole_once_done_has_gone_by(street: Street, end: End) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    engine.always(*stream(delta("a"), DONE, soon(), end))
    answer = await house.chat(stream=True)
    assert answer.content == delta("a") + DONE
    assert await house.metric("engine_failures_total") == 0
    await house.idle()


async def test_done_without_its_empty_line_is_done(street: Street) -> None:
    engine = await street.engine()
    engine.always(*stream(delta("a"), DONE.rstrip()))
    answer = await (await street.house(engine)).chat(stream=True)
    assert answer.content == delta("a") + DONE.rstrip()


async def test_an_event_too_long_to_hold_does_not_swallow_the_error(street: Street) -> None:
    engine = await street.engine()
    engine.always(*stream(delta("a"), b"data: " + b"x" * 2_000_000, soon(), End.RST))
    answer = await (await street.house(engine)).chat(stream=True)
    error, done = answer.content.rsplit(b"\n\n", 3)[1:3]
    assert b'"error"' in error
    assert error.startswith(b"data: {")
    assert done == b"data: [DONE]"


async def test_the_openai_sdk_sees_an_error_and_no_short_answer(street: Street) -> None:
    engine = await street.engine()
    engine.always(*stream(delta("Hel"), soon(), End.RST))
    house = await street.house(engine)
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=0) as sdk:
        got = await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        said: list[str] = []

        async def read() -> None:
            async for piece in got:
                said.append(piece.choices[0].delta.content or "")  # noqa: PERF401  # what came before the error counts

        with pytest.raises(openai.APIError, match="broke off"):
            await read()
    assert said == ["Hel"]


# What is not the client's


async def test_usage_is_asked_for_and_not_shown(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    answer = await house.chat(stream=True)
    assert engine.asked[0].json()["stream_options"] == {"include_usage": True}
    assert all(one == "[DONE]" or one["choices"] for one in events(answer.content))
    assert await house.metric("completion_tokens_total", tenant="team-a") == 6


async def test_usage_that_was_asked_for_is_shown_once_before_done(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    answer = await house.chat(stream=True, stream_options={"include_usage": True})
    *_, finish, used, done = events(answer.content)
    assert (finish["choices"][0]["finish_reason"], used["choices"], done) == ("stop", [], "[DONE]")
    assert used["usage"] == usage()
    assert answer.content.count(b'"usage":{') == 1
    assert usage_event() in answer.content


@pytest.mark.parametrize("streamed", [True, False])
async def test_transfer_parameters_never_reach_a_client(street: Street, streamed: bool) -> None:
    engine = await street.engine()
    params = {"kv_transfer_params": {"remote_host": "canary"}}
    chunked = event({"choices": [{"index": 0, "delta": {"content": "a"}}], **params})
    engine.always(*(stream(chunked, DONE) if streamed else whole(200, completed() | params)))
    answer = await (await street.house(engine)).chat(stream=streamed)
    assert "canary" not in answer.text
    assert "kv_transfer_params" not in answer.text


# The client leaves

HELD: dict[str, tuple[Callable[[], list[Any]], bool, bytes]] = {
    "before the head, streamed": (lambda: [End.SILENCE], True, b""),
    "before the head, whole": (lambda: [End.SILENCE], False, b""),
    "before the first event": (lambda: stream(End.SILENCE), True, b""),
    "in a whole body": (lambda: [*whole(200, completed())[:1], b"{", End.SILENCE], False, b""),
    "mid-stream": (lambda: stream(delta("a"), End.SILENCE), True, delta("a")),
}


@pytest.mark.parametrize("hard", [True, False], ids=["rst", "fin"])
@pytest.mark.parametrize("moment", HELD)
async def test_a_client_that_leaves_takes_everything_with_it(street: Street, moment: str, hard: bool) -> None:
    script, streamed, mark = HELD[moment]
    engine = await street.engine()
    engine.always(*script())
    house = await street.house(engine)
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=streamed)))
    call = await engine.arrival(CHAT)
    if mark:
        await client.until(mark)
    assert await house.metric("engine_requests") == 1
    await asyncio.sleep(0.02)  # the head is read by now, where there is one
    client.leave() if hard else client.writer.close()
    await asyncio.wait_for(call.closed.wait(), 1)
    await house.idle()
    await house.until("requests_total", 1, status="client_left")


async def test_a_client_that_leaves_before_a_spare_is_asked(street: Street) -> None:
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(End.SILENCE)
    house = await street.house(first, second)
    client = await street.raw(house)
    client.ask(orjson.dumps(chat()))
    await eventually(lambda: bool(first.asked or second.asked))
    client.leave()
    await house.idle()
    assert len(first.asked) + len(second.asked) == 1


async def test_a_client_that_does_not_read_and_leaves(street: Street) -> None:
    engine = await street.engine()
    engine.always(*stream(*[delta("x" * 60_000)] * 300, DONE))
    house = await street.house(engine)
    client = await street.raw(house)
    client.ask(orjson.dumps(chat(stream=True)))
    call = await engine.arrival(CHAT)
    await asyncio.sleep(0.05)
    client.leave()
    await eventually(lambda: call.closed.is_set() or call.over.is_set())
    await house.idle()


ENDINGS: dict[str, Script] = {
    "whole": whole(200, completed()),
    "400": refused(400, "no"),
    "500": refused(500, "no"),
    "503": refused(503, "no"),
    "rst before": [End.RST],
    "rst in the middle": stream(delta("a"), End.RST),
    "no done": stream(delta("a")),
    "abort": stream(delta("", "abort"), DONE),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_hundred_of_each_ending_leave_nothing(street: Street, ending: str) -> None:
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(*ENDINGS[ending])
    house = await street.house(first, second, tenants=tenant(concurrent=20))
    for _ in range(5):
        answers = await asyncio.gather(*(house.chat(stream=True) for _ in range(20)))
        assert 429 not in {answer.status_code for answer in answers}
    await house.idle()
    assert await house.metric("requests_total", tenant="team-a") == 100


async def test_a_hundred_clients_that_leave_leave_nothing(street: Street) -> None:
    engine = await street.engine()
    engine.script = lambda call: stream(delta("a"), End.SILENCE) if call.json().get("stream") else [End.SILENCE]
    house = await street.house(engine, tenants=tenant(concurrent=100))
    clients = [await street.raw(house) for _ in range(100)]
    for number, client in enumerate(clients):
        client.ask(orjson.dumps(chat(stream=number % 2 == 0)))
    await engine.arrival(CHAT, 100)
    assert (await house.chat()).status_code == 429
    for client in clients:
        client.leave()
    await house.idle()
    assert all(call.closed.is_set() for call in engine.asked)
    engine.script = answered
    answers = await asyncio.gather(*(house.chat() for _ in range(100)))
    assert {answer.status_code for answer in answers} == {200}


def tenant(**limits: int) -> list[dict[str, Any]]:
    return [{"name": "team-a", "keys": [{"sha256": digest(KEY)}], **limits}]


@pytest.mark.parametrize("status", [204, 206, 301, 307, 600, 999])
async def test_a_status_that_is_no_answer_is_the_engines_failure(street: Street, status: int) -> None:
    engine = await street.engine()
    engine.always(*whole(status, b"", headers=[("location", "http://10.0.0.1/evil")]))
    house = await street.house(engine)
    answer = await house.chat()
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")
    assert "location" not in answer.headers
    await house.idle()


@pytest.mark.parametrize("number", [-5, 10**15, 10**30, True, "7", None, 1.5, float("nan")])
async def test_a_usage_that_cannot_be_is_unknown(street: Street, number: object) -> None:
    engine = await street.engine()
    answer = completed()
    answer["usage"] = {
        "prompt_tokens": number,
        "completion_tokens": number,
        "prompt_tokens_details": {"cached_tokens": number},
    }
    engine.always(*whole(200, json.dumps(answer).encode()))
    house = await street.house(engine)
    assert (await house.chat()).status_code == 200
    assert await house.metric("requests_total", status="200") == 1
    assert await house.metric("completion_tokens_total") == 0


@pytest.mark.parametrize("value", [1, 1.0, 0, "true", []])
async def test_a_stream_that_is_no_truth_value_is_refused(street: Street, value: object) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    assert (await house.chat(stream=value)).status_code == 400
    assert not engine.asked


async def test_headers_that_the_engine_names_as_its_own_do_not_cross(street: Street) -> None:
    engine = await street.engine()
    named = [("connection", "keep-alive, X-Inner"), ("x-inner", "1"), ("x-moongate-route", "made up")]
    engine.always(*whole(200, completed(), headers=named))
    house = await street.house(engine)
    answer = await house.chat()
    assert "x-inner" not in answer.headers
    assert "x-moongate-route" not in answer.headers
