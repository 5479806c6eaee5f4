"""Which engines are alive, how busy each is, and what each is thought to hold.

Our own requests are counted exactly, by leases. An engine's own word (health, queue, cache) is read
every `poll` seconds and carries its age; one that is too old counts as missing, and what we know
ourselves stands without it. What an engine holds of a prompt is told by its KV events, or estimated
from what was sent there; it is forgotten when the engine was away.

An engine with data parallel ranks has a cache and a queue in each: every rank is an engine here, that is
named in the header `X-data-parallel-rank` (vllm/entrypoints/openai/engine/serving.py).
"""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from connector.blocks import Adapter, Prefix
from connector.calibrate import Finding
from connector.errors import Unreachable, WireError
from connector.events import Inbox, Subscription
from connector.held import MOST_BLOCKS, Estimated, Held, Reported
from connector.landmarks import NOWHERE, Landmarks, Sent
from connector.vllm import CacheFacts, Card, EngineControl, Load
from connector.wire import Timeouts, Wire
from gateway.breaker import Breaker
from gateway.sse import Fingerprint
from policies.interface import Candidate, Role

log = logging.getLogger("moongate")

CARDS_EVERY = 10
"""Polls between two readings of /v1/models (adapters come and go)."""
MISSES = 2
"""Polls in a row that must fail before an engine that can be connected to gets no more work."""
STALE_AFTER = 5
"""Polls after which an engine's word on its load counts as missing."""


NOTHING = CacheFacts(block_size=None, algorithm=None, blocks=None)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine's KV events come from."""

    address: str
    bind: bool = False
    replay: str | None = None
    """Where missed ones can be asked for."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine as configured."""

    url: str
    model: str
    role: Role = "both"
    api_key: str | None = None
    events: EventSource | None = None
    rank: int | None = None
    """Which data parallel rank is meant; None: it has one."""


class Engine:
    """One engine and what is known of it now."""

    def __init__(
        self,
        spec: EngineSpec,
        timeouts: Timeouts,
        poll_timeout: float,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.spec = spec
        self.id = urlsplit(spec.url).netloc + (f"#{spec.rank}" if spec.rank is not None else "")
        self.wire = Wire(spec.url, timeouts, tls)
        self.control = EngineControl(spec.url, api_key=spec.api_key, timeout=poll_timeout, tls=tls, rank=spec.rank)
        self.breaker = Breaker(clock)
        self.fingerprint = Fingerprint()
        key = [(b"authorization", b"Bearer " + spec.api_key.encode())] if spec.api_key else []
        rank = [(b"x-data-parallel-rank", str(spec.rank).encode())] if spec.rank is not None else []
        self.headers: tuple[tuple[bytes, bytes], ...] = (*key, *rank)
        self.held: Held = Estimated() if spec.events is None else Reported()
        self.sent = Sent(clock)
        self.subscription: Subscription | None = None
        self.cards: tuple[Card, ...] = ()
        self.version: str | None = None
        self.facts = NOTHING
        self.finding: Finding | None = None
        """Whether it hashes and names blocks as is believed; None: it was not found out yet."""
        self._found_at = 0.0
        self.trouble: str | None = "not asked yet"
        """Why it gets no work; None when it does."""
        self.since: float | None = None
        """When it came in, came back or began anew; None: it was there from the start."""
        self.requests = 0
        self.backlog = 0
        self._misses = 0
        self._load: Load | None = None
        self._load_at = 0.0

    @property
    def alive(self) -> bool:
        return self.trouble is None

    def signals(self, now: float, oldest: float) -> tuple[Load | None, float | None]:
        """What it said of its load, if that was read since `oldest`, and how many seconds ago it last did."""
        if self._load is None:
            return None, None
        return (self._load if self._load_at >= oldest else None), now - self._load_at

    def likely(self, landmarks: Landmarks, exact: bool) -> int:
        """Leading tokens that it likely holds when it comes to a prompt: they are being computed there.

        Where what it holds cannot be told, the prompt being inexact or its hashes others than ours: they were sent.
        """
        return self.sent.under_way(landmarks) if exact and self.pooled else self.sent.lately(landmarks)

    @property
    def pooled(self) -> bool:
        """Whether its blocks in the pool bear the names that are looked up, as far as is known."""
        return self.finding is None or not self.finding.disagrees

    def due(self, now: float, again: float, against: bool) -> bool:
        """Whether it must be calibrated: it was not, or `again` seconds ago it disagreed or could not be asked.

        `against`: it has other token ids.
        """
        if self.finding is None:
            return True
        return (against or not self.finding.final) and now - self._found_at >= again

    def found(self, finding: Finding, now: float) -> None:
        self.finding, self._found_at = finding, now

    def heard(self, load: Load | None, now: float) -> None:
        """What it says of its load. If it began at another moment than it said before, it is new and holds nothing."""
        if load is None:
            return
        if self._load is not None and None is not self._load.started != load.started is not None:
            log.warning("engine %s has begun anew", self.id)
            self._forget()
            self.since = now
        self._load, self._load_at = load, now

    def lost(self, trouble: str) -> None:
        """It is away. What it held may be gone when it is back."""
        if self.trouble != trouble:
            log.warning("engine %s is out: %s", self.id, trouble)
        self.trouble = trouble
        self._forget()

    def missed(self, trouble: str) -> None:
        """A poll failed. One alone may be the machine's or the network's pause, and takes nobody out."""
        self._misses += 1
        if not self.alive or self._misses >= MISSES:
            self.lost(trouble)

    def _forget(self) -> None:
        """It may be another one now."""
        self.finding = None
        self.held.clear()
        self.sent.forget()
        self.fingerprint.forget()
        if self.subscription is not None:
            self.subscription.restarted()

    def back(self, since: float | None) -> None:
        """It is well, since now or, at the gateway's start, since nobody knows when."""
        self._misses = 0
        if self.trouble is not None:
            log.info("engine %s is in", self.id)
            self.since = since
            if self.subscription is not None:
                self.subscription.restarted()
        self.trouble = None


class Lease:
    """A request's hold on an engine, for as long as it is under way there."""

    __slots__ = ("_backlog", "_computed", "_landmarks", "_prefix", "_released", "engine")

    def __init__(self, engine: Engine, backlog: int, prefix: Prefix | None, landmarks: Landmarks) -> None:
        self.engine = engine
        self._backlog = backlog
        self._prefix = prefix
        self._landmarks = landmarks
        self._computed = False
        self._released = False
        engine.requests += 1
        engine.backlog += backlog
        engine.sent.begin(landmarks)
        engine.breaker.trying()

    def prefilled(self, computed: bool) -> None:
        """The first byte is there. If the prompt was computed, the engine holds it."""
        self.engine.backlog -= self._backlog
        self._backlog = 0
        self._computed = computed
        if computed and self._prefix is not None and self.engine.alive:
            self.engine.held.computed(self._prefix)
        self._prefix = None

    def release(self) -> None:
        """The request is over there. Does nothing the second time."""
        if self._released:
            return
        self._released = True
        self.engine.requests -= 1
        self.engine.backlog -= self._backlog
        if self._computed:
            self.engine.sent.ended(self._landmarks)
        else:
            self.engine.sent.failed(self._landmarks)


class Fleet:
    """The engines."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        timeouts: Timeouts,
        poll: float,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` is how engines with an https:// URL are checked; without one, against the system's authorities."""
        self._engines = {
            engine.id: engine for spec in specs if (engine := Engine(spec, timeouts, max(poll, 1.0) * 3, clock, tls))
        }
        self._poll = poll
        self._clock = clock
        self._open = False
        self._watchers: list[asyncio.Task[None]] = []
        self._inbox: Inbox | None = None
        self._seen_facts: dict[str, CacheFacts] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._engines.values())

    async def open(self) -> None:
        """Ask every engine once, then keep watching. Engines that are down do not hold this up for long."""
        await asyncio.gather(*(self._ask(engine, cards=True) for engine in self.engines))
        self._open = True
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        self._inbox = Inbox(asyncio.get_running_loop())
        for engine in self.engines:
            source = engine.spec.events
            if source is not None and isinstance(engine.held, Reported):
                subscription = Subscription(
                    self._inbox, source.address, bind=source.bind, replay=source.replay, held=engine.held
                )
                subscription.open()
                engine.subscription = subscription

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for engine in self.engines:
            if engine.subscription is not None:
                engine.subscription.close()
        if self._inbox is not None:
            self._inbox.close()
        for engine in self.engines:
            engine.wire.close()
            await engine.control.close()

    def adapter(self, name: str) -> tuple[str, Adapter] | None:
        """The base model and the adapter that engines list under `name`, if one does."""
        for engine in self.engines:
            for card in engine.cards:
                if card.id == name and card.parent is not None and card.root is not None:
                    return engine.spec.model, Adapter(name, card.root)
        return None

    def root(self, model: str) -> str | None:
        """The model's path on its engines (`root` of /v1/models)."""
        for engine in self.engines:
            for card in engine.cards:
                if engine.spec.model == model == card.id and card.root:
                    return card.root
        return None

    def facts(self, model: str) -> CacheFacts:
        """What most of a model's living engines say of their caches."""
        return self._seen_facts.get(model, NOTHING)

    def candidates(
        self, model: str, adapter: Adapter | None, prefix: Prefix | None = None, landmarks: Landmarks = NOWHERE
    ) -> list[Candidate]:
        """The living engines of a model, as they stand now, and what each has of a prompt."""
        now = self._clock()
        return [
            self._candidate(engine, prefix, landmarks, now)
            for engine in self.engines
            if engine.spec.model == model and self.unfit(engine, adapter) is None
        ]

    @staticmethod
    def unfit(engine: Engine, adapter: Adapter | None) -> str | None:
        """Why an engine gets no request for its model, or for an adapter of it; None: it may get one."""
        if engine.trouble is not None:
            return engine.trouble
        if not engine.breaker.lets_through:
            return "it failed again and again, and is left alone for a while"
        if adapter is not None and not any(card.id == adapter.name for card in engine.cards):
            return f"it does not have the adapter {adapter.name}"
        return None

    def _candidate(self, engine: Engine, prefix: Prefix | None, landmarks: Landmarks, now: float) -> Candidate:
        load, age = engine.signals(now, now - STALE_AFTER * self._poll)
        return Candidate(
            id=engine.id,
            role=engine.spec.role,
            requests=engine.requests,
            tokens=engine.backlog,
            waiting=load.waiting if load is not None else None,
            own_tokens=engine.held.run(prefix) * prefix.block_size if prefix is not None else 0,
            running=load.running if load is not None else None,
            cache_usage=load.cache_usage if load is not None else None,
            signal_age=age,
            likely_tokens=engine.likely(landmarks, prefix is not None),
            since=now - engine.since if engine.since is not None else None,
            pooled=engine.pooled,
        )

    def signal_age(self, engine: Engine) -> float | None:
        """Seconds since the engine told of its load; None where it has not."""
        return engine.signals(self._clock(), 0.0)[1]

    def engine(self, engine_id: str) -> Engine:
        """The engine of that id. Raises `KeyError`."""
        return self._engines[engine_id]

    def lease(
        self, engine_id: str, backlog: int, prefix: Prefix | None = None, landmarks: Landmarks = NOWHERE
    ) -> Lease:
        """Count a request on an engine until it is released.

        `backlog` is the prompt tokens that it will have to compute, `landmarks` those of its prompt.
        """
        return Lease(self._engines[engine_id], backlog, prefix, landmarks)

    def lets_through(self, engine_id: str) -> bool:
        """Whether the engine's circuit breaker lets a request through now."""
        return self._engines[engine_id].breaker.lets_through

    def suspect(self, engine_id: str, trouble: str) -> None:
        """No connection could be made: no more work until the next poll finds the engine well."""
        engine = self._engines[engine_id]
        engine.lost(trouble)
        self._agree(engine.spec.model)

    async def _watch(self, engine: Engine) -> None:
        polls = 0
        while True:
            await asyncio.sleep(self._poll)
            polls += 1
            await self._ask(engine, cards=not engine.alive or polls % CARDS_EVERY == 0)

    async def _ask(self, engine: Engine, *, cards: bool) -> None:
        try:
            healthy = await engine.control.healthy()
            if healthy and cards:
                engine.cards = await engine.control.models()
                engine.version = await engine.control.version()
            facts, load = await engine.control.metrics() if healthy else (engine.facts, None)
        except Unreachable as error:
            engine.lost(error.detail)
        except WireError as error:
            engine.missed(error.detail)
        except Exception:
            log.exception("asking engine %s met a defect", engine.id)
            engine.missed("what it says could not be read")
        else:
            if not healthy:
                engine.lost("its /health is not 200")
            elif not any(card.id == engine.spec.model for card in engine.cards):
                engine.lost(f"it does not serve {engine.spec.model}; set its --served-model-name, or the model's name")
            else:
                engine.facts = replace(facts, version=engine.version)
                engine.held.capacity = min(facts.blocks or engine.held.capacity, MOST_BLOCKS)
                engine.heard(load, self._clock())
                engine.back(self._clock() if self._open else None)
        self._agree(engine.spec.model)

    def _agree(self, model: str) -> None:
        told = Counter(
            replace(engine.facts, blocks=None)
            for engine in self.engines
            if engine.alive and engine.spec.model == model and replace(engine.facts, blocks=None) != NOTHING
        )
        self._seen_facts[model] = max(told, key=lambda facts: told[facts], default=NOTHING)
