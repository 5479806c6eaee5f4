"""How many leading blocks of a prompt the pool holds, within a deadline and with few keys.

    Residence  answers a look-up; owns the pool's `Master` and what goes on beside the requests
    Landmarks  which prefixes were looked up before, and when they were seen to be there
    _Probe     one question to the pool, in a few rounds
    _Frontier  how old what the master evicts is

A prefix that was seen less than `VERIFIED_SECONDS` ago is not asked for. One that was looked up before is
sampled: one block at random of each of `SAMPLES` stretches, one object of it, the first and the last block
always. What comes behind it was never looked up; it is asked for whole, in chunks that grow, up to the
first gap, and sampled, too, where it is longer than a few chunks. Every object of a block counts, since an
engine loads a block only if each rank's and group's is there.

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

Why unknown is not zero: a master that does not answer says nothing about the pool. A placement made
in ignorance must not look like one made because the pool was empty.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple

from connector.blocks import Prefix
from connector.errors import BadAnswer, TimedOut, WireError
from connector.keys import KeyScheme
from connector.mooncake import CHUNK_KEYS, Master, Tier

VERIFIED_SECONDS = 5.0
"""For which a prefix that was seen is not asked for again. The engine that gets the request asks for the same
blocks, and the master then keeps them for its `default_kv_lease_ttl`, 10 s unless set otherwise."""
STRIDE = 32
"""Blocks between two landmarks."""
LANDMARKS = 64 * 1024
"""Landmarks that are kept, at most 272 bytes each: 17 MiB for prefixes of 2 million blocks."""
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
FAILURES = 3
"""Look-ups that fail one after the other before no more are made for a while."""
PAUSES = (0.5, 10.0)
"""Seconds of that while, at first and at most: it doubles with every failure."""
SCAN_EVERY = 50
SCAN_PAUSE = 0.002
SCAN_SECONDS = 10.0
OVER = 128
"""Blocks by which an answer may be too high before a scan counts it: the engines' chunk of 2048 tokens."""

Trouble = Literal["timeout", "error", "answer", "open"]


@dataclass(frozen=True, slots=True)
class Residency:
    """What the pool was seen to hold of one prompt."""

    run: int | None
    """Leading blocks that are wholly there; None where the pool could not be asked."""
    asked: int
    """Keys that were asked for."""
    trouble: Trouble | None = None
    """Why `run` is unknown. `open`: not asked, since no master serves or the last look-ups failed."""
    disk: int = 0
    """How many blocks of `run` are on disk alone, reckoned from those that were asked for."""


class Mark(NamedTuple):
    """What is known of a prefix."""

    at: float
    """When it was looked up; the oldest of its parts counts."""
    there: bool
    """All of it was, then."""
    disk: int
    """Blocks of it on disk alone."""


EMPTY = Mark(float("inf"), there=True, disk=0)
"""The prefix of no blocks is always there."""


class Chain:
    """The blocks of a prompt that can be reused, and what they are called."""

    __slots__ = ("_domain", "_hashes", "count", "scheme", "width")

    def __init__(self, prefix: Prefix, scheme: KeyScheme) -> None:
        self._hashes = prefix.hashes
        self._domain = hashlib.blake2b("\0".join(scheme.prefixes).encode(), digest_size=8).digest()
        self.scheme = scheme
        self.count = prefix.reusable
        self.width = len(scheme.prefixes)

    def name(self, end: int) -> bytes:
        """Of the prefix of `end` blocks, under which it is remembered. Models may share hashes, but no keys."""
        return self._domain + self._hashes[end - 1][-16:]

    def keys(self, block: int) -> tuple[str, ...]:
        return self.scheme.keys(self._hashes[block])

    def key(self, block: int, which: int) -> str:
        return self.scheme.prefixes[which] + self._hashes[block].hex()


class Landmarks:
    """Which prefixes were looked up, at every `STRIDE`th block and at their ends. Bounded: the oldest go first."""

    def __init__(self, capacity: int = LANDMARKS) -> None:
        self._marks: OrderedDict[bytes, Mark] = OrderedDict()
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self, chain: Chain, end: int) -> Mark | None:
        return self._marks.get(chain.name(end)) if end else EMPTY

    def at(self, chain: Chain, end: int) -> float:
        """When that prefix was looked up; of none, never."""
        mark = self.mark(chain, end)
        return mark.at if mark is not None else float("-inf")

    def known(self, chain: Chain) -> int:
        """Blocks of the longest prefix of `chain` that was looked up before."""
        return self._longest(chain, lambda end: chain.name(end) in self._marks)

    def there(self, chain: Chain, since: float = float("-inf")) -> int:
        """Blocks of the longest prefix of `chain` that was there after `since`."""

        def holds(end: int) -> bool:
            mark = self.mark(chain, end)
            return mark is not None and mark.there and mark.at > since

        return self._longest(chain, holds)

    def keep(self, chain: Chain, ends: Iterable[int], mark: Callable[[int], Mark]) -> None:
        """Remember what is known of these prefixes, the longest first, so that shorter ones outlive them."""
        for end in sorted(ends, reverse=True):
            name = chain.name(end)
            self._marks[name] = mark(end)
            self._marks.move_to_end(name)
        while len(self._marks) > self._capacity:
            self._marks.popitem(last=False)

    @staticmethod
    def _longest(chain: Chain, holds: Callable[[int], bool]) -> int:
        """What holds for a prefix holds for those it begins with, so halving finds the last of the strides."""
        if chain.count and holds(chain.count):
            return chain.count
        low, high = 0, chain.count // STRIDE
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(middle * STRIDE) else (low, middle - 1)
        last = min(low * STRIDE + STRIDE - 1, chain.count - 1)
        return next((end for end in range(last, low * STRIDE, -1) if holds(end)), low * STRIDE)


class _OutOfKeys(Exception):
    """A look-up has asked for as much as it may."""


class _Probe:
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


class _Frontier:
    """How long ago that was used last which the master evicts now, in seconds: younger prefixes are there.

    It is bracketed by what look-ups find: something as old as this was lost, or all of something older was there.
    """

    def __init__(self) -> None:
        self._lost = float("inf")
        self._whole = 0.0
        """The oldest that was seen to be whole."""

    def near(self, age: float) -> bool:
        """Whether something of that age may have lost a part. A margin of half, since look-ups are few.

        Until a loss is seen, all that is older than what was seen to be whole may.
        """
        return age > min(self._lost / 2, self._whole)

    def note(self, age: float, *, lost: bool) -> None:
        if lost is (age < self._lost):
            self._lost = age
        if not lost:
            self._whole = max(self._whole, age)


class _Breaker:
    """Whether look-ups are made: not for a while after some have failed, then one at a time until one does not."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause = PAUSES[0]
        self._again = 0.0

    @property
    def tripped(self) -> bool:
        return self._failures >= FAILURES

    def lets(self, now: float, trying: bool) -> bool:
        """`trying`: another look-up is under way."""
        return self._failures < FAILURES or (now >= self._again and not trying)

    def succeeded(self) -> None:
        self._failures = 0
        self._pause = PAUSES[0]

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= FAILURES and now >= self._again:
            self._again = now + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])


class Residence:
    """The leading runs of one pool. `open` it, so that lost segments and masters are noticed.

    While the last `FAILURES` look-ups have failed, or no master serves, the pool is not asked.
    """

    def __init__(
        self,
        master: Master,
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Random | None = None,
        verified: float = VERIFIED_SECONDS,
        scan_every: int = SCAN_EVERY,
    ) -> None:
        """`deadline` in seconds covers a whole look-up; one of `scan_every` answers is compared with all keys.

        `clock` is the master's; `verified` are the seconds for which what was seen is not asked for again.
        """
        self.master = master
        self._deadline = deadline
        self._clock = clock
        self._chance = chance or Random()  # noqa: S311 -- samples, no secrets
        self._verified = verified
        self._landmarks = Landmarks()
        self._probes: dict[bytes, asyncio.Task[Residency]] = {}
        self._breaker = _Breaker()
        self._frontier = _Frontier()
        self._watch: asyncio.Task[None] | None = None
        self._scan_every = scan_every
        self._scan: asyncio.Task[None] | None = None
        self._answers = 0
        self.scans = 0
        self.over_predicted = 0
        """Scans that found less than was said, by more than `OVER` blocks."""
        self.under_predicted = 0
        """Scans that found more than was said."""

    @property
    def asks(self) -> bool:
        """Whether the pool is asked: a master serves, and the last look-ups did not all fail."""
        return self.master.serving and not self._breaker.tripped

    @property
    def remembered(self) -> int:
        """Landmarks that are kept."""
        return len(self._landmarks)

    async def open(self) -> None:
        """Look at the masters, then go on doing so beside the requests."""
        await self.master.look()
        self._watch = asyncio.create_task(self.master.watch())

    async def close(self) -> None:
        tasks = [task for task in (self._watch, self._scan, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.master.close()

    async def look_up(self, prefix: Prefix, scheme: KeyScheme) -> Residency:
        """Count the leading blocks of `prefix` that the pool holds. Never raises for a sick pool."""
        chain = Chain(prefix, scheme)
        if not chain.count:
            return Residency(0, 0)
        residency = self._remembered(chain) or await self._shared(chain)
        if residency.run is not None:
            self._answers += 1
            if self._answers % self._scan_every == 0 and (self._scan is None or self._scan.done()):
                self._scan = asyncio.create_task(self._compare(chain, residency.run))
        return residency

    def _remembered(self, chain: Chain) -> Residency | None:
        now = self._clock()
        name = chain.name(chain.count)
        trying = bool(self._probes) and name not in self._probes
        if not self.master.serving or not self._breaker.lets(now, trying):
            return Residency(None, 0, "open")
        mark = self._landmarks.mark(chain, chain.count)
        fresh = mark is not None and mark.there and mark.at > self._since(now)
        return Residency(chain.count, 0, disk=mark.disk) if mark is not None and fresh else None

    def _since(self, now: float) -> float:
        """What was seen before is to be asked for again."""
        return max(now - self._verified, self.master.changed)

    async def _shared(self, chain: Chain) -> Residency:
        """Ask, together with all others that ask for the same.

        Who asked first has the earliest deadline, and the question ends with it; who then has most of the time
        left asks again. Nobody who leaves takes the question away from the others.
        """
        loop = asyncio.get_running_loop()
        name, until = chain.name(chain.count), loop.time() + self._deadline
        while True:
            task = self._probes.get(name)
            mine = task is None
            if task is None:
                task = self._probes[name] = asyncio.create_task(self._probe(chain, until))
                task.add_done_callback(lambda _: self._probes.pop(name))
            await asyncio.wait({task})
            residency = task.result()
            if mine or residency.trouble != "timeout" or until - loop.time() < self._deadline / 2:
                return residency

    async def _probe(self, chain: Chain, until: float) -> Residency:
        began = self._clock()
        marks = self._landmarks
        fresh, once, known = marks.there(chain, self._since(began)), marks.there(chain), marks.known(chain)
        doubtful = known - once > OVER or self._frontier.near(began - marks.at(chain, known))
        probe = _Probe(self.master, chain, fresh, once, known, doubtful=doubtful, until=until, chance=self._chance)
        trouble: Trouble | None = None
        try:
            await probe.go()
        except TimedOut:
            trouble = "timeout"
        except BadAnswer:
            trouble = "answer"
        except WireError:
            trouble = "error"
        if trouble is not None:
            self._breaker.failed(self._clock())
            return Residency(None, probe.asked, trouble)
        self._breaker.succeeded()
        if probe.run < once:
            self._frontier.note(began - marks.at(chain, once), lost=True)
        elif fresh < known <= probe.run:
            self._frontier.note(began - marks.at(chain, known), lost=False)
        return Residency(probe.run, probe.asked, disk=self._remember(chain, probe, fresh, began))

    def _remember(self, chain: Chain, probe: _Probe, fresh: int, began: float) -> int:
        """Keep what a probe has seen; tells how many blocks of the run are on disk.

        A prefix is as fresh as its oldest part.
        """
        base = self._landmarks.mark(chain, fresh) or EMPTY
        at, disk, run = min(began, base.at), base.disk, probe.run
        marks: dict[int, Mark] = {}
        strides = iter(range(fresh - fresh % STRIDE + STRIDE, run + 1, STRIDE))
        stride = next(strides, None)
        for end, behind in probe.disk():
            while stride is not None and stride <= end:
                marks[stride] = Mark(at, there=True, disk=base.disk + behind)
                stride = next(strides, None)
            disk = base.disk + behind
        if run > fresh:
            marks[run] = Mark(at, there=True, disk=disk)
        for end in (*range(run - run % STRIDE + STRIDE, chain.count, STRIDE), chain.count):
            if end > run:
                marks[end] = Mark(began, there=False, disk=0)
        self._landmarks.keep(chain, marks, marks.__getitem__)
        return disk

    async def _compare(self, chain: Chain, said: int) -> None:
        """Count every object of the blocks that were said to be there, and of some behind them, which come first."""
        step = max(1, CHUNK_KEYS // chain.width)
        with contextlib.suppress(WireError, TimeoutError):
            async with asyncio.timeout(SCAN_SECONDS):
                more = await self._leading(chain, said, min(chain.count, said + step))
                real = 0
                while real < said:
                    stop = min(said, real + step)
                    real = await self._leading(chain, real, stop)
                    if real < stop:
                        break
                    await asyncio.sleep(SCAN_PAUSE)
            self.scans += 1
            self.over_predicted += said - real > OVER
            self.under_predicted += real == said and more > said

    async def _leading(self, chain: Chain, start: int, stop: int) -> int:
        """The first gap between these blocks, or `stop`."""
        keys = [chain.keys(block) for block in range(start, stop)]
        there = await self.master.query([key for block in keys for key in block])
        return next((start + at for at, block in enumerate(keys) if not all(key in there for key in block)), stop)
