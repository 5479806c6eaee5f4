"""round_robin: each engine of a model in its turn."""

import pytest

from policies.interface import NoCapacity
from policies.round_robin import REMEMBERED, RoundRobin
from tests.policies.scenes import chosen, engine, engines, job


def test_each_in_its_turn() -> None:
    assert chosen(RoundRobin(), 7, engines("abc")) == "abcabca"


def test_the_order_of_the_candidates_means_nothing() -> None:
    policy = RoundRobin()

    assert "".join(chosen(policy, 1, engines(names)) for names in ("abc", "cab", "bca", "cba")) == "abca"


def test_models_that_alternate_do_not_share_a_turn() -> None:
    policy = RoundRobin()
    order = [policy.place(job(model=model), engines("ab")).engine for model in "mnmnmn"]

    assert "".join(order[::2]) == "".join(order[1::2]) == "aba"


def test_an_engine_that_goes_leaves_no_gap() -> None:
    policy = RoundRobin()

    assert chosen(policy, 2, engines("abc")) == "ab"
    assert sorted(chosen(policy, 2, engines("ab"))) == ["a", "b"]
    assert sorted(chosen(policy, 4, engines("abcd"))) == ["a", "b", "c", "d"]


def test_no_signal_is_used() -> None:
    busy = [engine("a", requests=99, tokens=10**6, waiting=99), engine("b", own=4096), engine("c", waiting=None)]

    assert chosen(RoundRobin(), 3, busy) == "abc"


def test_the_others_are_spares_in_the_order_of_their_turns() -> None:
    policy = RoundRobin()
    policy.place(job(), engines("abc"))

    assert policy.place(job(), engines("abc")).spares == ("c", "a")


def test_prefill_engines_have_no_turn() -> None:
    fleet = [engine("a", role="prefill"), engine("b"), engine("c", role="decode")]

    assert chosen(RoundRobin(), 4, fleet) == "bcbc"


def test_a_refusal_says_why_and_costs_no_turn() -> None:
    policy = RoundRobin()
    with pytest.raises(NoCapacity, match="no engine is available"):
        policy.place(job(), [])
    with pytest.raises(NoCapacity, match="role both or decode"):
        policy.place(job(), [engine("p", role="prefill")])

    assert chosen(policy, 2, engines("ab")) == "ab"


@pytest.mark.parametrize(("own", "pool", "loaded"), [(0, 0, 0), (64, 0, 0), (0, 96, 96), (64, 96, 32), (96, 64, 0)])
def test_the_prediction_is_vllms(own: int, pool: int, loaded: int) -> None:
    """The pool is asked only for what lies beyond the engine's own blocks."""
    placement = RoundRobin().place(job(pool=pool), [engine("a", own=own)])

    assert (placement.own_tokens, placement.pool_tokens) == (own, loaded)


def test_a_newcomer_has_its_turn_as_all_others() -> None:
    assert chosen(RoundRobin(), 4, [engine("a"), engine("b", since=0)]) == "abab"


def test_models_are_forgotten_not_gathered() -> None:
    policy = RoundRobin()
    for number in range(REMEMBERED + 10):
        policy.place(job(model=f"m{number}"), engines("ab"))

    assert len(policy._turns) == REMEMBERED
    assert policy.place(job(model=f"m{REMEMBERED + 9}"), engines("ab")).engine == "b"
