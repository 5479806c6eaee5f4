r"""A scripted TCP server: says exactly the bytes that a test tells it, and remembers what it heard.

    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")

    async with listen(script) as peer:
        ...  # peer.url, peer.lines

The n-th connection gets the n-th script, the last one all that follow. A script that ends leaves its
connection open until the peer is gone. A script that raises fails the test.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

SECOND_THOUGHTS = 5.0
"""Seconds after which a wait in a test is hopeless."""


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Line:
    """One connection, from the server's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.requests: list[Request] = []
        self.ended = asyncio.Event()
        """Set when the script saw the other side go."""

    async def request(self) -> Request:
        """The next request. Raises `asyncio.IncompleteReadError` where the other side left instead."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        method, target, _ = first.split(" ")
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, target, headers, body)
        self.requests.append(request)
        return request

    async def send(self, data: bytes) -> None:
        if self._writer.is_closing():  # uvloop has no ConnectionError for this
            raise ConnectionResetError("the other side is gone")
        self._writer.write(data)
        await self._writer.drain()

    async def left(self) -> None:
        """Wait until the other side is gone."""
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.ended.set()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """End with a RST instead of a FIN."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Line], Awaitable[None]]


@dataclass
class Peer:
    host: str
    port: int
    lines: list[Line]
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def requests(self) -> list[Request]:
        return [request for line in self.lines for request in line.requests]


@asynccontextmanager
async def listen(*scripts: Script, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """A peer on a free port, while the block runs, which it may not for long."""
    tasks: set[asyncio.Task[None]] = set()
    lines: list[Line] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        lines.append(line)
        try:
            await scripts[min(len(lines), len(scripts)) - 1](line)
            await line.left()
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(play(reader, writer)))

    server = await asyncio.start_server(accept, host, 0, ssl=tls)
    try:
        async with asyncio.timeout(4 * SECOND_THOUGHTS):
            yield Peer(host, server.sockets[0].getsockname()[1], lines, "http" if tls is None else "https")
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        failures = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in failures:
        if isinstance(failure, Exception) and not isinstance(failure, asyncio.IncompleteReadError | ConnectionError):
            raise failure


def answers(*pieces: bytes) -> Script:
    """To each request in turn one of `pieces`, the last one to all that follow."""

    async def script(line: Line) -> None:
        while True:
            await line.request()
            await line.send(pieces[min(len(line.requests), len(pieces)) - 1])

    return script


def once(*pieces: bytes) -> Script:
    """To the first request all of `pieces`, one write each; then the end."""

    async def script(line: Line) -> None:
        await line.request()
        for piece in pieces:
            await line.send(piece)
            await asyncio.sleep(0)
        line.close()

    return script


async def hold(line: Line) -> None:
    """Hear the request and say nothing."""
    await line.request()
    await line.left()


def ok(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, content_type, len(body), body)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(SECOND_THOUGHTS):
        while not condition():  # noqa: ASYNC110 -- of conditions in general nobody tells
            await asyncio.sleep(0.001)
