"""The whole surface, fuzzed: a gateway in a process of its own, odd clients before it, odd engines behind it.

Whatever is said to it, the gateway answers well-formed HTTP, never with a 500 of its own, in time; it logs
no traceback, nothing stays under way, and a neighbour of another tenant gets its own answers all the while
and appears in nobody else's. A minute in all; ten with --long, from a seed that is printed. A failure prints
the smallest input that was found.
"""

import asyncio
import http.client
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httptools
import pytest
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as examples
from hypothesis.strategies import SearchStrategy

from gateway.processes import Child, free_port
from tests.double import CHAT, DONE, Call, End, Engine, Master, Script, completed, delta, refused, stream, whole
from tests.gateway.grammar import Play, Said, plays, sayings
from tests.gateway.house import KEY, OTHER_KEY, chat, settings

T = TypeVar("T")

QUICK, LONG = 25.0, 300.0
"""Seconds of each test."""
SILENCE = 0.05
"""Seconds without a byte after which a connection is set aside, to be looked at again later."""
ENDED = 60.0
"""Seconds after which whatever a client said must be over: 10 s for a head, 5 s of keep-alive, and what a machine may
stand still for.
"""
ASIDE = 300
"""Connections that are kept aside at most."""
CANARY = "canary-of-team-b"
SICK, QUEER = "sick", "queer"
"""Models whose engines answer odd things: to a request that is marked, and to whoever asks how they are."""
MARK = "of the fuzz"
TROUBLE = re.compile(rb"Traceback|ERROR|CRITICAL|Exception")
OWN_FAULTS = (b"The gateway failed", b"Internal Server Error", b"defect of the gateway")


class Echo(Engine):
    """An engine that answers every path with the `user` of the request."""

    def answer(self, call: Call) -> Script:
        return super().answer(call) if call.path in {"/health", "/metrics", "/v1/models"} else self.script(call)


def echo(call: Call) -> Script:
    try:
        body = call.json()
        text = str(body.get("user"))[:200]
        if body.get("stream") is True:
            return stream(delta(text), delta("", "stop"), DONE)
        return whole(200, completed(text))
    except (AttributeError, TypeError, ValueError):
        return refused(400, "That is not understood.")


class Odd(Echo):
    """An engine that answers as a play has it, where it is asked to."""

    play: Play | None = None

    def answer(self, call: Call) -> Script:
        play = self.play
        if play is None:
            return super().answer(call)
        if self.cards[0]["id"] == QUEER and call.path in {"/metrics", "/v1/models"}:
            return whole(200, play.metrics if call.path == "/metrics" else play.models)
        if MARK.encode() not in call.body:
            return super().answer(call)
        end = {"open": (), "close": (End.FIN,), "reset": (End.RST,), "silence": (End.SILENCE,)}
        return (*play.pieces, *end[play.end])


@dataclass(frozen=True)
class Answer:
    status: int
    kind: bytes
    body: bytes


class Talk:
    """One connection of a client: what it said and what it has heard."""

    def __init__(self, said: Said, port: int) -> None:
        self.said = said
        self.began = time.monotonic()
        self.answers: list[Answer] = []
        self.raw = b""
        self.malformed: str | None = None
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpResponseParser(self)
        self._closed = False
        self._kind = self._body = b""
        with suppress(OSError):  # the gateway may close before it has heard all
            for at, to in zip((0, *said.cuts), (*said.cuts, len(said.data)), strict=True):
                self._socket.sendall(said.data[at:to])
                time.sleep(said.pause if to < len(said.data) else 0)
            if said.end == "shut":
                self._socket.shutdown(socket.SHUT_WR)
        if said.end in {"leave", "reset"}:
            self.leave(reset=said.end == "reset")

    @property
    def over(self) -> bool:
        """The gateway has closed, or has answered all."""
        return self._closed or (self.said.requests is not None and len(self.answers) >= self.said.requests)

    def hear(self, seconds: float) -> bool:
        """Take what comes until it is over; False where nothing has come for so long."""
        while not self.over:
            try:
                self._socket.settimeout(seconds)
                data = self._socket.recv(262144)
            except (TimeoutError, BlockingIOError):
                return False
            except OSError:
                data = b""
            self.raw += data
            self._closed = not data
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.malformed = self.malformed or str(error)
        self.leave()
        return True

    def leave(self, *, reset: bool = False) -> None:
        if reset:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
        self._closed = True

    # httptools

    def on_message_begin(self) -> None:
        self._kind = self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._kind = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 or status == 101:
            self.answers.append(Answer(status, self._kind, self._body))


class Neighbour(threading.Thread):
    """Another tenant, who chats all the while and must get its own answers."""

    def __init__(self, port: int, model: str) -> None:
        super().__init__(daemon=True)
        self.faults: list[str] = []
        self.lock = threading.Lock()
        """Held while it asks."""
        self._port = port
        self._model = model
        self._number = 0
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.wait(0.02):
            self.ask()

    def ask(self) -> None:
        with self.lock:
            self._number += 1
            name = f"{CANARY}-{self._number}-"
            for _ in range(3):  # an answer may be late where the machine is busy
                status, text = post(self._port, chat(f"I am {CANARY}.", model=self._model, user=name))
                if status != 504:
                    break
            if status != 200 or json.loads(text)["choices"][0]["message"]["content"] != name:
                self.faults.append(f"a neighbour who said {name} got {status}: {text[:500]!r}")

    def stop(self) -> None:
        self._enough.set()
        self.join()


def post(port: int, body: object) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", CHAT, json.dumps(body), {"authorization": f"Bearer {OTHER_KEY}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@dataclass
class World:
    """A gateway that is fuzzed, and what is looked at between whiles."""

    port: int
    log: Path
    neighbour: Neighbour
    aside: list[Talk] = field(default_factory=list)
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=5))
    """What was said last: what one input broke may show under the next."""
    _read: int = 0

    def put_aside(self, talk: Talk) -> None:
        if len(self.aside) < ASIDE:
            self.aside.append(talk)
        else:
            talk.leave()

    def look(self) -> None:
        """See that the log tells of no trouble and the neighbour has none."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        assert not TROUBLE.search(new), f"{new.decode(errors='replace')} after {self.recent}"
        assert not any(secret.encode() in new for secret in (CANARY, KEY, OTHER_KEY)), new
        assert not self.neighbour.faults, self.neighbour.faults

    def settle(self, judge: Callable[[Talk], None], until: float = 0) -> None:
        """See that what was set aside ends in time, nothing is under way, and the gateway still serves."""
        while True:
            waiting = [talk for talk in self.aside if not talk.hear(0)]
            for talk in self.aside:
                judge(talk)
                assert time.monotonic() < talk.began + ENDED, f"nothing more came for {ENDED:g} s after {talk.said!r}"
            self.aside = waiting
            if not waiting or time.monotonic() >= until:
                break
            time.sleep(0.1)
        self.look()
        with self.neighbour.lock:
            end = time.monotonic() + 5
            while left := self._under_way():
                assert time.monotonic() < end, left
                time.sleep(0.05)
        self.neighbour.ask()
        assert not self.neighbour.faults, self.neighbour.faults
        assert get(self.port, "/health")[0] == 200

    def _under_way(self) -> list[str]:
        text = get(self.port, "/metrics")[1]
        found = re.findall(r"^(moongate_engine_(?:requests|connections|backlog_tokens)\{.*) (\S+)$", text, re.MULTILINE)
        assert found
        return [f"{name} is {value}" for name, value in found if float(value)]


@contextmanager
def running(*doubles: Engine | Master) -> Iterator[None]:
    """Doubles in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, loop).result(10)

    try:
        for double in doubles:
            do(double.start())
        yield
    finally:
        for double in doubles:
            do(double.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def world(folder: Path, model: str, tree: dict[str, Any]) -> Iterator[World]:
    """A gateway with this configuration, and a neighbour who uses a model."""
    port = free_port()
    path = folder / "moongate.yaml"
    path.write_text(json.dumps({**tree, "listen": {"port": port, "max_body_bytes": 300_000}}))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Child("gateway", [sys.executable, "-m", "gateway", "serve", "--config", path], folder, environment) as child:
        child.wait_for(f"http://127.0.0.1:{port}/ready", 30)
        neighbour = Neighbour(port, model)
        neighbour.start()
        on = World(port, child.log, neighbour)
        try:
            yield on
        finally:
            neighbour.stop()
            for talk in on.aside:
                talk.leave()


def fuzz(
    on: World, what: SearchStrategy[T], do: Callable[[T], None], judge: Callable[[Talk], None], seconds: float
) -> None:
    """Do what is drawn, round after round, until the time is up."""
    number = 0 if seconds == QUICK else int(time.time())
    print(f"the first seed is {number}")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        play = examples(
            max_examples=100,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )(given(what)(do))
        seed(number)(play)()
        on.settle(judge)
        number += 1
    print(f"the last seed was {number - 1}")
    on.settle(judge, time.monotonic() + ENDED)


times = pytest.mark.parametrize("seconds", [QUICK, pytest.param(LONG, marks=pytest.mark.long)])


def judge_client(talk: Talk) -> None:
    """What may be answered to an odd client while the engines are well."""
    assert CANARY.encode() not in talk.raw
    for answer in talk.answers:
        assert 200 <= answer.status < 500 or answer.status in {501, 505}, answer
    if b"HEAD" not in talk.said.data and b"CONNECT" not in talk.said.data:  # their answers end with their heads
        assert talk.malformed is None, (talk.malformed, talk.raw)


@times
def test_odd_clients(tmp_path: Path, tokenizer_folder: Path, seconds: float) -> None:
    engines, master = (Echo(), Echo()), Master()
    for engine in engines:
        engine.script = echo
    with running(*engines, master):
        tree = settings(
            *engines,
            pools={"main": {"admin": [master.url], "deadline_ms": 500}},
            models=[{"name": "tiny", "tokenizer": str(tokenizer_folder), "pool": "main"}],
            policy={"use": "cache_aware"},
            timeouts={"body": 1, "connect": 5, "head": 5, "idle": 5, "total": 10, "keep_alive": 5},
        )
        with world(tmp_path, "tiny", tree) as on:

            def do(said: Said) -> None:
                on.recent.append(said.data[:2000])
                talk = Talk(said, on.port)
                if not talk.hear(SILENCE):
                    on.put_aside(talk)
                if said.end in {"leave", "reset"}:
                    time.sleep(0.01)  # what that stirs up shows in a while
                judge_client(talk)
                on.look()

            fuzz(on, sayings(), do, judge_client, seconds)


def judge_engine(talk: Talk) -> None:
    """What may be answered to a plain client where the engine is odd."""
    assert talk.malformed is None, (talk.malformed, talk.raw)
    assert CANARY.encode() not in talk.raw
    if not talk.answers:  # what is neither JSON nor events goes on as it comes, and is broken off where it breaks
        head = talk.raw.partition(b"\r\n\r\n")[0]
        assert head.startswith(b"HTTP/1.1 200 ")
        assert not re.search(rb"content-type: [^\r]*(?:json|event-stream)", head), talk.raw
        return
    assert len(talk.answers) == 1, talk.raw
    (answer,) = talk.answers
    assert not any(fault in answer.body for fault in OWN_FAULTS), answer
    if answer.status == 200 and answer.kind.startswith(b"text/event-stream"):
        assert b"data: [DONE]" in answer.body or b"data:[DONE]" in answer.body, answer.body


@times
def test_odd_engines(tmp_path: Path, seconds: float) -> None:
    engines = (Odd(SICK), Odd(SICK), Odd(QUEER))
    for engine in engines:
        engine.script = echo
    with running(*engines):
        tree = settings(
            models=[{"name": SICK}, {"name": QUEER}],
            engines={
                "static": [{"url": engine.url, "model": engine.cards[0]["id"]} for engine in engines],
                "poll_seconds": 0.05,
            },
            timeouts={"body": 1, "connect": 1, "head": 0.5, "idle": 0.5, "total": 3},
        )
        with world(tmp_path, SICK, tree) as on:

            def do(play: Play) -> None:
                for engine in engines:
                    engine.play = play
                body = json.dumps(chat(MARK, model=SICK, stream=play.stream)).encode()
                head = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
                request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
                talk = Talk(Said(request, (), 0, "wait", 1), on.port)
                assert talk.hear(5), talk.raw
                judge_engine(talk)
                on.neighbour.ask()
                on.look()

            fuzz(on, plays(), do, judge_engine, seconds)
