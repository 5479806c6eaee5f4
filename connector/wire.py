"""Keep-alive HTTP/1.1 to one origin, for the hot path.

    Wire        the connections to one origin: takes an idle one or makes one, resends at most once
    Connection  one socket: writes a request, parses what comes back, goes back to its Wire
    Answer      one response: head known, body read piece by piece, or poured on as it arrives

A body is handed on as the socket delivered it. Reading stops when more than `HIGH_WATER` bytes lie
unread, and while the reader has paused it. A wire looks after the limits of all its connections with one
timer, since a timer for each phase of each exchange costs as much as the exchange. Names are looked up
for each new connection, and a connection lies idle for `IDLE_KEPT` seconds at most, so a name that points
elsewhere is followed within them. Nothing here reads the environment: no proxy variable has any effect.

Why not an HTTP library: httpx costs milliseconds of CPU for each call at 32 connections and aiohttp
twice what this does; the control plane, where that does not matter, uses httpx.
"""

import asyncio
import errno
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from connector.errors import BadAnswer, Disconnected, Exhausted, Phase, TimedOut, Unreachable, WireError

HIGH_WATER = 256 * 1024
"""Unread bytes of one answer above which the socket is no longer read."""
MAX_HEAD = 64 * 1024
"""Bytes of response header that are accepted."""
TOO_LARGE = f"response header is larger than {MAX_HEAD} bytes"
IDLE_KEPT = 4.0
"""Seconds that an idle connection is used again: below the 5 s after which vLLM closes it."""
JOINED = 16 * 1024
"""Bodies up to this many bytes are copied behind their head, so that one write sends both."""
LOOKS = 5
"""How often a limit's duration is looked at: a limit is kept to a fifth of itself, or to a second."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one exchange, in seconds."""

    connect: float = 5.0
    head: float = 600.0
    """Until the first byte of the answer's body: an engine may send its header first and then prefill for minutes."""
    idle: float = 60.0
    """Between two pieces of the body."""
    reader: float = 60.0
    """For which the reader may leave what has come unread."""
    total: float = 3600.0
    """From `send` to the end of the body, where `send` is given no deadline."""

    @property
    def look(self) -> float:
        """Seconds between two looks at the limits."""
        return min(1.0, min(self.head, self.idle, self.reader, self.total) / LOOKS)


class Answer:
    """A response whose head has arrived. Read it to the end, or close it."""

    __slots__ = (
        "_connection",
        "_error",
        "_let_go",
        "_pieces",
        "_sink",
        "_size",
        "_waiter",
        "done",
        "headers",
        "status",
    )

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._let_go = False
        self._waiter: asyncio.Future[None] | None = None
        self.done = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def read(self) -> bytes:
        """The next piece of the body, at least one byte; `b""` at its end.

        Raises `Disconnected` where the body was cut short, `TimedOut` after a silence of `idle`.
        """
        if not self._pieces and not self.done and self._error is None:
            await self._wait()
        if self._pieces:
            if self._size > HIGH_WATER:
                self.resume()
            return self._taken()
        if self._error is not None:
            raise self._error
        return b""

    async def pour(self, sink: Callable[[bytes], None]) -> None:
        """Call `sink` with each piece of the rest the moment it is there, until the end. Raises as `read` does.

        This spares a stream the turn of a task for each piece. What `sink` raises ends the exchange and is
        raised here. A sink that cannot keep up calls `pause` and `resume`.
        """
        self._sink = sink
        try:
            self.flush()
            if not self.done and self._error is None and not self._let_go:
                await self._wait()
        finally:
            self._sink = None
        if self._error is not None and not self._let_go:
            raise self._error

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises `BadAnswer` above `limit` bytes. Cancelled, it closes."""
        pieces: list[bytes] = []
        size = 0
        try:
            while piece := await self.read():
                size += len(piece)
                if size > limit:
                    raise BadAnswer(self._connection.origin, f"answer is larger than {limit} bytes")
                pieces.append(piece)
        finally:
            self.close()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pause(self) -> None:
        """Read no more from the socket; the engine is held up once its own buffers are full."""
        if not self.done:
            self._connection.pause()

    def resume(self) -> None:
        if not self.done:
            self._connection.resume()

    def close(self) -> None:
        """Give up the rest. An engine sees its client leave and aborts the request."""
        if not self.done and self._error is None and not self._let_go:
            self._connection.abort()

    def let_go(self, seconds: float) -> None:
        """Nobody needs the rest, which is as good as over: it may come within `seconds`, unread.

        `pour` ends at once. A connection that is read to its end can be kept.
        """
        self._let_go = True
        if not self.done:
            self._connection.resume()
            asyncio.get_running_loop().call_later(seconds, self._cut_off)

    def _cut_off(self) -> None:
        if not self.done and self._error is None:
            self._connection.abort()

    # for the Connection

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)

    def fail(self, error: WireError) -> None:
        if self._error is None:
            self._error = error
        self.flush()

    def flush(self) -> None:
        """Hand on what has come, and wake who waits for it or for the end."""
        if self._let_go:
            self._taken()
        elif self._pieces and self._sink is not None:
            try:
                self._sink(self._taken())
            except Exception as error:  # noqa: BLE001 - raised by pour
                self._error = error
                if not self.done:  # or it is another's by now
                    self._connection.abort()
        elif self._size > HIGH_WATER and not self.done:
            self._connection.pause()
        if self._waiter is None or self._waiter.done():
            return
        if self.done or self._error is not None or self._pieces or self._let_go:
            self._waiter.set_result(None)

    def _taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._size = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """One socket to the origin; one exchange at a time."""

    def __init__(self, wire: "Wire") -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._head: asyncio.Future[Answer] | None = None
        self._head_size = 0
        self._headless = 0
        self._phase: Phase = "head"
        self._active = 0.0
        self._deadline = 0.0
        self._paused = False
        self.origin = wire.origin
        self.heard = False

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def active(self) -> float:
        """When a byte came last, or the last answer was over, on the loop's clock."""
        return self._active

    async def exchange(self, request: Sequence[bytes], deadline: float) -> Answer:
        """Send one request and wait for the head of its answer."""
        self.heard = False
        if self._transport is None:
            raise Disconnected(self.origin, "the connection ended before the request was sent")
        self._answer = Answer(self)
        self._head_size = self._headless = 0
        self._phase = "head"
        self._active = self._loop.time()
        self._deadline = deadline
        head: asyncio.Future[Answer] = self._loop.create_future()
        self._head = head
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)
        try:
            return await head
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            if self._head is head:  # else another exchange has begun here already
                self._head = None  # it knows the answer, which knows this connection

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._active = self._loop.time()
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._active = self._loop.time()
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def look(self, now: float) -> None:
        """Fail the exchange that has run into one of its limits; close a connection that lay idle for too long."""
        limits = self._wire.timeouts
        if self._answer is None:
            if self._active + IDLE_KEPT <= now:
                self.close()
        elif self._deadline <= now:
            self._fail(TimedOut(self.origin, "total", limits.total))
        elif self._paused:
            if self._active + limits.reader <= now:
                self._fail(TimedOut(self.origin, "reader", limits.reader))
        elif self._active + (limits.head if self._phase == "head" else limits.idle) <= now:
            self._fail(TimedOut(self.origin, self._phase, limits.head if self._phase == "head" else limits.idle))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self._active = self._loop.time()
        self._wire.opened(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._active = self._loop.time()
        answer = self._answer
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BadAnswer(self.origin, f"not an HTTP/1.1 answer: {error}"))
        if answer is None:
            return
        if answer.status:
            answer.flush()
        else:
            self._headless += len(data)  # a header that never ends is not seen by on_header
            if self._headless > MAX_HEAD:
                self._fail(BadAnswer(self.origin, TOO_LARGE))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._wire.forget(self)
        answer = self._answer
        if answer is None:
            return
        if exc is None and answer.status and self._ends_with_connection(answer):
            self._answer = None
            answer.done = True
            answer.flush()
        else:
            self._fail(Disconnected(self.origin, "the connection ended before the answer did"))

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._answer is None:
            self.abort()  # bytes that nobody asked for: never let them meet another request

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_HEAD:
            self._fail(BadAnswer(self.origin, TOO_LARGE))
        elif self._answer is not None and not self._answer.status:  # else it is a trailer
            self._answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is None or self._head is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            answer.headers.clear()
            return
        answer.status = status
        if not self._head.done():
            self._head.set_result(answer)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._phase = "idle"
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or not answer.status:
            return
        self._answer = None
        answer.done = True
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if self._parser.should_keep_alive() and not unsent and not self.closed:
            if self._paused:
                self.resume()
            self._wire.give_back(self)
        else:
            self.close()

    # inside

    @staticmethod
    def _ends_with_connection(answer: Answer) -> bool:
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
            for name, value in answer.headers
        )

    def _fail(self, error: WireError) -> None:
        answer, self._answer = self._answer, None
        self.abort()
        if answer is None:
            return
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        else:
            answer.fail(error)


class Wire:
    """The connections to one origin, such as `http://10.0.0.7:8000`."""

    def __init__(self, url: str, timeouts: Timeouts | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is how an https:// origin is checked; without one, against the system's authorities."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL with a host")
        self.timeouts = timeouts or Timeouts()
        self._tls = tls or ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self.origin = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        self._http = f" HTTP/1.1\r\nhost: {self.origin}\r\n".encode("ascii")
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._looking: asyncio.TimerHandle | None = None

    async def send(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | Sequence[bytes] = b"",
        deadline: float | None = None,
    ) -> Answer:
        """Send a request and return its answer once the head is there.

        `headers` come behind Host and Content-Length, which are set here. A body may come in parts. The whole
        exchange must be over at `deadline`, on the loop's clock. Raises `Unreachable`, `Disconnected`,
        `TimedOut` or `BadAnswer`. A request is sent a second time only when it went out on a kept connection
        that died without a byte of answer (RFC 9112, 9.3.1).
        """
        now = asyncio.get_running_loop().time()
        if deadline is None:
            deadline = now + self.timeouts.total
        request = self._render(method, target, headers, (body,) if isinstance(body, bytes) else body)
        kept = self._take(now)
        if kept is not None:
            try:
                return await kept.exchange(request, deadline)
            except Disconnected:
                if kept.heard:
                    raise
        fresh = await self._connect(deadline)
        return await fresh.exchange(request, deadline)

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        if self._looking is None:
            self._look_later()

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def busy(self) -> int:
        """Connections with an exchange under way."""
        return len(self._open) - len(self._idle)

    def close(self) -> None:
        """Drop every connection, busy ones too."""
        for connection in tuple(self._open):
            connection.abort()

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(self.timeouts.look, self._look)

    def _look(self) -> None:
        """Hold every connection to its limits."""
        self._looking = None
        now = asyncio.get_running_loop().time()
        for connection in tuple(self._open):
            connection.look(now)
        if self._open:
            self._look_later()

    def _render(self, method: str, target: str, headers: Headers, body: Sequence[bytes]) -> list[bytes]:
        lines = [method.encode("ascii"), b" ", target.encode("latin-1"), self._http]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        if size or method == "POST":
            lines.append(b"content-length: %d\r\n" % size)
        lines.append(b"\r\n")
        if size <= JOINED:
            return [b"".join((*lines, *body))]
        return [b"".join(lines), *body]

    def _take(self, now: float) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.active + IDLE_KEPT > now:
                return connection
            connection.close()
        return None

    async def _connect(self, deadline: float) -> Connection:
        limit = self.timeouts.connect
        loop = asyncio.get_running_loop()
        until = min(deadline, loop.time() + limit)
        connection = Connection(self)
        try:
            async with asyncio.timeout_at(until):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except asyncio.CancelledError:
            connection.abort()
            self.forget(connection)  # uvloop tells a connection nothing that is cancelled while it is made
            raise
        except TimeoutError:
            connection.abort()
            self.forget(connection)
            if until == deadline:
                raise TimedOut(self.origin, "total", self.timeouts.total) from None
            raise TimedOut(self.origin, "connect", limit) from None
        except (OSError, UnicodeError) as error:  # a name that cannot be one is no OSError
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # not the peer's fault
                raise Exhausted(self.origin, "no file descriptor is left in this process") from error
            raise Unreachable(self.origin, getattr(error, "strerror", None) or str(error)) from error
        return connection
