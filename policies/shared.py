"""Which beginnings many conversations share: a system prompt, or what agents branch from."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from policies.interface import Job

MOST = 65_536
"""Landmarks that are remembered, some 10 MB: 33 million tokens. Those of the longest unused tail go first."""
MOST_WAYS = 64
"""Ways on from a landmark are counted up to here: a part that more share is as good as free."""


class Part(NamedTuple):
    """A prompt's leading part that other conversations begin with."""

    tokens: int
    ways: int
    """How many conversations share it, the prompt's own included."""


NONE = Part(0, 1)


class _Way(NamedTuple):
    """What was seen to come after a landmark."""

    ways: int = 1
    end: int = 0
    """Tokens of the last prompt, where that ended before the next landmark; 0 where it went on."""
    whole: bytes = b""
    """And its name."""


_GONE_ON = _Way()


class Shared:
    """How many ways conversations go on from each landmark.

    Landmarks are chained: one that was never seen is a way on from the last one before it that was. What
    stands after a prompt's last landmark has no landmark. Two different prompts that both end there part
    where what is held of the new one ends before the old one did; and where nothing is held of it, if the
    old one is still being computed, or the new one is no longer. Otherwise the new one continues the old
    one, or does so as far as can be seen.

    Where prompts part lies between two landmarks. It shows in an engine that holds the shared part alone; where
    there is none, the shared part ends at its last landmark.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, _Way] = OrderedDict()

    def see(self, job: Job, tokens: int, own: Sequence[int], coming: int) -> Part:
        """The longest part that a prompt shares with others, and remember the prompt.

        Of its `tokens` the engines hold `own`, and one of them is computing all up to `coming`.
        """
        names, seen = job.landmarks, self._seen
        known = self._known(names)
        if known:
            held = max(job.pool_tokens or 0, *own)
            way = seen[names[known - 1]]
            ways = min(MOST_WAYS, way.ways + self._parts(way, job, known * job.landmark_tokens, held, coming))
            ends = known == len(names)
            seen[names[known - 1]] = _Way(ways, tokens, job.whole) if ends else _Way(ways)
        for name in names[known:-1]:
            seen[name] = _GONE_ON
        if known < len(names):
            seen[names[-1]] = _Way(end=tokens, whole=job.whole)
        for name in reversed(names):  # a head outlives what stands on it
            seen.move_to_end(name)
        while len(seen) > self._most:
            seen.popitem(last=False)
        for depth in range(min(known, len(seen)), 0, -1):
            ways = seen[names[depth - 1]].ways
            if ways > 1:
                at = depth * job.landmark_tokens
                fork = min((held for held in own if at <= held < at + job.landmark_tokens), default=at)
                return Part(min(tokens, fork), ways)
        return NONE

    @staticmethod
    def _parts(way: _Way, job: Job, at: int, held: int, coming: int) -> bool:
        """Whether the job goes another way than what was seen after `at` tokens."""
        if not way.end:
            return True
        if job.whole and job.whole == way.whole:
            return False
        if held < at:
            shorter = job.prompt_tokens is not None and job.prompt_tokens <= way.end
            return bool(job.whole) and (coming >= at or shorter)
        return held < way.end - job.block_tokens

    def _known(self, names: Sequence[bytes]) -> int:
        """How many leading landmarks were seen. Who has one has those before it: halve until the last is found."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._seen:
                low = middle + 1
            else:
                high = middle
        return low

    def __deepcopy__(self, _: object) -> "Shared":
        """One that remembers the same from here on by itself; what is remembered never changes."""
        found = Shared(self._most)
        found._seen = self._seen.copy()
        return found

    def __len__(self) -> int:
        return len(self._seen)
