"""Engines and a pool that exist only as numbers: what vLLM and Mooncake would do, with a clock that jumps.

An engine's steps and chunks are those of connector/simulated/timing.py, its blocks those of cache.py beside it. So
cached = max(own, run of the pool), loaded = max(0, run - own), and at least one token is computed. A request gets
the blocks for all of its prompt and answer when it is admitted, and queues while fewer are free; the answer's
blocks can be found when it ends. Prompts are put into the pool when they are computed, answers when they end and
where `save_decode_cache` is on; an engine that only decodes puts no prompts.

A full pool evicts one object for each that comes, the oldest lease deadline first, as Mooncake's master does above
its watermark: a put has the deadline of its moment; an engine's look-up, and its check before a put, move it on by
a lease. What still has a lease stays, and a put that finds no room is dropped. Of one prompt the head is the oldest.
"""

import heapq
import math
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from connector.blocks import Prefix
from connector.landmarks import Landmarks, Sent
from connector.simulated.cache import Cache
from connector.simulated.timing import Hold, Scheduler, Speed, Step, Work
from policies.interface import Candidate, Role

EPSILON = 1e-9
"""Steps; what comes at the very end of a step comes before the next."""


class Timeline:
    """What happens when. What is due at one moment happens in the order in which it was told."""

    def __init__(self) -> None:
        self.now = 0.0
        self._told = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._told += 1
        heapq.heappush(self._due, (when, self._told, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def next(self) -> bool:
        """Let the next thing happen; False when nothing is left."""
        if not self._due:
            return False
        self.now, _, call, arguments = heapq.heappop(self._due)
        call(*arguments)
        return True


class Pool:
    """Blocks and the ends of their leases, in two queues: all leases are as long, so each is in order."""

    def __init__(self, capacity: int, lease: float) -> None:
        self._capacity = capacity
        self._lease = lease
        self._put: OrderedDict[bytes, float] = OrderedDict()
        self._leased: OrderedDict[bytes, float] = OrderedDict()
        self.evicted = 0
        self.refused = 0
        """Blocks that found no room."""
        self.lost = 0

    def __contains__(self, block: bytes) -> bool:
        return block in self._leased or block in self._put

    def __len__(self) -> int:
        return len(self._put) + len(self._leased)

    def run(self, blocks: Sequence[bytes]) -> int:
        """How many leading ones it holds. Touches nothing: so the gateway asks."""
        return next((count for count, block in enumerate(blocks) if block not in self), len(blocks))

    def touch(self, blocks: Sequence[bytes], now: float) -> None:
        """An engine asks for these."""
        for block in blocks:
            if block in self._leased:
                self._leased.move_to_end(block)
            elif self._put.pop(block, None) is None:
                continue
            self._leased[block] = now + self._lease

    def put(self, blocks: Sequence[bytes], now: float) -> None:
        """An engine brings those that are not here."""
        self.touch(blocks, now)
        for block in blocks:
            if block in self:
                continue
            if len(self) >= self._capacity and not self._evict(now):
                self.refused += 1
            else:
                self._put[block] = now

    def lose(self, share: float, chance: random.Random) -> None:
        """A share of the blocks vanishes, as with the node that had their segments."""
        for queue in (self._put, self._leased):
            gone = [block for block in queue if chance.random() < share]
            self.lost += len(gone)
            for block in gone:
                del queue[block]

    def _evict(self, now: float) -> bool:
        put = next(iter(self._put.values()), math.inf)
        leased = next(iter(self._leased.values()), math.inf)
        if min(put, leased) > now:
            return False
        (self._put if put <= leased else self._leased).popitem(last=False)
        self.evicted += 1
        return True


class Leg:
    """One request on one engine."""

    def __init__(
        self,
        prefix: Prefix,
        landmarks: Landmarks,
        *,
        answer: Sequence[bytes],
        output: int,
        backlog: int,
        begun: Callable[["Leg"], None],
        ended: Callable[["Leg"], None],
    ) -> None:
        """`answer` names the blocks after the prompt's; `backlog` is the tokens that the gateway counts for it.

        `begun` and `ended` are called when its first and its last byte are there.
        """
        self.prefix = prefix
        self.landmarks = landmarks
        self.output = output
        self.backlog = backlog
        self.engine: Engine
        self.queued = 0
        """The engine's backlog when it was sent, as the gateway counts."""
        self.sent = 0.0
        self.own = self.loaded = 0
        """Tokens from the engine's own cache, and from the pool."""
        self.first = math.nan
        """When its first byte came."""
        self.begun = begun
        self.ended = ended
        self._answer = answer
        self._blocks: list[int] = []
        self._computed = 0
        self._loading = 0

    @property
    def answer(self) -> Sequence[bytes]:
        """The answer's full blocks. Its last token is never computed."""
        full = (self.prefix.tokens + self.output - 1) // self.prefix.block_size
        return self._answer[: full - len(self.prefix.hashes)]

    def plan(self) -> Work | Hold:
        """Take the blocks of all its tokens."""
        engine, prefix, size = self.engine, self.prefix, self.prefix.block_size
        reusable = prefix.hashes[: prefix.reusable]
        own = engine.run(reusable)
        needed = -(-(prefix.tokens + self.output) // size) - own
        if needed > engine.cache.spare(reusable[:own]):
            return Hold.CAPACITY
        run = max(own, engine.look_up(reusable))
        held = engine.cache.hold(reusable[:own])
        taken = engine.cache.take(needed)
        assert taken is not None
        self._blocks = held + taken
        self.own, self.loaded = own * size, (run - own) * size
        self._computed, self._loading = self.own, self.loaded
        return Work(prefix.tokens - self.own - self.loaded, self.loaded, self.output)

    def grant(self, tokens: int) -> None:
        """The prompt's blocks that become full can be found from now on."""
        size, hashes = self.prefix.block_size, self.prefix.hashes
        first = self._computed // size
        self._computed += tokens + self._loading
        self._loading = 0
        for place in range(first, min(self._computed // size, len(hashes))):
            self.engine.cache.keep(self._blocks[place], hashes[place])

    def leave(self) -> None:
        """Its answer can be found from now on; all blocks are given back."""
        for place, block in enumerate(self.answer, len(self.prefix.hashes)):
            self.engine.cache.keep(self._blocks[place], block)
        self.engine.cache.release(self._blocks)


@dataclass(slots=True)
class Tally:
    """What one engine did."""

    id: str
    requests: int = 0
    busy_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    load_tokens: int = 0
    load_seconds: float = 0.0
    evicted: int = 0
    """Blocks that can be found no more."""


class Engine:
    """One engine, and the gateway's books of it, which are those of gateway/fleet.py."""

    def __init__(
        self,
        name: str,
        role: Role,
        timeline: Timeline,
        pool: Pool | None,
        *,
        blocks: int,
        speed: Speed,
        put_delay: float,
    ) -> None:
        """`put_delay` is in seconds, from the moment at which blocks are full to the begin of their transfer."""
        self.id = name
        self.role = role
        self.cache = Cache(blocks)
        self.sent = Sent(lambda: timeline.now)
        self.requests = 0
        self.backlog = 0
        self.tally = Tally(name)
        self._time = timeline
        self._pool = pool
        self._put_delay = put_delay
        self._scheduler: Scheduler[Leg] = Scheduler(speed)
        self._step: Step[Leg] | None = None
        self._strides = 0
        """Steps under way that are all alike, in place of `_step`."""
        self._stride = self._began = 0.0
        """Seconds of each, and when the first began."""
        self._ticket = 0
        """Which awakening counts; those that were told before do not."""
        self._signals: tuple[float, float, float] | None = None
        self._polled = 0.0

    def run(self, blocks: Sequence[bytes]) -> int:
        """How many leading ones it holds. It has those before any that it has: a chain's tail is taken first."""
        return bisect_left(blocks, True, key=self._lacks)

    def look_up(self, blocks: Sequence[bytes]) -> int:
        """How many leading ones the pool holds. vLLM asks for all of a prompt, its own ones too."""
        if self._pool is None:
            return 0
        self._pool.touch(blocks, self._time.now)
        return self._pool.run(blocks)

    def poll(self) -> None:
        """The gateway reads its metrics."""
        self._signals = float(self._scheduler.waiting), float(self._scheduler.running), self.cache.usage
        self._polled = self._time.now

    def candidate(self, prefix: Prefix, landmarks: Landmarks) -> Candidate:
        """It as the gateway sees it. Its KV events have all come."""
        waiting, running, usage = self._signals or (None, None, None)
        return Candidate(
            id=self.id,
            role=self.role,
            requests=self.requests,
            tokens=self.backlog,
            waiting=waiting,
            own_tokens=self.run(prefix.hashes[: prefix.reusable]) * prefix.block_size,
            running=running,
            cache_usage=usage,
            signal_age=self._time.now - self._polled if self._signals is not None else None,
            likely_tokens=self.sent.under_way(landmarks),
        )

    def submit(self, leg: Leg) -> None:
        """A request comes in. A step that is under way is finished first."""
        leg.sent = self._time.now
        leg.queued = self.backlog
        leg.engine = self
        self.requests += 1
        self.backlog += leg.backlog
        self.sent.begin(leg.landmarks)
        self.tally.requests += 1
        self._scheduler.submit(leg)
        self._interrupt()

    def slow(self, factor: float) -> None:
        """Compute, decode and load at this factor of the present speed."""
        speed = self._scheduler.speed
        self._interrupt()
        self._scheduler.speed = replace(
            speed,
            prefill_tokens_per_second=speed.prefill_tokens_per_second * factor,
            decode_step_seconds=speed.decode_step_seconds / factor,
            decode_seconds_per_request=speed.decode_seconds_per_request / factor,
            load_bytes_per_second=speed.load_bytes_per_second * factor,
        )

    def put(self, leg: Leg, blocks: Sequence[bytes], then: Callable[[], None] = lambda: None) -> None:
        """Bring these blocks of a request to the pool, those that it lacks; `then` is called when they are there."""
        if self._pool is None:
            return
        lacking = sum(block not in self._pool for block in blocks) * leg.prefix.block_size
        seconds = self._scheduler.speed.load_seconds(lacking) if lacking else 0.0
        self._time.after(self._put_delay + seconds, self._there, blocks, then)

    def _there(self, blocks: Sequence[bytes], then: Callable[[], None]) -> None:
        assert self._pool is not None
        self._pool.put(blocks, self._time.now)
        then()

    def _lacks(self, block: bytes) -> bool:
        return block not in self.cache

    def _interrupt(self) -> None:
        """Somebody came: begin a step now, or as soon as the one under way is over."""
        if self._strides:
            begun = max(1, math.ceil((self._time.now - self._began) / self._stride - EPSILON))
            if begun < self._strides:
                self._strides = begun
                self._wake_at(self._began + begun * self._stride)
        elif self._step is None or self._step.idle:
            self._step = None
            self._wake_at(self._time.now)

    def _wake_at(self, when: float) -> None:
        self._ticket += 1
        self._time.at(max(when, self._time.now), self._wake, self._ticket)

    def _wake(self, ticket: int) -> None:
        """A step is over, or nothing was under way: begin the next."""
        if ticket != self._ticket:
            return
        if self._strides:
            self.tally.busy_seconds += self._strides * self._stride
            self._scheduler.skip(self._strides)
            self._strides = 0
        elif self._step is not None:
            step, self._step = self._step, None
            self._finish(step)
        self._begin()

    def _begin(self) -> None:
        now, speed = self._time.now, self._scheduler.speed
        self._strides = self._scheduler.alike(now)
        if self._strides:
            self._began, self._stride = now, speed.step_seconds(0, self._scheduler.running)
            self._wake_at(now + self._strides * self._stride)
            return
        self._step = self._scheduler.step(now)
        self.tally.evicted += len(self.cache.drain())
        if self._step is not None:
            self._wake_at(now + self._step.seconds)

    def _finish(self, step: Step[Leg]) -> None:
        if not step.idle:
            tally, speed = self.tally, self._scheduler.speed
            tally.busy_seconds += step.seconds
            tally.prefill_tokens += step.prefilled
            tally.prefill_seconds += step.prefilled / speed.prefill_tokens_per_second
        for leg in step.sampled:
            if math.isnan(leg.first):
                self._answers(leg)
        for leg in step.ended:
            leg.leave()
            self.requests -= 1
            self.sent.ended(leg.landmarks)
            leg.ended(leg)

    def _answers(self, leg: Leg) -> None:
        leg.first = self._time.now
        self.backlog -= leg.backlog
        if leg.loaded:
            self.tally.load_tokens += leg.loaded
            self.tally.load_seconds += self._scheduler.speed.load_seconds(leg.loaded)
        leg.begun(leg)
