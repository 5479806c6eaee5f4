"""round_robin: each engine of a model in its turn."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed

REMEMBERED = 4096
"""Models whose turns are remembered, under 1 MB; the one that was asked for longest ago is forgotten first."""


class RoundRobin:
    """Engine number n modulo the engines that are there, n counting the jobs of one model.

    Uses no signal, so none can be missing. Each model has its turn of its own: traffic that
    alternates between two models still reaches every engine of each. An engine that is new or back
    has its turn as all others.
    """

    blind = True

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        turn = self._turns.pop(job.model, 0)
        self._turns[job.model] = turn + 1
        if len(self._turns) > REMEMBERED:
            del self._turns[next(iter(self._turns))]
        first = turn % len(able)
        return placed(job, able[first:] + able[:first], "turn")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""
