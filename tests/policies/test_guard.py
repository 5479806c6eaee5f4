"""A policy's defects are met by another one, and counted."""

from asyncio import CancelledError
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from policies.conformance import conform
from policies.guard import MOST_REASONS, SLOW_AMONG, Failure, Guarded
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, Policy
from policies.least_loaded import LeastLoaded
from policies.load import BUILT_IN
from policies.round_robin import RoundRobin
from tests.policies.scenes import Scripted, chosen, engine, engines, job, placement

OUTCOME = Outcome(ok=True, engine="a", ttft=None, cached_tokens=None)


class Bench:
    """A guarded policy, its clock, and what was counted."""

    def __init__(self, policy: Policy) -> None:
        self.time = 0.0
        self.counted: list[Failure] = []
        self.fallback = Scripted(placement("b"))
        self.guarded = Guarded(policy, self.fallback, clock=lambda: self.time, count=self.counted.append)


class Slow(Scripted):
    """Takes as long as it is told."""

    seconds = 0.0
    bench: Bench

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        self.bench.time += self.seconds
        return super().place(job, candidates)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        self.bench.time += self.seconds
        super().observe(placement, outcome)


def slow() -> tuple[Slow, Bench]:
    policy = Slow(placement("a"))
    policy.bench = Bench(policy)
    return policy, policy.bench


class Broken(Scripted):
    """Raises, or answers what is no placement."""

    def __init__(self, answer: object) -> None:
        super().__init__(placement("a"))
        self.answer = answer

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        if isinstance(self.answer, Exception):
            raise self.answer


@pytest.mark.parametrize("make", BUILT_IN.values(), ids=BUILT_IN)
def test_a_policy_that_is_well_is_left_alone(make: type[Policy]) -> None:
    conform(lambda: Guarded(make(), LeastLoaded(), clock=lambda: 0.0, count=pytest.fail))


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("a defect"),
        None,
        {"engine": "a"},
        placement("nobody"),
        placement("a", spares=("nobody",)),
        replace(placement("a"), prefill="nobody"),
        replace(placement("a"), own_tokens=None),
        replace(placement("a"), reason=["a"]),
    ],
    ids=str,
)
def test_what_fails_is_replaced_and_counted(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Broken(answer))

    assert chosen(bench.guarded, 4, engines("ab")) == "bbbb"
    assert bench.counted == ["failed"] * 4
    assert caplog.text.count("the policy failed") == 1, "told once until it is well again"


class Meddling(Scripted):
    """Changes what it chooses among."""

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        candidates.clear()  # type: ignore[attr-defined]
        return super().place(job, candidates)


def test_nobody_changes_the_candidates() -> None:
    bench, able = Bench(Meddling(placement("a"))), engines("ab")

    assert bench.guarded.place(job(), able).engine == "b"
    assert [candidate.id for candidate in able] == ["a", "b"]
    assert bench.counted == ["failed"]


def test_a_failure_to_observe_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Broken(RuntimeError("a defect")))
    bench.guarded.observe(placement("a"), OUTCOME)

    assert bench.counted == ["failed"]
    assert "failed to observe" in caplog.text


def test_no_capacity_is_an_answer() -> None:
    bench = Bench(Broken(NoCapacity("nobody is good enough")))
    with pytest.raises(NoCapacity, match="good enough"):
        bench.guarded.place(job(), engines("ab"))

    assert (bench.counted, bench.fallback.asked) == ([], [])


def test_the_fallbacks_too() -> None:
    guarded = Guarded(Broken(None), RoundRobin(), clock=lambda: 0.0, count=lambda _: None)
    with pytest.raises(NoCapacity, match="role both or decode"):
        guarded.place(job(), [engine("p", role="prefill")])


def test_one_that_is_slow_is_out_of_service_the_third_time(caplog: pytest.LogCaptureFixture) -> None:
    policy, bench = slow()
    policy.seconds = 60

    assert chosen(bench.guarded, 5, engines("ab")) == "aaabb", "a late answer stands"
    assert bench.counted == ["slow", "slow", "slow", "out of service"]
    assert caplog.text.count("out of service") == 1
    bench.guarded.observe(placement("b"), OUTCOME)
    assert (len(policy.observed), len(bench.fallback.observed)) == (0, 1), "nor is it told of anything"


def test_slow_to_observe_is_slow() -> None:
    policy, bench = slow()
    policy.seconds = 0.06
    for _ in range(3):
        bench.guarded.observe(placement("a"), OUTCOME)

    assert bench.counted[-1] == "out of service"


def test_within_its_limit_it_may_take_its_time() -> None:
    policy, bench = slow()
    policy.seconds = 0.04
    chosen(bench.guarded, 10, engines("ab"))

    assert bench.counted == []


def test_a_pause_now_and_then_takes_nobody_out() -> None:
    policy, bench = slow()
    for call in range(4 * SLOW_AMONG):
        policy.seconds = 1 if call % (SLOW_AMONG // 2) == 0 else 0
        assert bench.guarded.place(job(), engines("ab")).engine == "a"

    assert bench.counted == ["slow"] * 8


def test_reasons_are_few_and_short() -> None:
    policy = Scripted(placement("a"))
    guarded = Bench(policy).guarded
    told = set()
    for number in range(200):
        policy.placement = replace(placement("a"), reason=f"reason {number}")
        told.add(guarded.place(job(), engines("ab")).reason)
    assert len(told) == MOST_REASONS + 1
    assert "reason 3" in told
    for odd in ("x" * 100_000, "two\nlines"):
        policy.placement = replace(placement("a"), reason=odd)
        assert guarded.place(job(), engines("ab")).reason == "other"


def test_a_policy_that_cancels_is_one_that_fails() -> None:
    class Cancels(Scripted):
        def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
            raise CancelledError

    bench = Bench(Cancels(placement("a")))
    assert bench.guarded.place(job(), engines("ab")).engine == "b"
    assert bench.counted == ["failed"]


def test_who_replaces_a_blind_policy_is_told_how_prompts_begin() -> None:
    class Blind(Slow):
        blind = True

    policy = Blind(placement("a"))
    policy.bench = Bench(policy)
    blind = [policy.bench.guarded.blind]
    policy.seconds = 1.0
    for _ in range(3):
        policy.bench.guarded.place(job(), [engine("a"), engine("b")])
    assert [*blind, policy.bench.guarded.blind] == [True, False]
    assert not Bench(Scripted(placement("a"))).guarded.blind
