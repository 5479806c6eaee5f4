"""The Mooncake masters of a pool, as they are spoken to.

    query      which of some keys have an object, and in which tier
    wait_for   until a block is there
    keys_of    under which names some blocks are there
    watch      which master serves, and when the pool lost something

All is asked over the master's HTTP port: that takes no lease and touches no LRU order, the answer comes
within a deadline or not at all, and the process loads no native client.

A name with a comma cannot be asked for: the master splits its keys after decoding them. Its answer
then lacks the key, and what an answer lacks is unknown.

How engines name a block is learned from one that must be there, where it is not as expected. Only
`/get_all_keys` tells it, a line for each key of the whole pool (100 bytes each, and as many more in the
master while it answers), so it is read once and not to its end; what it says is asked for again.

Of several masters one serves, which its `/health` tells (`service_ready`); a standby answers, too, and knows
nothing. While `watch` runs, masters that do not serve are not asked. A pool has lost something when its
master does not answer, serves no longer or is another one, and when a segment is gone: an engine that was
killed is dropped `client_ttl` after its last sign of life, and a new master knows no segment at first.

A master in multi-tenant mode shows the objects of the tenant `default` over HTTP and of no other. Engines
that use that tenant (they do unless they set `tenant_id`) are seen rightly; of others nothing is ever found,
and they get no credit for the pool. Tenants of a gateway need none of it: their salts keep them apart.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import orjson

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
WATCH_SECONDS = 0.25
"""Between two looks at the masters."""
LOOK_SECONDS = 0.5
"""For which each of them may take to answer one."""

log = logging.getLogger("moongate")
T = TypeVar("T")
Tier = Literal["memory", "disk"]


class Master:
    """The Mooncake masters of one pool, asked one at a time: the next one when one fails."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`urls` are the masters' HTTP (metrics) ports."""
        timeouts = Timeouts(connect=1.0, head=LEARN_SECONDS, idle=LEARN_SECONDS)
        self._wires = [Wire(url, timeouts) for url in urls]
        self._idle: frozenset[Wire] = frozenset()
        """Those that were seen not to serve."""
        self._served_by: Wire | None = None
        self._segments: frozenset[tuple[str, str]] = frozenset()
        self._clock = clock
        self.serving = True
        """Whether any of them served when they were last looked at."""
        self.changed = float("-inf")
        """When, on `clock`, the pool was last seen to have lost something."""

    @property
    def segments(self) -> int:
        """Segments that were in use when the master was last looked at."""
        return len(self._segments) if self.serving else 0

    async def query(self, keys: Sequence[str], seconds: float = LEARN_SECONDS) -> Mapping[str, Tier]:
        """Those of `keys` that have an object, and where the best replica is. Raises a `WireError`."""

        async def ask(wire: Wire) -> dict[str, Tier]:
            there: dict[str, Tier] = {}
            for start in range(0, len(keys), CHUNK_KEYS):
                there |= await self._query(wire, keys[start : start + CHUNK_KEYS])
            return there

        return await self._told(ask, seconds)

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
                    try:
                        if len(await self.query(keys)) == len(keys):
                            return True
                    except WireError:
                        pass  # another master may know
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 0.1)
        except TimeoutError:
            return False

    async def watch(self) -> None:
        """Look at the masters every `WATCH_SECONDS`, for ever. Raises nothing."""
        while True:
            await self.look()
            await asyncio.sleep(WATCH_SECONDS)

    async def look(self) -> None:
        """See which master serves and whether the pool has lost something, within twice `LOOK_SECONDS`."""
        ready = await asyncio.gather(*(self._ready(wire) for wire in self._wires))
        serving = [wire for wire, is_ready in zip(self._wires, ready, strict=True) if is_ready]
        self._idle = frozenset(self._wires) - frozenset(serving)
        self.serving = bool(serving)
        if not serving:
            self._lose()
            return
        wire = serving[0]
        self._wires.sort(key=lambda other: other is not wire)
        if wire is not self._served_by:
            self._lose()
            self._served_by = wire
            await self._tell_of_tenants(wire)
        segments = await self._mounted(wire)
        if segments is None or not segments.issuperset(self._segments):
            self._lose()
        self._segments = segments or frozenset()

    def _lose(self) -> None:
        self.changed = self._clock()
        if not self.serving:
            self._served_by = None

    async def _ready(self, wire: Wire) -> bool:
        """Whether this master serves. Older ones tell no more than that they are there."""
        try:
            status, body = await self._look_at(wire, "/health")
        except WireError:
            return False
        try:
            told = orjson.loads(body)
        except ValueError:
            told = None
        return status == 200 and (not isinstance(told, dict) or told.get("service_ready") is not False)

    async def _mounted(self, wire: Wire) -> frozenset[tuple[str, str]] | None:
        """The segments that are in use, each with its client; None where the master does not tell."""
        try:
            _, body = await self._look_at(wire, "/get_segments_detail")
            return frozenset(
                (str(segment["segment_name"]), str(segment["client_id"]))
                for segment in orjson.loads(body)["segments"]
                if segment.get("status", "OK") == "OK"
            )
        except (WireError, ValueError, KeyError, TypeError, AttributeError):
            return None

    async def _tell_of_tenants(self, wire: Wire) -> None:
        """Log that a master is in multi-tenant mode; one that is not refuses to speak of quotas."""
        try:
            status, _ = await self._look_at(wire, "/api/v1/tenant_quotas")
        except WireError:
            return
        if status == 200:
            log.warning(
                "the Mooncake master at %s is in multi-tenant mode: blocks of its tenant 'default' are seen, no others",
                wire.origin,
            )

    @staticmethod
    async def _look_at(wire: Wire, target: str) -> tuple[int, bytes]:
        """The status and the body of an answer that comes within `LOOK_SECONDS`."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                answer = await wire.send("GET", target)
                return answer.status, await answer.body(MAX_ANSWER)
        except TimeoutError:
            raise TimedOut(wire.origin, "total", LOOK_SECONDS) from None

    async def keys_of(self, hashes: Collection[bytes]) -> frozenset[str]:
        """The keys that end in any of the blocks `hashes`, whatever stands before it.

        That a key has an object still is not said. The blocks are best those of a prompt with a salt of its
        own, so that no other engines wrote them. Raises a `WireError`. Of a pool with more keys than
        `MAX_LISTING` bytes tell, some are missed.
        """
        return frozenset(await self._told(lambda wire: self._listed(wire, hashes)))

    async def resident(self, keys: Sequence[str]) -> frozenset[str]:
        """Those of `keys` that the pool holds. Raises a `WireError`."""
        return frozenset(await self.query(keys))

    async def _listed(self, wire: Wire, hashes: Collection[bytes]) -> set[str]:
        listing = await wire.send("GET", "/get_all_keys")
        try:
            if listing.status != 200:
                raise ValueError(f"the master answered {listing.status}")
            return await _ending(listing, frozenset(block.hex().encode() for block in hashes))
        finally:
            listing.close()

    async def _told(self, ask: Callable[[Wire], Awaitable[T]], seconds: float = LEARN_SECONDS) -> T:
        """What a master says within `seconds`; whatever goes wrong is a `WireError`."""
        wire = self._wires[0]
        try:
            async with asyncio.timeout(seconds):
                return await ask(wire)
        except TimeoutError:
            self._give_up(wire)
            raise TimedOut(wire.origin, "total", seconds) from None
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
    async def _query(wire: Wire, keys: Sequence[str]) -> dict[str, Tier]:
        """One question. A key that goes unanswered is a KeyError."""
        target = "/batch_query_keys?keys=" + ",".join(quote(key, safe="@:") for key in keys)
        answer = await wire.send("GET", target)
        body = await answer.body(MAX_ANSWER)
        if answer.status != 200:
            raise ValueError(f"the master answered {answer.status}")
        entries = orjson.loads(body)["data"]
        found = ((key, _tier(entries[key])) for key in keys)
        return {key: tier for key, tier in found if tier is not None}

    def _give_up(self, wire: Wire) -> None:
        """Ask the next master from now on, unless another question has seen to that already, or none serves."""
        if self._wires[0] is wire and not self._idle.issuperset(self._wires[1:]):
            self._wires.append(self._wires.pop(0))
            self._wires.sort(key=self._idle.__contains__)


def _tier(entry: Mapping[str, Any]) -> Tier | None:
    memory, disks = entry["values"], (entry["disk_values"], entry["local_disk_values"], entry["nof_values"])
    if entry["ok"] is not True:
        return None
    return "memory" if memory else "disk" if any(disks) else None


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
