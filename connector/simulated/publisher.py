"""KV events over ZeroMQ, as vLLM sends them.

A message is three frames: topic, 8 bytes of sequence number, and a msgpack array
`[time, events, data parallel rank]`. Whoever missed some asks the replay socket with an empty frame
and the first number wanted, and gets what is still buffered, then the number -1.

An address with a `*` is bound, any other one is connected to, as vLLM does.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from connector.simulated.events import Event, Numbers

BUFFERED = 10_000
"""Messages kept for replay."""
END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class Publisher:
    """One engine's events. A context: its sockets live while it is open."""

    endpoint: str
    replay: str | None
    clock: Callable[[], float]
    """Seconds since 1970, for the batches' time."""
    numbers: Numbers = field(default_factory=Numbers)
    buffered: int = BUFFERED
    _context: zmq.Context[zmq.Socket[bytes]] = field(init=False)
    _socket: zmq.Socket[bytes] = field(init=False)
    _task: asyncio.Task[None] | None = field(init=False, default=None)

    async def __aenter__(self) -> Self:
        self._context = zmq.Context()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=self.buffered)
        self._next = 0
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        if "*" in self.endpoint or "::" in self.endpoint:
            self._socket.bind(self.endpoint)
        else:
            self._socket.connect(self.endpoint)
        if self.replay is not None:
            router = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
            router.linger = 0
            router.bind(self.replay)
            self._task = asyncio.create_task(self._replay(router))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._socket.close()
        self._context.term()

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch. Never waits: a subscriber that does not read loses messages."""
        if not events:
            return
        payload = msgspec.msgpack.encode([self.clock(), list(events), 0])
        self._socket.send_multipart((b"", self._next.to_bytes(8, "big"), payload))
        self._sent.append((self._next, payload))
        self._next += 1

    def settings(self) -> dict[str, object]:
        """What /kv_event_sources says."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay,
            "buffer_steps": self.buffered,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        try:
            while True:
                frames = await router.recv_multipart()
                if len(frames) != 3:
                    continue
                client, _, first = frames
                for number, payload in list(self._sent):
                    if number >= int.from_bytes(first, "big"):
                        await router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
                await router.send_multipart([client, b"", b"", END, b""])
        finally:
            router.close()
