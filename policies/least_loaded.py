"""least_loaded: the engine with the least prefill work before it."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed

REMEMBERED = 4096
"""Engines whose turns are remembered; the one whose turn is longest past is forgotten first."""


class LeastLoaded:
    """The least of `load`, in tokens:

        load = tokens + request_tokens * max(requests, waiting)

    `tokens` is the prompt tokens under way that nobody held (this gateway's own count, exact);
    `request_tokens` is what a running request is worth by itself, in tokens, since it decodes.
    Where the engine's queue is unknown, `waiting` counts as 0 and our own count stands alone.
    Ties go to the engine that was chosen least recently.
    """

    def __init__(self, request_tokens: int = 256) -> None:
        self._request_tokens = request_tokens
        self._placed = 0
        self._last: dict[str, int] = {}

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        return placed(job, self.ranked(able_to_answer(candidates)), "least loaded")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""

    def load(self, candidate: Candidate) -> float:
        """Tokens of work before a new request on this engine."""
        return candidate.tokens + self._request_tokens * max(candidate.requests, candidate.waiting or 0)

    def ranked(self, able: Sequence[Candidate]) -> list[Candidate]:
        """Least loaded first; the first counts as chosen."""
        ranked = sorted(able, key=lambda c: (self.load(c), self.turn(c)))
        self.chose(ranked[0])
        return ranked

    def turn(self, candidate: Candidate) -> int:
        """When this engine was last chosen: the least goes first in a tie."""
        return self._last.get(candidate.id, 0)

    def chose(self, candidate: Candidate) -> None:
        """Note whose turn it was, so that the next tie goes elsewhere."""
        self._placed += 1
        self._last.pop(candidate.id, None)
        self._last[candidate.id] = self._placed
        if len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]
