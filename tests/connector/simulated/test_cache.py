"""Blocks are shared, freed tail first, and taken in the order in which they were used."""

from hypothesis import given
from hypothesis import strategies as st

from connector.simulated.cache import Cache


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{place}".encode() for place in range(length)]


def use(cache: Cache, hashes: list[bytes], extra: int = 0) -> list[int]:
    """A request that comes, finds what it can, computes the rest, and holds all."""
    own = cache.run(hashes)
    blocks = cache.hold(hashes[:own])
    taken = cache.take(len(hashes) - own + extra)
    assert taken is not None
    for block, digest in zip(taken, hashes[own:], strict=False):
        cache.keep(block, digest)
    return blocks + taken


def test_a_run_ends_at_the_first_gap() -> None:
    cache = Cache(8)
    one = chain("a", 4)
    use(cache, one)
    assert cache.run(one) == 4
    assert cache.run([one[0], b"other", one[2]]) == 1
    assert cache.run([]) == 0


def test_free_blocks_stay_findable_and_the_tail_goes_first() -> None:
    cache = Cache(4)
    one = chain("a", 4)
    cache.release(use(cache, one))
    assert (cache.run(one), cache.free, cache.usage) == (4, 4, 0.0)
    use(cache, chain("b", 2))
    assert cache.drain() == [one[3], one[2]]
    assert cache.run(one) == 2


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(4)
    old, new = chain("a", 2), chain("b", 2)
    first, second = use(cache, old), use(cache, new)
    cache.release(first)
    cache.release(second)
    cache.release(use(cache, old))
    use(cache, chain("c", 2))
    assert (cache.run(old), cache.run(new)) == (2, 0)


def test_blocks_without_a_hash_go_before_all_others() -> None:
    cache = Cache(3)
    one = chain("a", 2)
    cache.release(use(cache, one, extra=1))
    use(cache, chain("b", 1))
    assert cache.run(one) == 2


def test_blocks_in_use_are_not_taken() -> None:
    cache = Cache(3)
    one = chain("a", 2)
    held = use(cache, one)
    again = cache.hold(one)
    assert again == held
    assert cache.take(2) is None
    cache.release(held)
    assert cache.take(2) is None
    cache.release(again)
    assert cache.take(3) is not None
    assert cache.drain() == [one[1], one[0]]


def test_what_could_be_taken_beside_a_run() -> None:
    cache = Cache(6)
    one = chain("a", 3)
    cache.release(use(cache, one))
    held = use(cache, chain("b", 2))
    assert one[0] in cache
    assert b"other" not in cache
    assert (cache.free, cache.spare([]), cache.spare(one)) == (4, 4, 1)
    cache.hold(one[:2])
    assert cache.spare(one) == 1
    cache.release(held)
    assert cache.spare(one) == 3


def test_two_blocks_may_bear_one_hash() -> None:
    cache = Cache(3)
    first = use(cache, chain("a", 1))
    second = cache.take(1)
    assert second is not None
    cache.keep(second[0], b"a0")
    cache.release(first)
    cache.release(second)
    cache.take(2)
    assert cache.drain() == [b"a0"]
    assert cache.run([b"a0"]) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_no_block_is_lost_or_used_twice(requests: list[tuple[int, int]]) -> None:
    cache = Cache(8)
    held: list[list[int]] = []
    known: set[bytes] = set()
    for name, length in requests:
        hashes = chain(str(name), length)
        own = cache.run(hashes)
        blocks = cache.hold(hashes[:own])
        taken = cache.take(length - own)
        if taken is None:
            cache.release(blocks)
            if held:
                cache.release(held.pop(0))
            continue
        for block, digest in zip(taken, hashes[own:], strict=True):
            cache.keep(block, digest)
        known.update(hashes)
        held.append(blocks + taken)
        for digest in cache.drain():
            known.discard(digest)
        assert cache.free == 8 - len({block for chain_ in held for block in chain_})
        assert all(cache.run([digest]) == 1 for digest in known)
    for blocks in held:
        cache.release(blocks)
    assert cache.free == 8
