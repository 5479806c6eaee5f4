"""One run of a policy over a miniature fleet: the same scene, traffic and seed give the same bits.

The policy is the very object that the gateway runs, and is told what gateway/placing.py and fleet.py would tell it:
own counts of the moment, the engines' words as of the last poll, what each holds as its KV events say (they come at
once here), and how far a prompt is being computed there already. It learns what became of a placement when the
answer was given, as in gateway/settle.py. Nothing fails and nobody leaves here.

A placement with a prefill engine runs there first, waits until the prompt's last block is in the pool, and then
asks the policy once more who decodes, as gateway/serve.py does.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from connector.blocks import Prefix
from connector.landmarks import Landmarks, of_prefix
from connector.simulated.timing import Speed
from gateway.miniature import Engine, Leg, Pool, Tally, Timeline
from gateway.traffic import Ask, Traffic, setting
from policies.interface import Candidate, Job, Outcome, Placement, Policy, Role, uncached

MODEL, TENANT = "model", "tenant"
HANDOFF = 10.0
"""Seconds that a decode waits at most for its prompt in the pool, as timeouts.handoff."""


class CannotReplay(Exception):
    """The fleet cannot play this traffic; the message says why."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A share of the pool's blocks vanishes."""

    at: float
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError("a share is 0 to 1")


@dataclass(frozen=True, slots=True)
class Slowed:
    """An engine goes on at a factor of its speed; its number counts from 1."""

    at: float
    engine: int
    factor: float

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError("a factor is more than 0")


@dataclass(frozen=True, slots=True)
class Scene:
    """The fleet, and what happens to it."""

    engines: int = setting(8, "Engines that do everything.")
    prefill: int = setting(0, "Engines that only prefill, beside those.")
    decode: int = setting(0, "Engines that only decode.")
    blocks: int = setting(2048, "Blocks of each engine's own cache.", positive=True)
    prefill_rate: float = setting(8000.0, "Prompt tokens that an engine computes in a second.", positive=True)
    decode_step: float = setting(0.008, "Seconds of each step of an engine, whatever it computes.")
    decode_share: float = setting(0.0001, "Seconds that each request which decodes adds to a step.")
    step_tokens: int = setting(8192, "Tokens of a step at most (vLLM's max_num_batched_tokens).", positive=True)
    running: int = setting(256, "Requests that an engine works on at most (vLLM's max_num_seqs).", positive=True)
    pool: int = setting(0, "Blocks of the pool; 0: there is none.")
    bandwidth: float = setting(5.0, "Gigabytes that an engine loads from the pool in a second.", positive=True)
    load_latency: float = setting(0.002, "Seconds that each load takes beside.")
    token_bytes: int = setting(131_072, "Bytes of a token's keys and values.")
    store_delay: float = setting(0.05, "Seconds from blocks that are full to the begin of their way into the pool.")
    lease: float = setting(5.0, "Seconds that a look-up keeps a block in the pool.")
    save_decode_cache: bool = setting(False, "Put answers into the pool too, as vLLM's option of this name does.")
    poll: float = setting(1.0, "Seconds from one reading of the engines' metrics to the next.", positive=True)
    speed: float = setting(1.0, "How many times faster requests come.", positive=True)
    seed: int = setting(1, "Of what is left to chance.")
    lost: tuple[Lost, ...] = ()
    slowed: tuple[Slowed, ...] = ()

    @property
    def rates(self) -> Speed:
        """Of each engine."""
        return Speed(
            prefill_tokens_per_second=self.prefill_rate,
            decode_step_seconds=self.decode_step,
            decode_seconds_per_request=self.decode_share,
            load_bytes_per_second=self.bandwidth * 1e9,
            load_latency_seconds=self.load_latency,
            kv_bytes_per_token=self.token_bytes,
            max_batched_tokens=self.step_tokens,
            max_running=self.running,
        )


@dataclass(slots=True)
class Fate:
    """What became of one request."""

    ask: Ask
    arrived: float
    engine: str
    """Who computed its prompt."""
    predicted: int
    """Tokens that the gateway expected to be there, the engine's own and the pool's."""
    first: float = math.nan
    """When its first byte came."""
    ended: float = math.nan
    own: int = 0
    """Tokens that the engine had itself."""
    loaded: int = 0
    """Tokens that it took from the pool."""


@dataclass(frozen=True, slots=True)
class Run:
    """What became of all requests, and of the fleet."""

    fates: tuple[Fate, ...]
    engines: tuple[Tally, ...]
    pool_evicted: int
    pool_refused: int
    """Blocks that found no room in the pool."""
    pool_lost: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """A request and where it goes."""

    place: int
    fate: Fate
    prefix: Prefix
    landmarks: Landmarks
    job: Job
    placement: Placement


class Simulation:
    """A fleet, its gateway, and what is asked of it."""

    def __init__(self, scene: Scene, traffic: Traffic, policy: Policy) -> None:
        """Raises `CannotReplay`."""
        _check(scene, traffic)
        self._scene = scene
        self._asks = traffic.asks
        self._block_size = traffic.block_size
        self._policy = policy
        self._time = Timeline()
        self._pool = Pool(scene.pool, scene.lease) if scene.pool else None
        self._engines = {engine.id: engine for engine in self._made()}
        self._fates: list[Fate] = []
        self._followers: dict[int, list[int]] = {}
        self._left = len(self._asks)

    def play(self, progress: Callable[[], None] = lambda: None) -> Run:
        """Play all requests to their ends; `progress` is called when one has ended."""
        scene, time = self._scene, self._time
        for place, ask in enumerate(self._asks):
            if ask.follows is None:
                time.at(ask.at / scene.speed, self._arrive, place)
            else:
                self._followers.setdefault(ask.follows, []).append(place)
        chance = random.Random(scene.seed)  # noqa: S311 - seeded, not secret
        if self._pool is not None:
            for lost in scene.lost:
                time.at(lost.at, self._pool.lose, lost.share, chance)
        engines = list(self._engines.values())
        for slowed in scene.slowed:
            time.at(slowed.at, engines[slowed.engine - 1].slow, slowed.factor)
        time.at(0.0, self._poll)
        self._progress = progress
        while time.next():
            pass
        pool = self._pool if self._pool is not None else Pool(0, 0)
        tallies = tuple(engine.tally for engine in engines)
        return Run(tuple(self._fates), tallies, pool.evicted, pool.refused, pool.lost)

    def _made(self) -> Iterator[Engine]:
        scene = self._scene
        counts: tuple[tuple[Role, int], ...] = (
            ("both", scene.engines),
            ("prefill", scene.prefill),
            ("decode", scene.decode),
        )
        roles = [role for role, count in counts for _ in range(count)]
        for number, role in enumerate(roles, 1):
            yield Engine(
                f"engine-{number:02}",
                role,
                self._time,
                self._pool,
                blocks=scene.blocks,
                speed=scene.rates,
                put_delay=scene.store_delay,
            )

    def _poll(self) -> None:
        for engine in self._engines.values():
            engine.poll()
        if self._left:
            self._time.after(self._scene.poll, self._poll)

    def _arrive(self, place: int) -> None:
        ask, size = self._asks[place], self._block_size
        prefix = Prefix(ask.tokens, size, tuple(ask.chain[: ask.tokens // size]))
        landmarks = of_prefix(prefix)
        candidates = [engine.candidate(prefix, landmarks) for engine in self._engines.values()]
        job = Job(
            model=MODEL,
            tenant=TENANT,
            prompt_tokens=ask.tokens,
            pool_tokens=self._look_up(prefix, candidates),
            session=ask.session,
            landmarks=landmarks.keys,
            whole=landmarks.whole,
            landmark_tokens=landmarks.apart,
            block_tokens=size,
        )
        placement = self._policy.place(job, candidates)
        prefill = placement.prefill or placement.engine
        fate = Fate(ask, self._time.now, prefill, placement.own_tokens + placement.pool_tokens)
        self._fates.append(fate)
        plan = _Plan(place, fate, prefix, landmarks, job, placement)
        if placement.prefill is None:
            self._send(plan, candidates, prefill, ask.output, begun=self._begun, ended=self._ended)
        else:
            self._send(plan, candidates, prefill, 1, begun=_found, ended=self._prefilled)

    def _look_up(self, prefix: Prefix, candidates: Sequence[Candidate]) -> int | None:
        """What the gateway asks the pool: nothing where each engine holds all that a cache can give."""
        usable = prefix.reusable * prefix.block_size
        if self._pool is None or all(candidate.own_tokens >= usable for candidate in candidates):
            return None
        return self._pool.run(prefix.hashes[: prefix.reusable]) * prefix.block_size

    def _send(
        self,
        plan: _Plan,
        candidates: Sequence[Candidate],
        name: str,
        output: int,
        *,
        begun: Callable[[_Plan, Leg], None],
        ended: Callable[[_Plan, Leg], None],
    ) -> None:
        chosen = next(candidate for candidate in candidates if candidate.id == name)
        leg = Leg(
            plan.prefix,
            plan.landmarks,
            answer=plan.fate.ask.chain[len(plan.prefix.hashes) :],
            output=output,
            backlog=uncached(plan.job, chosen),
            begun=partial(begun, plan),
            ended=partial(ended, plan),
        )
        self._engines[name].submit(leg)

    def _begun(self, plan: _Plan, leg: Leg) -> None:
        _found(plan, leg)
        self._answers(plan, leg)
        if leg.engine.role != "decode":
            leg.engine.put(leg, plan.prefix.hashes)

    def _answers(self, plan: _Plan, leg: Leg) -> None:
        plan.fate.first = leg.first

    def _ended(self, plan: _Plan, leg: Leg) -> None:
        now = self._time.now
        plan.fate.ended = now
        if self._scene.save_decode_cache:
            leg.engine.put(leg, leg.answer)
        cached = plan.fate.own + plan.fate.loaded
        outcome = Outcome(
            ok=True,
            engine=leg.engine.id,
            ttft=leg.first - leg.sent,
            cached_tokens=cached,
            computed_tokens=plan.fate.ask.tokens - cached,
            queued_tokens=leg.queued,
        )
        self._policy.observe(plan.placement, outcome)
        self._left -= 1
        self._progress()
        for follower in self._followers.get(plan.place, ()):
            self._time.at(now + self._asks[follower].at / self._scene.speed, self._arrive, follower)

    def _prefilled(self, plan: _Plan, leg: Leg) -> None:
        """The prompt's blocks are on their way to the pool."""
        leg.engine.put(leg, plan.prefix.hashes, partial(self._put, plan, leg))

    def _put(self, plan: _Plan, leg: Leg) -> None:
        """They are there, unless the pool had no room for the last one: that is waited for in vain."""
        prefix = plan.prefix
        assert self._pool is not None
        seen = not prefix.reusable or prefix.hashes[prefix.reusable - 1] in self._pool
        job = msgspec.structs.replace(plan.job, prefilled=True)
        if seen:
            job = msgspec.structs.replace(job, pool_tokens=prefix.reusable * prefix.block_size)
        self._time.after(0.0 if seen else HANDOFF, self._decode, replace(plan, job=job), leg)

    def _decode(self, plan: _Plan, first: Leg) -> None:
        able = [
            engine.candidate(plan.prefix, plan.landmarks)
            for engine in self._engines.values()
            if engine.role != "prefill"
        ]
        candidates = [candidate for candidate in able if candidate.id != first.engine.id] or able
        name = self._policy.place(plan.job, candidates).engine
        self._send(plan, candidates, name, plan.fate.ask.output, begun=self._answers, ended=self._ended)


def _found(plan: _Plan, leg: Leg) -> None:
    """What there was of the prompt where it is computed."""
    plan.fate.own, plan.fate.loaded = leg.own, leg.loaded


def _check(scene: Scene, traffic: Traffic) -> None:
    if not scene.engines + scene.decode:
        raise CannotReplay("there is no engine that can answer")
    longest = max(-(-(ask.tokens + ask.output) // traffic.block_size) for ask in traffic.asks)
    if longest > scene.blocks:
        raise CannotReplay(
            f"a request needs {longest} blocks of {traffic.block_size} tokens, an engine has {scene.blocks}"
        )
    for slowed in scene.slowed:
        if not 1 <= slowed.engine <= scene.engines + scene.prefill + scene.decode:
            raise CannotReplay(f"there is no engine {slowed.engine} that could be slowed")
