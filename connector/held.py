"""What an engine holds of its own: told by its KV events, or else estimated from what was sent there. No I/O.

A block's key is the last eight bytes of its hash, in which 64-bit and full hashes agree.

A block's hash hangs on its parent's, so a prompt finds a block only where it finds all before it. Both
indexes keep it so: whatever is in them, its parent is. The held part of a chain is then its beginning,
and where it ends is found by halving: 13 look-ups for 8,000 blocks. `Estimated` has it from its order,
since whoever uses a block has used its parents. `Reported` keeps each block's parent, and drops blocks
whose parent it does not know: no prompt reaches them, and vLLM, which gives up tails first, gives them
up before it can tell of their parents again.

An engine may hold a block twice, where two requests computed it side by side or a prompt's last block was
computed once more. Each copy is stored and removed by an event of its own (vllm/v1/core/block_pool.py).

A hybrid model has groups of layers, each with blocks of its own; a group's blocks may span several of a
prompt's, and bear the hash of the last (BlockHashListWithBlockSize in vllm/v1/core/kv_cache_utils.py). Only
groups with full attention are kept, since they alone need the whole prefix; a prompt's run is the
shortest of theirs.

A request with `vllm_xargs: {"kv_cache_report_mode": "full"}` would make an engine tell of blocks anew that it
had, as one copy more; the gateway takes that out of what clients send (connector/handoff.py).
"""

import sys
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Protocol

from connector.blocks import Prefix

DEFAULT_BLOCKS = 65_536
"""Blocks remembered for an engine that does not say how many it has."""
KEY_BYTES = 8
KEY_COST = sys.getsizeof(bytes(KEY_BYTES)) + 7
"""Bytes that a key takes, with what Python's allocator rounds it up by. With the tables around it a block of
a chain takes 75 to 110, one that is a whole prompt 100 to 170, an estimated one 120 to 165."""
FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups that need a prompt's whole prefix (KVCacheSpecKind in vllm/v1/kv_cache_interface.py)."""
MAX_GROUPS = 64
MOST_BLOCKS = 4 * 1024 * 1024
"""Blocks remembered of an engine at most, whatever it says of itself: 64 million tokens in blocks of 16."""


class Held(Protocol):
    """What one engine is thought to hold."""

    capacity: int
    """Blocks that the engine has at most."""

    def run(self, prefix: Prefix) -> int:
        """How many leading blocks of a prompt are held, of those that can be reused."""
        ...

    def computed(self, prefix: Prefix) -> None:
        """The engine has computed or loaded this prompt."""
        ...

    def clear(self) -> None:
        """Nothing is known any more."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes that all this takes."""
        ...

    @property
    def evicted(self) -> int:
        """Blocks dropped for want of room, since the start."""
        ...

    def __len__(self) -> int: ...


class Estimated:
    """An LRU of the blocks that were sent to an engine, as large as the engine's own cache."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._evicted = 0
        self.capacity = DEFAULT_BLOCKS

    def run(self, prefix: Prefix) -> int:
        return _leading(self._blocks, prefix.hashes, min(prefix.reusable, len(prefix.hashes)))

    def computed(self, prefix: Prefix) -> None:
        """Remember its blocks. A chain's tail is forgotten first, as vLLM does."""
        for block in reversed(prefix.hashes):
            key = block[-KEY_BYTES:]
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)
            self._evicted += 1

    def clear(self) -> None:
        self._blocks = OrderedDict()

    @property
    def held_bytes(self) -> int:
        return sys.getsizeof(self._blocks) + KEY_COST * len(self._blocks)

    @property
    def evicted(self) -> int:
        return self._evicted

    def __len__(self) -> int:
        return len(self._blocks)


class Blocks:
    """The blocks of one group of layers, and how they hang together.

    Most blocks have one child and one copy. Those with none or several, and what was removed from under its
    children, stand in tables of their own, which stay small.
    """

    def __init__(self) -> None:
        self.size = 0
        """Tokens in a block."""
        self._parents: dict[bytes, bytes | None] = {}
        """Every block, with its parent's key."""
        self._leaves: dict[bytes, bytes] = {}
        """Those without a child, oldest first: each key with itself, to be used again as its child's parent."""
        self._branches: dict[bytes, int] = {}
        """Those with several children."""
        self._copies: dict[bytes, int] = {}
        """Those that are there more than once."""
        self._holes: dict[bytes, int] = {}
        """Blocks that were removed and have children still. A child counts again once its parent is back."""

    def run(self, prefix: Prefix) -> int:
        """How many leading blocks of a prompt are here, of those that can be reused."""
        step = 1
        if self.size > prefix.block_size and self.size % prefix.block_size == 0:
            step = self.size // prefix.block_size
        hashes = prefix.hashes[step - 1 :: step] if step > 1 else prefix.hashes
        most = min(prefix.reusable // step, len(hashes))
        count = _leading(self._parents, hashes, most)
        if self._holes:
            count = _scan(self._parents, hashes, count)
        return count * step

    def store(self, keys: Iterable[bytes], parent: bytes | None) -> int:
        """Add a chain, or one copy more of it. How many blocks were not, since their parent is not here."""
        parents, leaves, loose = self._parents, self._leaves, 0
        for key in keys:
            if key in parents:
                self._copies[key] = self._copies.get(key, 1) + 1
            elif parent is None or parent in parents:
                if parent is not None:
                    if parent in leaves:
                        parent = leaves.pop(parent)  # the same object, which takes no room
                    else:
                        self._branches[parent] = self._branches.get(parent, 1) + 1
                parents[key] = parent
                children = self._holes.pop(key, 0) if self._holes else 0
                if not children:
                    leaves[key] = key
                elif children > 1:
                    self._branches[key] = children
            else:
                loose += 1
            parent = key
        return loose

    def remove(self, keys: Iterable[bytes]) -> None:
        """Take one copy of each away."""
        for key in keys:
            copies = self._copies.get(key)
            if copies is not None:
                if copies > 2:
                    self._copies[key] = copies - 1
                else:
                    del self._copies[key]
            elif key in self._parents:
                self._drop(key)

    def trim(self, capacity: int) -> int:
        """Drop leaves, the oldest first, until there are no more blocks than that. How many blocks were dropped."""
        dropped = 0
        while len(self._parents) > capacity:
            leaf = next(iter(self._leaves), None)
            if leaf is None:  # hashes of a ring, which no prompt has
                dropped += len(self._parents)
                self.clear()
                break
            self._copies.pop(leaf, None)
            self._drop(leaf)
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Empty all tables, and give their room back."""
        self._parents, self._leaves, self._branches, self._copies, self._holes = {}, {}, {}, {}, {}

    @property
    def held_bytes(self) -> int:
        """Bytes that all tables take."""
        tables = (self._parents, self._leaves, self._branches, self._copies, self._holes)
        return sum(map(sys.getsizeof, tables)) + KEY_COST * (len(self._parents) + len(self._holes))

    def __len__(self) -> int:
        return len(self._parents)

    def _drop(self, key: bytes) -> None:
        parent = self._parents.pop(key)
        if self._leaves.pop(key, None) is None:
            self._holes[key] = self._branches.pop(key, 1)
        if parent is None:
            return
        held = parent in self._parents
        counts = self._branches if held else self._holes
        children = counts.pop(parent, 1) - 1
        if held and not children:
            self._leaves[parent] = parent
        elif children > held:  # one child alone is noted of a hole only
            counts[parent] = children


class Reported:
    """The blocks that an engine's events tell of, and how many events there were (connector/batches.py)."""

    def __init__(self) -> None:
        self._groups: dict[int | None, Blocks] = {}
        self._others: set[int | None] = set()
        """Groups without full attention."""
        self._evicted = 0
        self.capacity = DEFAULT_BLOCKS
        self.newest: bytes | None = None
        """The newest message that tells of a prompt's first block."""
        self.missed = False
        """Somebody has told that none comes."""
        self.received = 0
        """Messages that came, since the start; so are all that follow."""
        self.events = 0
        """Events that were applied."""
        self.gaps = 0
        """Times that a message was missing."""
        self.replays = 0
        """Times that the engine told again what was asked for, all of it."""
        self.failed = 0
        """Times that it did not."""
        self.bad = 0
        """Messages and events that could not be read."""
        self.loose = 0
        """Blocks whose parent was not known."""
        self.forgotten = 0
        """Times that something was forgotten, since some of it may be gone."""

    def run(self, prefix: Prefix) -> int:
        return min((blocks.run(prefix) for blocks in self._groups.values()), default=0)

    def computed(self, prefix: Prefix) -> None:
        """The engine says so itself."""

    def stored(
        self, keys: Sequence[bytes], parent: bytes | None, size: int, group: int | None, kind: str | None
    ) -> None:
        """The engine holds these blocks of `size` tokens, a chain that goes on from `parent`."""
        if kind is not None and kind not in FULL_ATTENTION and len(self._others) < MAX_GROUPS:
            self._others.add(group)
        blocks = self._groups.get(group)
        if blocks is None:
            if group in self._others or len(self._groups) >= MAX_GROUPS:
                return
            blocks = self._groups[group] = Blocks()
        blocks.size = max(blocks.size, size)
        self.loose += blocks.store(keys, parent)
        over = len(self) - self.capacity  # groups share the engine's blocks
        if over > 0:
            self._evicted += blocks.trim(max(0, len(blocks) - over))

    def removed(self, keys: Sequence[bytes], group: int | None) -> None:
        """The engine has given up a copy of each of these blocks."""
        blocks = self._groups.get(group)
        if blocks is not None:
            blocks.remove(keys)
        elif group not in self._others:
            for blocks in self._groups.values():
                blocks.remove(keys)

    def clear(self) -> None:
        self._groups = {}

    def forget(self) -> None:
        """Nothing is known any more, though some of it may be held."""
        if len(self):
            self.forgotten += 1
        self.clear()

    @property
    def held_bytes(self) -> int:
        return sum(blocks.held_bytes for blocks in self._groups.values())

    @property
    def evicted(self) -> int:
        return self._evicted

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))


def _leading(blocks: Collection[bytes], hashes: Sequence[bytes], most: int) -> int:
    """How many of the first `most` are there, where whatever is there has its parent there."""
    held, ahead = 0, most if blocks else 0
    while held < ahead:
        middle = (held + ahead) // 2
        if hashes[middle][-KEY_BYTES:] in blocks:
            held = middle + 1
        else:
            ahead = middle
    return held


def _scan(blocks: Container[bytes], hashes: Sequence[bytes], most: int) -> int:
    """The same, one by one, where a parent may be missing."""
    for count in range(most):
        if hashes[count][-KEY_BYTES:] not in blocks:
            return count
    return most
