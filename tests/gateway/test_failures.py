"""Engines that fail: who is asked next and how often, who is left alone, and when a silence is too long."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from tests.double import (
    CHAT,
    DONE,
    LAST_CHUNK,
    End,
    Script,
    Step,
    answered,
    completed,
    delta,
    event,
    head,
    refused,
    stream,
    whole,
)
from tests.gateway.heard import refusal
from tests.gateway.house import Street, eventually
from tests.gateway.sending import asking, noticed, saying

pytestmark = pytest.mark.usefixtures("calm")


# Trying again


FIRST_BYTES: dict[str, list[bytes]] = {
    "a role": [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})],
    "a text": [delta(""), delta("Hel")],
    "a tool call": [event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c"}]}}]})],
    "a comment": [b": ping\n\n"],
}


@pytest.mark.parametrize("fault", [End.RST, End.FIN, End.SILENCE])
@pytest.mark.parametrize("said", FIRST_BYTES)
async def test_after_a_byte_of_the_answer_nobody_else_is_asked(street: Street, said: str, fault: End) -> None:
    first, second = await street.engines(2)
    gate = asyncio.Event()
    for engine in (first, second):
        engine.always(*stream(*FIRST_BYTES[said], gate, fault))
    house = await street.house(first, second, timeouts={"head": 5, "idle": 0.3})
    client = await asking(street, house)
    seen = await client.until(FIRST_BYTES[said][-1])
    gate.set()
    seen += await client.until(b"\r\n" + LAST_CHUNK)
    assert seen.count(b"HTTP/1.1 200") == 1
    for one in FIRST_BYTES[said]:
        assert seen.count(one) == FIRST_BYTES[said].count(one)
    assert seen.count(b'data: {"error":') == 1
    assert seen.count(DONE) == 1
    assert len(first.asked) + len(second.asked) == 1
    await house.idle()


@pytest.mark.parametrize("status", [400, 402, 404, 408, 409, 413, 422, 425, 429, 500, 501])
async def test_what_another_engine_would_answer_too_is_not_tried_again(street: Street, status: int) -> None:
    engines = await street.engines(3)
    for engine in engines:
        engine.always(*refused(status, "no"))
    house = await street.house(*engines, retries={"attempts": 3})
    for count in range(1, 6):
        assert (await house.chat()).status_code == status
        assert sum(len(engine.asked) for engine in engines) == count
    assert await house.metric("retries_total") == 0


RETRIED: dict[str, Script] = {
    "502": refused(502, "no"),
    "503": refused(503, "no"),
    "504": refused(504, "no"),
    "draining": refused(500, "cannot schedule new futures after shutdown"),
    "reset": [End.RST],
    "closed": [End.FIN],
}


@pytest.mark.parametrize("attempts", [1, 2, 3])
@pytest.mark.parametrize("fault", RETRIED)
async def test_another_engine_is_asked_each_time_with_the_same_bytes(street: Street, fault: str, attempts: int) -> None:
    engines = await street.engines(4)
    for engine in engines:
        engine.script = lambda _: RETRIED[fault]
    house = await street.house(*engines, retries={"attempts": attempts, "budget": 1.0})
    assert (await house.chat(stream=True)).status_code >= 500
    assert sorted(len(engine.asked) for engine in engines) == [0] * (4 - attempts) + [1] * attempts
    assert len({call.body for engine in engines for call in engine.asked}) == 1
    await house.idle()


@pytest.mark.parametrize("fault", ["503", "reset"])
async def test_a_fleet_that_is_down_is_not_stormed(street: Street, fault: str) -> None:
    engines = await street.engines(4)
    for engine in engines:
        engine.script = lambda _: RETRIED[fault]
    house = await street.house(*engines, retries={"attempts": 2, "budget": 0.1})
    for _ in range(30):
        for answer in await asyncio.gather(*(house.chat() for _ in range(10))):
            assert answer.status_code in (502, 503)
    assert sum(len(engine.asked) for engine in engines) <= 330
    await house.idle()


async def test_one_engine_that_is_down_is_hardly_seen(street: Street) -> None:
    """Its requests go to the others; what is beyond the budget is few, since it is soon left alone."""
    engines = await street.engines(4)
    engines[0].always(*refused(503, "no"))
    house = await street.house(*engines, retries={"attempts": 2, "budget": 0.1})
    answers = [await house.chat() for _ in range(200)]
    assert sum(answer.status_code != 200 for answer in answers) <= 10
    assert sum(len(engine.asked) for engine in engines) <= 220
    await house.idle()


# An engine that keeps failing rests


FAILING: dict[str, Script] = {"reset": [End.RST], "503": refused(503, "no"), "no http": [b"no\r\n\r\n", End.FIN]}


@pytest.mark.parametrize("fault", FAILING)
async def test_engines_that_keep_failing_are_left_alone_until_they_are_well(street: Street, fault: str) -> None:
    engine = await street.engine()
    engine.script = lambda _: FAILING[fault]
    house = await street.house(engine)
    name = f"127.0.0.1:{engine.port}"
    assert "moongate_engine_breaker{" in await house.metrics()
    assert await house.metric("engine_breaker", engine=name) == 0

    async def opened() -> bool:
        await house.chat()
        return await house.metric("engine_breaker", engine=name) == 2

    await eventually(opened)
    before = len(engine.asked)
    answer = await house.chat()
    if len(engine.asked) == before:
        refusal(answer, 503, "server_error")
        assert int(answer.headers["retry-after"]) >= 1
    engine.script = answered

    async def closed() -> bool:
        await asyncio.sleep(0.05)
        return (await house.chat()).status_code == 200 and await house.metric("engine_breaker", engine=name) == 0

    await eventually(closed, 60)
    await house.idle()


@pytest.mark.parametrize(
    "script", [refused(400, "no"), refused(429, "no"), refused(404, "no"), whole(200, completed())]
)
async def test_refusals_are_no_failures(street: Street, script: Script) -> None:
    engine = await street.engine()
    engine.script = lambda _: script
    house = await street.house(engine)
    for _ in range(60):
        assert (await house.chat()).status_code < 500
    assert "moongate_engine_breaker{" in await house.metrics()
    assert await house.metric("engine_breaker") == 0
    assert len(engine.asked) == 60


async def test_clients_that_leave_are_no_failures(street: Street) -> None:
    engine, house = await saying(street, End.SILENCE)
    for number in range(1, 41):
        client = await asking(street, house)
        await engine.arrival(CHAT, number)
        client.leave()
    await house.idle()
    engine.script = answered
    assert (await house.chat()).status_code == 200
    assert "moongate_engine_breaker{" in await house.metrics()
    assert await house.metric("engine_breaker") == 0


async def test_a_failing_engine_harms_no_other(street: Street) -> None:
    first, second = await street.engines(2)
    first.always(End.RST)
    house = await street.house(first, second, retries={"attempts": 2, "budget": 1.0})
    for _ in range(100):
        assert (await house.chat()).status_code == 200
    assert await house.metric("engine_breaker", engine=f"127.0.0.1:{second.port}") == 0
    assert len(first.asked) < 40


# Time

PATIENT = {"connect": 5, "head": 20, "idle": 0.3, "total": 60}


@pytest.mark.parametrize("steps", [(), (head(200, [("content-type", "text/event-stream")]),)], ids=["head", "event"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_long_prefill_is_no_silence(street: Street, steps: tuple[bytes, ...], streamed: bool) -> None:
    """Between bytes there may be 0.3 s; before the first byte of the body, 20."""
    gate = asyncio.Event()
    answer = stream(delta("a"), DONE, framing="close") if streamed else whole(200, completed())
    said = [*steps, gate, *answer[1:]] if steps and streamed else [gate, *answer]
    _, house = await saying(street, *said, timeouts=PATIENT)
    asyncio.get_running_loop().call_later(0.8, gate.set)
    heard = await house.chat(stream=streamed)
    assert heard.status_code == 200
    assert b"error" not in heard.content
    await house.idle()


async def test_a_slow_stream_may_take_longer_than_any_gap(street: Street) -> None:
    async def trickle(gates: list[asyncio.Event]) -> None:
        for gate in gates:
            await asyncio.sleep(0.4)
            gate.set()

    gates = [asyncio.Event() for _ in range(5)]
    steps: list[Step] = [step for gate in gates for step in (gate, delta("a"))]
    _, house = await saying(street, *stream(*steps, DONE), timeouts={"head": 1.5, "idle": 1.5, "total": 60})
    opening = asyncio.create_task(trickle(gates))
    assert (await house.chat(stream=True)).content == delta("a") * 5 + DONE
    await opening


SILENT: dict[str, Script] = {
    "no head": [End.SILENCE],
    "half a head": [b"HTTP/1.1 200 OK\r\ncontent-le", End.SILENCE],
    "only a head": stream(End.SILENCE),
    "only a head, not streamed": [
        head(200, [("content-type", "application/json"), ("content-length", "9")]),
        End.SILENCE,
    ],
    "only an interim answer": [b"HTTP/1.1 103 Early Hints\r\n\r\n", End.SILENCE],
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("kind", SILENT)
async def test_an_answer_that_does_not_begin_is_a_timeout(street: Street, kind: str, streamed: bool) -> None:
    engine = await street.engine()
    engine.script = lambda _: SILENT[kind]
    house = await street.house(engine, timeouts={"connect": 5, "head": 0.3, "idle": 20, "total": 60})
    answer = await house.chat(stream=streamed)
    error = refusal(answer, 504, "timeout")
    assert error["code"] == "head_timeout"
    await noticed(*engine.asked)
    assert await house.metric("engine_failures_total", cause="head_timeout") == 1
    await house.idle()


@pytest.mark.parametrize("rest", [[], [b'data: {"half'], [b": ping\n\n"]])
async def test_a_stream_that_falls_silent_ends_with_an_error(street: Street, rest: list[bytes]) -> None:
    limits = {"connect": 5, "head": 20, "idle": 0.3, "total": 60}
    engine, house = await saying(street, *stream(delta("a"), delta("b"), *rest, End.SILENCE), timeouts=limits)
    answer = await house.chat(stream=True)
    assert answer.status_code == 200
    *_, error, done = (one for one in answer.content.split(b"\n\n") if one)
    assert done == DONE.strip()
    told = orjson.loads(error.removeprefix(b"data: "))["error"]
    assert (told["type"], told["code"]) == ("timeout", "idle_timeout")
    await noticed(*engine.asked)
    await house.idle()


async def test_a_connection_that_is_refused_is_no_timeout(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    await engine.stop()
    refusal(await house.chat(), {502, 503}, "server_error")
    assert await house.metric("engine_failures_total", cause="unreachable") == 1


@asynccontextmanager
async def black_hole(port: int) -> AsyncIterator[None]:
    """A port on which no connection is ever made: its queue is full."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        await asyncio.sleep(0)
        try:
            yield
        finally:
            for one in waiting:
                one.close()


@pytest.mark.parametrize("spare", [True, False])
async def test_a_connection_that_is_never_made_is_given_up_in_time(street: Street, spare: bool) -> None:
    first, second = await street.engines(2)
    house = await street.house(first, *([second] if spare else []), timeouts={"connect": 0.3})
    await first.stop()
    async with black_hole(first.port):
        answers = [await house.chat() for _ in range(2)]
    if spare:
        assert {answer.status_code for answer in answers} == {200}
    else:
        refusal(answers[0], {502, 503, 504})
    await house.idle()
