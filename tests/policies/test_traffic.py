"""What becomes of whole traffic under the policies, over a simulated fleet."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count, pairwise

import pytest

from policies.cache_aware import CacheAware
from policies.cost import Cost
from policies.interface import Policy
from policies.least_loaded import LeastLoaded
from policies.round_robin import RoundRobin
from tests.policies.sim import Engine, Fleet, Text, busiest, fleet

SYSTEM = 1
"""The piece that is the system prompt of all."""
BY_CACHE = pytest.mark.parametrize("make", [CacheAware, Cost])


# a system prompt that all share


class Users:
    """So many users with one system prompt, each of whom sends the next turn some time after the last was answered."""

    def __init__(self, policy: Policy, *, system: int, turn: tuple[int, int], slots: int, seed: int) -> None:
        self.fleet = fleet(4, slots=slots)
        self.stayed: list[bool] = []
        """For each turn but users' first, whether it went where the first one did."""
        self._policy = policy
        self._turn = turn
        self._chance = random.Random(seed)
        self._names = count(10)
        self._said = [Text(((SYSTEM, system),)) for _ in range(100)]
        self._idle = list(range(100))
        self._homes: dict[int, str] = {}
        self._left = 400
        for _ in range(32):
            self._send()
        self.fleet.run()

    def _send(self) -> None:
        if not self._left:
            return
        self._left -= 1
        user = self._idle.pop(self._chance.randrange(len(self._idle)))
        prompt = self._said[user].then(next(self._names), self._chance.randint(*self._turn))
        answer = (next(self._names), 100)

        def answered() -> None:
            self._said[user] = prompt.then(*answer)
            self._idle.append(user)
            self._send()

        engine = self.fleet.send(self._policy, prompt, answer=answer, decode=0.5, then=answered)
        if user in self._homes:
            self.stayed.append(engine == self._homes[user])
        self._homes.setdefault(user, engine)


@BY_CACHE
@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize(("system", "turn"), [(8192, (50, 50)), (8000, (600, 600)), (8000, (50, 2000))], ids=str)
def test_a_system_prompt_that_all_share_makes_no_hot_spot(
    make: Callable[[], Policy], system: int, turn: tuple[int, int], slots: int
) -> None:
    found = Users(make(), system=system, turn=turn, slots=slots, seed=1)
    turns = Users(RoundRobin(), system=system, turn=turn, slots=slots, seed=1)

    assert len(found.fleet.sent) == 400
    assert busiest(found.fleet.sent) <= 0.4
    assert sum(found.stayed) >= 0.8 * len(found.stayed), "and users stay where their first turn was"
    assert found.fleet.time <= 1.3 * turns.fleet.time


# one request at a time


def sequential(policy: Policy, *, shared: int, turn: int, turns: int, rate: float, decode: float) -> list[str]:
    """Forty sessions, never two requests in flight; where each one's first turn went."""
    on, names, firsts = fleet(4, rate=rate), count(10), []
    for _ in range(40):
        text = Text(((SYSTEM, shared),)) if shared else Text(())
        for number in range(turns):
            text, answer = text.then(next(names), turn), (next(names), 100)
            engine = on.send(policy, text, answer=answer, decode=decode)
            on.run()
            text = text.then(*answer)
            if not number:
                firsts.append(engine)
    return firsts


@pytest.mark.parametrize(("rate", "decode"), [(20_000, 0.5), (1000, 0.001)], ids=["slow decode", "fast decode"])
@pytest.mark.parametrize("turn", [50, 511, 2000])
@pytest.mark.parametrize("shared", [0, 8000, 8192])
@pytest.mark.parametrize("make", [CacheAware, Cost, LeastLoaded, RoundRobin])
def test_sessions_one_after_another_reach_every_engine(
    make: Callable[[], Policy], shared: int, turn: int, rate: float, decode: float
) -> None:
    times = Counter(sequential(make(), shared=shared, turn=turn, turns=1, rate=rate, decode=decode))

    assert len(times) == 4
    assert all(5 <= number <= 20 for number in times.values())


@BY_CACHE
@pytest.mark.parametrize("shared", [0, 8192])
def test_so_do_sessions_of_several_turns(make: Callable[[], Policy], shared: int) -> None:
    times = Counter(sequential(make(), shared=shared, turn=300, turns=5, rate=20_000, decode=0.5))

    assert len(times) == 4
    assert all(5 <= number <= 20 for number in times.values())


# conversations


def conversations(policies: Sequence[Policy], *, shared: int, first: tuple[int, int], seed: int) -> tuple[float, float]:
    """Twenty conversations of ten turns, at once; the shares of turns where the first was, and where the last was.

    Where there are several policies, as in gateways of their own, the turns of a conversation go through
    one after another.
    """
    on, names, chance = fleet(4), count(10), random.Random(seed)
    went: list[list[str]] = [[] for _ in range(20)]

    def turn(number: int, said: Text) -> None:
        done = len(went[number])
        prompt = said.then(next(names), chance.randint(*(first if not done else (100, 900))))
        answer = (next(names), 150)
        policy = policies[(number + done) % len(policies)]

        def answered() -> None:
            if len(went[number]) < 10:
                on.at(on.time + chance.random(), lambda: turn(number, prompt.then(*answer)))

        went[number].append(on.send(policy, prompt, answer=answer, decode=0.5, then=answered))

    for number in range(20):
        turn(number, Text(((SYSTEM, shared),)) if shared else Text(()))
    on.run()
    firsts = sum(engine == engines[0] for engines in went for engine in engines[1:])
    lasts = sum(now == before for engines in went for before, now in pairwise(engines))
    return firsts / 180, lasts / 180


@BY_CACHE
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("first", [(20, 200), (100, 3000)], ids=str)
@pytest.mark.parametrize("shared", [0, 8192])
def test_a_conversation_stays_on_its_engine(
    make: Callable[[], Policy], shared: int, first: tuple[int, int], seed: int
) -> None:
    where_first, _ = conversations([make()], shared=shared, first=first, seed=seed)

    assert where_first >= 0.9


@BY_CACHE
@pytest.mark.parametrize("first", [(20, 200), (100, 3000)], ids=str)
@pytest.mark.parametrize("shared", [0, 8192])
def test_turns_that_alternate_between_two_gateways_go_to_one_engine(
    make: Callable[[], Policy], shared: int, first: tuple[int, int]
) -> None:
    _, where_last = conversations([make(), make()], shared=shared, first=first, seed=1)

    assert where_last >= 0.9


# identical prompts, and newcomers


def sends(on: Fleet, policy: Policy, prompt: Text) -> None:
    on.send(policy, prompt)


@BY_CACHE
@pytest.mark.parametrize("pieces", [((2, 8192),), ((2, 8000), (3, 192)), ((2, 8500),)], ids=str)
def test_identical_cold_prompts_are_computed_by_two_engines_at_most(
    make: Callable[[], Policy], pieces: tuple[tuple[int, int], ...]
) -> None:
    on, policy = fleet(4), make()
    for number in range(60):
        on.at(number * 0.05 / 60, lambda: sends(on, policy, Text(pieces)))
    on.run()

    assert len(on.sent) == 60
    assert len(set(on.sent)) <= 2


@BY_CACHE
def test_unless_there_are_far_too_many_for_two(make: Callable[[], Policy]) -> None:
    on, policy = fleet(4), make()
    for number in range(600):
        on.at(number * 0.05 / 600, lambda: sends(on, policy, Text(((2, 8192),))))
    on.run()

    assert len(set(on.sent)) == 4


@pytest.mark.parametrize("known", ["by our own leases", "by the engines' word"])
@pytest.mark.parametrize("since", [0.0, 1.0, 15.0, 29.0])
@pytest.mark.parametrize("make", [CacheAware, Cost, LeastLoaded])
def test_a_newcomer_is_not_flooded(make: Callable[[], Policy], since: float, known: str) -> None:
    engines = [Engine(name) for name in "abc"]
    for engine in engines:
        if known == "by our own leases":
            engine.requests = 20
        else:
            engine.foreign = 20
    on, policy = Fleet([*engines, Engine("new", since=since)]), make()
    for number in range(64):
        on.send(policy, Text(((number, 2000),)))

    assert on.sent.count("new") <= 32
    assert since == 0 or on.sent.count("new") > 0
