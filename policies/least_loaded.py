"""least_loaded: the engine with the least prefill work before it."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed, uncached
from policies.pressure import Pressure


class LeastLoaded:
    """The least of `now`, in tokens, and where it is the same the least of `lately` (policies/pressure.py):

        now = tokens + request_tokens * max(requests, waiting + running)

    Where the engine's own figures are unknown our count stands alone. `lately` is what was placed
    there before, so that requests that come one at a time reach every engine. An engine that is new
    or back is given its part by and by, for `warm` seconds. A prompt that was not counted is
    remembered as a request without a prompt.
    """

    def __init__(self, request_tokens: int = 256, warm: float = 30.0) -> None:
        self._pressure = Pressure(request_tokens, warm)

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        ranked = by_load(able, self._pressure.now(able), self._pressure.lately(able))
        self._pressure.chose(ranked[0], uncached(job, ranked[0]))
        return placed(job, ranked, "least loaded")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""


def by_load(able: Sequence[Candidate], now: Sequence[float], lately: Sequence[float]) -> list[Candidate]:
    """Those of `able`, least loaded first."""
    return [able[i] for i in sorted(range(len(able)), key=lambda i: (now[i], lately[i]))]
