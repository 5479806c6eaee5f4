"""Block hashes to object keys to how many leading blocks the pool holds.

The Mooncake master is asked over its HTTP port (`GET /batch_query_keys`): that takes no lease and
touches no LRU order, the answer comes within a deadline or not at all, and the process loads no
native client. Keys are asked for in prefix order, a chunk at a time, and no further than the first
gap, since vLLM loads nothing behind one.

A key is `[cache_prefix@]MODEL@tp_rank:T@pcpP@dcpD@pp_rank:R@group:0@HASH`, MODEL being the last
component of the engine's --model. A block can be loaded only if the object of every rank is there.
Source: PoolKey and _init_lookup_key_prefixes in vLLM 0.32.0,
vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/{data,worker}.py.

A name with a comma cannot be asked for: the master splits its keys after decoding them. Its answer
then lacks the key, and what an answer lacks is unknown.

Why unknown is not zero: a master that does not answer says nothing about the pool. A placement made
in ignorance must not look like one made because the pool was empty.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import orjson

from connector.blocks import Prefix
from connector.errors import TimedOut, WireError
from connector.wire import Timeouts, Wire

CHUNK_KEYS = 128
"""Keys asked for at a time: 0.3 ms for the master, so that it serves its engines in between."""
MAX_ANSWER = 4 * 1024 * 1024

Trouble = Literal["timeout", "error", "answer"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The parallel layout of the engines that write the pool: one object a block and rank."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    kv_heads: int | None = None
    """KV heads of the model; fewer than `tp` are replicated and stored once each. None: enough."""

    def suffixes(self) -> tuple[str, ...]:
        """The part of the key between the model's name and the hash, for every rank."""
        replicas = 1 if self.kv_heads is None or self.dcp > 1 else max(1, self.tp // self.kv_heads)
        return tuple(
            f"@tp_rank:{tp}@pcp{pcp}@dcp{tp % self.dcp}@pp_rank:{pp}@group:0@"
            for pcp in range(self.pcp)
            for tp in range(self.tp // replicas)
            for pp in range(self.pp)
        )


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How one cache domain names its objects."""

    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, ranks: Ranks | None = None) -> "KeyScheme":
        """`name` is the model folder's name, behind `cache_prefix@` where the engines set one."""
        return cls(tuple(name + suffix for suffix in (ranks or Ranks()).suffixes()))

    def keys(self, block_hash: bytes) -> tuple[str, ...]:
        """Every object that must exist for this block to be usable."""
        digest = block_hash.hex()
        return tuple(prefix + digest for prefix in self.prefixes)


@dataclass(frozen=True, slots=True)
class Residency:
    """What the pool was seen to hold of one prompt."""

    run: int | None
    """Leading blocks that are wholly there; None where the pool could not be asked."""
    asked: int
    """Keys that were asked for."""
    trouble: Trouble | None = None
    """Why `run` is unknown."""


class Master:
    """The Mooncake masters of one pool, asked one at a time: the next one when one fails."""

    def __init__(self, urls: Sequence[str], deadline: float) -> None:
        """`urls` are the masters' HTTP (metrics) ports; `deadline` in seconds covers a whole look-up."""
        timeouts = Timeouts(connect=max(deadline, 1.0), head=max(deadline, 1.0), idle=max(deadline, 1.0))
        self._wires = [Wire(url, timeouts) for url in urls]
        self._deadline = deadline

    async def look_up(self, prefix: Prefix, scheme: KeyScheme) -> Residency:
        """Count the leading blocks of `prefix` that the pool holds. Never raises for a sick pool."""
        run = asked = 0
        wire = self._wires[0]
        try:
            async with asyncio.timeout(self._deadline):
                for blocks in self._chunks(prefix.hashes[: prefix.reusable], scheme):
                    keys = [key for block in blocks for key in block]
                    asked += len(keys)
                    resident = await self._resident(wire, keys)
                    for block in blocks:
                        if not resident.issuperset(block):
                            return Residency(run, asked)
                        run += 1
        except (TimeoutError, TimedOut):
            return self._unknown(wire, asked, "timeout")
        except WireError:
            return self._unknown(wire, asked, "error")
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._unknown(wire, asked, "answer")
        return Residency(run, asked)

    async def wait_for(self, block: bytes, scheme: KeyScheme, deadline: float) -> bool:
        """Wait until every object of a block is there, at most `deadline` seconds.

        A prefill's answer comes before its blocks are stored (24 ms to 2.6 s earlier), so the hand
        over to a decode engine waits for the last full block. False: not seen in time.
        """
        keys = scheme.keys(block)
        pause = 0.005
        try:
            async with asyncio.timeout(deadline):
                while True:
                    wire = self._wires[0]
                    try:
                        if (await self._resident(wire, keys)).issuperset(keys):
                            return True
                    except (WireError, ValueError, KeyError, TypeError, AttributeError):
                        self._give_up(wire)
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 0.1)
        except TimeoutError:
            return False

    def close(self) -> None:
        for wire in self._wires:
            wire.close()

    @staticmethod
    def _chunks(hashes: Sequence[bytes], scheme: KeyScheme) -> Iterator[list[tuple[str, ...]]]:
        step = max(1, CHUNK_KEYS // len(scheme.prefixes))
        for start in range(0, len(hashes), step):
            yield [scheme.keys(block) for block in hashes[start : start + step]]

    @staticmethod
    async def _resident(wire: Wire, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that have a replica in memory or on disk. A key that goes unanswered is a KeyError."""
        target = "/batch_query_keys?keys=" + ",".join(quote(key, safe="@:") for key in keys)
        answer = await wire.send("GET", target)
        body = await answer.body(MAX_ANSWER)
        if answer.status != 200:
            raise ValueError(f"the master answered {answer.status}")
        entries = orjson.loads(body)["data"]
        return {key for key in keys if _stored(entries[key])}

    def _unknown(self, wire: Wire, asked: int, trouble: Trouble) -> Residency:
        self._give_up(wire)
        return Residency(None, asked, trouble)

    def _give_up(self, wire: Wire) -> None:
        """Ask the next master from now on, unless another look-up has seen to that already."""
        if self._wires[0] is wire:
            self._wires.append(self._wires.pop(0))


def _stored(entry: Mapping[str, Any]) -> bool:
    places = (entry["values"], entry["disk_values"], entry["local_disk_values"], entry["nof_values"])
    return entry["ok"] is True and any(places)
