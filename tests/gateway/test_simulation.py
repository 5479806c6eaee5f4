"""One run: the policy is told what the gateway would tell it, and is told what became of it."""

import random
from collections.abc import Sequence

import pytest

from gateway.simulation import CannotReplay, Lost, Run, Scene, Simulation, Slowed
from gateway.traffic import Agents, Ask, Traffic
from policies.cost import Cost
from policies.interface import Candidate, Job, Outcome, Placement, Policy
from policies.load import load

AGENTS = Agents(sessions=6, turns=5, system_tokens=1000, first_tokens=1000, turn_tokens=500, output_tokens=100, ramp=5)
SMALL = Scene(engines=3, blocks=1000)


class Watched:
    """A policy that remembers what it was asked and told."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.asked: list[tuple[Job, Sequence[Candidate], Placement]] = []
        self.told: list[tuple[Placement, Outcome]] = []

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        placement = self._policy.place(job, candidates)
        self.asked.append((job, candidates, placement))
        return placement

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        self._policy.observe(placement, outcome)
        self.told.append((placement, outcome))


def run(scene: Scene, policy: str = "cache_aware", agents: Agents = AGENTS) -> tuple[Run, Watched]:
    watched = Watched(load(policy, {}))
    return Simulation(scene, agents.traffic(scene.seed), watched).play(), watched


@pytest.mark.parametrize("pool", [0, 2000])
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_it_is_the_same_to_the_last_bit(policy: str, pool: int) -> None:
    scene = Scene(engines=3, blocks=300, pool=pool, lost=(Lost(20, 0.5),), slowed=(Slowed(10, 2, 0.5),))
    one, other = run(scene, policy)[0], run(scene, policy)[0]
    assert one == other
    assert len(one.fates) == 30
    assert all(fate.arrived < fate.first <= fate.ended for fate in one.fates)


def test_the_policy_sees_what_the_gateway_shows() -> None:
    _, watched = run(Scene(engines=3, blocks=1000, pool=5000))
    assert len(watched.asked) == len(watched.told) == 30
    job, candidates, _ = watched.asked[-1]
    assert job.pool_tokens is not None
    assert job.prompt_tokens is not None
    assert 0 < job.pool_tokens < job.prompt_tokens
    assert job.session is not None
    assert len(job.landmarks) == (job.prompt_tokens - 1) // 64 * 64 // job.landmark_tokens
    assert job.block_tokens == 64
    assert job.whole
    assert all(c.signal_age is not None and 0 <= c.signal_age <= 1 for c in candidates)
    assert max(c.own_tokens for c in candidates) > 0
    for placement, outcome in watched.told:
        assert outcome.ok
        assert outcome.engine == placement.engine
        assert outcome.ttft is not None
        assert outcome.ttft > 0
        assert outcome.cached_tokens is not None


def test_a_prompt_that_is_being_computed_is_likely_held_soon() -> None:
    blocks = tuple(place.to_bytes(8, "big") for place in range(70))
    asks = tuple(Ask(at=place / 100, tokens=4096, output=2, chain=blocks) for place in range(3))
    watched = Watched(load("round_robin", {}))
    Simulation(SMALL, Traffic("twins", 64, asks), watched).play()
    _, candidates, _ = watched.asked[1]
    assert [c.likely_tokens for c in candidates] == [4032, 0, 0]  # its last block is never reused
    assert [c.tokens for c in candidates] == [4096, 0, 0]


def test_conversations_stay_where_they_are_held() -> None:
    scattered, kept = run(SMALL, "round_robin")[0], run(SMALL, "cache_aware")[0]
    own = [sum(fate.own for fate in one.fates) for one in (scattered, kept)]
    assert own[1] > 1.2 * own[0]
    assert all(fate.loaded == 0 for one in (scattered, kept) for fate in one.fates)


def test_the_pool_gives_what_others_computed_and_a_loss_takes_it() -> None:
    with_pool = run(Scene(engines=3, blocks=1000, pool=5000), "round_robin")[0]
    lossy = run(Scene(engines=3, blocks=1000, pool=5000, lost=tuple(Lost(at, 1.0) for at in range(90))), "round_robin")[
        0
    ]
    loaded = [sum(fate.loaded for fate in one.fates) for one in (with_pool, lossy)]
    assert loaded[0] > 4 * loaded[1]
    assert lossy.pool_lost > 0
    assert all(fate.own + fate.loaded < fate.ask.tokens for fate in with_pool.fates)


def test_answers_are_in_the_pool_where_that_is_wanted() -> None:
    without = run(Scene(engines=3, blocks=1000, pool=5000), "round_robin")[0]
    saved = run(Scene(engines=3, blocks=1000, pool=5000, save_decode_cache=True), "round_robin")[0]
    found = [sum(fate.own + fate.loaded for fate in one.fates) for one in (without, saved)]
    assert found[1] > found[0]


def test_prefill_and_decode_run_apart() -> None:
    scene = Scene(engines=0, prefill=2, decode=2, blocks=1000, pool=5000)
    done, watched = run(scene, "disaggregated")
    prefilled = [placement for job, _, placement in watched.asked if placement.prefill is not None]
    decodes = [(job, candidates) for job, candidates, _ in watched.asked if job.prefilled]
    assert len(prefilled) == len(decodes) > 20
    assert len(watched.told) == len(done.fates) == 30
    assert {fate.engine for fate in done.fates} >= {"engine-01", "engine-02"}
    assert all(c.role == "decode" for _, candidates in decodes for c in candidates)
    assert all(job.pool_tokens == (job.prompt_tokens - 1) // 64 * 64 for job, _ in decodes if job.prompt_tokens)
    computed = {tally.id: tally.prefill_tokens for tally in done.engines}
    assert computed["engine-01"] + computed["engine-02"] > 10 * (computed["engine-03"] + computed["engine-04"])


def test_a_decode_waits_in_vain_for_a_pool_without_room() -> None:
    blocks = tuple(place.to_bytes(8, "big") for place in range(4))
    asks = (Ask(at=0, tokens=1100, output=2, chain=blocks), Ask(at=5, tokens=1700, output=2, chain=blocks))
    watched = Watched(load("disaggregated", {}))
    scene = Scene(engines=0, prefill=1, decode=1, pool=2, lease=60)
    first, second = Simulation(scene, Traffic("two", 512, asks), watched).play().fates
    assert first.first - first.arrived < 1
    assert second.first - second.arrived > 10
    assert [job.pool_tokens for job, _, _ in watched.asked if job.prefilled] == [1024, 1024]


class Learning(Cost):
    """The cost policy, and what it knew of the second engine's prefill rate after each answer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        super().observe(placement, outcome)
        if outcome.engine == "engine-02":
            self.rates.append(1 / self.rate(outcome.engine).prefill)


def test_an_engine_at_half_its_speed_is_known_for_it_and_gets_less() -> None:
    chance = random.Random(1)
    asks = tuple(
        Ask(
            at=chance.uniform(0, 400),
            tokens=chance.randrange(500, 6000),
            output=5,
            chain=tuple((place * 100 + block).to_bytes(8, "big") for block in range(12)),
        )
        for place in range(2000)
    )
    policy = Learning()
    scene = Scene(engines=3, slowed=(Slowed(200, 2, 0.5),))
    done = Simulation(scene, Traffic("single", 512, asks), policy).play()
    there = [fate for fate in done.fates if fate.engine == "engine-02"]
    before = sum(fate.ended < 200 for fate in there)
    assert policy.rates[before - 1] == pytest.approx(8000, rel=0.1)
    assert all(rate == pytest.approx(4000, rel=0.2) for rate in policy.rates[before + 50 :])
    share = [
        sum(fate.engine == "engine-02" for fate in fates) / len(fates)
        for fates in (done.fates[:1000], done.fates[1100:])
    ]
    assert share[0] == pytest.approx(1 / 3, abs=0.03)
    assert share[1] == pytest.approx(1 / 5, abs=0.05)  # as its share of the speed


def test_requests_come_faster() -> None:
    times = [max(fate.ended for fate in run(Scene(engines=3, blocks=1000, speed=speed))[0].fates) for speed in (1, 2)]
    assert times[1] < 0.8 * times[0]


@pytest.mark.parametrize(
    ("scene", "says"),
    [
        (Scene(engines=0, prefill=2), "no engine that can answer"),
        (Scene(blocks=3), "an engine has 3"),
        (Scene(engines=1, blocks=1000, slowed=(Slowed(1, 2, 0.5),)), "no engine 2"),
    ],
)
def test_what_cannot_be_played_is_told(scene: Scene, says: str) -> None:
    with pytest.raises(CannotReplay, match=says):
        run(scene)


def test_progress_is_told_of_every_request() -> None:
    told: list[int] = []
    Simulation(SMALL, AGENTS.traffic(1), load("round_robin", {})).play(lambda: told.append(1))
    assert len(told) == 30
