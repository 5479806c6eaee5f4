"""What the pool holds: of a prompt's blocks, how many leading ones; of a block, under which names.

The Mooncake master is asked over its HTTP port (`GET /batch_query_keys`): that takes no lease and
touches no LRU order, the answer comes within a deadline or not at all, and the process loads no
native client. Keys are asked for in prefix order, a chunk at a time, and no further than the first
gap, since vLLM loads nothing behind one.

A name with a comma cannot be asked for: the master splits its keys after decoding them. Its answer
then lacks the key, and what an answer lacks is unknown.

How engines name a block is learned from one that must be there, where it is not as expected. Only
`/get_all_keys` tells it, a line for each key of the whole pool (100 bytes each, and as many more in the
master while it answers), so it is read once and not to its end; what it says is asked for again.

Why unknown is not zero: a master that does not answer says nothing about the pool. A placement made
in ignorance must not look like one made because the pool was empty.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import orjson

from connector.blocks import Prefix
from connector.errors import BadAnswer, TimedOut, WireError
from connector.keys import KeyScheme
from connector.wire import Answer, Timeouts, Wire

CHUNK_KEYS = 128
"""Keys asked for at a time: 0.3 ms for the master, so that it serves its engines in between."""
MAX_ANSWER = 4 * 1024 * 1024
MAX_LISTING = 32 * 1024 * 1024
"""Bytes of a list of all keys that are read."""
MAX_KEY = 64 * 1024
LEARN_SECONDS = 10.0
"""For a look at all keys: 200,000 take a fifth of a second."""

T = TypeVar("T")
Trouble = Literal["timeout", "error", "answer"]


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
        longest = max(deadline, LEARN_SECONDS)
        timeouts = Timeouts(connect=max(deadline, 1.0), head=longest, idle=longest)
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

    async def keys_of(self, hashes: Collection[bytes]) -> frozenset[str]:
        """The keys that end in any of the blocks `hashes`, whatever stands before it.

        That a key has an object still is not said. The blocks are best those of a prompt with a salt of its
        own, so that no other engines wrote them. Raises a `WireError`. Of a pool with more keys than
        `MAX_LISTING` bytes tell, some are missed.
        """
        return frozenset(await self._told(lambda wire: self._listed(wire, hashes)))

    async def resident(self, keys: Sequence[str]) -> frozenset[str]:
        """Those of `keys` that the pool holds. Raises a `WireError`."""
        return frozenset(await self._told(lambda wire: self._all_resident(wire, keys)))

    async def _listed(self, wire: Wire, hashes: Collection[bytes]) -> set[str]:
        listing = await wire.send("GET", "/get_all_keys")
        try:
            if listing.status != 200:
                raise ValueError(f"the master answered {listing.status}")
            return await _ending(listing, frozenset(block.hex().encode() for block in hashes))
        finally:
            listing.close()

    async def _told(self, ask: Callable[[Wire], Awaitable[T]]) -> T:
        """What a master says within `LEARN_SECONDS`; whatever goes wrong is a `WireError`."""
        wire = self._wires[0]
        try:
            async with asyncio.timeout(LEARN_SECONDS):
                return await ask(wire)
        except TimeoutError:
            self._give_up(wire)
            raise TimedOut(wire.origin, "total", LEARN_SECONDS) from None
        except WireError:
            self._give_up(wire)
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._give_up(wire)
            raise BadAnswer(wire.origin, "not what a Mooncake master answers") from error

    def close(self) -> None:
        for wire in self._wires:
            wire.close()

    @staticmethod
    def _chunks(hashes: Sequence[bytes], scheme: KeyScheme) -> Iterator[list[tuple[str, ...]]]:
        step = max(1, CHUNK_KEYS // len(scheme.prefixes))
        for start in range(0, len(hashes), step):
            yield [scheme.keys(block) for block in hashes[start : start + step]]

    async def _all_resident(self, wire: Wire, keys: Sequence[str]) -> set[str]:
        """`_resident` for any number of keys."""
        there: set[str] = set()
        for start in range(0, len(keys), CHUNK_KEYS):
            there |= await self._resident(wire, keys[start : start + CHUNK_KEYS])
        return there

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


async def _ending(listing: Answer, digests: frozenset[bytes]) -> set[str]:
    """The keys that end in one of `digests`, out of a list with a key a line."""
    found: set[bytes] = set()
    size, rest = 0, b""
    while size < MAX_LISTING and (piece := await listing.read()):
        size += len(piece)
        *keys, rest = (rest + piece).split(b"\n")
        found.update(_those_of(keys, digests))
        if len(rest) > MAX_KEY:
            raise ValueError("no list of keys")
        await asyncio.sleep(0)
    found.update(_those_of([rest], digests))
    return {key.decode() for key in found}


def _those_of(keys: Sequence[bytes], digests: frozenset[bytes]) -> Iterator[bytes]:
    for key in keys:
        whole = key.strip()
        _, mark, digest = whole.rpartition(b"@")
        if mark and digest in digests:
            yield whole
