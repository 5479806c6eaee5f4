"""least_loaded: the least of `now`, and of `lately` where that is the same."""

from policies.least_loaded import LeastLoaded
from tests.policies.scenes import chosen, engine, engines, job


def test_the_least_loaded_is_chosen_and_the_others_are_spares_by_load() -> None:
    fleet = [engine("a", tokens=300), engine("b", tokens=100), engine("c", tokens=200)]
    placement = LeastLoaded().place(job(), fleet)

    assert placement.engine == "b"
    assert placement.spares == ("c", "a")


def test_ties_go_to_the_one_chosen_least_recently() -> None:
    assert chosen(LeastLoaded(), 6, engines("abc")) == "abcabc"


def test_ties_turn_among_the_tied_alone() -> None:
    fleet = [engine("a"), engine("b", tokens=1), engine("c")]

    assert chosen(LeastLoaded(), 4, fleet) == "acac"


def test_what_was_placed_lately_counts_by_its_tokens() -> None:
    policy = LeastLoaded()
    policy.place(job(5000), engines("ab"))

    assert chosen(policy, 3, engines("ab"), job(16)) == "bbb"


def test_an_idle_engine_comes_before_a_busy_one_whatever_it_did_lately() -> None:
    policy = LeastLoaded()
    policy.place(job(5000), engines("a"))

    assert chosen(policy, 2, [engine("a"), engine("b", requests=1)], job(16)) == "aa"


def test_an_engine_that_was_not_chosen_lately_comes_first() -> None:
    policy = LeastLoaded()
    chosen(policy, 4, engines("ab"))

    assert chosen(policy, 1, engines("abc")) == "c"


def test_a_newcomer_comes_as_the_mean() -> None:
    """Of 20 and 10 that is 15; half of it when half of the time is over."""
    fleet = [engine("a", requests=20), engine("b", requests=10)]

    assert chosen(LeastLoaded(warm=30), 1, [*fleet, engine("c", since=0)]) == "b"
    assert chosen(LeastLoaded(warm=30), 1, [*fleet, engine("c", since=15)]) == "c"
    assert chosen(LeastLoaded(warm=30), 1, [*fleet, engine("c", since=30)]) == "c"
    assert chosen(LeastLoaded(warm=0), 1, [*fleet, engine("c", since=0)]) == "c"


def test_what_a_request_is_worth_can_be_set() -> None:
    fleet = [engine("a", requests=2), engine("b", tokens=250)]

    assert chosen(LeastLoaded(request_tokens=100), 1, fleet) == "a"
    assert chosen(LeastLoaded(request_tokens=200), 1, fleet) == "b"


def test_an_idle_prefill_engine_is_not_chosen() -> None:
    assert chosen(LeastLoaded(), 1, [engine("a", role="prefill"), engine("b", tokens=10**6, role="decode")]) == "b"


def test_what_an_engine_holds_means_nothing() -> None:
    assert chosen(LeastLoaded(), 1, [engine("a", own=4096, tokens=1), engine("b")]) == "b"
