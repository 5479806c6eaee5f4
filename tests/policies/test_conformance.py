"""Every policy of ours conforms, and every rule can be broken: a policy that breaks it is caught."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.conformance import check_placement, conform
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, Policy, able_to_answer, placed
from policies.load import BUILT_IN
from policies.round_robin import RoundRobin


@pytest.mark.parametrize("make", BUILT_IN.values(), ids=BUILT_IN)
@pytest.mark.parametrize("seed", range(3))
def test_ours_conform(make: Callable[[], Policy], seed: int) -> None:
    conform(make, seed=seed)


@given(
    st.sampled_from(list(BUILT_IN)),
    st.lists(
        st.builds(
            Candidate,
            id=st.sampled_from("abcdef"),
            role=st.sampled_from(["both", "prefill", "decode"]),
            requests=st.integers(0, 3),
            tokens=st.integers(0, 10**6),
            waiting=st.none() | st.floats(0, 1e6),
            own_tokens=st.integers(0, 10**6),
            running=st.none() | st.floats(0, 1e6),
            cache_usage=st.none() | st.floats(0, 1),
            signal_age=st.none() | st.floats(0, 1e6),
            likely_tokens=st.integers(0, 10**6),
            since=st.none() | st.floats(0, 1e6),
            pooled=st.booleans(),
        ),
        max_size=6,
        unique_by=lambda candidate: candidate.id,
    ),
    st.builds(
        Job,
        model=st.sampled_from("mn"),
        tenant=st.just("t"),
        prompt_tokens=st.none() | st.integers(0, 10**6),
        pool_tokens=st.none() | st.integers(0, 10**6),
        disk_tokens=st.integers(0, 10**6),
        session=st.none() | st.text(),
        landmarks=st.lists(st.binary(min_size=8, max_size=8), max_size=5, unique=True).map(tuple),
        whole=st.binary(max_size=8),
    ),
)
def test_ours_conform_in_scenes_that_the_kit_does_not_know(name: str, candidates: list[Candidate], job: Job) -> None:
    policy = BUILT_IN[name]()
    if all(candidate.role == "prefill" for candidate in candidates):
        with pytest.raises(NoCapacity):
            policy.place(job, candidates)
    else:
        check_placement(job, candidates, policy.place(job, candidates))


class Bad(RoundRobin):
    """A policy that is fine but for one thing."""

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        return self.spoil(job, candidates, super().place(job, candidates))

    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return placement


class OfAnEmptyFleet(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        if not candidates:
            return Placement("nobody", None, (), 0, 0, "hope")
        return super().place(job, candidates)


class OfPrefillEnginesAlone(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        if {candidate.role for candidate in candidates} == {"prefill"}:
            return placed(job, candidates, "whatever")
        return super().place(job, candidates)


class OnAPrefillEngine(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, engine=next((c.id for c in candidates if c.role == "prefill"), placement.engine))


class OnAStranger(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, engine="stranger")


class SortsTheCallersList(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        assert isinstance(candidates, list)
        candidates.sort(key=lambda candidate: candidate.id)
        return super().place(job, candidates)


class PrefillsOnAStranger(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, prefill="stranger")


class PrefillsWhereItDecodes(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, prefill=placement.engine)


class PrefillsOnADecodeEngine(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        others = (c.id for c in candidates if c.role == "decode" and c.id != placement.engine)
        return replace(placement, prefill=next(others, None))


class HandsOverBlindly(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        others = (c.id for c in candidates if c.role != "decode" and c.id != placement.engine)
        return replace(placement, prefill=next(others, None))


class SparesTheEngineItself(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, spares=(placement.engine,))


class SparesOneTwice(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, spares=placement.spares * 2)


class SparesAStranger(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, spares=(*placement.spares, "stranger"))


class SparesAPrefillEngine(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, spares=tuple(c.id for c in candidates if c.id != placement.engine))


class OwesTokens(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, own_tokens=-32)


class OwesThePool(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, pool_tokens=-32)


class AddsOwnAndPool(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, pool_tokens=job.pool_tokens or 0)


class SaysNoReason(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, reason="")


class Dices(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        random.shuffle(able)
        return placed(job, able, "dice")


class SharesItsState(Bad):
    placed = 0

    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        SharesItsState.placed += 1
        return replace(placement, reason=f"number {SharesItsState.placed}")


class CountsOnTheQueue(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = sorted(able_to_answer(candidates), key=lambda c: c.waiting)  # type: ignore[arg-type,return-value]
        return placed(job, able, "shortest queue")


class CountsOnTheCount(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        assert job.prompt_tokens is None or job.prompt_tokens >= 0
        return replace(placement, own_tokens=min(placement.own_tokens, job.prompt_tokens))  # type: ignore[type-var]


class CountsOnASession(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, reason=job.session.upper() or "none")  # type: ignore[union-attr]


class CountsOnLandmarks(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        return replace(placement, reason=f"prefix {job.landmarks[0].hex()}")


class CountsOnTheRunning(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = sorted(able_to_answer(candidates), key=lambda c: -c.running)  # type: ignore[operator]
        return placed(job, able, "fewest running")


class CountsOnTheCache(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = sorted(able_to_answer(candidates), key=lambda c: 1 - c.cache_usage)  # type: ignore[operator]
        return placed(job, able, "emptiest")


class DividesByWarmth(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = sorted(able_to_answer(candidates), key=lambda c: 1 / c.since if c.since is not None else 0)
        return placed(job, able, "warmest")


class GivesUpWhereThereIsAnEngine(Bad):
    def spoil(self, job: Job, candidates: Sequence[Candidate], placement: Placement) -> Placement:
        if job.pool_tokens is None:
            raise NoCapacity("the pool is unknown")
        return placement


class CannotBearFailure(Bad):
    def observe(self, placement: Placement, outcome: Outcome) -> None:
        self.ttft = round(outcome.ttft, 3)  # type: ignore[arg-type]


class FallsOverWhenEmpty(Bad):
    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        return placed(job, [candidates[0]], "first")


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (OfAnEmptyFleet, "an empty fleet must raise NoCapacity"),
        (OfPrefillEnginesAlone, "prefill engines alone must raise NoCapacity"),
        (OnAPrefillEngine, "a prefill engine must not answer"),
        (OnAStranger, "the engine must be one of the candidates"),
        (SortsTheCallersList, "must be left as they are"),
        (PrefillsOnAStranger, "the prefill engine must be one of the candidates"),
        (PrefillsWhereItDecodes, "no second leg"),
        (PrefillsOnADecodeEngine, "a decode engine must not prefill"),
        (HandsOverBlindly, "a pool that cannot be asked"),
        (SparesTheEngineItself, "spares must be distinct"),
        (SparesOneTwice, "spares must be distinct"),
        (SparesAStranger, "a spare must be a candidate"),
        (SparesAPrefillEngine, "a spare must be a candidate"),
        (OwesTokens, "own tokens cannot be negative"),
        (OwesThePool, "pool tokens cannot be negative"),
        (AddsOwnAndPool, "never the sum"),
        (SaysNoReason, "a reason must be given"),
        (Dices, "in the same way"),
        (SharesItsState, "in the same way"),
        (CountsOnTheQueue, "nothing but NoCapacity.*TypeError"),
        (CountsOnTheCount, "nothing but NoCapacity.*TypeError"),
        (CountsOnASession, "nothing but NoCapacity.*AttributeError"),
        (CountsOnLandmarks, "nothing but NoCapacity.*IndexError"),
        (CountsOnTheRunning, "nothing but NoCapacity.*TypeError"),
        (CountsOnTheCache, "nothing but NoCapacity.*TypeError"),
        (DividesByWarmth, "nothing but NoCapacity.*ZeroDivisionError"),
        (GivesUpWhereThereIsAnEngine, "nothing but NoCapacity.*the pool is unknown"),
        (CannotBearFailure, "nothing but NoCapacity.*TypeError"),
        (FallsOverWhenEmpty, "nothing but NoCapacity.*IndexError"),
    ],
    ids=lambda row: row.__name__ if isinstance(row, type) else "",
)
def test_a_policy_that_breaks_a_rule_is_told_which(make: Callable[[], Policy], rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        conform(make)


def test_the_bad_ones_are_bad_for_one_thing_only() -> None:
    conform(Bad)
