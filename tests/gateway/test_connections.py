"""Connections on both sides: who may leave when, what is sent again, what crosses, and what is left behind."""

import asyncio
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.double import (
    CHAT,
    DONE,
    LAST_CHUNK,
    Call,
    End,
    Engine,
    Script,
    Step,
    answered,
    chunk,
    completed,
    delta,
    head,
    refused,
    stream,
    whole,
)
from tests.gateway.heard import hear, last_words, refusal, serves_on
from tests.gateway.house import KEY, OTHER_KEY, House, Raw, Street, chat, digest, events, eventually
from tests.gateway.memory import peak
from tests.gateway.sending import STREAMED, asking, declaring, noticed, saying
from tests.gateway.test_serve import BAD, LONG, pair

pytestmark = pytest.mark.usefixtures("calm")

MB = 1_000_000


def leave(client: Raw, *, hard: bool) -> None:
    client.leave() if hard else client.writer.close()


def tenants(**limits: int) -> list[dict[str, Any]]:
    return [{"name": "team-a", "keys": [{"sha256": digest(KEY)}], **limits}]


def joined(steps: Script) -> bytes:
    return b"".join(step for step in steps if isinstance(step, bytes))


# The client leaves

HELD: dict[str, tuple[list[Step], bool, bytes]] = {
    "before the head": ([End.SILENCE], True, b""),
    "before the head, not streamed": ([End.SILENCE], False, b""),
    "before the first event": (stream(End.SILENCE), True, b""),
    "within the first event": (stream(b'data: {"cho', End.SILENCE), True, b""),
    "after the first event": (stream(delta("a"), End.SILENCE), True, delta("a")),
    "within a later event": (stream(delta("a"), b'data: {"cho', End.SILENCE), True, delta("a")),
    "after DONE": (stream(delta("a"), DONE, End.SILENCE), True, DONE),
    "within a whole body": ([head(200, [("content-length", "99")]), b"{", End.SILENCE], False, b""),
    "within an interim answer": ([b"HTTP/1.1 102 Processing\r\n\r\n", End.SILENCE], True, b""),
}


@pytest.mark.parametrize("hard", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("moment", HELD)
async def test_an_engine_sees_a_client_leave_at_once(street: Street, moment: str, hard: bool) -> None:
    steps, streamed, mark = HELD[moment]
    engine, house = await saying(street, *steps, timeouts={"total": 15})
    client = await asking(street, house, streamed=streamed)
    call = await engine.arrival(CHAT)
    if mark:
        await client.until(mark)
    leave(client, hard=hard)
    await noticed(call)
    await house.idle()


@pytest.mark.parametrize("hard", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("count", [1, 50])
async def test_clients_that_leave_in_mid_stream_are_counted_as_such(street: Street, count: int, hard: bool) -> None:
    engine, house = await saying(street, *stream(*[delta("a")] * 3, End.SILENCE))
    clients = [await asking(street, house) for _ in range(count)]
    for client in clients:
        for _ in range(3):
            await client.until(delta("a"))
        leave(client, hard=hard)
    await noticed(*engine.asked)
    await house.idle()
    await house.until("requests_total", count, status="client_left")
    assert len(engine.asked) == count


async def test_a_client_that_leaves_while_its_engine_is_sought_costs_no_engine(
    street: Street, tokenizer_folder: Path
) -> None:
    """The pool is being asked; nothing has been sent to an engine, and nothing is."""
    engine, master = await street.engine(), await street.master()
    master.everywhere = [End.SILENCE]
    house = await street.house(
        engine,
        models=[{"name": "tiny", "tokenizer": str(tokenizer_folder), "pool": "main"}],
        pools={"main": {"admin": [master.url], "deadline_ms": 20_000}},
    )
    client = await street.raw(house)
    client.ask(orjson.dumps(chat("the engine loads a block of the prefix from the pool " * 20)))
    await eventually(lambda: bool(master.calls))
    client.leave()
    await house.until("requests_total", 1, status="client_left")
    assert not engine.asked
    await house.idle()


async def test_a_client_that_leaves_in_its_own_body_is_forgotten(street: Street) -> None:
    engine, house = await saying(street, *whole(200, completed()), tenants=tenants(concurrent=1))
    for hard in (True, False):
        client = await street.raw(house)
        client.send(declaring(9) + b"{")
        await asyncio.sleep(0.05)
        leave(client, hard=hard)

        async def free() -> bool:
            return (await house.chat()).status_code == 200

        await eventually(free)
    assert len(engine.asked) == 2


async def test_a_client_that_leaves_right_after_its_answer_has_not_left(street: Street) -> None:
    engine, house = await saying(street, *stream(delta("a"), DONE))
    for _ in range(20):
        client = await asking(street, house, "connection: close")
        assert DONE in await last_words(client)
        client.leave()
    await house.until("requests_total", 20, status="200")
    assert not [call for call in engine.asked if call.closed.is_set()]


# Every ending leaves nothing


class Turned:
    """An engine that takes a turn at every way to end badly."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self._at = 0

    def __call__(self, _: Call) -> Script:
        self._at += 1
        return self._scripts[self._at % len(self._scripts)]


ENDINGS: dict[str, list[Script]] = {
    "answered": [whole(200, completed())],
    "streamed": [stream(delta("a"), DONE)],
    "400": [refused(400, "no")],
    "429": [refused(429, "no")],
    "500": [refused(500, "no")],
    "401": [refused(401, "no")],
    "reset at once": [[End.RST]],
    "closed at once": [[End.FIN]],
    "reset in mid-stream": [stream(delta("a"), End.RST)],
    "closed in mid-stream": [stream(delta("a"), End.FIN)],
    "silent": [[End.SILENCE]],
    "silent in mid-stream": [stream(delta("a"), End.SILENCE)],
    "no http": [[b"220 smtp\r\n\r\n"]],
    "surplus": [[joined(whole(200, completed())) * 2]],
    "now and then": [[End.RST], whole(200, completed()), stream(delta("a")), refused(400, "no"), refused(503, "no")],
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_every_ending_gives_all_that_it_held_back(street: Street, ending: str) -> None:
    engines = await street.engines(2)
    for engine in engines:
        engine.script = Turned(*ENDINGS[ending])
    limits = {"head": 0.3, "idle": 0.3, "connect": 2, "total": 20}
    house = await street.house(*engines, tenants=tenants(concurrent=20), timeouts=limits)
    rounds = 1 if "silent" in ending else 5
    for _ in range(rounds):
        answers = await asyncio.gather(*(house.chat(stream=True) for _ in range(20)))
        assert "concurrency_limit" not in "".join(answer.text for answer in answers)
        assert await house.metric("engine_requests") == 0
    await house.idle()
    await at_full_strength(house, engines, 20)


async def at_full_strength(house: House, engines: list[Engine], slots: int) -> None:
    """The tenant can again use every slot, and no more."""
    if await house.metric("engine_breaker"):
        return  # the engines are resting; that is told by the answers
    gate = asyncio.Event()
    before = sum(len(engine.asked) for engine in engines)
    for engine in engines:
        engine.always(gate, *whole(200, completed()))
    held = [asyncio.create_task(house.chat()) for _ in range(slots)]
    await eventually(lambda: sum(len(engine.asked) for engine in engines) == before + slots)
    assert (await house.chat()).status_code == 429
    gate.set()
    assert {(await one).status_code for one in held} == {200}
    await house.idle()


@pytest.mark.parametrize("moment", ["before the head", "after the first event"])
async def test_clients_that_leave_give_all_that_they_held_back(street: Street, moment: str) -> None:
    steps, _, mark = HELD[moment]
    engine, house = await saying(street, *steps, tenants=tenants(concurrent=20))
    for turn in range(1, 4):
        clients = [await asking(street, house) for _ in range(20)]
        await engine.arrival(CHAT, 20 * turn)
        for client in clients:
            if mark:
                await client.until(mark)
            client.leave()
        await house.idle()
    await at_full_strength(house, [engine], 20)


async def test_requests_that_the_policy_turns_away_hold_nothing(street: Street) -> None:
    engine = await street.engine()
    policy = {"use": BAD, "settings": {"mode": "no capacity"}}
    house = await street.house(engine, tenants=tenants(concurrent=20), policy=policy)
    for _ in range(5):
        answers = await asyncio.gather(*(house.chat() for _ in range(20)))
        assert {answer.status_code for answer in answers} == {503}
    assert not engine.asked
    await house.idle()


async def test_an_engine_that_goes_away_under_its_requests_takes_no_count_with_it(street: Street) -> None:
    first, second = await street.engines(2)
    for engine in (first, second):
        engine.always(*stream(delta("a"), End.SILENCE))
    house = await street.house(first, second, tenants=tenants(concurrent=20))
    clients = [await asking(street, house) for _ in range(20)]
    for client in clients:
        await client.until(delta("a"))
    await first.stop()
    for client in clients[1:]:
        client.leave()
    clients[0].leave()
    await house.idle()
    assert "-" not in "".join(line.split()[-1] for line in (await house.metrics()).splitlines() if "engine_re" in line)
    await at_full_strength(house, [second], 20)


# Kept connections


@pytest.mark.parametrize("death", [End.FIN, End.RST])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_kept_connection_that_dies_unheard_is_replaced_once(street: Street, death: End, streamed: bool) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    assert (await house.chat()).status_code == 200
    engine.scripts.append([death])
    assert (await house.chat(stream=streamed)).status_code == 200
    _, unanswered, answer = engine.asked
    assert unanswered.body == answer.body
    assert unanswered.connection != answer.connection
    assert await house.metric("retries_total") == 0


@pytest.mark.parametrize("death", [End.FIN, End.RST])
async def test_a_prefills_kept_connection_is_replaced_too(street: Street, tokenizer_folder: Path, death: End) -> None:
    p = await pair(street, tokenizer_folder)
    assert (await p.house.chat(LONG)).status_code == 200
    p.master.everything = False
    prefill, died = p.prefill.script, list[Call]()

    def once(call: Call) -> Script:
        died.append(call)
        return [death] if len(died) == 1 else prefill(call)

    p.prefill.script = once
    assert (await p.house.chat(f"another: {LONG}")).status_code == 200
    first, second = died
    assert first.body == second.body
    assert first.connection != second.connection
    assert len(p.decoded) == 2
    assert await p.house.metric("engine_failures_total") == 0
    await p.house.idle()


@pytest.mark.parametrize("death", [End.FIN, End.RST])
async def test_a_fresh_connection_that_dies_is_not_replaced(street: Street, death: End) -> None:
    engine, house = await saying(street, death)
    refusal(await house.chat(), 502)
    assert len(engine.asked) == 1
    await house.idle()


@pytest.mark.parametrize("words", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_kept_connection_that_has_said_a_byte_is_not_replaced(street: Street, words: bytes) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    assert (await house.chat()).status_code == 200
    engine.scripts.append([words, End.FIN])
    refusal(await house.chat(), 502)
    assert len(engine.asked) == 2


@pytest.mark.parametrize("death", [End.FIN, End.RST])
async def test_a_connection_is_replaced_only_once(street: Street, death: End) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    assert (await house.chat()).status_code == 200
    engine.always(death)
    refusal(await house.chat(), 502)
    assert len(engine.asked) == 3


async def test_an_engine_that_closes_idle_connections_costs_no_request(street: Street) -> None:
    """Each request comes about when the engine closes what it finds idle."""
    engine = await street.engine()
    engine.idle = 0.02
    house = await street.house(engine)
    chance = random.Random(1)
    for number in range(100):
        assert (await house.chat(stream=number % 2 == 0)).status_code == 200
        await asyncio.sleep(0.02 + chance.uniform(-0.003, 0.003))
    assert await house.metric("engine_failures_total") == 0
    await house.idle()


@pytest.mark.parametrize("way", ["connection: close", "http/1.0"])
async def test_a_connection_that_the_engine_will_close_is_not_used_again(street: Street, way: str) -> None:
    engine = await street.engine()
    said = joined(whole(200, completed(), headers=[("connection", "close")] if way == "connection: close" else []))
    engine.always(said.replace(b"HTTP/1.1", b"HTTP/1.0") if way == "http/1.0" else said)
    house = await street.house(engine)
    for _ in range(3):
        assert (await house.chat()).status_code == 200
    assert len({call.connection for call in engine.asked}) == 3


async def test_a_connection_is_kept_where_nothing_speaks_against_it(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    for number in range(6):
        assert (await house.chat(stream=number % 2 == 0)).status_code == 200
    assert len({call.connection for call in engine.asked}) == 1


# How many at once


async def test_three_hundred_streams_run_at_once(street: Street) -> None:
    engines, gate = await street.engines(2), asyncio.Event()
    for engine in engines:
        engine.always(*stream(delta("a"), gate, DONE))
    house = await street.house(*engines)
    clients = [await asking(street, house) for _ in range(300)]
    for client in clients:
        await client.until(delta("a"))
    assert await house.metric("engine_requests") == 300
    assert {len(engine.asked) for engine in engines} == {150}
    gate.set()
    for client in clients:
        await client.until(b"\r\n" + LAST_CHUNK)
    await house.idle()


async def test_an_engine_that_hangs_takes_no_room_from_another(street: Street) -> None:
    first, second = await street.engine("tiny"), await street.engine("other")
    static = [{"url": first.url, "model": "tiny"}, {"url": second.url, "model": "other"}]
    house = await street.house(*static, models=[{"name": "tiny"}, {"name": "other"}])
    first.everywhere = [End.SILENCE]
    clients = [await asking(street, house) for _ in range(200)]
    await first.arrival(CHAT, 200)
    for _ in range(20):
        assert (await house.client.post(CHAT, json=chat() | {"model": "other"})).status_code == 200
    assert not [client for client in clients if client.reader.at_eof()]
    assert await house.metric("engine_requests", engine=f"127.0.0.1:{first.port}") == 200


@pytest.mark.parametrize("streamed", [True, False])
async def test_clients_that_come_and_go_leave_nothing(street: Street, streamed: bool) -> None:
    _, house = await saying(street, *stream(delta("a"), delta("b"), DONE))
    chance = random.Random(2)

    async def visit() -> None:
        for _ in range(15):
            client = await asking(street, house, streamed=streamed)
            with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                async with asyncio.timeout(chance.uniform(0, 0.004)):
                    await client.until(b"\r\n" + LAST_CHUNK)
            leave(client, hard=chance.random() < 0.5)

    await asyncio.gather(*(visit() for _ in range(40)))
    await house.idle()
    answers = await asyncio.gather(*(house.chat(stream=True) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    await house.idle()


# What crosses

MINE = {
    "te": "trailers, canary",
    "upgrade": "canary",
    "proxy-authorization": "Basic canary",
    "proxy-connection": "canary",
    "keep-alive": "timeout=5, canary",
    "trailer": "X-Canary",
    "x-drop": "canary",
    "x-drop-too": "canary",
    "cookie": "a=canary",
    "x-api-key": "canary",
    "api-key": "canary",
    "x-forwarded-for": "10.0.0.1, canary",
    "x-forwarded-host": "canary",
    "x-forwarded-proto": "canary",
    "x-real-ip": "canary",
    "forwarded": "for=canary",
    "via": "1.1 canary",
    "expect": "",
    "content-encoding": "identity",
}


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_is_a_clients_own_does_not_reach_the_engine(street: Street, streamed: bool) -> None:
    engine = await street.engine()
    house = await street.house({"url": engine.url, "model": "tiny", "api_key": "engine-key"})
    client = await street.raw(house)
    lines = [f"{name}: {value}" for name, value in MINE.items() if value]
    client.ask(orjson.dumps(chat(stream=streamed)), "connection: keep-alive, X-Drop, x-drop-too", *lines)
    assert (await hear(client)).status == 200
    (call,) = engine.asked
    assert b"canary" not in call.head.lower()
    assert KEY.encode() not in call.head
    assert call.headers("authorization") == ["Bearer engine-key"]
    assert call.headers("host") == [f"127.0.0.1:{engine.port}"]
    assert call.headers("content-length") == [str(len(call.body))]
    assert not call.headers("transfer-encoding")


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"])
async def test_an_engine_without_a_key_gets_none(street: Street, name: str) -> None:
    engine = await street.engine()
    house = await street.house(engine, auth={"mode": "none"}, tenants=[])
    assert (await house.client.post(CHAT, json=chat(), headers={name: "Bearer canary"})).status_code == 200
    assert b"canary" not in engine.asked[0].head
    assert not engine.asked[0].headers("authorization")


THEIRS = [
    ("set-cookie", "a=canary"),
    ("Set-Cookie", "b=canary"),
    ("www-authenticate", "Bearer canary"),
    ("proxy-authenticate", "Basic canary"),
    ("keep-alive", "timeout=5, canary"),
    ("upgrade", "canary"),
    ("trailer", "X-Canary"),
    ("te", "canary"),
    ("connection", "keep-alive, X-Inner"),
    ("x-inner", "canary"),
    ("server", "canary"),
    ("x-request-id", "canary"),
    ("x-passes", "yes"),
]


@pytest.mark.parametrize("status", [200, 400, 429])
@pytest.mark.parametrize("streamed", [True, False])
async def test_what_is_an_engines_own_does_not_reach_the_client(street: Street, streamed: bool, status: int) -> None:
    steps = (
        stream(delta("a"), DONE, headers=THEIRS) if streamed and status == 200 else whole(status, {}, headers=THEIRS)
    )
    _, house = await saying(street, *steps)
    heard = await hear(await asking(street, house, streamed=streamed))
    assert heard.status == status
    assert b"canary" not in heard.head.lower()
    assert heard.headers("x-passes") == ["yes"]
    assert len(heard.headers("date")) <= 1
    assert len(heard.headers("content-type")) == 1


async def test_an_engines_trailers_do_not_cross(street: Street) -> None:
    steps = stream(delta("a"), DONE)[:-1]
    engine, house = await saying(street, *steps, b"0\r\nX-Canary: canary\r\n\r\n")
    for _ in range(2):
        heard = await hear(await asking(street, house))
        assert heard.body == delta("a") + DONE
        assert b"canary" not in heard.head + heard.body
    assert len({call.connection for call in engine.asked}) <= 2


@pytest.mark.parametrize("name", ["x-forwarded-for", "x-real-ip", "forwarded", "x-client-ip", "cf-connecting-ip"])
async def test_a_limit_is_not_dodged_by_another_address(street: Street, name: str) -> None:
    engine = await street.engine()
    house = await street.house(engine, tenants=tenants(requests_per_minute=3))
    statuses = [
        (await house.client.post(CHAT, json=chat(), headers={name: f"for=10.0.{n}.1"})).status_code for n in range(10)
    ]
    assert statuses == [200] * 3 + [429] * 7
    assert not [call for call in engine.asked if b"10.0." in call.head]


# Clients that are slow


@pytest.mark.parametrize("sent", [0, 1, 50])
async def test_a_body_that_does_not_come_is_given_up(street: Street, sent: int) -> None:
    engine, house = await saying(street, *whole(200, completed()), timeouts={"body": 0.3})
    client = await street.raw(house)
    client.send(declaring(99) + b" " * sent)
    refusal(await hear(client), 408)
    assert await last_words(client) == b""
    await serves_on(house)
    assert not engine.asked


async def test_a_body_that_drips_is_given_up_and_holds_nobody_up(street: Street) -> None:
    _, house = await saying(street, *whole(200, completed()), timeouts={"body": 0.5}, tenants=tenants(concurrent=60))
    clients = [await street.raw(house) for _ in range(50)]
    for client in clients:
        client.send(declaring(999))

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.05)
            for client in clients:
                client.send(b" ")

    dripping = asyncio.create_task(drip())
    assert (await house.chat()).status_code == 200
    try:
        for client in clients:
            assert (await hear(client)).status == 408
    finally:
        dripping.cancel()
    await serves_on(house)
    await house.until("requests_total", 50, status="408")


@pytest.mark.long
@pytest.mark.parametrize("start", [b"", b"GET /", b"GET /health HTTP/1.1\r\nx: "])
async def test_a_head_that_does_not_come_is_given_up(street: Street, start: bytes) -> None:
    """Not a byte of it, or one each second: the time is counted from the connection's beginning."""
    _, house = await saying(street, *whole(200, completed()))
    clients = [await street.raw(house) for _ in range(100)]
    for client in clients:
        client.send(start)
    async with asyncio.timeout(20):
        while not all(client.reader.at_eof() or client.reader.exception() for client in clients):
            for client in clients:
                if start and not client.reader.at_eof():
                    client.send(b"x")
            assert (await house.chat()).status_code == 200
            await asyncio.sleep(1)
    await serves_on(house)


def flood() -> Iterator[Step]:
    """Two hundred megabytes of events, as fast as they are taken."""
    yield head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")])
    piece = chunk(delta("x" * 60_000))
    for _ in range(200 * MB // len(piece)):
        yield piece
    yield chunk(DONE) + LAST_CHUNK


async def narrow(street: Street, house: House) -> Raw:
    """A client whose kernel holds little, and that has asked for a stream."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", house.port))
    client = Raw(*await asyncio.open_connection(sock=sock, limit=1024))
    client.ask(STREAMED)
    return client


async def steady(read: Callable[[], int]) -> int:
    """A number, once it no longer grows."""
    last, since = -1, 0
    async with asyncio.timeout(30):
        while since < 10:
            await asyncio.sleep(0.05)
            since = since + 1 if read() == last else 0
            last = read()
    return last


async def test_a_client_that_does_not_read_holds_the_engine_back(street: Street) -> None:
    engine = await street.engine()
    engine.script = lambda _: flood()
    house = await street.house(engine, timeouts={"write": 60})
    with peak() as memory:
        clients = [await narrow(street, house) for _ in range(5)]
        await engine.arrival(CHAT, 5)
        taken = await steady(lambda: sum(call.taken for call in engine.asked))
    assert memory.grown < 5 * 5 * MB
    assert taken < 5 * 30 * MB, "kernels hold a part of it"
    assert not [call for call in engine.asked if call.over.is_set()]
    assert (await house.client.get("/health")).status_code == 200
    for client in clients:
        client.leave()
    await noticed(*engine.asked)
    await house.idle()


async def test_a_client_that_takes_nothing_is_given_up(street: Street) -> None:
    engine = await street.engine()
    engine.script = lambda _: flood()
    house = await street.house(engine, timeouts={"write": 0.4}, tenants=tenants(concurrent=3))
    clients = [await narrow(street, house) for _ in range(3)]
    await engine.arrival(CHAT, 3)
    await noticed(*engine.asked)
    await house.idle()
    engine.script = answered

    async def served() -> bool:
        """Each has its place back, which it has until what is left for its client is dropped."""
        return (await house.chat()).status_code == 200

    await eventually(served)
    for client in clients:
        assert DONE not in await last_words(client)
        client.leave()


async def test_a_client_that_takes_little_by_little_is_served_to_the_end(street: Street) -> None:
    engine = await street.engine()
    said = [delta("x" * 60_000)] * 150
    engine.always(*stream(*said, DONE))
    house = await street.house(engine, timeouts={"write": 1.5})
    client = await narrow(street, house)
    await engine.arrival(CHAT)
    size = 0
    async with asyncio.timeout(60):
        while not client.reader.at_eof():
            piece = await client.reader.read(400_000)
            size += len(piece)
            if piece.endswith(LAST_CHUNK):
                break
            if size % 7 == 0:
                await asyncio.sleep(0.01)
    assert size > sum(map(len, said))
    await house.until("requests_total", 1, status="200")
    await house.idle()
    client.leave()


# Names whose address changes


async def test_new_connections_go_to_the_new_address(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await street.engines(2)
    await second.stop()
    second.host, second.port = "127.0.0.2", first.port
    await second.start()
    at, resolve = [first.host], socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: resolve(
            at[0] if host in ("engine.test", b"engine.test") else host, *more, **named
        ),
    )
    gate = asyncio.Event()
    house = await street.house({"url": f"http://engine.test:{first.port}", "model": "tiny"})
    first.always(gate, *whole(200, completed("first")))
    held = asyncio.create_task(house.chat())
    await first.arrival(CHAT)
    at[0] = second.host
    assert (await house.chat()).status_code == 200
    assert (len(first.asked), len(second.asked)) == (1, 1)
    gate.set()
    assert "first" in (await held).text
    await first.stop()

    async def moved() -> bool:
        return (await house.chat()).status_code == 200

    await eventually(moved)
    assert len(second.asked) >= 2
    await house.idle()


# Answers that nobody asked for

CANARY = joined(whole(200, completed("canary")))
MINE_WHOLE = joined(whole(200, completed("mine")))


def later() -> asyncio.Event:
    """A gate that opens when the answer before it has been read."""
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, gate.set)
    return gate


DESYNCED: dict[str, Callable[[], list[Step]]] = {
    "two answers": lambda: [MINE_WHOLE + CANARY],
    "two answers, two pieces": lambda: [MINE_WHOLE, CANARY],
    "one more, later": lambda: [MINE_WHOLE, later(), CANARY],
    "a length too short": lambda: [head(200, [("content-length", "2")]) + b"{}canary" + CANARY],
    "no length for a 204": lambda: [head(204) + CANARY],
    "a body for a 304": lambda: [head(304, [("content-length", "0")]) + CANARY],
    "two lengths": lambda: [head(200, [("content-length", "2"), ("content-length", "5")]) + b"{}abc" + CANARY],
    "a length and chunks": lambda: [
        head(200, [("content-length", "2"), ("transfer-encoding", "chunked")]) + b"2\r\n{}\r\n0\r\n\r\n" + CANARY
    ],
    "something behind the last chunk": lambda: [joined(stream(b"{}", content_type="application/json")) + CANARY],
    "a stream and more": lambda: [joined(stream(delta("mine"), DONE)) + CANARY],
    "a stream and more, later": lambda: [joined(stream(delta("mine"), DONE)), later(), CANARY],
    "an interim answer, later": lambda: [MINE_WHOLE, later(), b"HTTP/1.1 100 Continue\r\n\r\n" + CANARY],
    "half an answer, later": lambda: [MINE_WHOLE, later(), CANARY[:20]],
    "line breaks, later": lambda: [MINE_WHOLE, later(), b"\r\n\r\n" + CANARY],
    "a switch of protocols": lambda: [head(101, [("upgrade", "x"), ("connection", "upgrade")]) + CANARY],
}


@pytest.mark.parametrize("kind", DESYNCED)
async def test_no_tenant_gets_an_answer_that_it_did_not_ask_for(street: Street, kind: str) -> None:
    engine = await street.engine()
    house = await street.house(engine, retries={"attempts": 1, "budget": 1.0})
    theirs = {"authorization": f"Bearer {OTHER_KEY}"}
    for _ in range(4):
        engine.script = lambda _: DESYNCED[kind]()
        mine = await house.chat(stream="stream" in kind)
        assert b"canary" not in mine.content
        dirty = engine.asked[-1].connection
        await asyncio.sleep(0.05 if "later" in kind else 0)
        engine.script = answered
        for _ in range(3):
            answer = await house.client.post(CHAT, json=chat(), headers=theirs)
            assert b"canary" not in answer.content
            assert answer.status_code in (200, 503)
        assert dirty not in [call.connection for call in engine.asked[-3:]]
    await house.idle()


async def test_tenants_answers_do_not_meet_when_clients_leave(street: Street) -> None:
    """Each answer names its request; those that are given up end in the middle."""
    engine = await street.engine()
    engine.script = lambda call: stream(
        delta(call.json()["messages"][0]["content"]), later(), delta("z"), DONE, headers=[("x-passes", "yes")]
    )
    house = await street.house(engine)

    async def ask(number: int) -> None:
        if number % 3 == 0:
            client = await street.raw(house)
            client.ask(orjson.dumps(chat(f"canary-{number}", stream=True)))
            await client.until(b"canary")
            client.leave()
            return
        headers = {"authorization": f"Bearer {OTHER_KEY if number % 2 else KEY}"}
        answer = await house.client.post(CHAT, json=chat(f"mine-{number}", stream=True), headers=headers)
        assert events(answer.content)[0]["choices"][0]["delta"]["content"] == f"mine-{number}"
        assert b"canary" not in answer.content

    for turn in range(10):
        await asyncio.gather(*(ask(turn * 30 + number) for number in range(30)))
    await house.idle()
