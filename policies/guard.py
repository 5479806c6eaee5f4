"""A policy of anybody's, and what places a request when that one fails, so that none of its defects is a client's."""

import logging
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec.structs import replace

from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, Policy

log = logging.getLogger("moongate")

Failure = Literal["failed", "slow", "out of service"]
SLOW_TIMES = 3
"""So often slow, within SLOW_AMONG calls, and the policy is out of service."""
SLOW_AMONG = 1000
MOST_REASONS = 64
REASON_LETTERS = 80


class Guarded:
    """Places as `policy` does.

    Where it raises, makes no placement, or names an engine that is no candidate, `fallback` places the
    request. Where it takes longer than `limit` seconds its answer stands, since nothing can stop it; the
    third time in a thousand calls it is out of service for good, and `fallback` takes its place. `count` is
    told of each failure. `NoCapacity` is an answer and no failure; that of the fallback passes too.
    """

    def __init__(
        self,
        policy: Policy,
        fallback: Policy,
        *,
        clock: Callable[[], float],
        count: Callable[[Failure], None],
        limit: float = 0.05,
    ) -> None:
        self._policy = policy
        self._fallback = fallback
        self._clock = clock
        self._count = count
        self._limit = limit
        self._calls = 0
        self._slow: deque[int] = deque(maxlen=SLOW_TIMES)
        """The calls that were slow last."""
        self._reasons: set[str] = set()
        self._failing = False
        """It failed the last time, which is in the log already."""

    @property
    def policy(self) -> Policy:
        """The one in service."""
        return self._policy

    @property
    def blind(self) -> bool:
        """Whether the one in service does not care how a prompt begins."""
        return bool(getattr(self._policy, "blind", False))

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        if self._policy is self._fallback:
            return self._fallback.place(job, candidates)
        candidates = tuple(candidates)  # which nobody can change
        started = self._clock()
        try:
            placement = among(candidates, self._policy.place(job, candidates))
        except NoCapacity:
            raise
        except (Exception, CancelledError):
            if self._is_news():
                log.exception("the policy failed; the fallback placed the request")
            return self._fallback.place(job, candidates)
        finally:
            self._took(self._clock() - started)
        self._failing = False
        return self._brief(placement)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        started = self._clock()
        try:
            self._policy.observe(placement, outcome)
        except (Exception, CancelledError):
            if self._is_news():
                log.exception("the policy failed to observe an outcome")
        finally:
            self._took(self._clock() - started)

    def _brief(self, placement: Placement) -> Placement:
        """The placement with one of few reasons, since each is a metric's label."""
        reason = placement.reason
        if reason in self._reasons:
            return placement
        if len(self._reasons) < MOST_REASONS and len(reason) <= REASON_LETTERS and reason.isprintable():
            self._reasons.add(reason)
            return placement
        return replace(placement, reason="other")

    def _is_news(self) -> bool:
        """Count a failure, and say whether it is the first after the policy was well."""
        self._count("failed")
        news, self._failing = not self._failing, True
        return news

    def _took(self, seconds: float) -> None:
        self._calls += 1
        if seconds <= self._limit or self._policy is self._fallback:
            return
        self._count("slow")
        self._slow.append(self._calls)
        if len(self._slow) == SLOW_TIMES and self._calls - self._slow[0] < SLOW_AMONG:
            self._count("out of service")
            log.error("the policy took %.3f s, the third time above %.3f s: it is out of service", seconds, self._limit)
            self._policy = self._fallback


def among(candidates: Sequence[Candidate], placement: Placement) -> Placement:
    """The placement, if it is one and every engine that it names is a candidate."""
    if not isinstance(placement, Placement):
        raise TypeError(f"the policy made no placement but {type(placement).__name__}")
    numbers = isinstance(placement.own_tokens, int) and isinstance(placement.pool_tokens, int)
    if not isinstance(placement.reason, str) or not numbers:
        raise TypeError("the policy's placement has a reason that is no text, or tokens that are no number")
    known = {candidate.id for candidate in candidates}
    for name in (placement.engine, placement.prefill or placement.engine, *placement.spares):
        if name not in known:
            raise ValueError(f"the policy named an engine that is no candidate: {name}")
    return placement
