"""An engine's own blocks: found by hash, shared while in use, the least recently used taken first. Pure.

As vLLM's block pool (vllm/v1/core/block_pool.py): a block that is free stays findable until its place
is needed; a request frees its chain tail first, so that a head outlives its tail; a block without a
hash can never be found and is taken before all others. Two blocks may bear the same hash, where a
prompt's last block had to be computed once more.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Cache:
    """A set number of blocks, known by their numbers."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        """In the order in which they are taken."""
        self._users = [0] * blocks
        self._hash: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, OrderedDict[int, None]] = {}
        self._removed: list[bytes] = []

    @property
    def free(self) -> int:
        """Blocks that nobody uses, those that are still findable among them."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.free / self.size

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def run(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these are here."""
        for count, block in enumerate(hashes):
            if block not in self._found:
                return count
        return len(hashes)

    def spare(self, hashes: Sequence[bytes]) -> int:
        """How many new blocks could be taken beside a run that is here."""
        return self.free - sum(next(iter(self._found[block])) in self._free for block in hashes)

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Use the blocks of a run that is here. They are not taken from whoever uses them already."""
        blocks = [next(iter(self._found[block])) for block in hashes]
        for block in blocks:
            self._free.pop(block, None)
            self._users[block] += 1
        return blocks

    def take(self, count: int) -> list[int] | None:
        """So many new blocks, or None where fewer are free: then nothing changes."""
        if count > len(self._free):
            return None
        return [self._evict() for _ in range(count)]

    def keep(self, block: int, digest: bytes) -> None:
        """A block in use is full now, and can be found."""
        self._hash[block] = digest
        self._found.setdefault(digest, OrderedDict())[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """A request is done with its chain, given head first."""
        findable: list[int] = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._hash[block] is None:
                self._free[block] = None
                self._free.move_to_end(block, last=False)
            else:
                findable.append(block)
        self._free.update(OrderedDict.fromkeys(findable))

    def reset(self) -> bool:
        """Forget what every block holds, unless any is in use: then nothing changes. Whether it was done."""
        if self.free < self.size:
            return False
        self._hash = [None] * self.size
        self._found.clear()
        return True

    def drain(self) -> list[bytes]:
        """The hashes of the blocks that were taken away since the last call, first to last."""
        removed, self._removed = self._removed, []
        return removed

    def _evict(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._users[block] = 1
        digest = self._hash[block]
        if digest is not None:
            self._hash[block] = None
            self._removed.append(digest)
            bearers = self._found[digest]
            del bearers[block]
            if not bearers:
                del self._found[digest]
        return block
