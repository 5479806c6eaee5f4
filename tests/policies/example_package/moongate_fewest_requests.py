"""A placement policy as anybody may publish one: pip install it, and name it under `policy.use`."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed


class FewestRequests:
    """The engine with the fewest requests; of those within `slack` of it, the one that holds most of the prompt."""

    def __init__(self, slack: int = 0) -> None:
        self._slack = slack

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        fewest = min(c.requests for c in able)
        return placed(
            job,
            sorted(able, key=lambda c: (max(0, c.requests - fewest - self._slack), -c.own_tokens, c.requests)),
            "fewest requests",
        )

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""
