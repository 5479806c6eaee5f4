"""The checks that every policy must pass, ours and yours.

    from policies.conformance import conform
    conform(MyPolicy)            # or: conform(lambda: MyPolicy(beta=2))

It makes fresh policies and plays jobs at them; an `AssertionError` names the rule that was broken.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, Policy, Role

ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


def conform(make: Callable[[], Policy], *, rounds: int = 300, seed: int = 1) -> None:
    """Raise AssertionError where a policy breaks a rule; `make` gives a fresh one each time."""
    try:
        refuses_an_empty_fleet(make)
        needs_an_engine_that_answers(make)
        places_on_what_is_there(make, random.Random(seed), rounds)
        repeats_itself(make, random.Random(seed), rounds)
        bears_missing_signals(make)
        bears_every_outcome(make)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"nothing but NoCapacity, and that only without an able engine: {error!r}") from error


def refuses_an_empty_fleet(make: Callable[[], Policy]) -> None:
    try:
        make().place(_job(), [])
    except NoCapacity:
        return
    raise AssertionError("an empty fleet must raise NoCapacity")


def needs_an_engine_that_answers(make: Callable[[], Policy]) -> None:
    try:
        make().place(_job(), [_candidate("p", role="prefill")])
    except NoCapacity:
        return
    raise AssertionError("a fleet of prefill engines alone must raise NoCapacity")


def places_on_what_is_there(make: Callable[[], Policy], chance: random.Random, rounds: int) -> None:
    policy = make()
    for _ in range(rounds):
        job, candidates = _scene(chance)
        before = tuple(candidates)
        placement = policy.place(job, candidates)
        assert tuple(candidates) == before, "the candidates must be left as they are"
        check_placement(job, candidates, placement)


def repeats_itself(make: Callable[[], Policy], chance: random.Random, rounds: int) -> None:
    one, other = make(), make()
    for _ in range(rounds):
        job, candidates = _scene(chance)
        assert one.place(job, candidates) == other.place(job, candidates), (
            "two fresh policies must place the same jobs in the same way"
        )


def bears_missing_signals(make: Callable[[], Policy]) -> None:
    policy = make()
    signals = [
        [
            _candidate("a", waiting=waiting, running=running, cache_usage=usage, signal_age=age, since=since),
            _candidate("b"),
        ]
        for waiting, running, usage, age in ((None, None, None, None), (3.0, None, None, 0.0), (0.0, 2.0, 1.0, 1e6))
        for since in (None, 0.0, 1e9)
    ]
    for tokens in (None, 0, 5000):
        for pool in (None, 0, 4096):
            for session, landmarks in ((None, ()), ("", ()), ("s", (b"1",)), ("s" * 10_000, (b"1", b"2", b"3"))):
                job = _job(tokens, pool, session=session, landmarks=landmarks)
                for candidates in signals:
                    check_placement(job, candidates, policy.place(job, candidates))


def bears_every_outcome(make: Callable[[], Policy]) -> None:
    policy = make()
    candidates = [_candidate("a"), _candidate("b")]
    for ok in (True, False):
        for ttft in (None, 0.0, 0.2):
            for cached in (None, 0, 512):
                for computed, queued in ((None, None), (0, 0), (4096, None), (4096, 2048)):
                    placement = policy.place(_job(), candidates)
                    check_placement(_job(), candidates, placement)
                    policy.observe(placement, Outcome(ok, "b", ttft, cached, computed, queued))


def check_placement(job: Job, candidates: Sequence[Candidate], placement: Placement) -> None:
    """The rules for one placement."""
    roles = {c.id: c.role for c in candidates}
    assert placement.engine in roles, "the engine must be one of the candidates"
    assert roles[placement.engine] != "prefill", "a prefill engine must not answer"
    if placement.prefill is not None:
        assert placement.prefill in roles, "the prefill engine must be one of the candidates"
        assert placement.prefill != placement.engine, "prefill on the engine that answers is no second leg"
        assert roles[placement.prefill] != "decode", "a decode engine must not prefill for another"
        assert job.pool_tokens is not None, "no hand over through a pool that cannot be asked"
    assert len({placement.engine, *placement.spares}) == 1 + len(placement.spares), "spares must be distinct"
    assert all(roles.get(spare, "prefill") != "prefill" for spare in placement.spares), (
        "a spare must be a candidate that can answer"
    )
    assert placement.own_tokens >= 0, "own tokens cannot be negative"
    assert placement.pool_tokens >= 0, "pool tokens cannot be negative"
    longest = max(c.own_tokens for c in candidates)
    assert placement.own_tokens + placement.pool_tokens <= max(longest, job.pool_tokens or 0), (
        "cached is max(own, pool), never the sum"
    )
    assert placement.reason, "a reason must be given"


def _scene(chance: random.Random) -> tuple[Job, list[Candidate]]:
    blocks = chance.randrange(0, 200)
    pool = chance.choice([None, chance.randrange(0, blocks + 1) * 32])
    beginning = chance.randrange(3)
    job = _job(
        chance.choice([None, blocks * 32 + 7]),
        pool,
        disk_tokens=chance.randrange(0, (pool or 0) + 1),
        session=chance.choice([None, "one", "two"]),
        landmarks=tuple(bytes((beginning, number)) for number in range(blocks // 16)),
        whole=chance.choice([b"", bytes((beginning, 255, chance.randrange(4)))]),
    )
    candidates = [
        _candidate(
            f"engine-{number}",
            role=chance.choice(ROLES),
            requests=chance.randrange(0, 40),
            tokens=chance.randrange(0, 40_000),
            waiting=chance.choice([None, float(chance.randrange(0, 20))]),
            running=chance.choice([None, float(chance.randrange(0, 20))]),
            cache_usage=chance.choice([None, chance.random()]),
            signal_age=chance.choice([None, chance.random()]),
            own_tokens=chance.randrange(0, blocks + 1) * 32,
            likely_tokens=chance.choice([0, chance.randrange(0, blocks + 1) * 32]),
            since=chance.choice([None, chance.random() * 60]),
            pooled=chance.random() < 0.9,
        )
        for number in range(chance.randrange(1, 9))
    ]
    candidates.append(_candidate("engine-last"))
    chance.shuffle(candidates)
    return job, candidates


def _job(prompt_tokens: int | None = 5000, pool_tokens: int | None = 1024, **others: Any) -> Job:
    return Job(model="m", tenant="t", prompt_tokens=prompt_tokens, pool_tokens=pool_tokens, **others)


def _candidate(name: str, **others: Any) -> Candidate:
    plain: dict[str, Any] = {"role": "both", "requests": 0, "tokens": 0, "waiting": 0.0, "own_tokens": 0}
    return Candidate(id=name, **plain | others)
