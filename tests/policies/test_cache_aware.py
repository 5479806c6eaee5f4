"""cache_aware: work = compute + price * load + queue_share * (max(now, lately) - awaited) - stay."""

from copy import deepcopy

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
    fleet = [engine("a", own=4096, tokens=13_000), engine("b")]
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
        # of which 1000 on disk at 0.3: 3000 cost 500
        (job(5000, 3000, disk=1000), engine("a", own=0), engine("b", own=3000, tokens=999), "b"),
        (job(5000, 3000, disk=1000), engine("a", own=0), engine("b", own=3000, tokens=1001), "a"),
        # a prompt that is held twice over is worth no more than itself
        (job(100), engine("a", own=96), engine("b", own=9600, tokens=193), "a"),
        # what it will likely hold counts as held
        (job(5000), engine("a", own=1000), engine("b", likely=2048, tokens=2095 + 2048), "b"),
        (job(5000), engine("a", own=1000), engine("b", likely=2048, tokens=2097 + 2048), "a"),
        # and is no queue before itself, where nothing else is
        (job(5000), engine("a"), engine("b", likely=2048, tokens=2048), "b"),
        # an engine of which nothing of the pool can be expected computes all of it
        (job(5000, 3000), engine("a", tokens=5399), engine("b", pooled=False), "a"),
        (job(5000, 3000), engine("a", tokens=5401), engine("b", pooled=False), "b"),
    ],
)
def test_the_formula(what: Job, one: Candidate, other: Candidate, winner: str) -> None:
    policy = CacheAware(load_share=0.1, disk_share=0.3, queue_share=0.5, stay_tokens=0)
    assert chosen(policy, 1, [one, other], what) == winner


def test_the_shares_can_be_set() -> None:
    fleet = [engine("a", own=3000), engine("b", own=1000, tokens=0), engine("c", own=2000)]

    assert chosen(CacheAware(load_share=0), 1, fleet, job(5000, 4000)) == "a"
    busy = [engine("a", own=3000, tokens=4000), engine("b", own=0)]
    assert chosen(CacheAware(queue_share=0.5, stay_tokens=0), 1, busy) == "a"
    assert chosen(CacheAware(queue_share=1, stay_tokens=0), 1, busy) == "b"
    assert chosen(CacheAware(queue_share=1, stay_tokens=1001), 1, busy) == "a"


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


def test_engines_that_hold_the_same_are_told_apart_by_load() -> None:
    fleet = [engine("a", own=1024, tokens=9), engine("b", own=1024, tokens=8)]
    found = CacheAware().place(job(), fleet)

    assert (found.engine, found.reason) == ("b", "all hold the same, least loaded")


# what many conversations share


def spread(policy: CacheAware, others: int, marks: str = "aaaa") -> None:
    """So many conversations that begin alike, four landmarks long, and then differ."""
    for number in range(others):
        policy.place(job(2600, marks=marks + chr(ord("b") + number)), engines("xyz"))


@pytest.mark.parametrize(("others", "queue", "goes"), [(1, 2047, "a"), (1, 2049, "b"), (3, 1023, "a"), (3, 1025, "b")])
def test_what_k_conversations_share_costs_a_kth_where_it_lacks(others: int, queue: int, goes: str) -> None:
    """A new one on top of so many others: the 2048 tokens cost 1024 where there are two, 512 where there are four."""
    policy = CacheAware(queue_share=0.5)
    spread(policy, others)
    fleet = [engine("a", own=2048, tokens=queue), engine("b")]

    assert chosen(policy, 1, fleet, job(2600, marks="aaaaz")) == goes


def test_the_longest_branch_is_not_recomputed_lightly() -> None:
    """Four agents that branch at 50k tokens: another engine still costs some 12.5k."""
    policy = CacheAware(queue_share=0.5)
    trunk = "t" * 98
    for agent in "abc":
        policy.place(job(51_000, marks=trunk + agent), engines("xyz"))
    fleet = [engine("a", own=50_176, tokens=24_000), engine("b")]

    assert chosen(policy, 1, fleet, job(51_000, marks=trunk + "d")) == "a"


def test_a_conversation_stays_where_its_own_part_is() -> None:
    policy = CacheAware(queue_share=0.5, stay_tokens=2048)
    spread(policy, 60)
    shared = job(2700, marks="aaaab")  # the first of them goes on
    fleet = [engine("a", own=2600, tokens=4000), engine("b", own=2048)]

    assert chosen(policy, 1, fleet, shared) == "a"
    assert chosen(policy, 1, [engine("a", own=2048, tokens=4000), engine("b", own=2048)], shared) == "b"


# prompts that were not counted


def test_a_prompt_that_was_not_counted_goes_where_its_text_was_sent_lately() -> None:
    fleet = [engine("a", likely=1024, requests=1), engine("b")]
    found = CacheAware().place(job(None, None, marks="abc"), fleet)

    assert (found.engine, found.own_tokens, found.reason) == ("a", 0, "longest prefix")


def test_a_longer_one_follows_the_first() -> None:
    policy = CacheAware()
    first = policy.place(job(None, None, marks="ab"), engines("xy")).engine
    fleet = [engine(name, likely=1024 if name == first else 0) for name in "xy"]

    assert policy.place(job(None, None, marks="abc"), fleet).engine == first


# who counts


def test_an_engine_that_cannot_answer_changes_nothing() -> None:
    """Its load of nothing is no reason to balance."""
    fleet = [engine("a", own=4096, requests=5), engine("b", requests=5)]
    idle = engine("c", role="prefill", own=5000)

    assert chosen(CacheAware(), 3, fleet) == chosen(CacheAware(), 3, [*fleet, idle]) == "aaa"


def test_a_prediction_is_of_what_is_held_not_of_what_is_likely() -> None:
    found = CacheAware().place(job(pool=512), [engine("a", own=64, likely=4096), engine("b")])

    assert (found.engine, found.own_tokens, found.pool_tokens) == ("a", 64, 448)


# what it tells of itself


def test_it_explains_what_it_weighs_and_remembers_nothing_of_it() -> None:
    policy, fleet = CacheAware(), [engine("a", own=2048, tokens=400), engine("b"), engine("p", role="prefill")]
    spread(policy, 1)
    told = [policy.explain(job(2600, 1024, marks="aaaaz"), fleet) for _ in range(2)]

    assert told[0] == told[1]
    assert set(told[0]) == {"a", "b"}
    assert told[0]["a"] == {"work_tokens": 552 + 200}
    assert told[0]["b"] == {"work_tokens": pytest.approx(552 + 512 + 51.2)}
    assert policy.place(job(2600, 1024, marks="aaaaz"), fleet).engine == "a"


def test_a_copy_goes_its_own_way() -> None:
    policy = CacheAware()
    other = deepcopy(policy)
    spread(other, 5)
    fleet = [engine("a", own=2048, tokens=2000), engine("b")]

    assert chosen(policy, 1, fleet, job(2600, marks="aaaaz")) == "a"
    assert chosen(other, 1, fleet, job(2600, marks="aaaaz")) == "b"
