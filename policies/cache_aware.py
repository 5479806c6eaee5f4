"""cache_aware: where most of the prompt is held already, unless that engine is far busier."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, expected, placed, uncached
from policies.least_loaded import LeastLoaded


class CacheAware:
    """The least of `work`, in tokens:

        work = uncached + load_share * pool + queue_share * load

    `uncached` is what the engine would compute, `pool` what it would load beyond its own blocks,
    `load` is least_loaded's. A prompt that could not be counted, or that nobody holds, leaves
    `load` alone to decide: that is least_loaded, with its rotation of ties. An unknown pool counts
    as holding nothing for everybody, which changes no order. `queue_share` below 1 keeps a
    conversation on its engine through small differences of load.
    """

    def __init__(self, load_share: float = 0.1, queue_share: float = 0.5, request_tokens: int = 256) -> None:
        self._load_share = load_share
        self._queue_share = queue_share
        self._by_load = LeastLoaded(request_tokens)

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        if job.prompt_tokens is None or not any(c.own_tokens for c in able):
            return placed(job, self._by_load.ranked(able), "nothing cached, least loaded")
        by_work = sorted(able, key=lambda c: (self._work(job, c), -c.own_tokens, self._by_load.turn(c)))
        self._by_load.chose(by_work[0])
        longest = max(c.own_tokens for c in able)
        reason = "longest prefix" if by_work[0].own_tokens == longest else "longest prefix is busy"
        return placed(job, by_work, reason)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""

    def _work(self, job: Job, candidate: Candidate) -> float:
        _, loaded = expected(job, candidate)
        return uncached(job, candidate) + self._load_share * loaded + self._queue_share * self._by_load.load(candidate)
