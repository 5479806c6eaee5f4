"""The sockets on which engines tell of KV events, and the turns in which they are read.

vLLM publishes over ZMQ (vllm/distributed/kv_events.py, 0.28 to 0.32): frames are a topic, a sequence number of eight
bytes, big-endian, and the message. connector/follower.py brings messages into order, connector/batches.py reads them.

Why no zmq.asyncio: it makes some futures for each message. Read straight from the sockets, 50,000
events a second take 0.4 of a core in messages of one event, 0.16 in messages of eight, I/O thread included.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from connector.errors import ConnectorError
from connector.follower import Follower
from connector.held import Reported

QUEUE = 10_000
"""Messages that may wait to be read; beyond them ZMQ drops, which the sequence then shows."""
MAX_MESSAGE = 4 * 1024 * 1024
"""Bytes of a message; ZMQ ends the connection over a larger one. One block takes some 200."""
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
