"""What is learned of each engine from its answers: how long it takes for a computed token, and for a loaded one."""

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from policies.interface import Outcome, Placement

RECENT = 15
"""Answers that an engine's rate is the median of: half of them may be odd, and eight tell that it changed."""
FEW = 3
"""Answers below which nothing is concluded."""
LEAST_TOKENS = 1024
"""Tokens that an answer must have waited for: what a step costs by itself is small against them."""
MANY = 8
"""As a computed token takes several times as long as a loaded one."""
FORGOTTEN_AFTER = 512
"""Answers of others after which an engine that gave none is as unknown as at first, so that it is tried again."""
REMEMBERED = 4096
"""Engines that are remembered, some 4 MB; the one that answered longest ago is forgotten first."""
FASTEST, SLOWEST = 1e-7, 1e-2
"""Seconds for a token. An answer that says otherwise counts as saying this."""


class Rate(NamedTuple):
    """Seconds for a token."""

    prefill: float
    """One that is computed."""
    load: float
    """One that comes from the pool."""


class _Recent:
    """What an engine's last answers say, in seconds for a token."""

    def __init__(self, share: float) -> None:
        """`share` of them say less than what is concluded."""
        self._share = share
        self._said: deque[float] = deque(maxlen=RECENT)
        self.seconds: float | None = None
        """What is concluded; None while they are few."""

    def add(self, seconds: float) -> None:
        self._said.append(min(SLOWEST, max(FASTEST, seconds)))
        if len(self._said) >= FEW:
            self.seconds = sorted(self._said)[int(len(self._said) * self._share)]


class _Engine:
    def __init__(self) -> None:
        self.prefill = _Recent(0.5)
        self.load = _Recent(0.25)
        self.told = 0
        """How many answers the fleet had given when it gave its last."""


class Rates:
    """Seconds for a token, by engine:

        prefill = median of (ttft - loaded * load) / (queued + computed)            over its last answers
        load    = lower quartile of (ttft - (queued + computed) * prefill) / loaded

    `computed` and `loaded` are tokens of the prompt, as far as the engine tells of what it found, `queued` those
    of other prompts that were before it when it was sent. An answer counts for `prefill` where no more tokens
    were loaded than computed and waited for, for `load` where MANY times as many were; and only with LEAST_TOKENS
    of the kind. What comes to an engine while it loads only adds to the time, hence the quartile. An answer whose
    prompt was computed elsewhere, or that lacks a figure, counts for nothing.

    Of an engine of which little is known, the rates are the median of those of the others, and where nothing is
    known of any, the priors.
    """

    def __init__(self, prior: Rate) -> None:
        self._prior = prior
        self._engines: dict[str, _Engine] = {}
        self._told = 0
        self._usual: Rate | None = prior
        """Of engines that are not known; None: to be found anew."""

    def of(self, engine: str) -> Rate:
        """The rates of one engine."""
        known = self._engines.get(engine)
        if known is None or self._told - known.told > FORGOTTEN_AFTER:
            return self._of_others()
        prefill, load = known.prefill.seconds, known.load.seconds
        if prefill is None or load is None:
            others = self._of_others()
            prefill, load = prefill or others.prefill, load or others.load
        return Rate(prefill, load)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Learn from an answer."""
        ttft, computed, queued = outcome.ttft, outcome.computed_tokens, outcome.queued_tokens
        if ttft is None or computed is None or queued is None or outcome.cached_tokens is None:
            return
        if not outcome.ok or placement.prefill is not None or outcome.engine != placement.engine:
            return
        rate = self.of(outcome.engine)
        loaded, work = max(0, outcome.cached_tokens - placement.own_tokens), queued + computed
        engine = self._answered(outcome.engine)
        if loaded <= work and work >= LEAST_TOKENS:
            engine.prefill.add((ttft - loaded * rate.load) / work)
        elif loaded >= MANY * work and loaded >= LEAST_TOKENS:
            engine.load.add((ttft - work * rate.prefill) / loaded)

    def _answered(self, name: str) -> _Engine:
        """What is known of an engine that has just answered."""
        self._told += 1
        self._usual = None
        engine = self._engines.pop(name, None)
        if engine is None or self._told - engine.told > FORGOTTEN_AFTER:
            engine = _Engine()
        engine.told = self._told
        self._engines[name] = engine
        if len(self._engines) > REMEMBERED:
            del self._engines[next(iter(self._engines))]
        return engine

    def _of_others(self) -> Rate:
        if self._usual is None:
            prefill = [engine.prefill.seconds for engine in self._engines.values()]
            load = [engine.load.seconds for engine in self._engines.values()]
            self._usual = Rate(_middle(prefill, self._prior.prefill), _middle(load, self._prior.load))
        return self._usual


def _middle(seconds: Iterable[float | None], prior: float) -> float:
    known = [one for one in seconds if one is not None]
    return median(known) if known else prior
