"""What a replay says of a workload is what real engines do with it.

Twenty conversations go through a gateway to two real engines, whose caches are too small for all of them, once
under each policy; then the same conversations are replayed, at the rates that were measured of an engine.
"""

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from gateway.simulation import Scene, Simulation
from gateway.traffic import Ask, Traffic
from policies.load import load

from .ask import COMPLETIONS, bearer, completion, post
from .conftest import KEYS, settings
from .stack import Engine, Pool, start_engine, start_gateway, start_master
from .watch import Watch

BLOCK = 32
BLOCKS = 500
CONVERSATIONS = 20
TURNS = 6
SYSTEM_TOKENS = 640
OUTPUT = 8
SECONDS = 80.0
"""From the first turns to the last, about."""
GAP = 0.3
"""Seconds between two turns at least: of two that come at about the same time, chance decides which comes first, and
with that where all later ones go."""
POLICIES = ("round_robin", "cache_aware", "cost")


class Hits(NamedTuple):
    """Shares of all prompt tokens that engines had themselves, and that they loaded."""

    own: float
    loaded: float


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: when it comes, and its whole prompt."""

    at: float
    conversation: int
    prompt: list[int]


def conversations(seed: int) -> list[Turn]:
    """They begin with the same system prompt; each turn adds some hundred tokens to the last one's prompt."""
    chance = random.Random(seed)
    system = [chance.randrange(100, 400) for _ in range(SYSTEM_TOKENS)]
    turns = []
    for conversation in range(CONVERSATIONS):
        prompt, at = list(system), chance.uniform(0, SECONDS / TURNS)
        for _ in range(TURNS):
            prompt = prompt + [chance.randrange(100, 400) for _ in range(chance.randrange(150, 450))]
            turns.append(Turn(at, conversation, prompt))
            at += chance.uniform(0.5, 1.5) * SECONDS / TURNS
    spaced: list[Turn] = []
    for turn in sorted(turns, key=lambda turn: turn.at):
        spaced.append(replace(turn, at=max(turn.at, spaced[-1].at + GAP)) if spaced else turn)
    return spaced


def traffic(turns: Sequence[Turn]) -> Traffic:
    """The same for a replay. No turn's prompt has what was answered to the last one, so answers are found by nobody."""
    asks = []
    for place, turn in enumerate(turns):
        blocks = [
            (block if block < SYSTEM_TOKENS // BLOCK else (turn.conversation + 1 << 20) + block).to_bytes(8, "big")
            for block in range(len(turn.prompt) // BLOCK)
        ]
        answer = (1 << 40) + place
        chain = (*blocks, answer.to_bytes(8, "big"))
        asks.append(Ask(turn.at, len(turn.prompt), OUTPUT, chain))
    return Traffic("conversations", BLOCK, tuple(asks))


@pytest.fixture(scope="module")
def small(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two engines of few blocks, which tell of them."""
    folder = tmp_path_factory.mktemp("small")
    with ExitStack() as stop:
        master = stop.enter_context(start_master(folder))
        few = ("--num-gpu-blocks-override", str(BLOCKS))
        engines = [
            stop.enter_context(
                start_engine(model_folder, f"small-{n}", master, folder=folder, events=True, extra_args=few)
            )
            for n in (1, 2)
        ]
        yield Pool(master, tuple(engine.ready() for engine in engines))


@pytest.fixture(scope="module")
def watch(small: Pool) -> Iterator[Watch]:
    """A block that an engine's store client gives up is computed again, which no replay can foresee."""
    with Watch(small.engines) as watch:
        yield watch


def by_source(engines: Sequence[Engine]) -> tuple[float, float, float]:
    """Prompt tokens that engines had, loaded, and computed."""
    own, loaded, computed = (
        sum(engine.count("prompt_tokens_by_source_total", source=source) for engine in engines)
        for source in ("local_cache_hit", "external_kv_transfer", "local_compute")
    )
    return own, loaded, computed


def rates(engine: Engine) -> tuple[float, float]:
    """Prompt tokens that it computes in a second, and seconds of a step."""

    def seconds(tokens: int, output: int) -> float:
        chance = random.Random(uuid.uuid4().int)
        prompt = [chance.randrange(100, 400) for _ in range(tokens)]
        began = time.monotonic()
        assert post(engine.url, COMPLETIONS, completion(prompt, max_tokens=output, ignore_eos=True)).status == 200
        return time.monotonic() - began

    def usual(tokens: int, output: int) -> float:
        return sorted(seconds(tokens, output) for _ in range(3))[1]

    step = max(0.001, (usual(64, 33) - usual(64, 1)) / 32)
    return 4000 / max(0.05, usual(4000, 1) - step), step


def real(pool: Pool, model: Path, folder: Path, policy: str, turns: Sequence[Turn]) -> Hits:
    """Play them, each at its time."""
    static = [
        {"url": e.url, "model": "tiny", "kv_events": {"connect": e.events, "replay": e.replay}} for e in pool.engines
    ]
    config = settings(pool, model, policy=policy, engines={"static": static})
    before = by_source(pool.engines)
    salt = uuid.uuid4().hex  # so that nothing is found of another run
    with (
        start_gateway(config, folder) as gateway,
        httpx.Client(
            base_url=gateway.url,
            headers=bearer(KEYS["team-a"]),
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=120,
            trust_env=False,
        ) as client,
        ThreadPoolExecutor(len(turns)) as threads,
    ):
        began = time.monotonic()

        def ask(turn: Turn) -> None:
            time.sleep(max(0.0, began + turn.at - time.monotonic()))
            body = completion(turn.prompt, max_tokens=OUTPUT, ignore_eos=True, cache_salt=salt)
            client.post(COMPLETIONS, json=body).raise_for_status()

        list(threads.map(ask, turns))
    own, loaded, computed = (after - was for was, after in zip(before, by_source(pool.engines), strict=True))
    total = own + loaded + computed
    assert total == sum(len(turn.prompt) for turn in turns)
    return Hits(own / total, loaded / total)


def replayed(scene: Scene, policy: str, turns: Sequence[Turn]) -> Hits:
    fates = Simulation(scene, traffic(turns), load(policy, {})).play().fates
    tokens = sum(fate.ask.tokens for fate in fates)
    return Hits(sum(fate.own for fate in fates) / tokens, sum(fate.loaded for fate in fates) / tokens)


@pytest.mark.long
@pytest.mark.usefixtures("watch")
def test_hit_rates_and_the_order_of_policies_are_those_of_real_engines(
    small: Pool, model_folder: Path, tmp_path: Path
) -> None:
    turns = conversations(1)
    prefill_rate, step = rates(small.engines[0])
    scene = Scene(engines=2, blocks=BLOCKS - 1, prefill_rate=prefill_rate, decode_step=step, running=16, pool=100_000)
    found = {policy: real(small, model_folder, tmp_path / policy, policy, turns) for policy in POLICIES}
    again = {policy: replayed(scene, policy, turns) for policy in POLICIES}
    shown = f"{prefill_rate:.0f} tokens a second, steps of {step:.4f} s; real {found}, replayed {again}"
    for policy in POLICIES:
        assert sum(again[policy]) == pytest.approx(sum(found[policy]), abs=0.02), shown
        if policy != "cost":  # which goes by the times that it measures, and those of real engines vary
            assert again[policy].own == pytest.approx(found[policy].own, abs=0.02), shown
    for hits in (found, again):
        assert hits["round_robin"].own + 0.1 < min(hits["cache_aware"].own, hits["cost"].own), shown
