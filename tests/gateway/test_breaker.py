"""When an engine that fails is left alone, and when it is tried again."""

import pytest

from gateway.breaker import CLOSED, FAILURES, FIRST_SECONDS, HALF_OPEN, MOST_SECONDS, OPEN, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.trying()
        breaker.failed()


def test_a_few_failures_change_nothing(breaker: Breaker) -> None:
    fail(breaker, FAILURES - 1)
    assert breaker.state == CLOSED
    breaker.answered()
    fail(breaker, FAILURES - 1)
    assert breaker.lets_through, "only failures in a row count"


def test_many_in_a_row_open_it_for_a_while(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    assert (breaker.state, breaker.lets_through) == (OPEN, False)
    clock.now += FIRST_SECONDS - 0.01
    assert (breaker.state, breaker.lets_through) == (OPEN, False)
    clock.now += 0.01
    assert (breaker.state, breaker.lets_through) == (HALF_OPEN, True)


def test_one_request_tries_it_and_an_answer_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.now += FIRST_SECONDS
    breaker.trying()
    assert not breaker.lets_through, "one is enough"
    breaker.answered()
    assert (breaker.state, breaker.lets_through) == (CLOSED, True)
    fail(breaker, FAILURES - 1)
    assert breaker.lets_through, "it counts anew"


def test_the_while_doubles_with_each_failed_try_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    pause = FIRST_SECONDS
    for _ in range(10):
        clock.now += pause - 0.01
        assert breaker.state == OPEN
        clock.now += 0.01
        assert breaker.state == HALF_OPEN
        fail(breaker)
        pause = min(MOST_SECONDS, pause * 2)
    clock.now += pause
    breaker.trying()
    breaker.answered()
    fail(breaker, FAILURES)
    clock.now += FIRST_SECONDS
    assert breaker.lets_through, "after an answer it begins with a short while again"


def test_what_was_under_way_when_it_opened_does_not_lengthen_the_while(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3 * FAILURES):
        breaker.trying()
    for _ in range(3 * FAILURES):
        breaker.failed()
    clock.now += FIRST_SECONDS
    assert breaker.lets_through


def test_an_answer_to_what_was_under_way_closes_it(breaker: Breaker) -> None:
    fail(breaker, FAILURES)
    breaker.answered()
    assert breaker.state == CLOSED


def test_a_try_whose_client_left_tells_nothing(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.now += FIRST_SECONDS
    breaker.trying()
    breaker.gave_no_sign()
    assert (breaker.state, breaker.lets_through) == (HALF_OPEN, True), "the next one tries it"
