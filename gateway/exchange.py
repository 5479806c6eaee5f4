"""One HTTP exchange with a client: its head, its body within limits, and the answer's bytes.

`present()` watches for the client's leaving and cancels what runs inside it, at whatever `await` it
stands. Nothing else on the path has to think of that.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from gateway.errors import BodyTooLarge, BodyTooSlow, ClientLeft, GatewayError

_WELL_FORMED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Exchange:
    """A request from its head on, and the answer to it."""

    __slots__ = ("_finished", "_receive", "_send", "headers", "path", "request_id", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.request_id = request_id(self.headers)
        self.started = False
        self._finished = False
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def body(self, limit: int, seconds: float) -> bytes:
        """The request's body. Raises `BodyTooLarge` (a declared length at once), `BodyTooSlow`, `ClientLeft`."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(limit)
        pieces: list[bytes] = []
        size = 0
        more = True
        try:
            async with asyncio.timeout(seconds):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    piece = message.get("body", b"")
                    more = message.get("more_body", False)
                    size += len(piece)
                    if size > limit:
                        raise BodyTooLarge(limit)
                    pieces.append(piece)
        except TimeoutError:
            raise BodyTooSlow(f"The request body did not arrive within {seconds:g} s; send it again.") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @asynccontextmanager
    async def present(self) -> AsyncIterator[None]:
        """Run the block while the client is there. Raises `ClientLeft` as soon as it is not."""
        task = asyncio.current_task()
        assert task is not None
        left = False

        async def listen() -> None:
            nonlocal left
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._finished:
                left = True
                task.cancel()

        watch = asyncio.create_task(listen())
        try:
            yield
        except asyncio.CancelledError:
            if left and task.uncancel() == 0:
                raise ClientLeft from None
            raise
        finally:
            watch.cancel()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the answer's head."""
        self.started = True
        headers.append((b"x-request-id", self.request_id.encode("ascii")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body; waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self, piece: bytes = b"") -> None:
        """Send the last piece of the body."""
        self._finished = True
        await self._send({"type": "http.response.body", "body": piece})

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def refuse(self, error: GatewayError) -> None:
        """Answer with an error. Once the head is out nothing can be refused any more."""
        await self.answer(error.status, [(b"content-type", b"application/json"), *error.headers], error.body())


def request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's x-request-id where it is well formed, else one of our own."""
    for name, value in headers:
        if name == b"x-request-id" and _WELL_FORMED_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex
