"""now = tokens + request_tokens * max(requests, waiting + running); lately = placements, decaying."""

import pytest

from policies.interface import Candidate
from policies.pressure import MOST_TOKENS, REMEMBERED, Pressure
from tests.policies.scenes import engine, engines


@pytest.mark.parametrize(
    ("candidate", "now"),
    [
        (engine("a"), 0),
        (engine("a", tokens=700), 700),
        (engine("a", requests=3), 300),
        (engine("a", waiting=5), 500),
        (engine("a", running=5), 500),
        (engine("a", waiting=2, running=5), 700),
        (engine("a", requests=3, waiting=5, tokens=7), 507),
        (engine("a", requests=5, waiting=2, running=2, tokens=7), 507),
        (engine("a", requests=3, waiting=None, tokens=7), 307),
        (engine("a", waiting=None, running=4), 400),
        (engine("a", waiting=None), 0),
        (engine("a", own=9999, likely=9999), 0),
    ],
)
def test_what_is_before_a_new_request(candidate: Candidate, now: float) -> None:
    assert Pressure(100, 30).now([candidate]) == [now]


def test_what_was_placed_decays_with_each_placement_and_never_vanishes() -> None:
    pressure = Pressure(100, 30)
    pressure.chose(engine("a"), 412)
    seen = []
    for _ in range(64):
        pressure.chose(engine("b"), 0)
        seen.append(pressure.lately(engines("a"))[0])

    assert seen == sorted(seen, reverse=True)
    assert seen[0] == pytest.approx(512 * 31 / 32)
    assert 0 < seen[-1] < 512 / 4


def test_a_long_prompt_leaves_no_more_than_any() -> None:
    pressure = Pressure(100, 30)
    pressure.chose(engine("a"), 10**6)

    assert pressure.lately(engines("ab")) == [MOST_TOKENS, 0]


def test_it_is_bounded_however_much_is_placed() -> None:
    pressure = Pressure(100, 30)
    for _ in range(1000):
        pressure.chose(engine("a"), 10**6)

    assert pressure.lately(engines("a"))[0] <= 32 * MOST_TOKENS


def test_engines_are_forgotten_not_gathered() -> None:
    pressure = Pressure(100, 30)
    for number in range(REMEMBERED + 10):
        pressure.chose(engine(str(number)), 0)

    assert len(pressure._lately) == REMEMBERED
    assert pressure.lately([engine("0"), engine(str(REMEMBERED + 9))]) == [0, 100]


@pytest.mark.parametrize(
    ("fleet", "now"),
    [
        # a newcomer is raised to its part of the mean of the others, 1500
        ([engine("a", requests=20), engine("b", requests=10), engine("c", since=0)], [2000, 1000, 1500]),
        ([engine("a", requests=20), engine("b", requests=10), engine("c", since=10)], [2000, 1000, 1000]),
        ([engine("a", requests=20), engine("b", requests=10), engine("c", since=30)], [2000, 1000, 0]),
        # unless it has more of its own
        ([engine("a", requests=20), engine("c", since=0, requests=30)], [2000, 3000]),
        # newcomers do not enter the mean, and an engine that was there for long is none
        ([engine("a", requests=20), engine("b", since=0), engine("c", since=15, requests=1)], [2000, 2000, 1000]),
        ([engine("a", requests=20), engine("b", since=10**6)], [2000, 0]),
        # where all are newcomers nobody is
        ([engine("a", requests=20, since=1), engine("b", since=0)], [2000, 0]),
    ],
)
def test_slow_start(fleet: list[Candidate], now: list[float]) -> None:
    assert Pressure(100, 30).now(fleet) == pytest.approx(now)


def test_slow_start_of_the_memory() -> None:
    pressure = Pressure(100, 30)
    pressure.chose(engine("a"), 500)

    assert pressure.lately([engine("a"), engine("b", since=0), engine("c")]) == pytest.approx([600, 300, 0])
