"""How busy each engine is, in tokens: what is before a new request there, and what was placed there lately."""

from collections.abc import Sequence

from policies.interface import Candidate

DECAY = 31 / 32
"""What is left of a placement's work in the memory with each placement after it: some 32 of them count."""
MOST_TOKENS = 1024
"""What a placement counts for in the memory at most: a long prompt that is done must not keep its engine empty."""
REMEMBERED = 4096
"""Engines that are remembered, under 1 MB; the one that was chosen longest ago is forgotten first."""


class Pressure:
    """Two figures for each engine, both in tokens:

        now    = tokens + request_tokens * max(requests, waiting + running)
        lately = the sum over placements of min(work, MOST_TOKENS) * DECAY ** (placements since)

    `tokens` is the prompt tokens under way that nobody held (this gateway's own count, exact);
    `request_tokens` is what a request is worth by itself, in tokens, since it decodes; `work` is what
    a placed request was to compute, and `request_tokens`. `waiting` and `running` count as 0 where
    they are not known, so that our own count stands alone.

    `lately` tells engines apart that are all idle whenever a request comes, as they are where requests
    come one at a time. It decays by placements, since policies read no clock.

    Slow start: an engine that came `since` seconds ago is empty and cold. Both its figures are at least
    (1 - since / warm) times the mean of those that are no newcomers, until it has been there for `warm`
    seconds. Where all are newcomers, or `since` is None, nothing is corrected.
    """

    def __init__(self, request_tokens: int, warm: float) -> None:
        self._request_tokens = request_tokens
        self._warm = warm
        self._placed = 0
        self._lately: dict[str, tuple[float, int]] = {}
        """The figure of each engine when it was last chosen, and how many placements there had been."""

    def now(self, able: Sequence[Candidate]) -> list[float]:
        """The tokens of work before a new request on each, in the order given."""
        worth = self._request_tokens
        return self._eased(
            able, [c.tokens + worth * max(c.requests, (c.waiting or 0) + (c.running or 0)) for c in able]
        )

    def lately(self, able: Sequence[Candidate]) -> list[float]:
        """The work that was placed on each lately, in the order given."""
        found = []
        for candidate in able:
            figure, then = self._lately.get(candidate.id, (0.0, 0))
            found.append(figure * DECAY ** (self._placed - then))
        return self._eased(able, found)

    def chose(self, candidate: Candidate, tokens: int) -> None:
        """A request goes there that has so many tokens to compute."""
        figure, then = self._lately.pop(candidate.id, (0.0, 0))
        figure *= DECAY ** (self._placed + 1 - then)
        self._placed += 1
        self._lately[candidate.id] = (figure + min(tokens + self._request_tokens, MOST_TOKENS), self._placed)
        if len(self._lately) > REMEMBERED:
            del self._lately[next(iter(self._lately))]

    def _eased(self, able: Sequence[Candidate], figures: list[float]) -> list[float]:
        """The figures, those of newcomers raised."""
        new = [c.since is not None and c.since < self._warm for c in able]
        if not any(new) or all(new):
            return figures
        old = [figure for figure, newcomer in zip(figures, new, strict=True) if not newcomer]
        mean = sum(old) / len(old)
        return [
            max(figure, (1 - (c.since or 0) / self._warm) * mean) if newcomer else figure
            for c, figure, newcomer in zip(able, figures, new, strict=True)
        ]
