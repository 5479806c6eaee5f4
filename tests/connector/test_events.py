"""What an engine holds, by its events and by estimate. No socket: messages are handed in."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.blocks import Prefix
from connector.events import Estimated, Reported


def prefix(*names: int, tokens: int | None = None, size: int = 4) -> Prefix:
    """A prompt of these blocks and one token more."""
    hashes = tuple(name.to_bytes(32, "big") for name in names)
    return Prefix(tokens=len(names) * size + 1 if tokens is None else tokens, block_size=size, hashes=hashes)


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
    assert len(held) == 3
    assert held.run(prefix(1, 2, 3, 4, 5)) == 3


def test_the_least_recently_used_prompt_goes() -> None:
    held = Estimated()
    held.capacity = 4
    held.computed(prefix(1, 2))
    held.computed(prefix(3, 4))
    held.computed(prefix(1, 2))
    held.computed(prefix(5, 6))
    assert [held.run(prefix(*p)) for p in ((1, 2), (3, 4), (5, 6))] == [2, 0, 2]


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=20), st.integers(1, 10))
def test_held_is_bounded_and_what_came_last_is_there(prompts: list[list[int]], capacity: int) -> None:
    held = Estimated()
    held.capacity = capacity
    for blocks in prompts:
        unique = list(dict.fromkeys(blocks))
        held.computed(prefix(*unique))
        assert len(held) <= capacity
        assert held.run(prefix(*unique)) == min(len(unique), capacity)


# Reported


def message(number: int, *events: object, rank: int | None = 0) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.5, list(events), rank])]


def stored(*names: int, short: bool = False, **fields: object) -> dict[str, object]:
    """The event as vLLM writes it, hashes in full or as 64 bits."""
    hashes: Sequence[object] = [name if short else name.to_bytes(32, "big") for name in names]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def removed(*names: int, medium: str = "GPU") -> dict[str, object]:
    hashes = [name.to_bytes(32, "big") for name in names]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


@pytest.mark.parametrize("short", [False, True])
def test_what_is_stored_is_held_until_it_is_removed(short: bool) -> None:
    held = Reported()
    held.receive(message(0, stored(1, 2, 3, short=short)))
    assert held.run(prefix(1, 2, 3)) == 3
    held.receive(message(1, removed(2)))
    assert held.run(prefix(1, 2, 3)) == 1


def test_what_was_sent_there_is_not_guessed_as_well() -> None:
    held = Reported()
    held.computed(prefix(1, 2))
    assert len(held) == 0


def test_the_pools_blocks_are_not_the_engines() -> None:
    held = Reported()
    held.receive(message(0, stored(1, medium="cpu")))
    assert held.run(prefix(1)) == 0
    held.receive(message(1, stored(1), removed(1, medium="cpu")))
    assert held.run(prefix(1)) == 1


def test_a_cleared_cache_is_empty() -> None:
    held = Reported()
    held.receive(message(0, stored(1, 2), {"type": "AllBlocksCleared"}, stored(3)))
    assert [held.run(prefix(name)) for name in (1, 2, 3)] == [0, 0, 1]


def test_a_gap_forgets_what_came_before_it() -> None:
    held = Reported()
    held.receive(message(56, stored(1)))
    assert held.gaps == 0, "one may come late"
    held.receive(message(58, stored(2)))
    assert (held.gaps, held.run(prefix(1)), held.run(prefix(2))) == (1, 0, 1)


def test_an_engine_that_begins_anew_is_known_anew() -> None:
    held = Reported()
    for number in range(500):
        held.receive(message(number, stored(number + 1)))
    held.receive(message(0, stored(7)))
    assert len(held) == 1
    assert held.run(prefix(7)) == 1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"\0" * 8, b"garbage"],
        [b"", b"\0" * 8, b"\x91" * 200_000 + b"\xc0"],
        [b"", b"\0" * 8, msgspec.msgpack.encode([])],
        [b"", b"\0" * 8, msgspec.msgpack.encode({"ts": 1})],
        [b"", b"\0" * 8, msgspec.msgpack.encode([0, [7], 0])],
        [b"", b"\0" * 8, msgspec.msgpack.encode([0, [{"type": "BlockStored", "block_hashes": [None]}], 0])],
        [b"", b"\0" * 8, msgspec.msgpack.encode([0, [{"type": "BlockStored"}], 0])],
    ],
)
def test_what_cannot_be_read_is_counted_and_trusted_in_nothing(frames: list[bytes]) -> None:
    held = Reported()
    held.receive(message(0, stored(1)))
    held.receive(frames)
    assert (held.bad, len(held)) == (1, 0)
    held.receive(message(1, stored(2)))
    assert held.run(prefix(2)) == 1


def test_new_fields_and_new_kinds_do_no_harm() -> None:
    held = Reported()
    batch = [0.5, [stored(1, zz_new=[1]), {"type": "BlockMoved", "block_hashes": [b"x"]}], None, "and more"]
    held.receive([b"kv", (0).to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
    assert (held.run(prefix(1)), held.bad) == (1, 0)


def test_a_flood_is_bounded() -> None:
    held = Reported()
    held.capacity = 10
    held.receive(message(0, stored(*range(1, 100))))
    assert len(held) == 10


@given(st.randoms(use_true_random=False))
def test_it_follows_a_model_of_the_engine(chance: random.Random) -> None:
    held, real = Reported(), set[int]()
    for number in range(30):
        names = [chance.randrange(1, 40) for _ in range(chance.randrange(1, 5))]
        if chance.random() < 0.6:
            held.receive(message(number, stored(*names, short=chance.random() < 0.5)))
            real.update(names)
        else:
            held.receive(message(number, removed(*names)))
            real.difference_update(names)
    assert {name for name in range(1, 40) if held.run(prefix(name))} == real
