"""How many leading blocks of a prompt the pool holds, within a deadline and with few keys.

    Residence  answers a look-up; owns the pool's `Master` and what goes on beside the requests
    Seen       which prefixes were looked up before, and when they were seen to be there (connector/seen.py)
    Probe      one question to the pool, in a few rounds (connector/probe.py)
    _Frontier  how old what the master evicts is

A prefix that was seen less than `VERIFIED_SECONDS` ago is not asked for. Equal prefixes share one question. What is
told of a prefix that was looked up before rests on samples; one in `SCAN_EVERY` answers is compared with all keys
afterwards, beside the requests.

Why unknown is not zero: a master that does not answer says nothing about the pool. A placement made
in ignorance must not look like one made because the pool was empty.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from connector.blocks import Prefix
from connector.errors import BadAnswer, TimedOut, WireError
from connector.keys import KeyScheme
from connector.mooncake import CHUNK_KEYS, Master
from connector.probe import Probe
from connector.seen import EMPTY, STRIDE, Chain, Mark, Seen

VERIFIED_SECONDS = 5.0
"""For which a prefix that was seen is not asked for again. The engine that gets the request asks for the same
blocks, and the master then keeps them for its `default_kv_lease_ttl`, 10 s unless set otherwise."""
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
        self._seen = Seen()
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
        """Prefixes that are."""
        return len(self._seen)

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
        mark = self._seen.mark(chain, chain.count)
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
        seen = self._seen
        fresh, once, known = seen.there(chain, self._since(began)), seen.there(chain), seen.known(chain)
        doubtful = known - once > OVER or self._frontier.near(began - seen.at(chain, known))
        probe = Probe(self.master, chain, fresh, once, known, doubtful=doubtful, until=until, chance=self._chance)
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
            self._frontier.note(began - seen.at(chain, once), lost=True)
        elif fresh < known <= probe.run:
            self._frontier.note(began - seen.at(chain, known), lost=False)
        return Residency(probe.run, probe.asked, disk=self._remember(chain, probe, fresh, began))

    def _remember(self, chain: Chain, probe: Probe, fresh: int, began: float) -> int:
        """Keep what a probe has seen; tells how many blocks of the run are on disk.

        A prefix is as fresh as its oldest part.
        """
        base = self._seen.mark(chain, fresh) or EMPTY
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
        self._seen.keep(chain, marks, marks.__getitem__)
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
