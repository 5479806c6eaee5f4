"""Which prefixes the pool was asked about before, and when they were seen to be there."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from connector.blocks import Prefix
from connector.keys import KeyScheme

STRIDE = 32
"""Blocks between two marks."""
MARKS = 64 * 1024
"""Marks that are kept, at most 272 bytes each: 17 MiB for prefixes of 2 million blocks."""


class Mark(NamedTuple):
    """What is known of a prefix."""

    at: float
    """When it was looked up; the oldest of its parts counts."""
    there: bool
    """All of it was, then."""
    disk: int
    """Blocks of it on disk alone."""


EMPTY = Mark(float("inf"), there=True, disk=0)
"""The prefix of no blocks is always there."""


class Chain:
    """The blocks of a prompt that can be reused, and what they are called."""

    __slots__ = ("_domain", "_hashes", "count", "scheme", "width")

    def __init__(self, prefix: Prefix, scheme: KeyScheme) -> None:
        self._hashes = prefix.hashes
        self._domain = hashlib.blake2b("\0".join(scheme.prefixes).encode(), digest_size=8).digest()
        self.scheme = scheme
        self.count = prefix.reusable
        self.width = len(scheme.prefixes)

    def name(self, end: int) -> bytes:
        """Of the prefix of `end` blocks, under which it is remembered. Models may share hashes, but no keys."""
        return self._domain + self._hashes[end - 1][-16:]

    def keys(self, block: int) -> tuple[str, ...]:
        return self.scheme.keys(self._hashes[block])

    def key(self, block: int, which: int) -> str:
        return self.scheme.prefixes[which] + self._hashes[block].hex()


class Seen:
    """Which prefixes were looked up, at every `STRIDE`th block and at their ends. Bounded: the oldest go first."""

    def __init__(self, capacity: int = MARKS) -> None:
        self._marks: OrderedDict[bytes, Mark] = OrderedDict()
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self, chain: Chain, end: int) -> Mark | None:
        return self._marks.get(chain.name(end)) if end else EMPTY

    def at(self, chain: Chain, end: int) -> float:
        """When that prefix was looked up; of none, never."""
        mark = self.mark(chain, end)
        return mark.at if mark is not None else float("-inf")

    def known(self, chain: Chain) -> int:
        """Blocks of the longest prefix of `chain` that was looked up before."""
        return self._longest(chain, lambda end: chain.name(end) in self._marks)

    def there(self, chain: Chain, since: float = float("-inf")) -> int:
        """Blocks of the longest prefix of `chain` that was there after `since`."""

        def holds(end: int) -> bool:
            mark = self.mark(chain, end)
            return mark is not None and mark.there and mark.at > since

        return self._longest(chain, holds)

    def keep(self, chain: Chain, ends: Iterable[int], mark: Callable[[int], Mark]) -> None:
        """Remember what is known of these prefixes, the longest first, so that shorter ones outlive them."""
        for end in sorted(ends, reverse=True):
            name = chain.name(end)
            self._marks[name] = mark(end)
            self._marks.move_to_end(name)
        while len(self._marks) > self._capacity:
            self._marks.popitem(last=False)

    @staticmethod
    def _longest(chain: Chain, holds: Callable[[int], bool]) -> int:
        """What holds for a prefix holds for those it begins with, so halving finds the last of the strides."""
        if chain.count and holds(chain.count):
            return chain.count
        low, high = 0, chain.count // STRIDE
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(middle * STRIDE) else (low, middle - 1)
        last = min(low * STRIDE + STRIDE - 1, chain.count - 1)
        return next((end for end in range(last, low * STRIDE, -1) if holds(end)), low * STRIDE)
