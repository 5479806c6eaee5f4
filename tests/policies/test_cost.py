"""cost = wait + load + prefill + others + later - stay, in seconds."""

from copy import deepcopy

import pytest

from policies.cost import Cost
from policies.interface import Candidate, Job, Outcome
from policies.load import BadPolicy, load
from tests.policies.scenes import chosen, engine, engines, job


def plain(**settings: float) -> Cost:
    """1,000 tokens a second, 10,000 loaded; the other terms only where they are wanted."""
    given: dict[str, float] = dict.fromkeys(("others_share", "later_share", "waiting_share"), 0.0)
    given |= {"request_tokens": 0, "stay_tokens": 0, **settings}
    policy = load("cost", {"prefill_rate": 1000.0, "load_rate": 10_000.0, **given})
    assert isinstance(policy, Cost)
    return policy


@pytest.mark.parametrize(
    ("what", "one", "other", "settings", "winner"),
    [
        # what b has more is worth as much as what waits there
        (job(5000), engine("a", own=1000), engine("b", own=2000, tokens=999), {}, "b"),
        (job(5000), engine("a", own=1000), engine("b", own=2000, tokens=1001), {}, "a"),
        # pool 3000: a loads them in 0.3 s
        (job(5000, 3000), engine("a"), engine("b", own=3000, tokens=299), {}, "b"),
        (job(5000, 3000), engine("a"), engine("b", own=3000, tokens=301), {}, "a"),
        # a third of which comes from disk, at a third of the rate: 0.5 s
        (job(5000, 3000, disk=1000), engine("a"), engine("b", own=3000, tokens=499), {}, "b"),
        (job(5000, 3000, disk=1000), engine("a"), engine("b", own=3000, tokens=501), {}, "a"),
        # later: 1000 tokens more to compute count five times
        (job(5000), engine("a", own=1000), engine("b", own=2000, tokens=4999), {"later_share": 4.0}, "b"),
        (job(5000), engine("a", own=1000), engine("b", own=2000, tokens=5001), {"later_share": 4.0}, "a"),
        # and three times more where three wait: 9 s
        (job(3000), engine("a", waiting=3), engine("b", tokens=8999), {"waiting_share": 1.0}, "b"),
        (job(3000), engine("a", waiting=3), engine("b", tokens=9001), {"waiting_share": 1.0}, "a"),
        # others: 3000 tokens hold up four requests on a, at a tenth: 4.2 s; on b nobody
        (job(3000), engine("a", requests=4), engine("b", tokens=1199), {"others_share": 0.1}, "b"),
        (job(3000), engine("a", requests=4), engine("b", tokens=1201), {"others_share": 0.1}, "a"),
        # and who runs there for others counts as well
        (job(3000), engine("a", waiting=1, running=3), engine("b", tokens=1199), {"others_share": 0.1}, "b"),
        # stay: what is held of the conversation's own
        (job(5000), engine("a"), engine("b", own=16, tokens=515), {"stay_tokens": 500}, "b"),
        (job(5000), engine("a"), engine("b", own=16, tokens=517), {"stay_tokens": 500}, "a"),
        # what it will likely hold counts as held, and is no queue before itself
        (job(5000), engine("a"), engine("b", likely=2048, tokens=2048), {}, "b"),
        # an engine of which nothing of the pool can be expected computes all of it
        (job(5000, 3000), engine("a", tokens=2699), engine("b", pooled=False), {}, "a"),
        (job(5000, 3000), engine("a", tokens=2701), engine("b", pooled=False), {}, "b"),
        # an unknown pool is one that holds nothing
        (job(5000, None), engine("a", own=1000), engine("b", own=2000, tokens=1001), {}, "a"),
    ],
)
def test_the_formula(what: Job, one: Candidate, other: Candidate, settings: dict[str, float], winner: str) -> None:
    assert chosen(plain(**settings), 1, [one, other], what) == winner


def test_the_terms_add_up_and_nothing_is_remembered_of_telling_them() -> None:
    policy = plain(others_share=0.1, later_share=2.0, waiting_share=0.5, request_tokens=100, stay_tokens=300)
    fleet = [engine("a", own=1024, requests=2, waiting=1, tokens=500), engine("b")]
    what = job(5000, 3072)
    terms = policy.explain(what, fleet)
    assert terms == policy.explain(what, fleet)
    ttft = 700 + 204.8 + 1928
    assert terms["a"] == {"cost_ms": pytest.approx(ttft + 385.6 + 4820 - 300), "ttft_ms": pytest.approx(ttft)}
    assert policy.place(what, fleet).engine == min(terms, key=lambda name: terms[name]["cost_ms"])


def test_reasons() -> None:
    policy = plain()
    assert policy.place(job(), engines("ab")).reason == "nothing cached, least cost"
    assert policy.place(job(), [engine("a", own=512), engine("b", own=512)]).reason == "all hold the same, least cost"
    assert policy.place(job(), [engine("a", own=512), engine("b")]).reason == "longest prefix"
    placement = policy.place(job(), [engine("a", own=512, tokens=9000), engine("b")])
    assert (placement.engine, placement.spares, placement.reason) == ("b", ("a",), "longest prefix costs more")


def test_ties_go_round() -> None:
    assert sorted(chosen(Cost(), 12, engines("abc"))) == sorted("abc" * 4)


def test_a_part_that_many_share_is_computed_on_more_engines() -> None:
    policy = plain()
    fleet = [engine("a", own=4096, tokens=3000), *engines("bcd")]
    for ways in range(1, 8):  # so many share 3072 of 5000 tokens; a lacks 904, the others 1928 and 3072 * 4 / ways**2
        placement = policy.place(job(5000, marks="shared" + "tuvwxyz"[ways - 1]), fleet)
        assert (placement.engine == "a") is (ways <= 2), ways


def test_a_slow_engine_gets_less_and_is_known_for_it() -> None:
    policy = Cost()
    for _ in range(15):
        for name, seconds in (("a", 0.5), ("b", 1.0)):
            placement = policy.place(job(4000), [engine(name)])
            policy.observe(placement, Outcome(True, name, seconds, 0, 4000, 0))
    assert policy.rate("a").prefill == pytest.approx(0.5 / 4000)
    assert policy.rate("b").prefill == pytest.approx(1.0 / 4000)
    assert policy.place(job(4000), [engine("a", tokens=3000), engine("b")]).engine == "a"
    assert policy.place(job(4000), [engine("a", tokens=30_000), engine("b")]).engine == "b"


def test_it_learns_alike_in_a_copy() -> None:
    policy = Cost()
    placement = policy.place(job(4000), engines("ab"))
    other = deepcopy(policy)
    for one in (policy, other):
        for _ in range(5):
            one.observe(placement, Outcome(True, placement.engine, 1.0, 0, 4000, 0))
    assert policy.rate("a") == other.rate("a")


@pytest.mark.parametrize("settings", [{"prefill_rate": 0.0}, {"load_rate": -1.0}])
def test_rates_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(BadPolicy, match="more than 0"):
        load("cost", settings)
