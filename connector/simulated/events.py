"""KV events as vLLM publishes them: what the engine stored, what it gave up. Over ZeroMQ.

A message is three frames: topic, 8 bytes of sequence number, and a msgpack array
`[time, events, data parallel rank]`, each event a map with its `type`. Whoever missed some asks the
replay socket with an empty frame and the first number wanted, and gets what is still buffered, then
the number -1. Source: vllm/distributed/kv_events.py of 0.32.0, and for the medium `cpu` (blocks that
this engine put into the pool) mooncake/store/worker.py; both compared with a running engine.

An address with a `*` is bound, any other one is connected to, as vLLM does.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgpack
import zmq
import zmq.asyncio

BUFFERED = 10_000
END = (-1).to_bytes(8, "big", signed=True)

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks of one request."""

    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    block_size: int
    extra_keys: Sequence[tuple[str, ...] | None]
    """For each block the adapter's name and the salt, where they go into its hash."""
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Numbers:
    """How block hashes are written: full bytes, or by vLLM's default their low 64 bits."""

    whole: bool = True

    def of(self, digest: bytes) -> bytes | int:
        return digest if self.whole else int.from_bytes(digest[-8:], "big")


def stored(chain: Chain, numbers: Numbers) -> Event:
    """The engine has computed or loaded these blocks."""
    return {
        "type": "BlockStored",
        "block_hashes": [numbers.of(digest) for digest in chain.hashes],
        "parent_block_hash": None if chain.parent is None else numbers.of(chain.parent),
        "token_ids": list(chain.tokens),
        "block_size": chain.block_size,
        "lora_id": chain.lora_id,
        "medium": "GPU",
        "lora_name": chain.lora_name,
        "extra_keys": list(chain.extra_keys),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def put(chain: Chain, numbers: Numbers) -> list[Event]:
    """The engine has put these blocks into the pool: an event each, the adapter unnamed."""
    events = []
    parent = chain.parent
    for count, digest in enumerate(chain.hashes):
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": [numbers.of(digest)],
                "parent_block_hash": None if parent is None else numbers.of(parent),
                "token_ids": list(chain.tokens[count * chain.block_size : (count + 1) * chain.block_size]),
                "block_size": chain.block_size,
                "lora_id": None,
                "medium": "cpu",
                "lora_name": None,
                "group_idx": 0,
            }
        )
        parent = digest
    return events


def removed(digest: bytes, numbers: Numbers) -> Event:
    """The engine has given up this block."""
    return {"type": "BlockRemoved", "block_hashes": [numbers.of(digest)], "medium": "GPU", "group_idx": 0}


def cleared() -> Event:
    """The engine has given up all blocks."""
    return {"type": "AllBlocksCleared"}


@dataclass
class Publisher:
    """One engine's events. A context: its sockets live while it is open."""

    endpoint: str
    replay: str | None
    clock: Callable[[], float]
    """Seconds since 1970, for the batches' time."""
    numbers: Numbers = Numbers()
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
        payload: bytes = msgpack.packb([self.clock(), list(events), 0])
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
