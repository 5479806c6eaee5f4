"""One engine's messages of KV events in order, whatever is lost, repeated or late.

Blocks are thought to be held only if every message since the last forgetting was taken in, so that nothing is
believed that was given up in a message that was missed. An engine that has a replay socket tells again, on request,
what it still has of its last messages. So

    first contact, or contact anew     everything is asked for, from number 0
    a number is missing                what is missing is asked for; later messages wait
    the numbers go back, or the        the engine may have begun anew: what it was thought to hold is
    connection was lost                forgotten at once, then everything is asked for
    there is no such socket, it is     what this engine was thought to hold is forgotten, and grows
    late, or it has not all            again from the next message on

vLLM's replay socket drops what is beyond some thousand messages that ZMQ has not sent yet, its last word too. So the
rest is asked for as often as more of it comes: ten times or fewer for its 10,000 messages.
"""

from collections import deque
from collections.abc import Callable

from connector.batches import Decoder
from connector.held import Reported

MAX_PENDING = 16 * 1024 * 1024
"""Bytes of messages that wait for a replay."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of a replay's last message."""


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


def _number(frame: bytes) -> int | None:
    """A message's number. That of a replay's end is none."""
    return int.from_bytes(frame, "big") if len(frame) == 8 and frame != END else None
