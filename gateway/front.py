"""The server's side of a connection: uvicorn's protocol, with our own way for the routes that are hot.

A hot route gets an `Exchange` on the connection itself; everything else goes on as ASGI, by uvicorn. Both
pass the same gate: framing that two parsers could read in two ways is refused whatever this parser makes
of it (RFC 9112, 6.3), and what comes before or behind a body is bounded in bytes and in time. One timer
looks after each connection, since one a request costs more than the request's own parsing.

A request that arrives while another is under way on the same connection (pipelining) is not read: the
connection closes behind the answer, as RFC 9112, 9.3.2 lets a server do, and the client's leaving is
always seen.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.cors import Cors
from gateway.errors import BadRequest
from gateway.exchange import Exchange, request_id
from gateway.framing import NAMES, declared_length

MAX_HEAD = 64 * 1024
"""Bytes that may come without any of them being of a body."""
HEAD_SECONDS = 10.0
"""Seconds for a request line and its headers."""
LINGER_SECONDS = 2.0
"""Seconds for which what a refused client still sends is read and dropped, so that it gets to read its answer."""
LINGER_BYTES = 128 * 1024 * 1024
"""And bytes."""

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]
Route = Callable[[str, str], Handler | None]
"""Method and path to who answers; None where the route is not hot."""

_SIMPLE = re.compile(rb"[A-Z]+ [^ \r\n]*\r?\n")
"""A request line of HTTP/0.9, which is the whole request; the parser would wait for a header."""


class Front(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(
        self,
        *settings: Any,
        route: Route,
        refused: Callable[[], None],
        cors: Cors,
        write: float,
        keep_alive: float,
        **more: Any,
    ) -> None:
        """`refused` is told of each request that is no HTTP. In seconds: `write`, for which a client may take
        nothing, and `keep_alive`, for which a connection may lie idle between two requests.
        """
        super().__init__(*settings, **more)
        self._route = route
        self._refused = refused
        self._write = write
        self._keep_alive = keep_alive
        self._cors = cors
        self._exchange: Exchange | None = None
        self._framing: list[tuple[bytes, bytes]] = []
        self._deaf = False
        """What comes is not read as a request any more."""
        self._last = False
        """No more requests after this one."""
        self._bare = 0
        self._since = 0.0
        """When the connection fell idle, or a head began."""
        self._served = False
        self._undelivered: Exchange | None = None
        self._written = 0
        self._taken = 0
        self._stuck = 0.0
        """When the client last took something."""
        self._timer: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self._stuck = self.loop.time()
        self._timer = self.loop.call_later(min(HEAD_SECONDS, self._write), self._look)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._bare += len(data)
            if self._bare > LINGER_BYTES:
                self.transport.abort()
            return
        if not self._bare and self._exchange is None:
            self._since = self.loop.time()
        self._bare += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deafen()  # no other protocol is spoken here; what was asked is answered as HTTP/1.1
        except httptools.HttpParserError:
            self._refuse("The request is not valid HTTP/1.1.")
        if self._bare > MAX_HEAD:
            self._refuse("The request's head or trailer is too large.")
        elif self._bare == len(data) and not self._busy and _SIMPLE.match(data):
            self._refuse("Send the request in HTTP/1.1.")  # its line is all there is of it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        exchange = self._forget()
        if exchange is not None:
            exchange.lost()
        self._delivered()
        self._deaf = True
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.paused(False)
        else:
            self.flow.resume_reading()
        self._delivered()

    def shutdown(self) -> None:
        """The server wants to end: the answer under way is the last on this connection."""
        self._last = True
        if self._exchange is None:
            super().shutdown()

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._busy:
            self._deafen()
        self.url = b""
        self.headers = []
        self._framing = []

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._deaf:
            return
        name = name.lower()
        self.headers.append((name, value))
        if name in NAMES:
            self._framing.append((name, value))

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        try:
            declared = declared_length(self.parser.get_http_version(), self.url, self._framing)
        except BadRequest as fault:
            self._refuse(fault.message)
            return
        if self.parser.should_upgrade() and self._get_upgrade() == b"websocket":
            self._refuse("No WebSocket is spoken here; streams are server-sent events.")
            return
        target = self.url
        if not target.startswith(b"/") and b"://" in target:  # absolute form, whose host is the Host
            parts = urlsplit(target)
            target = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        path, _, query = target.decode("latin-1").partition("?")
        method = self.parser.get_method().decode("ascii")
        handler = self._route(method, path)
        if handler is None:
            self._go_on()
            return
        later = self.parser.get_http_version() != "1.0"
        fields = _fields(self.headers)
        more = self.server_state.default_headers
        if self._cors.origins:
            more = [*more, *self._cors.headers(fields.get(b"origin"))]
        exchange = self._exchange = Exchange(
            self,
            method,
            path,
            query,
            fields,
            declared=declared,
            persistent=later and self.parser.should_keep_alive(),
            chunks=later,
            full=self.flow.write_paused,
            more=more,
        )
        exchange.task = self.loop.create_task(handler(exchange))
        self.tasks.add(exchange.task)  # which the server waits for when it ends

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._bare = 0
        if self._exchange is not None:
            self._exchange.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._bare = 0
        if self._exchange is not None:
            self._exchange.complete()
        elif self.cycle is not None:
            super().on_message_complete()

    # exchange.Line

    @property
    def full(self) -> bool:
        return self.flow.write_paused

    def send(self, *pieces: bytes) -> None:
        if not self.transport.is_closing():
            if len(pieces) == 1:
                self._written += len(pieces[0])
                self.transport.write(pieces[0])
            else:
                self._written += sum(map(len, pieces))
                self.transport.writelines(pieces)

    def read_on(self, *, wanted: bool) -> None:
        if wanted:
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()

    def over(self, *, close: bool) -> None:
        exchange = self._forget()
        self._served = True
        self._since = self.loop.time()
        self.server_state.total_requests += 1
        if self.flow.write_paused:  # no next request before this answer is taken
            self._undelivered = exchange
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()
        if close or self._deaf or self._last:
            self._leave()

    def on_response_complete(self) -> None:
        """Uvicorn's request is over. Its timer would close the connection under the next one."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._served = True
        self._since = self.loop.time()
        if self._last or self.cycle.more_body:
            self._leave()

    def drop(self) -> None:
        self._forget()
        self.transport.abort()

    # inside

    @property
    def _busy(self) -> bool:
        return self._exchange is not None or (self.cycle is not None and not self.cycle.response_complete)

    def _forget(self) -> Exchange | None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.task is not None:
            self.tasks.discard(exchange.task)
        return exchange

    def _delivered(self) -> None:
        """The client has taken the last answer, or is gone."""
        exchange, self._undelivered = self._undelivered, None
        if exchange is not None:
            exchange.delivered()

    def _go_on(self) -> None:
        """Leave the request to uvicorn, which makes its scope when a message begins."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers += headers
        self.expect_100_continue = any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in headers
        )
        super().on_headers_complete()

    def _refuse(self, message: str) -> None:
        """Answer what is no request, and close."""
        if self._deaf:
            return
        self._refused()
        if self._exchange is not None:
            self._exchange.spoil(BadRequest(message))
        elif self._busy:
            self.transport.close()
        else:
            body = BadRequest(message).body()
            self.send(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (request_id({}), len(body), body)
            )
            self.transport.close()
        self._deafen()

    def _deafen(self) -> None:
        """Read nothing more as a request; close behind the answer that is under way."""
        self._deaf = True
        if self._exchange is None and self.cycle is not None:
            self.cycle.keep_alive = False

    def _leave(self) -> None:
        """Close so that the client gets to read what was written, though it may still be sending."""
        self._deaf = True
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _look(self) -> None:
        """Close a connection on which nothing moves though it should."""
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        if self._written - unsent > self._taken or not unsent:
            self._stuck = now
        self._taken = self._written - unsent
        if now - self._stuck >= self._write:
            self.transport.abort()
            return
        wait = min(HEAD_SECONDS, self._write)
        if not self._busy and not unsent:
            limit = self._keep_alive if self._served and not self._bare else HEAD_SECONDS
            wait = self._since + limit - now
        if wait > 0:
            self._timer = self.loop.call_later(wait, self._look)
        else:
            self.transport.close()


def _fields(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The header by name; what stands on several lines is one list (RFC 9110, 5.3)."""
    fields = dict(headers)
    if len(fields) < len(headers):
        fields.clear()
        for name, value in headers:
            fields[name] = fields[name] + b", " + value if name in fields else value
    return fields


__all__ = ["Front", "Handler", "Route"]
