"""What stands behind the gateway in a benchmark: an engine and a master that answer at once, in one process.

    python -m tests.benchmarks.upstream PORT EVENTS PAUSE

Hot requests get a canned chat, streamed ones EVENTS events with PAUSE seconds between them, each with the
moment at which it is sent (time.monotonic, which all processes share) as its text. Every key is in the pool.
"""

import asyncio
import re
import resource
import sys
import time
from typing import cast
from urllib.parse import unquote

import orjson
import uvloop

from tests.double import DONE, LAST_CHUNK, Engine, chunk, completed, delta, head, usage_event

_engine = Engine()
_CONTROL = {
    "/health": (b"", "text/plain"),
    "/v1/models": (orjson.dumps({"object": "list", "data": _engine.cards}), "application/json"),
    "/metrics": (_engine._metrics(), "text/plain"),
}
_STAMP = re.compile(rb'"content":"([0-9.]{18})"')
_WHOLE = orjson.dumps(completed(finish="stop", prompt=-1))


def whole(body: bytes, content_type: str = "application/json") -> bytes:
    return head(200, [("content-type", content_type), ("content-length", str(len(body)))]) + body


def stamped() -> bytes:
    return delta(f"{time.monotonic():018.6f}")


def stamps(stream: bytes | bytearray) -> list[tuple[int, float]]:
    """Where in a stream each stamp ends, and its moment."""
    return [(mark.end(), float(mark[1])) for mark in _STAMP.finditer(stream)]


class Connection(asyncio.Protocol):
    """One connection; reads whole requests, answers each at once."""

    def __init__(self, events: int, pause: float) -> None:
        self._events = events
        self._pause = pause
        self._pieces: list[bytes] = []
        self._lacks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._lacks -= len(data)
        if self._lacks > 0:  # a large body: not looked at before it is whole
            return
        buffer = b"".join(self._pieces)
        raw, mark, rest = buffer.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", raw) if mark else None
        self._lacks = int(length[1]) - len(rest) if length else 0
        self._pieces = [buffer]
        if mark and self._lacks <= 0:
            self._pieces = []
            self._answer(raw.split(b" ", 2)[1].decode(), rest)

    def _answer(self, target: str, body: bytes) -> None:
        path, _, query = target.partition("?")
        if path in _CONTROL:
            self._transport.write(whole(*_CONTROL[path]))
        elif path == "/batch_query_keys":
            found = {"ok": True, "error": None, "values": [{"size_": 1}]}
            found |= dict.fromkeys(("disk_values", "local_disk_values", "nof_values"))
            keys = unquote(query.removeprefix("keys=")).split(",")
            self._transport.write(whole(orjson.dumps({"success": True, "data": dict.fromkeys(keys, found)})))
        elif b'"stream":true' in body:
            self._streaming = asyncio.create_task(self._stream())
        else:
            self._transport.write(whole(_WHOLE))

    async def _stream(self) -> None:
        self._transport.write(head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]))
        for _ in range(self._events):
            self._transport.write(chunk(stamped()))
            await asyncio.sleep(self._pause)
        self._transport.write(chunk(usage_event(prompt=-1)) + chunk(DONE) + LAST_CHUNK)


async def main(port: int, events: int, pause: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(events, pause), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
