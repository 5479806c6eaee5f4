"""An engine's KV events, taken in order: what it stored, what it gave up.

vLLM publishes over ZMQ (vllm/distributed/kv_events.py, 0.28 to 0.32): frames are a topic, a sequence
number of eight bytes, big-endian, and msgpack: `[time, [event, ...], data parallel rank]`. Events are
maps with a `type` and are read by name, so that new fields and unknown kinds do no harm. What is not
needed, token ids above all, is skipped without being made into objects.

Only blocks in the engine's own cache count. Events of the medium `cpu` tell of puts into the pool,
never of removals from it, so the pool is asked instead (connector/mooncake.py).

An engine that has a replay socket tells again, on request, what it still has of its last messages. So

    first contact, or contact anew     everything is asked for, from number 0
    a number is missing                what is missing is asked for; later messages wait
    the numbers go back, or the        the engine may have begun anew: what it was thought to hold is
    connection was lost                forgotten at once, then everything is asked for
    there is no such socket, it is     what this engine was thought to hold is forgotten, and grows
    late, or it has not all            again from the next message on

vLLM's replay socket drops what is beyond some thousand messages that ZMQ has not sent yet, its last word
too. So the rest is asked for as often as more of it comes: ten times or fewer for its 10,000 messages.

Blocks are thought to be held only if every message since the last forgetting was taken in, so
that nothing is believed that was given up in a message that was missed.

Why no zmq.asyncio: it makes some futures for each message. Read straight from the sockets, 50,000
events a second take 0.4 of a core in messages of one event, 0.16 in messages of eight, I/O thread included.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from connector.errors import ConnectorError
from connector.held import KEY_BYTES, Reported

OWN_MEDIA = frozenset({None, "GPU"})
QUEUE = 10_000
"""Messages that may wait to be read; beyond them ZMQ drops, which the sequence then shows."""
MAX_MESSAGE = 4 * 1024 * 1024
"""Bytes of a message; ZMQ ends the connection over a larger one. One block takes some 200."""
MAX_BLOCKS = 16_384
"""Blocks that a message may tell of, so that none holds requests up for long: a step of an engine that computes
262,144 tokens, in blocks of 16, has as many."""
MAX_PENDING = 16 * 1024 * 1024
"""Bytes of messages that wait for a replay."""
MAX_WITNESS = 1024 * 1024
"""Bytes of a message that is kept to judge hashes by."""
SLICE = 0.001
"""Seconds for which messages are read before requests get as long a turn."""
SILENCE = 2.0
"""Seconds in which a replay must begin."""
PAUSE = 0.25
"""Seconds without a message after which its rest is asked for."""
REPLAY = 10.0
"""Seconds that a whole replay may take."""
APART = 0.02
"""Seconds between two connections for replays: engines that share an address by mistake cause one with each message."""
RECONNECT = 0.5
"""Seconds after which a lost connection is made anew if ZMQ has not done it: it never does after an error of the
protocol, such as a message that is too large."""
HEARTBEAT = 5_000
"""Milliseconds between ZMQ's own questions whether the peer is there; it is lost after three."""
MAX_SOCKETS = 8192
"""ZMQ's sockets in one process; a subscription has up to four."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of a replay's last message."""
_WORD = 0xFFFFFFFFFFFFFFFF


class _Event(msgspec.Struct, gc=False):
    """An event of any kind, as far as it is needed."""

    type: str
    block_hashes: list[int | bytes] | None = None
    parent_block_hash: int | bytes | None = None
    block_size: int | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class _Kind(msgspec.Struct, gc=False):
    type: str


class _Row(msgspec.Struct, array_like=True, gc=False):
    """A batch as vLLM writes it."""

    ts: msgspec.Raw
    events: list[_Event]


class _Map(msgspec.Struct, gc=False):
    """A batch with names, as some builds of vLLM write it."""

    events: list[_Event]


class _RawRow(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: list[msgspec.Raw]


class _RawMap(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]


class Decoder:
    """Messages to what an engine holds."""

    def __init__(self) -> None:
        self._row = msgspec.msgpack.Decoder(_Row)
        self._map = msgspec.msgpack.Decoder(_Map)
        self._raw_row = msgspec.msgpack.Decoder(_RawRow)
        self._raw_map = msgspec.msgpack.Decoder(_RawMap)
        self._event = msgspec.msgpack.Decoder(_Event)
        self._kind = msgspec.msgpack.Decoder(_Kind)

    def take(self, payload: bytes, held: Reported) -> None:
        """Apply a message's events. Where one cannot be read, what came before is trusted no more."""
        try:
            batch = self._map.decode(payload) if _is_map(payload) else self._row.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._one_by_one(payload, held)
            return
        if sum(1 + len(event.block_hashes or ()) for event in batch.events) > 2 * MAX_BLOCKS:
            _bad(held)
            return
        for event in batch.events:
            self._apply(event, payload, held)

    def _one_by_one(self, payload: bytes, held: Reported) -> None:
        """Apply the events of a message in which something cannot be read."""
        try:
            batch = self._raw_map.decode(payload) if _is_map(payload) else self._raw_row.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            _bad(held)
            return
        if len(batch.events) > MAX_BLOCKS:
            _bad(held)
            return
        for raw in batch.events:
            try:
                if self._kind.decode(raw).type in _KINDS:
                    self._apply(self._event.decode(raw), payload, held)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                _bad(held)

    @staticmethod
    def _apply(event: _Event, payload: bytes, held: Reported) -> None:
        kind = event.type
        if kind not in _KINDS:
            return
        held.events += 1
        if kind == "AllBlocksCleared":
            held.clear()
            return
        if event.medium not in OWN_MEDIA or event.locality == "REMOTE":
            return
        if event.block_hashes is None:
            _bad(held)
            return
        keys = [
            block[-KEY_BYTES:] if isinstance(block, bytes) else (block & _WORD).to_bytes(KEY_BYTES, "big")
            for block in event.block_hashes
        ]
        if kind == "BlockRemoved":
            held.removed(keys, event.group_idx)
            return
        parent = event.parent_block_hash
        if parent is None:
            if len(payload) <= MAX_WITNESS:
                held.newest = payload
        else:
            parent = parent[-KEY_BYTES:] if isinstance(parent, bytes) else (parent & _WORD).to_bytes(KEY_BYTES, "big")
        held.stored(keys, parent, event.block_size or 0, event.group_idx, event.kv_cache_spec_kind)


_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def witness(held: Reported) -> Mapping[str, Any] | None:
    """The newest event that tells of a prompt's first block, whole, to judge hashes by; once."""
    payload, held.newest = held.newest, None
    if payload is None:
        return None
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        for event in reversed(events):
            first = event["type"] == "BlockStored" and event.get("parent_block_hash") is None
            if first and event.get("medium") in OWN_MEDIA:
                assert isinstance(event, dict)
                return event
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # what lies beside the fields that were read may be anything
    return None


class Follower:
    """One engine's messages in order, whatever is lost, repeated or late. No socket: messages are handed in."""

    def __init__(self, held: Reported, ask: Callable[[int, bool], None] | None) -> None:
        """`ask` asks the engine for its messages from a number on, and is told whether they are the rest of a
        replay; None where it cannot be asked.
        """
        self.asking = False
        """A replay is awaited."""
        self._held = held
        self._ask = ask
        self._decoder = Decoder()
        self._expected: int | None = None
        """The number of the next message to be applied; None: whichever comes."""
        self._start = 0
        """The number from which on was asked for the last time."""
        self._whole = True
        """The replay had all that was asked for, so far."""
        self._live = -1
        """The number of the last message that came by itself."""
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_bytes = 0

    def anew(self) -> None:
        """The engine may have begun anew, or there is contact for the first time."""
        self.lost()
        if self._ask is not None:
            self._begin(0)

    def lost(self) -> None:
        """The engine cannot be heard: what it holds may change."""
        self._held.forget()
        self.asking = False
        self._expected = None
        self._live = -1
        self._drop_pending()

    def live(self, frames: list[bytes]) -> None:
        """Take in a message that came by itself."""
        self._held.received += 1
        number = _number(frames[1]) if len(frames) == 3 else None
        if number is None:
            self._held.bad += 1
            if not self.asking:
                self._missed(self._expected)
            return
        if number <= self._live:
            self.anew()
        self._live = number
        if not self.asking and self._expected is not None and number > self._expected:
            self._held.gaps += 1
            self._missed(self._expected)
        self._next(number, frames[2])

    def replayed(self, frames: list[bytes]) -> None:
        """Take in a message that was asked for: topic, number, payload; some builds of vLLM leave the topic out."""
        if not self.asking:
            return
        number = _number(frames[-2]) if len(frames) >= 2 else None
        if len(frames) >= 2 and frames[-2] == END:
            if self.going and self._short:
                self.resume()
            else:
                self._end(whole=self._whole and not self._short)
        elif number is None or self._expected is None:
            self._held.bad += 1
            self.failed()
        elif number == self._expected:
            self._take(number, frames[-1])
        elif number > self._expected and self.going:
            self.resume()
        elif number > self._expected:  # it has not all
            self._whole = False
            self._held.forget()
            self._take(number, frames[-1])

    @property
    def going(self) -> bool:
        """Some of the replay has come."""
        return self.asking and self._expected is not None and self._expected > self._start

    @property
    def _short(self) -> bool:
        """The replay has not come to where the messages begin that wait for it."""
        return bool(self._pending) and self._expected is not None and self._pending[0][0] > self._expected

    def resume(self) -> None:
        """Ask for the rest of a replay that is `going`: some of it was lost."""
        if self._ask is not None and self._expected is not None:
            self._start = self._expected
            self._ask(self._start, True)

    def failed(self) -> None:
        """The replay is late, or is none."""
        if self.asking:
            self._held.forget()
            self._expected = None
            self._end(whole=False)

    def _missed(self, start: int | None) -> None:
        """Messages from this number on are missing."""
        if self._ask is not None and start is not None:
            self._begin(start)
        else:
            self._held.forget()
            self._expected = None

    def _begin(self, start: int) -> None:
        assert self._ask is not None
        self.asking = self._whole = True
        self._expected = self._start = start
        self._ask(start, False)

    def _next(self, number: int, payload: bytes) -> None:
        """Take a message in when its turn comes, unless the replay has told of it already."""
        if self.asking:
            self._pending.append((number, payload))
            self._pending_bytes += len(payload)
            if self._pending_bytes > MAX_PENDING:
                self.failed()
        elif self._expected is None or number >= self._expected:
            self._take(number, payload)

    def _end(self, *, whole: bool) -> None:
        """The replay is over: go on with what came in the meantime."""
        self.asking = False
        if whole:
            self._held.replays += 1
        else:
            self._held.failed += 1
        for number, payload in self._pending:
            expected = self._expected
            if expected is not None and number > expected:
                self._held.gaps += 1
                self._held.forget()
            if expected is None or number >= expected:
                self._take(number, payload)
        self._drop_pending()

    def _take(self, number: int, payload: bytes) -> None:
        self._expected = number + 1
        self._decoder.take(payload, self._held)

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0


class NoEvents(ConnectorError):
    """The address cannot be bound or connected to."""


class Inbox:
    """What all subscriptions of an event loop share: ZMQ's one I/O thread, and turns in which messages are read."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._waiting: dict[Subscription, None] = {}
        self._turn: asyncio.Handle | None = None

    def wake(self, subscription: "Subscription") -> None:
        """Something may have come for it."""
        self._waiting[subscription] = None
        if self._turn is None:
            self._turn = self.loop.call_soon(self._read)

    def leave(self, subscription: "Subscription") -> None:
        """It is closed."""
        self._waiting.pop(subscription, None)

    def close(self) -> None:
        """After the subscriptions."""
        if self._turn is not None:
            self._turn.cancel()
        self.context.term()

    def _read(self) -> None:
        """Read for a slice of time, subscription by subscription, and let others work before the next."""
        self._turn = None
        end = time.perf_counter() + SLICE
        while self._waiting and time.perf_counter() < end:
            subscription = next(iter(self._waiting))
            del self._waiting[subscription]
            if subscription.read(end):
                self._waiting[subscription] = None
        if self._waiting and self._turn is None:
            self._turn = self.loop.call_later(SLICE, self._read)


class Subscription:
    """A SUB socket on an engine's events. vLLM connects to a concrete address and binds one with `*`."""

    def __init__(
        self,
        inbox: Inbox,
        address: str,
        *,
        bind: bool,
        replay: str | None,
        held: Reported,
        tap: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        """`replay` is the address of the engine's replay socket, `tap` sees each message before it is taken in."""
        self._inbox = inbox
        self._address = address
        self._bind = bind
        self._replay = replay
        self._tap = tap
        self._follower = Follower(held, None if replay is None else self._ask)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._answers: zmq.Socket[bytes] | None = None
        self._dialling: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reconnect: asyncio.TimerHandle | None = None
        self._heard = self._asked = self._dialled = 0.0

    def open(self) -> None:
        """Follow the engine's events until closed. Raises `NoEvents`."""
        try:
            self._socket = self._made(zmq.SUB)
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            if self._bind:
                self._socket.bind(self._address)
            else:
                self._socket.connect(self._address)
            if self._replay is not None:  # an address that is none shows here, not in the middle of things
                with self._made(zmq.DEALER) as trial:
                    trial.connect(self._replay)
        except zmq.ZMQError as error:
            self.close()
            raise NoEvents(f"no KV events can be had at {self._address}: {error}") from error
        self._watch(self._socket)
        self._watch(self._monitor)

    def close(self) -> None:
        """Follow no longer. What was heard stays."""
        self._hang_up()
        self._leave_be()
        for socket in (self._socket, self._monitor):
            if socket is not None:
                self._inbox.loop.remove_reader(socket.fileno())
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._monitor = None
        self._inbox.leave(self)

    def restarted(self) -> None:
        """The engine has begun anew, or was away: what it told before that counts no more."""
        if self._socket is not None:
            self._skip()
            self._follower.anew()
            self._settle()

    def read(self, end: float) -> bool:
        """Take messages in until this moment of `time.perf_counter`. Whether there may be more."""
        self._hear()
        while self._socket is not None:
            message = _receive(self._socket)
            if message is not None:
                if self._tap is not None:
                    self._tap(message)
                self._follower.live(message)
            answer = _receive(self._answers) if self._answers is not None else None
            if answer is not None:
                self._heard = self._inbox.loop.time()
                self._follower.replayed(answer)
            self._settle()
            if message is None and answer is None:
                return False
            if time.perf_counter() >= end:
                return True
        return False

    def _hear(self) -> None:
        """Whether the connection was lost or made."""
        while self._monitor is not None and (frames := _receive(self._monitor)) is not None:
            if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                self._skip()
                self._follower.lost()
                self._leave_be()
                if not self._bind:
                    self._reconnect = self._inbox.loop.call_later(RECONNECT, self._again)
            else:
                self._leave_be()
                self._follower.anew()
            self._settle()

    def _again(self) -> None:
        """Connect anew, unless that was done."""
        self._hear()
        if self._socket is not None and self._reconnect is not None:
            with suppress(zmq.ZMQError):  # there is nothing left to disconnect
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        self._leave_be()

    def _leave_be(self) -> None:
        if self._reconnect is not None:
            self._reconnect.cancel()
            self._reconnect = None

    def _skip(self) -> None:
        """Drop what was told before now."""
        for _ in range(QUEUE):
            if self._socket is None or _receive(self._socket) is None:
                break

    def _ask(self, start: int, rest: bool) -> None:
        """Ask for all messages from this number on, on a connection of its own, so that no earlier answer is taken."""
        self._drop_answers()
        self._heard = self._inbox.loop.time()
        if not rest:
            self._asked = self._heard
        if self._deadline is None:
            self._deadline = self._inbox.loop.call_later(PAUSE, self._late)
        wait = self._dialled + APART - self._heard
        if wait > 0:
            self._dialling = self._inbox.loop.call_later(wait, self._dial, start)
        else:
            self._dial(start)

    def _dial(self, start: int) -> None:
        """Make the connection for a replay, and ask."""
        assert self._replay is not None
        self._dialling = None
        self._dialled = self._heard = self._inbox.loop.time()
        try:
            self._answers = self._made(zmq.DEALER)
            self._answers.connect(self._replay)
            self._answers.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError:  # no socket is left in this process: as if there was no answer
            return
        self._watch(self._answers)

    def _late(self) -> None:
        """Look whether a replay is silent, or takes too long."""
        self._deadline = None
        self.read(time.perf_counter())  # after a pause of this process, what came in time waits still
        now = self._inbox.loop.time()
        if now >= self._asked + REPLAY:
            self._follower.failed()
        elif self._follower.going and now >= self._heard + PAUSE:
            self._follower.resume()
        elif now >= self._heard + SILENCE:
            self._follower.failed()
        if self._follower.asking and self._deadline is None:
            self._deadline = self._inbox.loop.call_later(PAUSE, self._late)
        self._settle()

    def _settle(self) -> None:
        """Give up the connection for a replay that is over."""
        if not self._follower.asking:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._drop_answers()

    def _drop_answers(self) -> None:
        """Close the connection for a replay, or make none."""
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        if self._answers is not None:
            self._inbox.loop.remove_reader(self._answers.fileno())
            self._answers.close()
            self._answers = None

    def _made(self, kind: int) -> zmq.Socket[bytes]:
        """A socket with limits. Raises `zmq.ZMQError`."""
        socket = self._inbox.context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT)
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._inbox.loop.add_reader(socket.fileno(), self._inbox.wake, self)
        self._inbox.wake(self)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message; None where there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _number(frame: bytes) -> int | None:
    """A message's number. That of a replay's end is none."""
    return int.from_bytes(frame, "big") if len(frame) == 8 and frame != END else None


def _is_map(payload: bytes) -> bool:
    """Whether msgpack begins with a map."""
    return payload[:1] in _MAPS


_MAPS = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))


def _bad(held: Reported) -> None:
    """Something may have been removed that is believed in."""
    held.bad += 1
    held.forget()
