"""What an engine holds, block by block. No events: chains are handed in."""

import random
import resource
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from connector.blocks import Prefix
from connector.held import DEFAULT_BLOCKS, Blocks, Estimated, Reported
from connector.landmarks import MOST, Sent, of_prefix

SIZE = 4


def digest(*path: int) -> bytes:
    """The hash of the block at the end of this path: it hangs on all blocks before it."""
    return b"\x01" * 24 + (hash(path) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")


def chain(*path: int) -> list[bytes]:
    return [digest(*path[: count + 1]) for count in range(len(path))]


def keys(*path: int) -> list[bytes]:
    return [block[-8:] for block in chain(*path)]


def prefix(*path: int, tokens: int | None = None, size: int = SIZE) -> Prefix:
    """A prompt of these blocks and one token more."""
    return Prefix(
        tokens=len(path) * size + 1 if tokens is None else tokens, block_size=size, hashes=tuple(chain(*path))
    )


def random_path(chance: random.Random, depth: int = 6) -> tuple[int, ...]:
    """Two choices at each block, so that prompts share beginnings."""
    return tuple(chance.randrange(2) for _ in range(chance.randrange(1, depth + 1)))


# Estimated


def test_the_run_ends_at_the_first_block_that_is_not_held() -> None:
    held = Estimated()
    held.computed(prefix(1, 2, 3))
    assert held.run(prefix(1, 2, 3, 4)) == 3
    assert held.run(prefix(1, 9, 3)) == 1
    assert held.run(prefix(9, 2, 3)) == 0


def test_one_token_is_always_computed() -> None:
    held = Estimated()
    held.computed(prefix(1, 2))
    assert held.run(prefix(1, 2, tokens=8)) == 1


def test_the_tail_is_forgotten_first() -> None:
    held = Estimated()
    held.capacity = 3
    held.computed(prefix(1, 2, 3, 4, 5))
    assert (len(held), held.evicted) == (3, 2)
    assert held.run(prefix(1, 2, 3, 4, 5)) == 3


def test_the_least_recently_used_prompt_goes() -> None:
    held = Estimated()
    held.capacity = 4
    held.computed(prefix(1, 2))
    held.computed(prefix(3, 4))
    held.computed(prefix(1, 2))
    held.computed(prefix(5, 6))
    assert [held.run(prefix(*p)) for p in ((1, 2), (3, 4), (5, 6))] == [2, 0, 2]


@pytest.mark.parametrize("seed", range(50))
def test_an_estimate_is_an_lru_of_blocks(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.randrange(1, 10)
    held, used = Estimated(), list[bytes]()
    held.capacity = capacity
    for _ in range(30):
        path = random_path(chance)
        held.computed(prefix(*path))
        for key in reversed(keys(*path)):
            used = [one for one in used if one != key] + [key]
        used = used[-capacity:]
        assert len(held) == len(used)
        other = random_path(chance)
        assert held.run(prefix(*other)) == run_of(used, keys(*other))


class Counted(tuple[bytes, ...]):  # noqa: SLOT001 -- a tuple can have none
    """Hashes that count how often one is looked at."""

    looks: list[int]

    def __getitem__(self, at: Any) -> Any:
        self.looks.append(1)
        return super().__getitem__(at)


@pytest.mark.parametrize("held", [0, 1, 5000, 7999, 8000])
def test_a_long_chain_is_found_in_few_steps(held: int) -> None:
    chance = random.Random(held)
    hashes = Counted(chance.randbytes(32) for _ in range(8000))
    hashes.looks = []
    long = Prefix(tokens=8000 * SIZE + 1, block_size=SIZE, hashes=hashes)
    estimated, reported = Estimated(), Reported()
    estimated.computed(Prefix(tokens=held * SIZE, block_size=SIZE, hashes=tuple(list(hashes)[:held])))
    reported.stored([one[-8:] for one in list(hashes)[:held]], None, SIZE, 0, None)
    assert [estimated.run(long), reported.run(long)] == [held, held]
    assert len(hashes.looks) <= 2 * 14


# Blocks, and what an engine reports


def run_of(there: Sequence[bytes] | dict[bytes, int], wanted: Sequence[bytes]) -> int:
    """Block by block."""
    count = 0
    while count < len(wanted) and wanted[count] in there:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_stored_and_removed_the_run_is_exact(seed: int) -> None:
    chance = random.Random(seed)
    blocks, copies = Blocks(), dict[bytes, int]()
    for _ in range(60):
        path = random_path(chance)
        start = chance.randrange(len(path))
        names = keys(*path)
        if chance.random() < 0.55:
            blocks.store(names[start:], names[start - 1] if start else None)
            for at in range(start, len(names)):
                if names[at] in copies or at == 0 or names[at - 1] in copies:
                    copies[names[at]] = copies.get(names[at], 0) + 1
        elif chance.random() < 0.97:
            blocks.remove([names[-1]])
            if copies.get(names[-1], 0) > 1:
                copies[names[-1]] -= 1
            else:
                copies.pop(names[-1], None)
        else:
            blocks.clear()
            copies.clear()
        assert len(blocks) == len(copies)
        for _ in range(4):
            other = random_path(chance)
            assert blocks.run(prefix(*other)) == run_of(copies, keys(*other))
    while copies:
        name = chance.choice(list(copies))
        blocks.remove([name] * copies.pop(name))
    assert len(blocks) == 0
    assert not any((blocks._leaves, blocks._branches, blocks._copies, blocks._holes))


@pytest.mark.parametrize("seed", range(50))
def test_leaves_are_dropped_for_want_of_room(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.randrange(1, 8)
    blocks = Blocks()
    for _ in range(40):
        path = random_path(chance)
        before = len(blocks)
        names = keys(*path)
        new = sum(blocks.run(prefix(*path[: at + 1])) != at + 1 for at in range(len(path)))
        blocks.store(names, None)
        dropped = blocks.trim(capacity)
        assert len(blocks) == before + new - dropped <= capacity
        held = [at for at in range(len(path)) if blocks.run(prefix(*path[: at + 1])) == at + 1]
        assert held == list(range(len(held))), "no block without its parent"


def test_a_ring_of_hashes_is_bounded_as_well() -> None:
    blocks = Blocks()
    blocks.store([b"a", b"b"], None)
    blocks.remove([b"a"])
    blocks.store([b"a"], b"b")
    assert blocks.trim(1) == 2
    assert len(blocks) == 0


def test_a_copy_less_is_still_one() -> None:
    held = Reported()
    held.stored(keys(1, 2), None, SIZE, 0, None)
    held.stored(keys(1, 2), None, SIZE, 0, None)
    held.removed(keys(1, 2)[1:], 0)
    assert held.run(prefix(1, 2)) == 2
    held.removed(keys(1, 2)[1:], 0)
    assert held.run(prefix(1, 2)) == 1


def test_what_hangs_on_nothing_known_cannot_be_found() -> None:
    held = Reported()
    held.stored(keys(1, 2, 3)[2:], keys(1, 2)[1], SIZE, 0, None)
    assert (len(held), held.loose) == (0, 1)


def test_a_child_counts_again_once_its_parent_is_back() -> None:
    held = Reported()
    held.stored(keys(1, 2, 3), None, SIZE, 0, None)
    held.removed(keys(1, 2)[1:], 0)
    assert held.run(prefix(1, 2, 3)) == 1
    held.stored(keys(1, 2)[1:], keys(1)[0], SIZE, 0, None)
    assert held.run(prefix(1, 2, 3)) == 3


def test_only_groups_with_full_attention_count() -> None:
    held = Reported()
    held.stored(keys(1, 2, 3), None, SIZE, 0, "full_attention")
    held.stored(keys(1, 2, 3)[2:], None, SIZE, 1, "sliding_window")
    held.removed(keys(1, 2, 3), 1)
    assert held.run(prefix(1, 2, 3)) == 3
    held.removed(keys(1, 2, 3)[2:], 0)
    assert held.run(prefix(1, 2, 3)) == 2


def test_a_block_is_held_where_every_such_group_has_it() -> None:
    held = Reported()
    held.stored(keys(1, 2, 3), None, SIZE, 0, "full_attention")
    held.stored(keys(1, 2), None, SIZE, 3, "mla_attention")
    assert held.run(prefix(1, 2, 3)) == 2


def test_a_groups_block_may_span_several_of_a_prompts() -> None:
    held = Reported()
    names = keys(1, 2, 3, 4, 5, 6)
    held.stored(names[1::2], None, 2 * SIZE, 0, "full_attention")
    assert held.run(prefix(1, 2, 3, 4, 5, 6)) == 6
    assert held.run(prefix(1, 2, 3, 4, 5)) == 4
    assert held.run(prefix(1, 2, 3, 9, 5, 6)) == 2
    held.removed(names[5:], 0)
    assert held.run(prefix(1, 2, 3, 4, 5, 6)) == 4


def test_blocks_of_another_size_match_nothing() -> None:
    held = Reported()
    held.stored(keys(71, 72), None, 16 * SIZE, 0, "full_attention")
    assert held.run(prefix(*range(40))) == 0


def test_a_removal_without_a_known_group_is_believed_of_all() -> None:
    held = Reported()
    held.stored(keys(1, 2), None, SIZE, 0, None)
    held.removed(keys(1, 2)[1:], None)
    assert held.run(prefix(1, 2)) == 1


def test_what_was_sent_there_is_not_guessed_as_well() -> None:
    held = Reported()
    held.computed(prefix(1, 2))
    assert len(held) == 0


def test_a_flood_is_bounded() -> None:
    held = Reported()
    held.capacity = 10
    held.stored(keys(*range(1, 100)), None, SIZE, 0, None)
    assert (len(held), held.evicted) == (10, 89)
    assert held.run(prefix(*range(1, 100))) == 10


def test_no_number_of_groups_makes_it_grow() -> None:
    held = Reported()
    for group in range(1000):
        held.stored(keys(1), None, SIZE, group, None if group % 2 else "mamba")
    assert len(held) <= 64


def unique(number: int, blocks: int) -> tuple[bytes, ...]:
    """A prompt that shares nothing with any other."""
    return tuple(number.to_bytes(4, "big") + block.to_bytes(4, "big") for block in range(blocks))


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("prompts", "blocks", "capacity"),
    [
        (6_000, 64, 16_384),
        pytest.param(200_000, 256, DEFAULT_BLOCKS, marks=pytest.mark.long),
    ],
)
def test_prompts_without_end_take_no_more_memory(prompts: int, blocks: int, capacity: int) -> None:
    """Whatever is remembered of an engine, told or estimated, and of what was sent there. What is lost is counted."""
    reported, estimated, sent = Reported(), Estimated(), Sent(lambda: 0.0)
    reported.capacity = estimated.capacity = capacity

    def send(number: int) -> Prefix:
        hashes = unique(number, blocks)
        prefix = Prefix(tokens=blocks * 16 + 1, block_size=16, hashes=hashes)
        reported.stored(hashes, None, 16, 0, "full_attention")
        estimated.computed(prefix)
        sent.begin(of_prefix(prefix))
        sent.failed(of_prefix(prefix))
        return prefix

    filling = prompts // 4
    for number in range(filling):
        send(number)
    filled, held = resident(), reported.held_bytes + estimated.held_bytes
    for number in range(filling, prompts):
        newest = send(number)
    assert resident() - filled < max(8_000_000, held // 4)
    for index in (reported, estimated):
        assert len(index) == capacity
        assert index.evicted == prompts * blocks - capacity, "nothing is dropped in silence"
        assert index.run(newest) == blocks
    assert len(sent) <= MOST
    assert sent.lately(of_prefix(newest)) == blocks * 16
    for index in (reported, estimated):
        index.clear()
        assert index.held_bytes < 2000


def test_blocks_take_what_they_are_said_to() -> None:
    chance = random.Random(4)
    reported, estimated = Reported(), Estimated()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for conversation in conversations(chance):
            reported.stored(conversation, None, SIZE, 0, "full_attention")
        middle = tracemalloc.get_traced_memory()[0]
        for conversation in conversations(chance):
            estimated.computed(Prefix(tokens=len(conversation) * SIZE, block_size=SIZE, hashes=tuple(conversation)))
        after = tracemalloc.get_traced_memory()[0]
        assert (middle - before) / len(reported) <= 130
        assert middle - before == pytest.approx(reported.held_bytes, rel=0.15)
        assert after - middle == pytest.approx(estimated.held_bytes, rel=0.15)
        reported.clear()
        estimated.clear()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def conversations(chance: random.Random) -> Iterator[list[bytes]]:
    """As many as an engine of 40,000 blocks holds."""
    for _ in range(100):
        yield [chance.randbytes(8) for _ in range(400)]


def test_groups_share_the_engines_blocks() -> None:
    held = Reported()
    held.capacity = 100
    for group in range(40):
        held.stored(keys(*range(group, group + 20)), None, SIZE, group, "full_attention")
    assert len(held) <= 100
    assert held.evicted >= 700
