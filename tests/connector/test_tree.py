"""What is remembered of texts: as much as they share, within a bound."""

import gc
import random
import tracemalloc
from array import array
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.tree import DEPTH, Chain, Forest, Found, Stretch, _Node, _Tree

SIZE = 4
"""Tokens in a block."""


class Letters:
    """Texts of which every fourth byte is a mark, and every byte a token."""

    def after(self, text: bytes, at: int) -> int | None:
        return at + 4 if at + 4 <= len(text) else None

    def holds(self, text: bytes, at: int) -> bool:
        return at <= len(text)


LETTERS = Letters()


def chain(domain: Hashable = "a", hashing: Hashable = "h", size: int = SIZE) -> Chain:
    return Chain(domain, LETTERS, (), hashing, size)


def block(text: bytes, number: int) -> bytes:
    """A hash that says which block it is of."""
    return text[: (number + 1) * SIZE].rjust(32)[-32:]


def learn(forest: Forest, text: bytes, of: Chain) -> Found:
    """What is found of a text, which is remembered then."""
    found = forest.find(of, text)
    new = text[found.at : len(text) // 4 * 4]
    marks = range(4, len(new) + 1, 4)
    hashes = [block(text, number) for number in range(found.tokens // SIZE, (found.tokens + len(new)) // SIZE)]
    stretch = Stretch(array("I", marks), array("I", marks), array("I", list(new)), hashes if of.block_size else [])
    forest.add(of, text, found.at, stretch)
    assert forest.shrink()
    return found


def shared(text: bytes, others: list[bytes]) -> int:
    """The marks that a text shares with others, in bytes."""
    return max((at for other in others for at in range(0, len(text) + 1, 4) if other[:at] == text[:at]), default=0)


def nodes(tree: _Tree) -> list[_Node]:
    found = [tree.root]
    for node in found:
        found += node.children.values()
    return found


def check(forest: Forest) -> None:
    """What is counted is what is there, and all is in its place."""
    weights: dict[Hashable, int] = {}
    for of, tree in forest._trees.items():
        for node in nodes(tree):
            assert node.weigh() == 0, "it was weighed when it changed last"
            weights[of.domain] = weights.get(of.domain, 0) + node.weight
            leaf = node is not tree.root and not node.children
            assert (node in forest._domains[of.domain].leaves) == leaf
            if node is not tree.root:
                assert node.ends[-1] == len(node.edge)
                assert node.counts[-1] == len(node.ids)
                assert node.parent is not None
                assert node.parent.children[node.key] is node
    assert {name: domain.weight for name, domain in forest._domains.items()} == weights
    assert forest.held_bytes == sum(weights.values())
    assert {name for level in forest._levels.values() for name in level} == set(weights)


texts = st.lists(st.sampled_from([b"aaaa", b"aaab", b"bbbb", b"c"]), max_size=12).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, st.sampled_from("ab"), st.sampled_from("hi")), max_size=20))
def test_as_much_is_found_as_is_shared_with_any_earlier_text(steps: list[tuple[bytes, str, str]]) -> None:
    forest = Forest(2**30)
    seen: dict[Chain, list[bytes]] = {}
    for text, domain, hashing in steps:
        of = chain(domain, hashing)
        found = learn(forest, text, of)

        assert found.at == shared(text, seen.get(of, []))
        assert found.last(found.tokens) == list(text[: found.at])
        assert found.last(3) == list(text[: found.at])[-3:]
        assert found.hashes == [block(text, number) for number in range(found.at // SIZE)]
        seen.setdefault(of, []).append(text)
        check(forest)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(texts, st.sampled_from("abc")), max_size=30), st.integers(0, 6000))
def test_the_bound_holds(steps: list[tuple[bytes, str]], bound: int) -> None:
    forest = Forest(bound)
    for text, domain in steps:
        learn(forest, text, chain(domain))
        assert forest.held_bytes <= bound
        check(forest)
    forest.clear()
    check(forest)


def test_it_can_be_forgotten_bit_by_bit() -> None:
    forest = Forest(10_000)
    for number in range(10):
        text = b"%08d" % number * 12
        forest.add(chain(), text, 0, Stretch(array("I", [96]), array("I", [1]), array("I", [1]), []))
    before = forest.held_bytes
    assert before > 10_000
    assert not forest.shrink(1)
    assert 10_000 < forest.held_bytes < before
    assert forest.shrink()
    check(forest)
    assert forest.held_bytes <= 10_000


def test_a_conversation_that_grows_is_one_node() -> None:
    forest = Forest(2**30)
    for turn in range(1, 50):
        learn(forest, bytes(range(200)) * turn, chain())
    assert len(nodes(forest._trees[chain()])) == 2


def test_blocks_that_end_elsewhere_than_marks() -> None:
    forest = Forest(2**30)
    of = chain(size=3)
    text = bytes(range(40))
    counts = array("I", range(4, 41, 4))
    forest.add(of, text, 0, Stretch(counts, counts[:], array("I", list(text)), [bytes([at]) for at in range(13)]))

    found = forest.find(of, text[:18] + b"x")

    assert (found.at, found.tokens) == (16, 16)
    assert found.hashes == [bytes([at]) for at in range(5)]
    forest.add(
        of, text[:16] + b"abcd", 16, Stretch(array("I", [4]), array("I", [4]), array("I", list(b"abcd")), [b"x"])
    )
    assert forest.find(of, text).hashes == [bytes([at]) for at in range(13)]
    assert forest.find(of, text[:16] + b"abcd").hashes == [*(bytes([at]) for at in range(5)), b"x"]


def test_what_has_changed_since_is_not_spoilt() -> None:
    forest = Forest(2**30)
    text = b"aaaabbbbcccc"
    four = array("I", [4])
    learn(forest, text, chain())
    forest.add(chain(), text, 0, Stretch(four, four[:], array("I", list(b"aaaa")), []))
    forest.add(chain("b"), text, 4, Stretch(four, four[:], array("I", list(b"bbbb")), []))
    assert forest.find(chain(), text).at == 12
    assert forest.find(chain("b"), text).at == 0
    check(forest)


def test_a_path_has_so_many_nodes_and_the_newer_text_stays() -> None:
    forest = Forest(2**30)
    long = b"".join(b"%04d" % number for number in range(3 * DEPTH))
    learn(forest, long, chain())
    for end in [*range(len(long) - 4, 0, -4), *range(4, len(long), 8)]:
        text = long[:end] + b"else"
        learn(forest, text, chain())
        assert forest.find(chain(), text).at == len(text)
        assert len(forest._trees[chain()].path(long)) <= DEPTH + 1
    check(forest)


def test_the_least_recently_used_goes_first() -> None:
    forest = Forest(20_000)
    first, second = b"first" * 20, b"later" * 20
    learn(forest, first, chain())
    learn(forest, second, chain())
    for number in range(20):
        learn(forest, b"%04d" % number * 25, chain())
        assert forest.find(chain(), first).at
    assert not forest.find(chain(), second).at


def test_one_domain_cannot_push_out_another() -> None:
    forest = Forest(200_000)
    mine = [b"%08d" % number * 12 for number in range(20)]
    for text in mine:
        learn(forest, text, chain("mine"))
    for number in range(3000):
        learn(forest, b"%08d" % -number * 12, chain("theirs"))
    assert all(forest.find(chain("mine"), text).at for text in mine)
    assert forest.held_bytes > 150_000
    check(forest)


def test_nor_can_many_that_hold_little() -> None:
    forest = Forest(200_000)
    for number in range(400):
        learn(forest, b"%08d" % number * 12, chain(number))
    assert 150_000 < forest.held_bytes <= 200_000
    assert forest.find(chain(399), b"%08d" % 399 * 12).at
    check(forest)


@pytest.mark.parametrize("domains", [1, 500])
@pytest.mark.parametrize("length", [40, 4000])
def test_what_is_counted_is_what_is_taken(domains: int, length: int) -> None:
    chance = random.Random(1)
    texts = [chance.randbytes(length) for _ in range(3_000_000 // (length + 2000))]
    forest = Forest(2**30)
    gc.collect()
    tracemalloc.start()
    for number, text in enumerate(texts):
        learn(forest, text, chain(number % domains))
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < forest.held_bytes / taken < 1.25
