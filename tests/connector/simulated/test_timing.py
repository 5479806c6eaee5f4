"""Steps take exactly as long as the formula says, and go to those who came first."""

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.simulated.timing import Hold, Scheduler, Speed, Work

SPEED = Speed(
    prefill_tokens_per_second=1000,
    decode_step_seconds=0.010,
    decode_seconds_per_request=0.001,
    load_bytes_per_second=1_000_000,
    load_latency_seconds=0.5,
    kv_bytes_per_token=1000,
    max_batched_tokens=100,
    max_running=2,
)


@dataclass(eq=False)
class Asked:
    work: Work | Hold
    granted: list[int] = field(default_factory=list)

    def plan(self) -> Work | Hold:
        return self.work

    def grant(self, tokens: int) -> None:
        self.granted.append(tokens)


def asked(compute: int, output: int = 1, load: int = 0) -> Asked:
    return Asked(Work(compute, load, output))


def run(scheduler: Scheduler[Asked], limit: int = 100) -> list[tuple[float, list[Asked]]]:
    """The ends of all steps until nothing is left, and who got a token then."""
    now = 0.0
    steps: list[tuple[float, list[Asked]]] = []
    for _ in range(limit):
        step = scheduler.step(now)
        if step is None:
            return steps
        now += step.seconds
        steps.append((round(now, 6), list(step.sampled)))
    raise AssertionError("it never ends")


def scheduler_of(*requests: Asked, speed: Speed = SPEED) -> Scheduler[Asked]:
    scheduler: Scheduler[Asked] = Scheduler(speed)
    for request in requests:
        scheduler.submit(request)
    return scheduler


def test_a_step_is_its_base_and_its_decodes_and_its_prefill() -> None:
    assert SPEED.step_seconds(prefilled=0, decoding=0) == pytest.approx(0.010)
    assert SPEED.step_seconds(prefilled=50, decoding=3) == pytest.approx(0.010 + 0.050 + 0.003)
    assert SPEED.load_seconds(100) == pytest.approx(0.5 + 0.1)


def test_one_request_prefills_and_then_decodes() -> None:
    one = asked(40, output=3)
    assert run(scheduler_of(one)) == [(0.050, [one]), (0.061, [one]), (0.072, [one])]
    assert one.granted == [40, 1, 1]


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    one = asked(250)
    assert run(scheduler_of(one)) == [(0.110, []), (0.220, []), (0.280, [one])]
    assert one.granted == [100, 100, 50]


def test_decodes_go_before_prefills_and_share_their_step() -> None:
    scheduler = scheduler_of(first := asked(10, output=2))
    assert scheduler.step(0.0) is not None
    scheduler.submit(second := asked(200, output=1))
    steps = run(scheduler)
    assert first.granted == [10, 1]
    assert second.granted == [99, 100, 1]
    assert steps == [(0.110, [first]), (0.220, []), (0.231, [second])]


def test_who_comes_third_waits_for_a_place() -> None:
    first, second, third = asked(10, output=2), asked(10, output=1), asked(10, output=1)
    scheduler = scheduler_of(first, second, third)
    step = scheduler.step(0.0)
    assert step is not None
    assert (step.sampled, scheduler.running, scheduler.waiting) == ((first, second), 1, 1)
    step = scheduler.step(step.seconds)
    assert step is not None
    assert step.sampled == (first, third)


def test_a_load_holds_nobody_up_and_loads_come_one_after_another() -> None:
    loading, also, plain = asked(10, load=100), asked(10, load=100), asked(10)
    scheduler = scheduler_of(loading, also, plain)
    step = scheduler.step(0.0)
    assert step is not None
    assert step.sampled == (plain,)
    assert (scheduler.loading, scheduler.waiting) == (2, 2)
    step = scheduler.step(0.020)
    assert step is not None
    assert step.idle
    assert step.seconds == pytest.approx(0.6 - 0.020)
    assert [sampled for _, sampled in run(scheduler) if sampled] == [[loading], [also]]


def test_a_deferred_request_is_passed_and_a_full_cache_is_not() -> None:
    deferred, plain = Asked(Hold.DEFERRED), asked(10)
    scheduler = scheduler_of(deferred, plain)
    step = scheduler.step(0.0)
    assert step is not None
    assert (step.sampled, scheduler.held) == ((plain,), Hold.DEFERRED)
    assert scheduler.step(1.0) is None
    deferred.work = Work(5, 0, 1)
    assert run(scheduler) == [(0.015, [deferred])]

    full = Asked(Hold.CAPACITY)
    scheduler = scheduler_of(full, asked(10))
    assert scheduler.step(0.0) is None
    assert (scheduler.held, scheduler.waiting) == (Hold.CAPACITY, 2)


def test_what_is_removed_gets_nothing_more() -> None:
    waiting, loading, running = Asked(Hold.DEFERRED), asked(10, load=1), asked(10, output=9)
    scheduler = scheduler_of(waiting, loading, running)
    scheduler.step(0.0)
    for request in (waiting, loading, running):
        scheduler.remove(request)
    assert scheduler.step(9.0) is None
    assert (scheduler.running, scheduler.waiting) == (0, 0)


ROOMY = replace(SPEED, max_running=3, load_latency_seconds=0.050_371_9)


def strides(scheduler: Scheduler[Asked], arrivals: list[tuple[float, Asked]]) -> list[tuple[float, list[Asked]]]:
    """When who ended, with all steps that are alike taken at once, as far as the next arrival."""
    now = 0.0
    ends: list[tuple[float, list[Asked]]] = []
    while True:
        while arrivals and arrivals[0][0] <= now:
            scheduler.submit(arrivals.pop(0)[1])
        count = scheduler.alike(now)
        seconds = scheduler.speed.step_seconds(0, scheduler.running)
        if arrivals:
            count = min(count, math.ceil((arrivals[0][0] - now) / seconds))
        if count:
            scheduler.skip(count)
            now += count * seconds
            continue
        step = scheduler.step(now)
        if step is None and not arrivals:
            return ends
        idle = step is None or step.idle
        ends += [(round(now + step.seconds, 6), list(step.ended))] if step is not None and step.ended else []
        now += step.seconds if step is not None else math.inf
        if idle and arrivals:
            now = min(now, arrivals[0][0])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 250), st.integers(1, 60), st.integers(0, 99)), max_size=8))
def test_steps_taken_at_once_are_those_taken_one_by_one(asks: list[tuple[int, int, int, int]]) -> None:
    def arrivals() -> list[tuple[float, Asked]]:
        return [
            (at * 0.123_457, asked(compute, output, load if load > 50 else 0))
            for at, compute, output, load in sorted(asks)
        ]

    class OneByOne(Scheduler[Asked]):
        def alike(self, now: float) -> int:
            return 0

    one, other = arrivals(), arrivals()
    names = [id(request) for _, request in one], [id(request) for _, request in other]
    slow, fast = strides(OneByOne(ROOMY), list(one)), strides(Scheduler(ROOMY), list(other))
    told = [
        [(at, [which.index(id(request)) for request in ended]) for at, ended in ends]
        for ends, which in zip((slow, fast), names, strict=True)
    ]
    assert [ended for _, ended in told[0]] == [ended for _, ended in told[1]]
    assert [at for at, _ in told[0]] == pytest.approx([at for at, _ in told[1]], abs=1e-4)
    assert sorted(place for _, ended in told[0] for place in ended) == list(range(len(asks)))
    assert [sum(request.granted) for _, request in one] == [sum(request.granted) for _, request in other]


def test_nothing_is_alike_while_somebody_may_come_in() -> None:
    scheduler = scheduler_of(asked(10, output=50), asked(250, output=50))
    assert scheduler.alike(0.0) == 0
    scheduler.step(0.0)
    assert scheduler.alike(0.1) == 0  # the second still prefills
    scheduler.step(0.1)
    scheduler.step(0.2)
    assert scheduler.alike(0.3) == 46  # the first has had three of its fifty, and ends in a step that is told
    full = asked(10)
    scheduler.submit(full)
    assert scheduler.alike(0.3) == 0
    scheduler.step(0.3)
    assert scheduler.alike(0.4) == 45  # no place for it before somebody ends
    scheduler.remove(full)


@pytest.mark.parametrize("work", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_work_that_cannot_be_is_refused(work: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Work(*work)
