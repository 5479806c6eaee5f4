"""What is known of earlier texts, by their beginnings: a radix tree for each chain, all within so many bytes.

A chain is whose cache it is, how is hashed, salt, adapter, and the tokens that go before the text.
Trees of two chains share nothing.

A node is a stretch of text from one mark to another. A mark is a place where the text can be cut (see
connector/cuts.py), so the ids up to it are the same in every text that begins so. Marks follow from the
text alone, so a node's child is found by the text up to its first mark, and compared as a whole: one
memcmp for a conversation that has grown, however long it is. A text that goes on where a leaf ends
makes that leaf longer; one that leaves a node in its middle splits it at the last mark that they share.

Over the bound, the least recently used leaf goes, of the domain that holds most (to within an eighth).
So a tenant that sends ever new texts pushes out its own.

Why not every byte a place to split: ids are only certain at marks, so a finer tree would know no more.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Protocol

DEPTH = 256
"""Nodes on one path; where there would be more, the newer text takes the older one's place."""
_NODE = 500
"""Bytes of a node beside what it holds: itself, its place in its parent and among the leaves (measured)."""


class Marks(Protocol):
    """Where texts can be cut."""

    def after(self, text: bytes, at: int) -> int | None: ...

    def holds(self, text: bytes, at: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Chain:
    """What two prompts must have in common for what is known of one to be of use to the other."""

    domain: Hashable
    marks: Marks
    before: tuple[int, ...] = ()
    """Token ids that go before the text; its first stretch has them as well."""
    hashing: Hashable = None
    """Whatever else a block's hash depends on."""
    block_size: int = 0
    """Tokens in a block; 0 where nothing is hashed."""

    def blocks(self, tokens: int, more: int) -> int:
        """How many blocks end within so many more tokens."""
        return (tokens + more) // self.block_size - tokens // self.block_size if self.block_size else 0


@dataclass(frozen=True, slots=True)
class Found:
    """How far a text is known."""

    at: int
    """Bytes, up to a mark."""
    tokens: int
    """Tokens up to there."""
    runs: Sequence[tuple["array[int]", int]]
    """Their ids: the first so many of each array. Arrays are only ever extended, so this stays true."""
    hashes: list[bytes]
    """Of the full blocks up to there."""

    def last(self, count: int) -> list[int]:
        """The last ids."""
        found: list[int] = []
        for ids, length in reversed(self.runs):
            if count <= 0:
                break
            found[:0] = ids[max(0, length - count) : length]
            count -= length
        return found


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was made of a text from a mark on, up to its last mark."""

    ends: "array[int]"
    """Bytes from the beginning to each mark."""
    counts: "array[int]"
    """Tokens up to each."""
    ids: "array[int]"
    hashes: list[bytes]
    """Of the blocks that end within it."""


class _Node:
    __slots__ = ("children", "counts", "edge", "ends", "hashes", "ids", "key", "parent", "weight")

    def __init__(self, edge: bytearray, stretch: Stretch) -> None:
        self.edge = edge
        self.ends = stretch.ends
        self.counts = stretch.counts
        self.ids = stretch.ids
        self.hashes = stretch.hashes
        self.children: dict[int, _Node] = {}
        self.parent: _Node | None = None
        self.key = 0
        self.weight = 0

    def hang(self, parent: "_Node", key: int) -> None:
        """Become the child of another; `key` is the hash of the text up to the first mark."""
        self.parent = parent
        self.key = key
        parent.children[key] = self

    def shares(self, text: bytes, at: int, marks: Marks) -> int:
        """How many of its marks hold in a text, from a place on."""
        if text.startswith(self.edge, at):
            low = len(self.ends)
        else:
            low, high = 0, len(self.ends)
            while low < high:
                middle = (low + high + 1) // 2
                begin, end = self.ends[low - 1] if low else 0, self.ends[middle - 1]
                if text[at + begin : at + end] == self.edge[begin:end]:
                    low = middle
                else:
                    high = middle - 1
        while low and not marks.holds(text, at + self.ends[low - 1]):
            low -= 1
        return low

    def weigh(self) -> int:
        """Bytes more than when it was weighed last."""
        held = sum(map(getsizeof, (self.edge, self.ends, self.counts, self.ids, self.hashes, self.children)))
        if self.hashes:
            held += len(self.hashes) * (getsizeof(self.hashes[0]) + 15 & ~15)
        more = _NODE + held - self.weight
        self.weight += more
        return more

    def extend(self, text: bytes, stretch: Stretch) -> None:
        edge, tokens = len(self.edge), len(self.ids)
        self.edge += text
        self.ends.extend(array("I", [edge + end for end in stretch.ends]))
        self.counts.extend(array("I", [tokens + count for count in stretch.counts]))
        self.ids.extend(stretch.ids)
        self.hashes += stretch.hashes

    def upto(self, marks: int, blocks: int) -> "_Node":
        """A node with what this one has up to a mark."""
        end, count = self.ends[marks - 1], self.counts[marks - 1]
        stretch = Stretch(self.ends[:marks], self.counts[:marks], self.ids[:count], self.hashes[:blocks])
        return _Node(self.edge[:end], stretch)

    def leave(self, marks: int, blocks: int) -> None:
        """Keep only what follows a mark."""
        end, count = self.ends[marks - 1], self.counts[marks - 1]
        self.edge = self.edge[end:]
        self.ends = array("I", [each - end for each in self.ends[marks:]])
        self.counts = array("I", [each - count for each in self.counts[marks:]])
        self.ids = self.ids[count:]
        self.hashes = self.hashes[blocks:]


@dataclass(frozen=True, slots=True)
class _Step:
    """A node on a text's path, how many of its marks hold, and what goes before it."""

    node: _Node
    marks: int
    at: int
    tokens: int

    @property
    def whole(self) -> bool:
        return self.marks == len(self.node.ends)

    @property
    def end(self) -> int:
        return self.at + (self.node.ends[self.marks - 1] if self.marks else 0)

    @property
    def count(self) -> int:
        return self.node.counts[self.marks - 1] if self.marks else 0


class _Tree:
    __slots__ = ("chain", "root")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.root = _Node(bytearray(), Stretch(array("I"), array("I"), array("I"), []))

    def path(self, text: bytes) -> list[_Step]:
        """The nodes that a text goes along, the root first; all but the last as a whole."""
        marks = self.chain.marks
        step = _Step(self.root, 0, 0, 0)
        path = [step]
        while step.whole and len(path) <= DEPTH and (end := marks.after(text, step.end)) is not None:
            child = step.node.children.get(hash(text[step.end : end]))
            shared = child.shares(text, step.end, marks) if child is not None else 0
            if child is None or not shared:
                break
            step = _Step(child, shared, step.end, step.tokens + step.count)
            path.append(step)
        return path


class _Domain:
    __slots__ = ("leaves", "level", "name", "weight")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.weight = 0
        self.level = -1
        self.leaves: OrderedDict[_Node, _Tree] = OrderedDict()
        """The one that was used longest ago first."""


class Forest:
    """The trees of all chains, within a bound. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._trees: dict[Chain, _Tree] = {}
        self._domains: dict[Hashable, _Domain] = {}
        self._levels: dict[int, OrderedDict[Hashable, _Domain]] = {}
        """Domains that hold about as much, the one that was used longest ago first."""
        self.held_bytes = 0
        """Bytes that everything held takes, as Python lays it out."""

    def held_of(self, domain: Hashable) -> int:
        """Bytes of them that are one domain's."""
        return self._domains[domain].weight if domain in self._domains else 0

    def clear(self) -> None:
        self._trees.clear()
        self._domains.clear()
        self._levels.clear()
        self.held_bytes = 0

    def find(self, chain: Chain, text: bytes) -> Found:
        """What is known of a text's beginning."""
        tree = self._trees.get(chain)
        if tree is None:
            return Found(0, 0, (), [])
        path = tree.path(text)
        domain = self._domains[chain.domain]
        self._levels[domain.level].move_to_end(domain.name)
        if path[-1].node in domain.leaves:
            domain.leaves.move_to_end(path[-1].node)
        runs: list[tuple[array[int], int]] = []
        hashes: list[bytes] = []
        for step in path[1:]:
            runs.append((step.node.ids, step.count))
            if step.whole:
                hashes += step.node.hashes
            else:
                hashes += step.node.hashes[: chain.blocks(step.tokens, step.count)]
        return Found(step.end, step.tokens + step.count, runs, hashes) if runs else Found(0, 0, (), [])

    def add(self, chain: Chain, text: bytes, at: int, stretch: Stretch) -> None:
        """Remember what was made of a text from `at` on, which is where `find` said that it is known to.

        If that has changed since, nothing is remembered: the next text will tell. What is held may now be
        over the bound: `shrink` is to follow.
        """
        tree = self._trees.get(chain)
        if not stretch.ends or (tree is None and at):
            return
        if tree is None:
            tree = self._trees[chain] = _Tree(chain)
            if chain.domain not in self._domains:
                self._domains[chain.domain] = _Domain(chain.domain)
            self._weigh(tree, tree.root)
        path = tree.path(text)
        if path[-1].end != at:
            return
        node = self._open(tree, path)
        more = text[at : at + stretch.ends[-1]]
        if node is tree.root or node.children:
            key = hash(more[: stretch.ends[0]])
            if key in node.children:  # another text with the same hash
                self._drop(tree, node.children[key])
            child = _Node(bytearray(more), stretch)
            child.hang(node, key)
            self._weigh(tree, node)
            node = child
        else:
            node.extend(more, stretch)
        self._weigh(tree, node)
        leaves = self._domains[chain.domain].leaves
        leaves[node] = tree
        leaves.move_to_end(node)

    def shrink(self, leaves: int = 2**62) -> bool:
        """Forget so many leaves at most of what is over the bound; whether it then holds."""
        while self.held_bytes > self._max_bytes and self._levels:
            if not leaves:
                return False
            leaves -= 1
            domain = next(iter(self._levels[max(self._levels)].values()))
            self._shed(domain)
            if not domain.leaves:
                self._unplace(domain)
                del self._domains[domain.name]
        return True

    def _open(self, tree: _Tree, path: Sequence[_Step]) -> _Node:
        """The node that ends where a path ends: the last one, or the first part of it."""
        step = path[-1]
        node = step.node
        blocks = tree.chain.blocks(step.tokens, step.count)
        if len(path) > DEPTH:
            for child in list(node.children.values()):
                self._drop(tree, child)
            part = node.upto(step.marks, blocks)
            node.edge, node.ends, node.counts, node.ids, node.hashes = (
                part.edge, part.ends, part.counts, part.ids, part.hashes
            )  # fmt: skip
        elif not step.whole:
            upper = node.upto(step.marks, blocks)
            assert node.parent is not None
            upper.hang(node.parent, node.key)
            node.leave(step.marks, blocks)
            node.hang(upper, hash(bytes(node.edge[: node.ends[0]])))
            self._weigh(tree, node)
            self._weigh(tree, upper)
            return upper
        return node

    def _drop(self, tree: _Tree, node: _Node) -> None:
        """Forget a node and all that go on from it."""
        domain = self._domains[tree.chain.domain]
        assert node.parent is not None
        del node.parent.children[node.key]
        below = [node]
        while below:
            each = below.pop()
            domain.leaves.pop(each, None)
            self._change(domain, -each.weight)
            below += each.children.values()
            each.parent = None

    def _weigh(self, tree: _Tree, node: _Node) -> None:
        self._change(self._domains[tree.chain.domain], node.weigh())

    def _change(self, domain: _Domain, more: int) -> None:
        """Count bytes more, or fewer, for a domain."""
        self.held_bytes += more
        domain.weight += more
        level = _level(domain.weight)
        if level != domain.level:
            self._unplace(domain)
            self._levels.setdefault(level, OrderedDict())[domain.name] = domain
            domain.level = level

    def _unplace(self, domain: _Domain) -> None:
        level = self._levels.get(domain.level)
        if level is not None:
            del level[domain.name]
            if not level:
                del self._levels[domain.level]

    def _shed(self, domain: _Domain) -> None:
        """Forget a domain's least recently used leaf, and its tree if it was the last."""
        node, tree = next(iter(domain.leaves.items()))
        parent = node.parent
        assert parent is not None
        self._drop(tree, node)
        if parent.children:
            return
        if parent is tree.root:
            del self._trees[tree.chain]
            self._change(domain, -parent.weight)
        else:
            domain.leaves[parent] = tree


def _level(weight: int) -> int:
    """The same for weights within an eighth of each other."""
    length = weight.bit_length()
    return 8 * length + (weight >> max(0, length - 4) & 7)
