"""The engine: prompts in, tokens out, step after step.

One task runs the steps: it asks the scheduler who gets what, sleeps as long as the step takes times
the time scale, and hands out the tokens. Blocks become findable when they are scheduled, as in vLLM,
and are published in the same breath, so before the bytes that they belong to. The pool is looked up
when it is a request's turn; only a prompt's blocks are put there (save_decode_cache is off), a
little after they are computed.

What differs from vLLM: blocks for generated tokens that find no place are left uncached instead of
pushing another request out; and requests that ask for do_remote_prefill or do_remote_decode are
answered as if they did not, as engines do that have the store connector only.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from connector.blocks import Adapter, HashScheme, extend, hash_prompt
from connector.simulated.cache import Cache
from connector.simulated.events import Chain, Event, Numbers, cleared, put, removed, stored
from connector.simulated.metrics import Metrics
from connector.simulated.script import Call
from connector.simulated.text import Saying
from connector.simulated.timing import Hold, Scheduler, Speed, Step, Work

Finish = Literal["stop", "length", "abort"]
Role = Literal["kv_both", "kv_producer", "kv_consumer"]
"""vLLM's kv_role: all load from the pool, a consumer puts nothing there."""


class Pool(Protocol):
    """What an engine needs of a store."""

    async def run(self, hashes: Sequence[bytes]) -> int: ...

    async def put(self, hashes: Sequence[bytes]) -> list[int]: ...

    async def clear(self) -> bool: ...


class Events(Protocol):
    """What an engine needs of a publisher."""

    numbers: Numbers

    def publish(self, events: Sequence[Event]) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to answer once."""

    tokens: Sequence[int]
    answer: Saying
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    salt: str | None = None
    adapter: Adapter | None = None
    lora_id: int | None = None
    call: Call | None = None
    """The tool's call that the answer is."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought to one prompt."""

    choice: int
    token: int | None
    text: str
    finish: Finish | None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's measures."""

    scheme: HashScheme
    eos: int
    speed: Speed
    blocks: int = 4096
    role: Role = "kv_both"
    time_scale: float = 1.0
    """Real seconds for a simulated one. 0: as fast as it goes."""


class Generation:
    """One prompt on its way through the engine."""

    def __init__(self, engine: "Engine", prompt: Prompt, choice: int, outputs: asyncio.Queue[Output]) -> None:
        self._engine = engine
        self._outputs = outputs
        self.prompt = prompt
        self.choice = choice
        self.tokens = list(prompt.tokens)
        self.prefix = self._hashed(self.tokens)
        self.hashes = list(self.prefix)
        self.blocks: list[int] = []
        self.computed = 0
        self.own = self.loaded = 0
        self.arrived = self.last = engine.clock()
        self.text = ""
        self.told = 0
        self.sampled = 0
        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None
        self._loading = 0
        self._lookup: asyncio.Task[int] | None = None
        self._looked_from = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.own + self.loaded

    @property
    def created(self) -> int:
        """Prompt tokens whose blocks this request brought into the cache."""
        size = self._engine.settings.scheme.block_size
        return max(0, len(self.prefix) * size - self.cached)

    def plan(self) -> Work | Hold:
        size = self._engine.settings.scheme.block_size
        reusable = self.prefix[: (len(self.prompt.tokens) - 1) // size]
        own = self._engine.cache.run(reusable)
        run = self._pool_run(reusable, own)
        if run is None:
            return Hold.DEFERRED
        run = max(run, own)
        held = self._engine.cache.hold(reusable[:own])
        taken = self._engine.cache.take(-(-len(self.tokens) // size) - own)
        if taken is None:
            self._engine.cache.release(held)
            return Hold.CAPACITY
        self.blocks = held + taken
        self.own, self.loaded = own * size, (run - own) * size
        self.computed = self.own
        self._engine.counted_prefix(self)
        self._loading = self.loaded
        return Work(len(self.tokens) - self.cached, self.loaded, self.prompt.max_tokens)

    def grant(self, tokens: int) -> None:
        """The blocks that become full with these tokens can be found from now on."""
        size = self._engine.settings.scheme.block_size
        first = self.computed // size
        self.computed += tokens + self._loading
        self._loading = 0
        last = min(self.computed // size, len(self.hashes))
        if last <= first:
            return
        if last > len(self.blocks):
            more = self._engine.cache.take(last - len(self.blocks))
            if more is None:
                return
            self.blocks += more
        for place in range(first, last):
            self._engine.cache.keep(self.blocks[place], self.hashes[place])
        self._engine.note_stored(self.chain(first, last))

    def sample(self) -> None:
        """One more token, and the end if this is the last one."""
        engine, prompt = self._engine, self.prompt
        position = self.sampled
        self.sampled += 1
        token, piece = engine.settings.eos, ""
        ends = position >= max(prompt.answer.length, prompt.min_tokens) and not prompt.ignore_eos
        if ends:
            self.finish = "stop"
        else:
            word = prompt.answer.word(position)
            token, piece = word.token, word.text
        self.text += piece
        self._append(token)
        if not ends:
            self._stopped(token, len(piece))
        if self.finish is None and self.sampled >= prompt.max_tokens:
            self.finish = "length"
        self._tell(token)

    def abort(self) -> None:
        """End it here; what was held back is said."""
        self.finish = "abort"
        self._tell(None)

    def leave(self) -> None:
        """Give back what it holds."""
        if self._lookup is not None:
            self._lookup.cancel()
        self._engine.cache.release(self.blocks)
        self.blocks = []

    def chain(self, first: int, last: int) -> Chain:
        """So many of its blocks, for an event."""
        size = self._engine.settings.scheme.block_size
        adapter = self.prompt.adapter
        names = () if adapter is None else (adapter.name,)
        salt = (self.prompt.salt,) if self.prompt.salt else ()
        keys = [names + (salt if place == 0 else ()) or None for place in range(first, last)]
        return Chain(
            hashes=self.hashes[first:last],
            parent=self.hashes[first - 1] if first else None,
            tokens=self.tokens[first * size : last * size],
            block_size=size,
            extra_keys=keys,
            lora_id=self.prompt.lora_id,
            lora_name=None if adapter is None else adapter.name,
        )

    def _pool_run(self, reusable: Sequence[bytes], own: int) -> int | None:
        """The leading blocks that are there with the pool's help; None while it is being asked."""
        if self._engine.pool is None or own >= len(reusable):
            return own
        if self._lookup is None:
            self._looked_from = own
            self._lookup = asyncio.create_task(self._engine.look_up(reusable[own:]))
        if not self._lookup.done():
            return None
        return own if own < self._looked_from else self._looked_from + self._lookup.result()

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        size = self._engine.settings.scheme.block_size
        if len(self.tokens) % size == 0:
            self.hashes.append(self._next_hash(self.tokens[-size:]))

    def _stopped(self, token: int, new: int) -> None:
        if self.sampled < self.prompt.min_tokens:
            return
        if token in self.prompt.stop_token_ids:
            self.finish, self.stop_reason = "stop", token
            return
        ends: list[tuple[int, int, str]] = []
        for order, stop in enumerate(self.prompt.stop):
            start = self.text.find(stop, max(0, len(self.text) - new - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), order, stop))
        if ends:
            end, _, stop = min(ends)
            self.text = self.text[: end if self.prompt.keep_stop else end - len(stop)]
            self.finish, self.stop_reason = "stop", stop

    def _tell(self, token: int | None) -> None:
        """Say what cannot be the beginning of a stop string any more."""
        held = 0
        if self.finish is None and self.prompt.stop and not self.prompt.keep_stop:
            held = max(map(len, self.prompt.stop)) - 1
        end = max(self.told, len(self.text) - held)
        piece, self.told = self.text[self.told : end], end
        self._outputs.put_nowait(Output(self.choice, token, piece, self.finish, self.stop_reason))

    def _hashed(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        scheme = self._engine.settings.scheme
        return hash_prompt(tokens, scheme, salt=self.prompt.salt, adapter=self.prompt.adapter).hashes

    def _next_hash(self, block: Sequence[int]) -> bytes:
        """The hash of a block that generated tokens have filled."""
        parent = self.hashes[-1] if self.hashes else None
        scheme = self._engine.settings.scheme
        return extend(parent, block, scheme, salt=self.prompt.salt, adapter=self.prompt.adapter)[0]


@dataclass(frozen=True, slots=True)
class Answering:
    """Prompts that are being answered, and what comes of it."""

    generations: tuple[Generation, ...]
    queue: asyncio.Queue[Output]

    async def outputs(self) -> AsyncIterator[Output]:
        """Everything, in the order in which it comes, until all prompts have ended."""
        left = len(self.generations)
        while left:
            output = await self.queue.get()
            left -= output.finish is not None
            yield output


class Engine:
    """One engine. A context: it steps while it is open."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        pool: Pool | None = None,
        events: Events | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is in real seconds."""
        self.settings = settings
        self.metrics = metrics
        self.pool = pool
        self.clock = clock
        self.cache = Cache(settings.blocks)
        self.events = events
        self._scheduler: Scheduler[Generation] = Scheduler(settings.speed)
        self._alive: dict[Generation, None] = {}
        self._noted: list[Event] = []
        self._puts: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._now = 0.0
        self._due = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()
        for task in (self._task, *self._puts):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @contextlib.asynccontextmanager
    async def answering(self, prompts: Sequence[Prompt]) -> AsyncIterator[Answering]:
        """Answer these prompts; those that have not ended when the context is left give their places back."""
        queue: asyncio.Queue[Output] = asyncio.Queue()
        generations = tuple(Generation(self, prompt, choice, queue) for choice, prompt in enumerate(prompts))
        for generation in generations:
            self._alive[generation] = None
            self._scheduler.submit(generation)
        self._gauge()
        self._wake.set()
        try:
            yield Answering(generations, queue)
        finally:
            for generation in generations:
                if generation in self._alive:
                    generation.finish = "abort"
                    self._end(generation)

    def abort(self) -> None:
        """End everything, as an engine does that is told to stop: the answers are cut short and say so."""
        for generation in list(self._alive):
            generation.abort()
            self._end(generation)

    async def reset(self, *, external: bool = False) -> bool:
        """Forget all blocks, with `external` the pool's too. Whether it was done: not while any is in use.

        The events about it go out with the next step, as vLLM's do.
        """
        done = self.cache.reset()
        if done:
            self._note_removed()
            self._noted += [] if self.events is None else [cleared()]
        if external and self.pool is not None:
            return await self.pool.clear() and done
        return done

    @property
    def load(self) -> Mapping[str, float]:
        """What the header endpoint-load-metrics tells."""
        return {"num_requests_waiting": float(self._scheduler.waiting), "kv_cache_usage_perc": self.cache.usage}

    async def look_up(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these the pool can give."""
        assert self.pool is not None
        try:
            return await self.pool.run(hashes)
        finally:
            self._wake.set()

    def counted_prefix(self, generation: Generation) -> None:
        """A request has been found its cached tokens."""
        tokens = len(generation.prompt.tokens)
        self.metrics.queries.inc(tokens)
        self.metrics.hits.inc(generation.own)
        if self.pool is not None:
            self.metrics.external_queries.inc(tokens - generation.own)
            self.metrics.external_hits.inc(generation.loaded)

    def note_stored(self, chain: Chain) -> None:
        """Blocks are full; they go out with this step's events."""
        self._note_removed()
        if self.events is not None:
            self._noted.append(stored(chain, self.events.numbers))

    def _note_removed(self) -> None:
        for digest in self.cache.drain():
            if self.events is not None:
                self._noted.append(removed(digest, self.events.numbers))

    def _publish(self) -> None:
        self._note_removed()
        if self.events is not None and self._noted:
            self.events.publish(self._noted)
            self._noted = []

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            step = self._scheduler.step(self._now)
            self._publish()
            self._gauge()
            if step is None:
                await self._wake.wait()
                self._due = self.clock()
            elif step.idle:
                await self._wait(step.seconds)
            else:
                await self._pass(step.seconds)
                self._hand_out(step)

    async def _pass(self, seconds: float) -> None:
        """Let the time of a step pass; what the last one took too long is made up for, within limits."""
        self._due = max(self._due, self.clock() - 0.05) + seconds * self.settings.time_scale
        await asyncio.sleep(max(0.0, self._due - self.clock()))
        self._now += seconds

    async def _wait(self, seconds: float) -> None:
        """Nothing to compute until a load ends, unless somebody submits."""
        scale = self.settings.time_scale
        started = self.clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * scale):
                await self._wake.wait()
        passed = (self.clock() - started) / scale if scale else seconds
        self._now += min(seconds, passed) if self._wake.is_set() else seconds
        self._due = self.clock()

    def _hand_out(self, step: Step[Generation]) -> None:
        for generation in step.sampled:
            if generation not in self._alive:
                continue
            generation.sample()
            self._count(generation)
            if generation.finish is not None:
                self._end(generation)

    def _count(self, generation: Generation) -> None:
        now = self.clock()
        self.metrics.generated.inc()
        if generation.sampled == 1:
            self._prefilled(generation, now)
        else:
            self.metrics.between.observe(now - generation.last)
        generation.last = now

    def _prefilled(self, generation: Generation, now: float) -> None:
        tokens = len(generation.prompt.tokens)
        self.metrics.first_token.observe(now - generation.arrived)
        self.metrics.prompt.inc(tokens)
        self.metrics.by_source["local_compute"].inc(tokens - generation.cached)
        self.metrics.by_source["local_cache_hit"].inc(generation.own)
        self.metrics.by_source["external_kv_transfer"].inc(generation.loaded)
        if self.pool is not None and self.settings.role != "kv_consumer" and generation.prefix:
            task = asyncio.create_task(self._put(self.pool, generation))
            self._puts.add(task)
            task.add_done_callback(self._puts.discard)

    async def _put(self, pool: Pool, generation: Generation) -> None:
        """Bring a prompt's blocks to the pool: it takes as long as it would to load them."""
        tokens = len(generation.prompt.tokens) - generation.cached
        await asyncio.sleep(self.settings.speed.load_seconds(tokens) * self.settings.time_scale)
        for place in await pool.put(generation.prefix):
            if self.events is not None:
                self._noted += put(generation.chain(place, place + 1), self.events.numbers)
        self._publish()

    def _end(self, generation: Generation) -> None:
        assert generation.finish is not None
        del self._alive[generation]
        self._scheduler.remove(generation)
        generation.leave()
        self.metrics.success[generation.finish].inc()
        self.metrics.latency.observe(self.clock() - generation.arrived)
        if generation.sampled:
            self.metrics.computed.observe(len(generation.prompt.tokens) - generation.cached)
        self._gauge()

    def _gauge(self) -> None:
        waiting, loading = self._scheduler.waiting, self._scheduler.loading
        held = waiting - loading
        self.metrics.running.set(self._scheduler.running)
        self.metrics.waiting.set(waiting)
        deferred = loading + (held if self._scheduler.held is Hold.DEFERRED else 0)
        self.metrics.waiting_by_reason["deferred"].set(deferred)
        self.metrics.waiting_by_reason["capacity"].set(waiting - deferred)
        self.metrics.usage.set(self.cache.usage)
