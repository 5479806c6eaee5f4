"""How long an engine's steps take, and who gets what in each. Pure: no clock, no I/O.

    step = decode_step_seconds + decode_seconds_per_request * decoding + prefilled tokens / prefill rate

A step is scheduled as vLLM does it (vllm/v1/core/sched/scheduler.py, chunked prefill): running
requests first, in the order in which they came, a decoding one taking one token and a prefilling
one as many as are left of `max_batched_tokens`; then waiting requests, first come first served,
while there are tokens and places left. Tokens that come from the pool are loaded over one link, one
request after another, while the others go on; a request that loads holds no place.

The same scheduler runs behind the live engine, which really sleeps, and in a replay, which does not:
time is a number that the caller passes in. A replay need not go through thousands of steps in which
everybody gets one more token and nobody comes or goes: `alike` counts them and `skip` takes them at once.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine's rates. The defaults are those of a model of 8B on one large GPU, in round numbers."""

    prefill_tokens_per_second: float = 10_000.0
    decode_step_seconds: float = 0.008
    """What every step costs, however small: the weights are read once."""
    decode_seconds_per_request: float = 0.000_1
    """What each decoding request adds to its step."""
    load_bytes_per_second: float = 5_000_000_000.0
    load_latency_seconds: float = 0.002
    kv_bytes_per_token: int = 131_072
    """Keys and values, 8 heads of 128, 32 layers, 2 bytes each."""
    max_batched_tokens: int = 8192
    max_running: int = 256

    def step_seconds(self, prefilled: int, decoding: int) -> float:
        """The time of a step that prefills so many tokens and decodes for so many requests."""
        prefill = prefilled / self.prefill_tokens_per_second
        return self.decode_step_seconds + self.decode_seconds_per_request * decoding + prefill

    def load_seconds(self, tokens: int) -> float:
        """The time to load so many tokens from the pool, or to put them there, over a free link."""
        return self.load_latency_seconds + tokens * self.kv_bytes_per_token / self.load_bytes_per_second


@dataclass(frozen=True, slots=True)
class Work:
    """What a request needs: prompt tokens to load from the pool and to compute, tokens to generate."""

    compute: int
    load: int
    output: int

    def __post_init__(self) -> None:
        if self.compute < 1 or self.load < 0 or self.output < 1:
            raise ValueError(f"at least one token is computed and one generated: {self}")


class Hold(StrEnum):
    """Why a request stays in the queue; the words are those of vLLM's metric."""

    DEFERRED = "deferred"
    """It waits for an answer from outside; those behind it may pass."""
    CAPACITY = "capacity"
    """There is no place for it; nobody passes."""


class Request(Protocol):
    """What a scheduler asks of the one who submitted."""

    def plan(self) -> Work | Hold:
        """What is needed now that it is this request's turn. Asked again after a `Hold`."""

    def grant(self, tokens: int) -> None:
        """So many more of its tokens are computed in this step, prompt first."""


Submitted = TypeVar("Submitted", bound=Request)


@dataclass(frozen=True, slots=True)
class Step(Generic[Submitted]):
    """One step, as it was scheduled; its effects are there when `seconds` have passed."""

    seconds: float
    prefilled: int
    """Prompt tokens computed, of all requests."""
    sampled: tuple[Submitted, ...]
    """Those that get one more token at the end of this step."""
    ended: tuple[Submitted, ...] = ()
    """Those of them for which it is the last one."""

    @property
    def idle(self) -> bool:
        """Whether nothing is computed and the step only waits for a load: a new request may cut it short."""
        return not self.prefilled and not self.sampled


@dataclass(slots=True)
class _Running(Generic[Submitted]):
    request: Submitted
    compute: int
    output: int


@dataclass(frozen=True, slots=True)
class _Loading(Generic[Submitted]):
    running: _Running[Submitted]
    ready: float


class Scheduler(Generic[Submitted]):
    """Requests in, steps out."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self._waiting: deque[Submitted] = deque()
        self._loading: deque[_Loading[Submitted]] = deque()
        self._running: list[_Running[Submitted]] = []
        self._link_free = 0.0
        self._stuck = False
        """Whether none of the waiting can be admitted before somebody ends."""
        self.held: Hold = Hold.CAPACITY
        """Why the first of the waiting requests waits."""

    def submit(self, request: Submitted) -> None:
        self._stuck = self._stuck and bool(self._waiting)
        self._waiting.append(request)

    def remove(self, request: Submitted) -> None:
        """Forget a request, wherever it is. Its place is free from the next step on."""
        self._stuck = False
        self._waiting = deque(other for other in self._waiting if other is not request)
        self._loading = deque(other for other in self._loading if other.running.request is not request)
        self._running = [other for other in self._running if other.request is not request]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue, those that load among them, as vLLM counts."""
        return len(self._waiting) + len(self._loading)

    @property
    def loading(self) -> int:
        return len(self._loading)

    def step(self, now: float) -> Step[Submitted] | None:
        """Schedule the step that begins now. None: nothing can be done before somebody submits or a hold ends.

        `now` is in seconds and never less than before plus the last step's time, unless that was idle.
        """
        budget = self.speed.max_batched_tokens
        prefilled = decoding = 0
        sampled: list[Submitted] = []
        for one in self._candidates(now):
            if budget <= 0:
                break
            tokens = min(one.compute, budget) or 1
            budget -= tokens
            one.request.grant(tokens)
            if one.compute:
                prefilled += tokens
                one.compute -= tokens
            else:
                decoding += 1
            if not one.compute:
                one.output -= 1
                sampled.append(one.request)
        ended = tuple(one.request for one in self._running if not one.output)
        if ended:
            self._running = [one for one in self._running if one.output]
            self._stuck = False
        if prefilled or sampled:
            return Step(self.speed.step_seconds(prefilled, decoding), prefilled, tuple(sampled), ended)
        if self._loading:
            return Step(max(0.0, self._loading[0].ready - now), 0, ())
        return None

    def alike(self, now: float) -> int:
        """How many steps from now on only give everybody one more token, unless somebody submits; 0 where unknown.

        The step that ends somebody is not among them, so that nobody has to be told of any.
        """
        if (
            not self._running
            or (self._waiting and not self._stuck)
            or len(self._running) > self.speed.max_batched_tokens
        ):
            return 0
        if any(one.compute for one in self._running):
            return 0
        count = min(one.output for one in self._running) - 1
        if self._loading:
            seconds = self.speed.step_seconds(0, len(self._running))
            count = min(count, math.ceil((self._loading[0].ready - now) / seconds))
        return max(0, count)

    def skip(self, count: int) -> None:
        """Take so many of the steps that are alike; each is as long as `step_seconds` says of who runs."""
        for one in self._running:
            one.request.grant(count)
            one.output -= count

    def _candidates(self, now: float) -> Iterator[_Running[Submitted]]:
        """Whoever may get tokens, in order; the queue is asked only as far as the caller goes."""
        yield from list(self._running)
        while self._loading and self._loading[0].ready <= now and self._room:
            loaded = self._loading.popleft().running
            self._running.append(loaded)
            yield loaded
        yield from self._admitted(now)

    def _admitted(self, now: float) -> Iterator[_Running[Submitted]]:
        deferred: list[Submitted] = []
        self._stuck = False
        try:
            while self._waiting and self._room:
                request = self._waiting[0]
                work = request.plan()
                if work is Hold.CAPACITY:
                    break
                self._waiting.popleft()
                if isinstance(work, Hold):
                    deferred.append(request)
                    continue
                running = _Running(request, work.compute, work.output)
                if work.load:
                    self._load(running, work.load, now)
                    continue
                self._running.append(running)
                yield running
            self._stuck = bool(self._waiting) and not deferred
        finally:
            self.held = Hold.DEFERRED if deferred else Hold.CAPACITY
            self._waiting.extendleft(reversed(deferred))

    @property
    def _room(self) -> bool:
        return len(self._running) < self.speed.max_running

    def _load(self, running: _Running[Submitted], tokens: int, now: float) -> None:
        self._link_free = max(self._link_free, now) + self.speed.load_seconds(tokens)
        self._loading.append(_Loading(running, self._link_free))
