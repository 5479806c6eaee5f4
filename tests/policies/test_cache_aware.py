"""cache_aware: work = uncached + load_share * pool + queue_share * load."""

import pytest

from policies.cache_aware import CacheAware
from policies.interface import Candidate, Job
from tests.policies.scenes import chosen, engine, engines, job


def test_the_longest_prefix_wins() -> None:
    fleet = [engine("a", own=1024), engine("b", own=4096), engine("c")]
    placement = CacheAware().place(job(), fleet)

    assert (placement.engine, placement.spares, placement.reason) == ("b", ("a", "c"), "longest prefix")
    assert (placement.own_tokens, placement.pool_tokens) == (4096, 0)


def test_a_conversation_stays_through_small_differences_of_load() -> None:
    fleet = [engine("a", own=4096, tokens=4000), engine("b")]

    assert chosen(CacheAware(), 5, fleet) == "aaaaa"


def test_but_not_on_an_engine_that_is_far_busier() -> None:
    fleet = [engine("a", own=4096, tokens=9000), engine("b")]
    placement = CacheAware().place(job(), fleet)

    assert (placement.engine, placement.reason) == ("b", "longest prefix is busy")


@pytest.mark.parametrize(
    ("what", "one", "other", "winner"),
    [
        # work of a = 5000 - own, of b = 5000 - own + share * load
        (job(5000), engine("a", own=1000), engine("b", own=2000, tokens=1999), "b"),
        (job(5000), engine("a", own=1000), engine("b", own=2000, tokens=2001), "a"),
        # pool 3000: a loads 3000 at a tenth, b has all of it
        (job(5000, 3000), engine("a", own=0), engine("b", own=3000, tokens=599), "b"),
        (job(5000, 3000), engine("a", own=0), engine("b", own=3000, tokens=601), "a"),
        # a prompt that is held twice over is worth no more than itself
        (job(100), engine("a", own=96), engine("b", own=9600, tokens=193), "a"),
    ],
)
def test_the_formula(what: Job, one: Candidate, other: Candidate, winner: str) -> None:
    assert chosen(CacheAware(load_share=0.1, queue_share=0.5), 1, [one, other], what) == winner


def test_the_shares_can_be_set() -> None:
    fleet = [engine("a", own=3000), engine("b", own=1000, tokens=0), engine("c", own=2000)]

    assert chosen(CacheAware(load_share=0), 1, fleet, job(5000, 4000)) == "a"
    busy = [engine("a", own=3000, tokens=4000), engine("b", own=0)]
    assert chosen(CacheAware(queue_share=0.5), 1, busy) == "a"
    assert chosen(CacheAware(queue_share=1), 1, busy) == "b"


@pytest.mark.parametrize("what", [job(), job(None), job(None, None), job(5000, 4096), job(0)])
def test_where_nobody_holds_anything_load_decides_and_ties_turn(what: Job) -> None:
    policy = CacheAware()

    assert chosen(policy, 4, engines("abc"), what) == "abca"
    assert chosen(policy, 1, [engine("a", tokens=9), engine("b", tokens=8)], what) == "b"
    assert policy.place(what, engines("ab")).reason == "nothing cached, least loaded"


def test_so_it_does_for_a_prompt_that_was_not_counted() -> None:
    fleet = [engine("a", own=4096, tokens=1), engine("b")]

    assert chosen(CacheAware(), 1, fleet, job(None)) == "b"


def test_an_unknown_pool_changes_no_order() -> None:
    fleet = [engine("a", own=64), engine("b", own=128), engine("c", tokens=500), engine("d", own=128, tokens=1)]
    known, unknown = CacheAware().place(job(5000, 0), fleet), CacheAware().place(job(5000, None), fleet)

    assert known == unknown


def test_of_two_that_hold_the_same_the_idle_one_is_chosen() -> None:
    assert chosen(CacheAware(), 1, [engine("a", own=1024, requests=1), engine("b", own=1024)]) == "b"


def test_placements_by_prefix_count_for_the_next_tie() -> None:
    policy = CacheAware()
    chosen(policy, 1, [engine("a", own=1024), engine("b")])

    assert chosen(policy, 1, engines("ab")) == "b"


def test_a_prefill_engine_with_the_prefix_does_not_answer() -> None:
    fleet = [engine("a", role="prefill", own=4096), engine("b", role="decode")]
    placement = CacheAware().place(job(), fleet)

    assert (placement.engine, placement.spares, placement.own_tokens) == ("b", (), 0)
