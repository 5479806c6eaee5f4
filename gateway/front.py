"""The server's protocol: uvicorn's, with bounds on what comes before and behind a body. It has none.

Without them, header lines, trailers and chunk extensions that never end fill the memory of the process
for anybody who can connect, and a connection that says nothing stays for ever.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024
"""Bytes that may come without any of them being of a body."""
HEAD_SECONDS = 10.0
"""Seconds for a connection's first request line and headers; uvicorn's keep-alive bounds later silence."""


class Front(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *settings: Any, **more: Any) -> None:
        super().__init__(*settings, **more)
        self._bare = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        self._bare += len(data)
        super().data_received(data)
        if self._bare > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The request's head or trailer is too large.")

    def on_headers_complete(self) -> None:
        self._in_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bare = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bare = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
