"""What the gateway believes of engines and pool is what they count: turn by turn, through restarts and losses."""

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.demo import ANSWER_TOKENS, SYSTEM, TURNS, WORK

from .ask import CHAT, Answered, chat, eventually, metric, post, words
from .conftest import KEYS, SECRET, tenants
from .stack import Engine, Gateway, Master, start_engine, start_gateway, start_master
from .watch import Watch

BLOCK = 32
CLIENT_TTL = 10
CONVERSATIONS = 2


@dataclass
class Place:
    """Two engines that tell their KV events, and a pool that misses a lost engine after `CLIENT_TTL` seconds."""

    model: Path
    folder: Path
    master: Master
    engines: list[Engine]
    stop: ExitStack = field(repr=False)

    @staticmethod
    def setting(engine: Engine) -> dict[str, object]:
        """What a configuration says of an engine."""
        return {"url": engine.url, "model": "tiny", "kv_events": {"connect": engine.events, "replay": engine.replay}}

    def config(self, policy: str) -> dict[str, object]:
        return {
            "secret": SECRET,
            "pools": {"main": {"admin": [self.master.admin], "deadline_ms": 1000}},
            "models": [{"name": "tiny", "tokenizer": str(self.model), "pool": "main"}],
            "engines": {"static": [self.setting(engine) for engine in self.engines], "poll_seconds": 0.5},
            "policy": {"use": policy},
            "tenants": tenants(),
            "telemetry": {"expose_routing": True},
            "self_check": {"audit_every": 0, "calibrate": False},
        }

    def gateway(self, policy: str) -> Gateway:
        """A gateway over them, until the test module ends."""
        return self.stop.enter_context(start_gateway(self.config(policy), self.folder / uuid.uuid4().hex))

    def engine_of(self, answer: Answered) -> Engine:
        return next(engine for engine in self.engines if answer.route["engine"].endswith(f":{engine.port}"))

    def restart(self, engine: Engine) -> Engine:
        """End an engine and start another in its place."""
        engine.stop()
        new = self.stop.enter_context(
            start_engine(
                self.model, f"{engine.name}-again", self.master, folder=self.folder, events=True, instead_of=engine
            )
        )
        self.engines[self.engines.index(engine)] = new
        return new.ready()

    def quiet(self) -> None:
        """Wait until what was computed is in the pool."""
        counts = [-1]

        def unchanged() -> bool:
            counts.append(len(self.master.keys()))
            return len(counts) > 6 and len(set(counts[-6:])) == 1

        eventually(unchanged, "the pool is quiet")


@pytest.fixture(scope="module")
def place(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("knowledge")
    with ExitStack() as stop:
        master = stop.enter_context(start_master(folder, extra_args=[f"--client_ttl={CLIENT_TTL}"]))
        engines = [
            stop.enter_context(start_engine(model_folder, f"knows-{n}", master, folder=folder, events=True))
            for n in (1, 2)
        ]
        for engine in engines:
            engine.ready()
        yield Place(model_folder, folder, master, engines, stop)


@pytest.fixture(scope="module")
def watch(place: Place) -> Iterator[Watch]:
    with Watch(place.engines) as watch:
        yield watch


def sources(engine: Engine) -> tuple[int, int]:
    """Tokens that the engine took from its own cache, and from the pool, since its start."""
    own, pool = (
        engine.count("prompt_tokens_by_source_total", source=source)
        for source in ("local_cache_hit", "external_kv_transfer")
    )
    return int(own), int(pool)


def turn(place: Place, gateway: Gateway, messages: list[dict[str, Any]], key: str) -> tuple[Answered, tuple[int, int]]:
    """Send a turn, and what the engine that took it says that it had."""
    before = {engine.name: sources(engine) for engine in place.engines}
    body = chat("", messages=messages, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    answer = post(gateway.url, CHAT, body, key)
    assert answer.status == 200, answer.data
    engine = place.engine_of(answer)
    was, now = before[engine.name], sources(engine)
    return answer, (now[0] - was[0], now[1] - was[1])


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_what_is_predicted_is_what_engines_count(place: Place, policy: str) -> None:
    gateway = place.gateway(policy)
    told: list[tuple[int, int, int, int]] = []
    for number in range(CONVERSATIONS):
        key = KEYS["team-a" if number % 2 else "team-b"]
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{uuid.uuid4()} {SYSTEM}"}]
        for step in range(TURNS):
            messages.append({"role": "user", "content": f"step {step}. {WORK}"})
            answer, (own, pool) = turn(place, gateway, messages, key)
            told.append((answer.own, own, answer.pool, pool))
            messages.append({"role": "assistant", "content": answer.text})
            place.quiet()
    right = [abs(a - b) <= BLOCK and abs(c - d) <= BLOCK for a, b, c, d in told]
    assert sum(right) >= 0.95 * len(right), told
    assert sum(own + pool for _, own, _, pool in told) > 0
    if policy == "round_robin":
        assert sum(pool for *_, pool in told) > 0, "a turn on the other engine loads from the pool"


@pytest.mark.usefixtures("watch")
def test_what_a_restarted_engine_held_is_forgotten(place: Place) -> None:
    gateway = place.gateway("cache_aware")
    body = chat(words(900))
    first = post(gateway.url, CHAT, body, KEYS["team-a"])
    place.quiet()
    assert post(gateway.url, CHAT, body, KEYS["team-a"]).own > 0
    again = place.restart(place.engine_of(first))
    name = f"127.0.0.1:{again.port}"
    eventually(lambda: metric(gateway.url, "moongate_engine_up", engine=name) == 1, "it is in again")
    assert metric(gateway.url, "moongate_engine_held_blocks", engine=name) == 0
    for _ in range(6):
        answer = post(gateway.url, CHAT, chat(words(300)), KEYS["team-a"])
        assert answer.own == answer.cached == 0
    after, (own, pool) = turn(place, gateway, body["messages"], KEYS["team-a"])
    assert abs(after.own - own) <= BLOCK
    assert abs(after.pool - pool) <= BLOCK
    eventually(lambda: metric(gateway.url, "moongate_engine_held_blocks", engine=name) > 0, "it holds new blocks")


def test_a_killed_engines_part_of_the_pool_is_missed_in_time(place: Place) -> None:
    gateway = place.gateway("cache_aware")
    segments = metric(gateway.url, "moongate_pool_segments", pool="main")
    assert segments == len(place.engines) == 2
    body = chat(words(900))
    assert post(gateway.url, CHAT, body, KEYS["team-a"]).status == 200
    place.quiet()
    place.engines.pop().kill()
    looks = [time.monotonic()]

    def missed() -> bool:
        fewer = metric(gateway.url, "moongate_pool_segments", pool="main") < segments
        looks.append(time.monotonic())
        return fewer

    eventually(missed, "the segment is missed")
    pause = max(after - before for before, after in pairwise(looks))
    assert looks[-1] - looks[0] <= CLIENT_TTL + 1 + pause, f"{looks[-1] - looks[0]:.2f} s; a look took {pause:.2f} s"
    answer, (own, pool) = turn(place, gateway, body["messages"], KEYS["team-a"])
    assert abs(answer.own - own) <= BLOCK
    assert abs(answer.pool - pool) <= BLOCK


@pytest.mark.long
def test_each_data_parallel_rank_is_a_place_of_its_own(place: Place) -> None:
    ranks = ("--data-parallel-size", "2")
    with start_engine(
        place.model, "ranks", place.master, folder=place.folder, events=True, extra_args=ranks
    ).ready() as engine:
        config: dict[str, object] = place.config("round_robin") | {
            "engines": {"static": [{**Place.setting(engine), "data_parallel": 2}], "poll_seconds": 0.5}
        }
        with start_gateway(config, place.folder / "ranks-gateway") as gateway:
            body = chat(words(600))
            seen = []
            for _ in range(4):
                before = sources(engine)
                answer = post(gateway.url, CHAT, body, KEYS["team-a"])
                after = sources(engine)
                assert abs(answer.own - (after[0] - before[0])) <= BLOCK
                assert abs(answer.pool - (after[1] - before[1])) <= BLOCK
                seen.append((answer.route["engine"].rpartition("#")[2], answer.own > 0, answer.pool > 0))
                place.quiet()
    assert seen == [("0", False, False), ("1", False, True), ("0", True, False), ("1", True, False)]
