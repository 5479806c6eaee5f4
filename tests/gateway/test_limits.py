import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RateLimited
from gateway.limits import Bucket, Budget, Bytes, Limits
from gateway.tenants import Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def admitted(limits: Limits, tenant: Tenant) -> bool:
    try:
        with limits.admit(tenant):
            return True
    except RateLimited:
        return False


def test_no_limit_is_no_limit(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a")
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(limits.admit(tenant))
        limits.charge(tenant, 10**9)
        limits.settle(tenant, 10**9)
        assert limits.running(tenant) == 1000
    assert limits.running(tenant) == 0


def test_concurrency_is_a_number_of_slots(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", concurrent=2)
    with limits.admit(tenant), limits.admit(tenant):
        with pytest.raises(RateLimited) as caught, limits.admit(tenant):
            pass
        assert caught.value.code == "concurrency_limit"
        assert limits.running(tenant) == 2
    assert admitted(limits, tenant)


@pytest.mark.parametrize("ending", [ValueError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
def test_a_slot_comes_back_on_every_ending(clock: Clock, ending: type[BaseException]) -> None:
    limits, tenant = Limits(clock), Tenant("a", concurrent=1)
    for _ in range(100):
        with pytest.raises(ending), limits.admit(tenant):
            raise ending
        assert limits.running(tenant) == 0


def test_a_refusal_takes_no_slot(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", requests_per_minute=1)
    assert admitted(limits, tenant)
    for _ in range(10):
        assert not admitted(limits, tenant)
    assert limits.running(tenant) == 0


def test_a_refusal_for_slots_costs_no_request(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", concurrent=1, requests_per_minute=2)
    with limits.admit(tenant):
        assert not admitted(limits, tenant)
    assert admitted(limits, tenant)


def test_requests_fill_evenly(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", requests_per_minute=60)
    assert sum(admitted(limits, tenant) for _ in range(100)) == 60
    clock.now += 3
    assert sum(admitted(limits, tenant) for _ in range(100)) == 3
    clock.now += 3600
    assert sum(admitted(limits, tenant) for _ in range(100)) == 60


def test_retry_after_is_when_it_works_again(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", requests_per_minute=6)
    for _ in range(6):
        assert admitted(limits, tenant)
    with pytest.raises(RateLimited) as caught, limits.admit(tenant):
        pass
    assert caught.value.code == "request_limit"
    assert caught.value.headers == [(b"retry-after", b"10")]
    clock.now += 9.9
    assert not admitted(limits, tenant)
    clock.now += 0.2
    assert admitted(limits, tenant)


def test_the_message_never_says_try_again_in_0_s(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", requests_per_minute=600)
    while admitted(limits, tenant):
        pass
    with pytest.raises(RateLimited, match="in 1 s"), limits.admit(tenant):
        pass


def test_tokens_are_charged_and_settled(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", tokens_per_minute=600)
    limits.charge(tenant, 500)
    limits.settle(tenant, 700)  # 600 below zero
    with pytest.raises(RateLimited) as caught:
        limits.charge(tenant, 0)
    assert caught.value.code == "token_limit"
    assert caught.value.headers == [(b"retry-after", b"60")]
    clock.now += 61
    limits.charge(tenant, 5)


def test_a_prompt_larger_than_the_bucket_needs_a_full_one(clock: Clock) -> None:
    limits, tenant = Limits(clock), Tenant("a", tokens_per_minute=600)
    limits.charge(tenant, 10_000)
    with pytest.raises(RateLimited):
        limits.charge(tenant, 1)


def test_tenants_do_not_share(clock: Clock) -> None:
    limits = Limits(clock)
    one, other = Tenant("a", concurrent=1), Tenant("b", concurrent=1)
    with limits.admit(one), limits.admit(other):
        assert not admitted(limits, one)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30)), max_size=50))
def test_a_bucket_never_gives_more_than_its_size_and_what_flowed_in(steps: list[tuple[float, float]]) -> None:
    bucket, now, taken = Bucket(120, 0.0), 0.0, 0.0
    for amount, pause in steps:
        now += pause
        wait = bucket.take(amount, now)
        assert wait >= 0
        if wait == 0:
            taken += amount
        assert taken <= 120 + now * 2 + 1e-6


@given(st.floats(0.1, 500), st.floats(0.1, 500))
def test_a_buckets_wait_is_enough(first: float, amount: float) -> None:
    bucket = Bucket(100, 0.0)
    bucket.take(first, 0.0)
    wait = bucket.take(amount, 0.0)
    if wait:
        assert bucket.take(amount, wait + 1e-6) == 0


# Of all requests together


@given(st.integers(0, 100), st.lists(st.integers(0, 40), max_size=50))
def test_no_more_bytes_are_held_than_may_be(most: int, sizes: list[int]) -> None:
    held, taken = Bytes(most), list[int]()
    for size in sizes:
        fits = sum(taken) + size <= most
        assert held.take(size) is fits
        if fits:
            taken.append(size)
        elif taken:
            held.give(taken.pop(0))
    for size in taken:
        held.give(size)
    assert held.take(most)
    assert not held.take(1)


def spent(budget: Budget, times: int = 1000) -> int:
    return sum(budget.spend() for _ in range(times))


def test_a_budget_has_a_little_in_hand() -> None:
    """Or the first failure of a quiet gateway could not be tried again."""
    assert spent(Budget(0.1)) == 10


def test_a_budget_is_a_share_of_what_was_earned() -> None:
    budget = Budget(0.1)
    spent(budget)
    done = 0
    for _ in range(1000):
        budget.earn()
        done += budget.spend()
    assert 99 <= done <= 100


def test_a_quiet_time_does_not_pay_for_a_storm() -> None:
    budget = Budget(0.5, most=20)
    for _ in range(100_000):
        budget.earn()
    assert spent(budget) == 20


def test_no_share_is_no_second_try() -> None:
    budget = Budget(0)
    for _ in range(100):
        budget.earn()
    assert spent(budget) == 0


def test_the_whole_share_is_a_second_try_for_each() -> None:
    budget = Budget(1)
    for _ in range(1000):
        budget.earn()
        assert budget.spend()
