"""One question to the pool about one prompt, in a few rounds: its first gap, with few keys.

A prefix that was looked up before is sampled: one block at random of each of `SAMPLES` stretches, one object of it,
the first and the last block always. What comes behind it was never looked up; it is asked for whole, in chunks that
grow, up to the first gap, and sampled, too, where it is longer than a few chunks. Every object of a block counts,
since an engine loads a block only if each rank's and group's is there.

Why a sample will do: an engine's look-up renews the leases of a whole prompt at once, and the master evicts
the oldest leases first (BatchEvict in mooncake-store/src/master_service.cpp). So a prompt is there or gone as
a whole, but for the few at the boundary of an eviction, which have lost a random part, any part as likely as
another (measured: 360 to 1966 of 2000 blocks, alike in every tenth). Of n samples all survive in 1 of n + 1
such cases. Which prompts may be at the boundary is told by how old those are that were found to be gone;
they are sampled more densely. So are those that have lost their end, and those of which less is known: never
looked up, or not there when they were; or, until a loss is seen, older than all that was whole.

What samples do not tell: a master that evicts has at times taken all it found in its first shards, whatever its
age, and a thousandth of every prompt lies in each of them (measured: 1 to 80 of 2000 to 4000 blocks; what was put
and not looked up since has no lease and goes, too). And what is evicted between this look-up and the engine's.

Where a sample is missing and another one behind it is there, blocks were lost at random, and the first gap
lies near the beginning: blocks are asked for from there on. Otherwise the end is missing: blocks were never
stored, or are not yet, or were evicted first. Then the boundary is searched where it must be. What cannot be
found out with `MAX_KEYS` keys counts as gone.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random

from connector.mooncake import CHUNK_KEYS, Master, Tier
from connector.seen import Chain

SAMPLES = 96
MORE_SAMPLES = 384
"""Asked for as well where all samples of a prefix are there that may have been evicted in part."""
NARROWING = 16
"""Samples of the stretch that a boundary is known to lie in."""
FIRST_KEYS = 16
"""Keys of the first chunk of what was never looked up; each chunk is twice the one before, up to `CHUNK_KEYS`."""
WHOLE_KEYS = 240
"""Keys of such blocks that are asked for whole, before the rest is sampled."""
MAX_KEYS = 1024
"""Keys of one look-up, unless a single block has more objects than that."""


class _OutOfKeys(Exception):
    """A look-up has asked for as much as it may."""


class Probe:
    """One question to the pool about one chain. What it has found holds, even where it is not at its end."""

    def __init__(
        self,
        master: Master,
        chain: Chain,
        fresh: int,
        once: int,
        known: int,
        *,
        doubtful: bool,
        until: float,
        chance: Random,
    ) -> None:
        """Blocks up to `fresh` are there, those up to `once` were, those up to `known` were looked up.

        `doubtful`: some of these may have been evicted. `until` is on the loop's clock.
        """
        self._master = master
        self._chain = chain
        self._fresh = fresh
        self._once = once
        self._known = known
        self._doubtful = doubtful
        self._until = until
        self._chance = chance
        self._samples: dict[int, Tier | None] = {}
        """Blocks of which one object was asked for."""
        self._blocks: dict[int, Tier | None] = {}
        """Blocks of which all were."""
        self.asked = 0
        self.run = fresh

    async def go(self) -> None:
        """Find `run`. Raises a `WireError`."""
        with contextlib.suppress(_OutOfKeys):
            await self._go()

    async def _go(self) -> None:
        known, count = self._known, self._chain.count
        if known > self._fresh:
            behind = range(known, min(count, known + self._fit(FIRST_KEYS)))
            if known - self._fresh <= self._fit(SAMPLES):
                await self._ask((), range(self._fresh, behind.stop))
                if not await self._whole(known, SAMPLES):
                    return
            elif not await self._sampled(known, behind, doubtful=self._doubtful):
                return
        if await self._whole(count, WHOLE_KEYS) and self.run < count:
            await self._sampled(count, doubtful=True)

    def disk(self) -> Iterator[tuple[int, int]]:
        """Ends of prefixes behind `fresh`, with how many blocks behind it are on disk: each stands for those before."""
        found = self._samples | self._blocks
        last, disk = self._fresh, 0
        for place in sorted(place for place in found if self._fresh <= place < self.run):
            if found[place] == "disk":
                disk += place + 1 - last
            last = place + 1
            yield last, disk

    async def _sampled(self, end: int, whole: Iterable[int] = (), *, doubtful: bool) -> bool:
        """Move `run` towards `end` by what samples say; `whole` is asked for on the way. False: there is a gap.

        What was there and has lost its end is at the boundary of an eviction, and as `doubtful`.
        """
        start = self.run
        gap = await self._lost(start, end, SAMPLES, whole)
        if gap < end and not self._riddled(gap):
            gap = await self._boundary(start, gap)
        if (doubtful or gap < self._once) and not self._riddled(gap):
            gap = await self._lost(start, gap, MORE_SAMPLES)
        if self._riddled(gap):
            self.run = start
            await self._whole(gap, MAX_KEYS)
        else:
            self.run = gap
        return self.run == end

    async def _lost(self, start: int, end: int, samples: int, whole: Iterable[int] = ()) -> int:
        """The first of some samples that is not there, or `end`."""
        places = self._places(start, end, samples)
        await self._ask(places, whole)
        return next((place for place in places if not self._samples[place]), end)

    def _riddled(self, gap: int) -> bool:
        """Whether something behind a gap is there."""
        return any(tier for place, tier in self._samples.items() if place > gap)

    async def _boundary(self, start: int, gap: int) -> int:
        """The first gap of those at the end of what is there, where samples found one at `gap`."""
        while True:
            low = max((place + 1 for place, tier in self._samples.items() if tier and place < gap), default=start)
            low = max(low, start)
            if self._riddled(gap):
                return gap
            if (gap - low) * self._chain.width <= CHUNK_KEYS:
                break
            gap = await self._lost(low, gap, NARROWING)
        self.run = low
        await self._whole(gap, MAX_KEYS)
        return self.run

    async def _whole(self, end: int, keys: int) -> bool:
        """Move `run` to the first gap before `end`, or as far as about so many keys go. False: there is a gap."""
        size, left = FIRST_KEYS, keys
        while self.run < end and left > 0:
            stop = min(end, self.run + self._fit(size))
            left -= (stop - self.run) * self._chain.width
            if new := [place for place in range(self.run, stop) if place not in self._blocks]:
                await self._ask((), new)
            while self.run < stop:
                if not self._blocks[self.run]:
                    return False
                self.run += 1
            size = min(2 * size, CHUNK_KEYS)
        return True

    def _fit(self, keys: int) -> int:
        """How many blocks have so many keys; at least one."""
        return max(1, keys // self._chain.width)

    def _places(self, start: int, end: int, samples: int) -> list[int]:
        """One block of each of so many equal stretches; the first and the last one always."""
        size = end - start
        if size <= samples:
            return list(range(start, end))
        edges = [start + size * number // samples for number in range(1, samples)]
        return [start, *(self._chance.randrange(low, high) for low, high in pairwise(edges)), end - 1]

    async def _ask(self, samples: Sequence[int], whole: Iterable[int] = ()) -> None:
        """Find one object of each block of `samples` and all of each of `whole`. Raises `_OutOfKeys`."""
        one = {place: self._chain.key(place, self._chance.randrange(self._chain.width)) for place in samples}
        every = {place: self._chain.keys(place) for place in whole}
        keys = [*one.values(), *(key for block in every.values() for key in block)]
        if self.asked + len(keys) > max(MAX_KEYS, self._chain.width):
            raise _OutOfKeys
        self.asked += len(keys)
        there = await self._master.query(keys, self._until - asyncio.get_running_loop().time())
        for place, key in one.items():
            self._samples[place] = there.get(key)
        for place, block in every.items():
            self._blocks[place] = _farthest([there.get(key) for key in block])


def _farthest(tiers: Sequence[Tier | None]) -> Tier | None:
    """A block is where the farthest of its objects is, and nowhere if one is missing."""
    return None if None in tiers else "disk" if "disk" in tiers else "memory"
