"""least_loaded: load = tokens + request_tokens * max(requests, waiting)."""

import pytest

from policies.interface import Candidate
from policies.least_loaded import LeastLoaded
from tests.policies.scenes import chosen, engine, engines, job


@pytest.mark.parametrize(
    ("candidate", "load"),
    [
        (engine("a"), 0),
        (engine("a", tokens=700), 700),
        (engine("a", requests=3), 300),
        (engine("a", waiting=5), 500),
        (engine("a", requests=3, waiting=5, tokens=7), 507),
        (engine("a", requests=5, waiting=3, tokens=7), 507),
        (engine("a", requests=3, waiting=None, tokens=7), 307),
        (engine("a", waiting=None), 0),
        (engine("a", own=9999), 0),
    ],
)
def test_the_formula(candidate: Candidate, load: float) -> None:
    assert LeastLoaded(request_tokens=100).load(candidate) == load


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


def test_an_engine_that_comes_is_chosen_next() -> None:
    policy = LeastLoaded()
    chosen(policy, 4, engines("ab"))

    assert chosen(policy, 3, engines("abc")) == "cab"


def test_what_a_request_is_worth_can_be_set() -> None:
    fleet = [engine("a", requests=2), engine("b", tokens=250)]

    assert chosen(LeastLoaded(request_tokens=100), 1, fleet) == "a"
    assert chosen(LeastLoaded(request_tokens=200), 1, fleet) == "b"


def test_an_idle_prefill_engine_is_not_chosen() -> None:
    assert chosen(LeastLoaded(), 1, [engine("a", role="prefill"), engine("b", tokens=10**6, role="decode")]) == "b"


def test_what_an_engine_holds_means_nothing() -> None:
    assert chosen(LeastLoaded(), 1, [engine("a", own=4096, tokens=1), engine("b")]) == "b"
