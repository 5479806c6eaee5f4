"""Rates are learned from answers: enough of them, of the right kind, and not from odd ones."""

import random

import pytest

from policies import rates
from policies.interface import Outcome, Placement
from policies.rates import FEW, FORGOTTEN_AFTER, LEAST_TOKENS, RECENT, SLOWEST, Rate, Rates

PRIOR = Rate(1 / 10_000, 1 / 40_000)


def tell(
    learned: Rates,
    engine: str = "a",
    *,
    seconds: float | None = 1.0,
    computed: int | None = 4000,
    queued: int | None = 0,
    own: int = 0,
    cached: int | None = 0,
    ok: bool = True,
    answered_by: str | None = None,
    prefill: str | None = None,
) -> None:
    placement = Placement(engine, prefill, (), own, 0, "test")
    outcome = Outcome(ok, answered_by or engine, seconds, cached, computed, queued)
    learned.observe(placement, outcome)


def test_nothing_is_known_at_first() -> None:
    assert Rates(PRIOR).of("a") == PRIOR


def test_a_few_answers_tell_how_fast_it_computes() -> None:
    learned = Rates(PRIOR)
    for number in range(FEW):
        assert learned.of("a") == PRIOR
        tell(learned, seconds=0.5 + number, computed=2000 + 4000 * number)
    assert learned.of("a") == Rate(0.25 / 1000, PRIOR.load)


def test_who_waits_for_others_waits_for_their_tokens() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        tell(learned, seconds=2.0, computed=1000, queued=3000)
    assert learned.of("a").prefill == pytest.approx(2.0 / 4000)


def test_what_is_loaded_is_taken_off() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        tell(learned, seconds=1.0 + 0.05, computed=4000, own=1000, cached=3000)
    assert learned.of("a").prefill == pytest.approx(1.0 / 4000)


def test_who_loads_nearly_all_tells_how_fast_it_loads() -> None:
    learned = Rates(PRIOR)
    for odd in (0.0, 5.0, 9.0):  # others came while it loaded
        tell(learned, seconds=1.0 + 0.01 + odd, computed=100, own=1000, cached=21_000)
    assert learned.of("a").prefill == PRIOR.prefill
    assert learned.of("a").load == pytest.approx(1.0 / 20_000)


def test_one_of_both_kinds_tells_nothing() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        tell(learned, computed=4000, cached=5000)
        tell(learned, computed=LEAST_TOKENS - 1)
        tell(learned, computed=1, cached=LEAST_TOKENS - 1)
    assert learned.of("a") == PRIOR


def test_answers_that_tell_too_little_tell_nothing() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        tell(learned, seconds=None)
        tell(learned, computed=None)
        tell(learned, queued=None)
        tell(learned, cached=None)
        tell(learned, ok=False)
        tell(learned, answered_by="b")
        tell(learned, prefill="b")
    assert learned.of("a") == learned.of("b") == PRIOR


def test_odd_answers_move_nothing() -> None:
    learned, chance = Rates(PRIOR), random.Random(1)
    for number in range(200):
        odd = number % 3 == 0
        tell(learned, seconds=chance.uniform(0, 100) if odd else chance.uniform(0.95, 1.05), computed=5000)
        if number >= RECENT:
            assert learned.of("a").prefill == pytest.approx(1 / 5000, rel=0.06)


def test_an_engine_that_gets_slow_is_known_for_it_soon() -> None:
    learned = Rates(PRIOR)
    for _ in range(50):
        tell(learned, seconds=0.5, computed=4000)
    for _ in range(RECENT // 2 + 1):
        tell(learned, seconds=1.0, computed=4000)
    assert learned.of("a").prefill == pytest.approx(1 / 4000)


def test_what_is_said_is_bounded() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        tell(learned, seconds=1e9)
        tell(learned, "b", seconds=0.0)
    assert learned.of("a").prefill == SLOWEST
    assert 0 < learned.of("b").prefill < PRIOR.prefill


def test_an_unknown_engine_is_taken_for_a_usual_one() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        for engine, seconds in (("a", 0.4), ("b", 0.8), ("c", 4.0)):
            tell(learned, engine, seconds=seconds, computed=4000)
    assert learned.of("new").prefill == pytest.approx(0.8 / 4000)
    assert learned.of("new").load == PRIOR.load


def test_an_engine_that_was_not_heard_of_for_long_is_unknown_again() -> None:
    learned = Rates(PRIOR)
    for _ in range(FEW):
        tell(learned, "slow", seconds=40.0)
    for _ in range(FORGOTTEN_AFTER):
        tell(learned, "usual", seconds=0.4)
    assert learned.of("slow").prefill == pytest.approx(40.0 / 4000)
    tell(learned, "usual", seconds=0.4)
    assert learned.of("slow").prefill > 0.4 / 4000  # the middle of those that are remembered
    tell(learned, "slow", seconds=0.4)
    assert learned.of("slow").prefill == pytest.approx(0.4 / 4000)


def test_no_more_engines_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "REMEMBERED", 2)
    learned = Rates(PRIOR)
    for engine, seconds in (("a", 0.4), ("b", 0.8), ("c", 0.8)):
        for _ in range(FEW):
            tell(learned, engine, seconds=seconds, computed=4000)
    assert learned.of("a").prefill == pytest.approx(0.8 / 4000)
