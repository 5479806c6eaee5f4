"""What an engine holds of its own: told by its KV events, or else estimated from what was sent there.

vLLM publishes over ZMQ (vllm/distributed/kv_events.py of 0.32.0): frames are a topic, a sequence
number of eight bytes, big-endian, and msgpack: `[time, [event, ...], data parallel rank]`. Events
are maps with a `type` and are read by name, so that new fields and unknown kinds do no harm. A
block's hash comes as 64 bits or in full; both agree in their last eight bytes, which is the key here.

A missing sequence number means that blocks may be gone that we believe in: what this engine is
thought to hold is forgotten, and grows again. So it is when the sequence starts anew, since the
engine then did too.

Only blocks in the engine's own cache count. Events of the medium `cpu` tell of puts into the pool,
never of removals from it, so the pool is asked instead (connector/mooncake.py).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from connector.blocks import Prefix
from connector.errors import ConnectorError

DEFAULT_BLOCKS = 65_536
"""Blocks remembered for an engine that does not say how many it has: some 10 MB."""
KEY_BYTES = 8
OWN_MEDIA = frozenset({None, "GPU"})
QUEUE = 10_000
"""Batches that may wait to be read; beyond them ZMQ drops, which the sequence then shows."""


class Held(Protocol):
    """What one engine is thought to hold."""

    capacity: int
    """Blocks that the engine has at most."""

    def run(self, prefix: Prefix) -> int:
        """How many leading blocks of a prompt are held, of those that can be reused."""
        ...

    def computed(self, prefix: Prefix) -> None:
        """The engine has computed or loaded this prompt."""
        ...

    def clear(self) -> None:
        """Nothing is known any more."""
        ...

    def __len__(self) -> int: ...


class Estimated:
    """An LRU of the blocks that were sent to an engine, as large as the engine's own cache."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = DEFAULT_BLOCKS

    def run(self, prefix: Prefix) -> int:
        return _run(self._blocks, prefix)

    def computed(self, prefix: Prefix) -> None:
        """Remember its blocks. A chain's tail is forgotten first, as vLLM does."""
        for block in reversed(prefix.hashes):
            key = block[-KEY_BYTES:]
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)


class Reported:
    """The blocks that an engine's events tell of."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._next: int | None = None
        self._decoder = msgspec.msgpack.Decoder()
        self._witness: Mapping[str, Any] | None = None
        self.capacity = DEFAULT_BLOCKS
        self.gaps = 0
        """Times that a sequence number was missing."""
        self.received = 0
        """Messages that came, since the start."""
        self.missed = False
        """Somebody has told that none comes."""
        self.bad = 0
        """Messages that could not be read."""

    def run(self, prefix: Prefix) -> int:
        return _run(self._blocks, prefix)

    def computed(self, prefix: Prefix) -> None:
        """The engine says so itself."""

    def clear(self) -> None:
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)

    def witness(self) -> Mapping[str, Any] | None:
        """The newest event that tells of a prompt's first block, to judge hashes by; once."""
        event, self._witness = self._witness, None
        return event

    def receive(self, frames: list[bytes]) -> None:
        """Take one message in. What cannot be read is counted and treated as a gap."""
        self.received += 1
        try:
            _, number, payload = frames
            sequence = int.from_bytes(number, "big")
            _, events, *_ = self._decoder.decode(payload)
            if self._next is not None and sequence != self._next:
                self.gaps += 1
                self.clear()
            self._next = sequence + 1
            for event in events:
                self._apply(event)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgspec.DecodeError):
            self.bad += 1
            self.clear()

    def _apply(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.clear()
        elif kind == "BlockStored" and event.get("medium") in OWN_MEDIA:
            for block in event["block_hashes"]:
                self._blocks[_key(block)] = None
            if event.get("parent_block_hash") is None:
                self._witness = event
            while len(self._blocks) > self.capacity:
                self._blocks.popitem(last=False)
        elif kind == "BlockRemoved" and event.get("medium") in OWN_MEDIA:
            for block in event["block_hashes"]:
                self._blocks.pop(_key(block), None)


class Receives(Protocol):
    """Takes in an engine's messages."""

    def receive(self, frames: list[bytes]) -> None: ...


class NoEvents(ConnectorError):
    """The address cannot be bound or connected to."""


class Subscription:
    """A SUB socket on an engine's events. vLLM connects to a concrete address and binds one with `*`."""

    def __init__(self, address: str, *, bind: bool) -> None:
        """Raises `NoEvents`."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            if bind:
                self._socket.bind(address)
            else:
                self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise NoEvents(f"no KV events can be had at {address}: {error}") from error

    async def follow(self, held: Receives) -> None:
        """Read events for ever; cancel it to stop. Other work gets its turn after each message."""
        while True:
            held.receive(await self._socket.recv_multipart())
            await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _run(blocks: Mapping[bytes, None], prefix: Prefix) -> int:
    count = 0
    for block in prefix.hashes[: prefix.reusable]:
        if block[-KEY_BYTES:] not in blocks:
            break
        count += 1
    return count


def _key(block: object) -> bytes:
    """The last eight bytes of a hash, whichever way the engine gives it."""
    if isinstance(block, bytes):
        return block[-KEY_BYTES:]
    if isinstance(block, int):
        return (block & 0xFFFFFFFFFFFFFFFF).to_bytes(KEY_BYTES, "big")
    raise TypeError(f"a block hash is {type(block).__name__}")
