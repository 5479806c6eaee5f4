"""Keep-alive HTTP/1.1 to one origin, for the hot path.

    Wire        the connections to one origin: takes an idle one or makes one, resends at most once
    Connection  one socket: writes a request, parses what comes back, goes back to its Wire
    Answer      one response: head known, body read piece by piece as it arrives

A request is written in one piece and a body is handed on as the socket delivered it. Reading stops
when more than `HIGH_WATER` bytes lie unread. Nothing here reads the environment: no proxy variable
has any effect.

Why not an HTTP library: httpx costs milliseconds of CPU for each call at 32 connections and aiohttp
twice what this does; the control plane, where that does not matter, uses httpx.
"""

import asyncio
import errno
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from connector.errors import BadAnswer, Disconnected, Phase, TimedOut, Unreachable, WireError

HIGH_WATER = 256 * 1024
"""Unread bytes of one answer above which the socket is no longer read."""
MAX_HEAD = 64 * 1024
"""Bytes of response header that are accepted."""
TOO_LARGE = f"response header is larger than {MAX_HEAD} bytes"
IDLE_KEPT = 4.0
"""Seconds that an idle connection is used again: below the 5 s after which vLLM closes it."""
JOINED = 16 * 1024
"""Bodies up to this many bytes are copied behind their head, so that one write sends both."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one exchange, in seconds: connecting, first header byte, gap between bytes."""

    connect: float = 5.0
    head: float = 600.0
    idle: float = 60.0


class Answer:
    """A response whose head has arrived. Read it to the end, or close it."""

    __slots__ = ("_connection", "_error", "_pieces", "_size", "_waiter", "done", "headers", "status")

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: WireError | None = None
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
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            if self._size > HIGH_WATER:
                self._connection.resume()
            self._size = 0
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._error is not None:
            raise self._error
        return b""

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
        return b"".join(pieces)

    def close(self) -> None:
        """Give up the rest. An engine sees its client leave and aborts the request."""
        if not self.done:
            self._connection.abort()

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > HIGH_WATER:
            self._connection.pause()
        self._wake()

    def finish(self) -> None:
        self.done = True
        self._wake()

    def fail(self, error: WireError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self.origin = wire.origin
        self.heard = False
        self.idle_since = 0.0

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, request: Sequence[bytes]) -> Answer:
        """Send one request and wait for the head of its answer."""
        self.heard = False
        if self._transport is None:
            raise Disconnected(self.origin, "the connection ended before the request was sent")
        self._answer = Answer(self)
        self._head_size = self._headless = 0
        self._head = self._loop.create_future()
        for piece in request:
            self._transport.write(piece)
        self._watch("head", self._wire.timeouts.head)
        try:
            return await self._head
        except asyncio.CancelledError:
            self.abort()
            raise

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
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

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self._wire.opened(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._active = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BadAnswer(self.origin, f"not an HTTP/1.1 answer: {error}"))
        if self._answer is not None and not self._answer.status:
            self._headless += len(data)  # a header that never ends is not seen by on_header
            if self._headless > MAX_HEAD:
                self._fail(BadAnswer(self.origin, TOO_LARGE))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._wire.forget(self)
        answer = self._answer
        if answer is None:
            self._unwatch()
        elif exc is None and answer.status and self._ends_with_connection(answer):
            self._answer = None
            self._unwatch()
            answer.finish()
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
        elif self._answer is not None:
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
        self._watch("idle", self._wire.timeouts.idle)
        if not self._head.done():
            self._head.set_result(answer)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or not answer.status:
            return
        self._answer = None
        self._unwatch()
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if self._parser.should_keep_alive() and not self.closed and not unsent:
            if self._paused:
                self.resume()
            self.idle_since = self._loop.time()
            self._wire.give_back(self)
        else:
            self.close()
        answer.finish()

    # inside

    @staticmethod
    def _ends_with_connection(answer: Answer) -> bool:
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
            for name, value in answer.headers
        )

    def _fail(self, error: WireError) -> None:
        answer, self._answer = self._answer, None
        self._unwatch()
        self.abort()
        if answer is None:
            return
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        else:
            answer.fail(error)

    def _watch(self, phase: Phase, limit: float) -> None:
        self._unwatch()
        self._phase = phase
        self._active = self._loop.time()
        self._timer = self._loop.call_later(limit, self._check, limit)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, limit: float) -> None:
        """One timer a phase: it looks when the last byte came, instead of being reset by each."""
        now = self._loop.time()
        due = now + limit if self._paused else self._active + limit
        if due > now:
            self._timer = self._loop.call_at(due, self._check, limit)
        else:
            self._fail(TimedOut(self.origin, self._phase, limit))


class Wire:
    """The connections to one origin, such as `http://10.0.0.7:8000`."""

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL with a host")
        self.timeouts = timeouts or Timeouts()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self.origin = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def send(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> Answer:
        """Send a request and return its answer once the head is there.

        `headers` come behind Host and Content-Length, which are set here. Raises `Unreachable`,
        `Disconnected`, `TimedOut` or `BadAnswer`. A request is sent a second time only when it
        went out on a kept connection that died without a byte of answer (RFC 9112, 9.3.1).
        """
        request = self._render(method, target, headers, body)
        kept = self._take()
        if kept is not None:
            try:
                return await kept.exchange(request)
            except Disconnected:
                if kept.heard:
                    raise
        fresh = await self._connect()
        return await fresh.exchange(request)

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

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

    def _render(self, method: str, target: str, headers: Headers, body: bytes) -> list[bytes]:
        lines = [f"{method} {target} HTTP/1.1\r\nhost: {self.origin}\r\n".encode("ascii")]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if body or method == "POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        lines.append(b"\r\n")
        if len(body) <= JOINED:
            lines.append(body)
            return [b"".join(lines)]
        return [b"".join(lines), body]

    def _take(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - IDLE_KEPT
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        limit = self.timeouts.connect
        try:
            async with asyncio.timeout(limit):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise TimedOut(self.origin, "connect", limit) from None
        except (OSError, UnicodeError) as error:  # a name that cannot be one is no OSError
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # not the peer's fault
                raise WireError(self.origin, "no file descriptor is left in this process") from error
            raise Unreachable(self.origin, getattr(error, "strerror", None) or str(error)) from error
        return connection
