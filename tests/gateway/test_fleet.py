import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import zmq

from connector.blocks import Adapter, Prefix
from connector.calibrate import Finding
from connector.held import DEFAULT_BLOCKS
from connector.landmarks import GRACE, Landmarks
from connector.vllm import CacheFacts
from connector.wire import Timeouts
from gateway.breaker import FAILURES, FIRST_SECONDS
from gateway.fleet import NOTHING, STALE_AFTER, EngineSpec, EventSource, Fleet
from gateway.processes import free_port
from tests.double import Engine
from tests.gateway.house import eventually

LORA = {"id": "lora-a", "object": "model", "root": "/adapters/a", "parent": "tiny"}


def prefix(*names: int, tokens: int | None = None, size: int = 4) -> Prefix:
    """A prompt of these blocks and one token more."""
    hashes = tuple(b"%d" % name for name in names)
    return Prefix(tokens=len(names) * size + 1 if tokens is None else tokens, block_size=size, hashes=hashes)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def fleet_of(*specs: EngineSpec, clock: Clock | None = None, poll: float = 60) -> AsyncIterator[Fleet]:
    fleet = Fleet(specs, timeouts=Timeouts(connect=1, head=1, idle=1), poll=poll, clock=clock or Clock())
    try:
        await fleet.open()
        yield fleet
    finally:
        await fleet.close()


def spec(engine: Engine, model: str = "tiny") -> EngineSpec:
    return EngineSpec(engine.url, model)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        yield engine


async def test_events_say_what_an_engine_holds(engine: Engine) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.connect(address)
        async with fleet_of(EngineSpec(engine.url, "tiny", events=EventSource(address, bind=True))) as fleet:
            (one,) = fleet.engines
            fleet.lease(one.id, 0, prefix(1, 2)).prefilled(computed=True)
            assert len(one.held) == 0, "what is told by events is not guessed as well"
            stored = {"type": "BlockStored", "block_hashes": list(prefix(1, 2).hashes), "medium": "GPU"}
            sequence = itertools.count()

            def told() -> bool:
                """A subscriber hears nothing from before it was there, so say it until it is heard."""
                batch = msgspec.msgpack.encode([0.0, [stored], None])
                publisher.send_multipart([b"", next(sequence).to_bytes(8, "big"), batch])
                return len(one.held) == 2

            await eventually(told)
            assert fleet.candidates("tiny", None, prefix(1, 2))[0].own_tokens == 8


# Leases


async def test_a_lease_counts_until_it_ends(engine: Engine) -> None:
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        first, second = fleet.lease(one.id, 100, None), fleet.lease(one.id, 50, None)
        assert (one.requests, one.backlog) == (2, 150)
        for _ in range(2):
            first.prefilled(computed=True)
            assert (one.requests, one.backlog) == (2, 50), "the second time changes nothing"
        for _ in range(2):
            first.release()
            assert (one.requests, one.backlog) == (1, 50)
        second.release()
        assert (one.requests, one.backlog) == (0, 0)


async def test_what_was_computed_is_held(engine: Engine) -> None:
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        lease = fleet.lease(one.id, 0, prefix(1, 2))
        assert fleet.candidates("tiny", None, prefix(1, 2))[0].own_tokens == 0
        lease.prefilled(computed=True)
        assert fleet.candidates("tiny", None, prefix(1, 2))[0].own_tokens == 8


@pytest.mark.parametrize("how", ["refused", "lost", "never"])
async def test_what_was_not_computed_is_not(engine: Engine, how: str) -> None:
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        lease = fleet.lease(one.id, 0, prefix(1, 2))
        if how == "refused":
            lease.prefilled(computed=False)
        if how == "lost":
            one.lost("gone")
            lease.prefilled(computed=True)
        lease.release()
        assert len(one.held) == 0


async def test_candidates_say_what_is_under_way(engine: Engine) -> None:
    engine.waiting = 3
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        fleet.lease(one.id, 70, None)
        (candidate,) = fleet.candidates("tiny", None, None)
    assert (candidate.requests, candidate.tokens, candidate.waiting, candidate.own_tokens) == (1, 70, 3, 0)
    assert (candidate.id, candidate.role) == (f"127.0.0.1:{engine.port}", "both")


async def test_an_engine_whose_circuit_is_open_is_no_candidate(engine: Engine) -> None:
    clock = Clock()
    async with fleet_of(spec(engine), clock=clock) as fleet:
        (one,) = fleet.engines
        for _ in range(FAILURES):
            fleet.lease(one.id, 0, None)
            one.breaker.failed()
        assert fleet.candidates("tiny", None, None) == []
        assert one.alive, "its health is another matter"
        clock.now += FIRST_SECONDS
        assert len(fleet.candidates("tiny", None, None)) == 1
        fleet.lease(one.id, 0, None)
        assert fleet.candidates("tiny", None, None) == [], "one request tries it"
        one.breaker.answered()
        assert len(fleet.candidates("tiny", None, None)) == 1


async def test_an_engine_that_was_away_may_be_another(engine: Engine) -> None:
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        one.fingerprint.learn("vllm-0.32.0-tp1")
        one.lost("gone")
        assert not one.fingerprint.known


async def test_an_old_word_on_the_load_is_none(engine: Engine) -> None:
    clock = Clock()
    async with fleet_of(spec(engine), clock=clock, poll=60) as fleet:
        clock.now += STALE_AFTER * 60
        assert fleet.candidates("tiny", None, None)[0].waiting == 0
        clock.now += 1
        assert fleet.candidates("tiny", None, None)[0].waiting is None


async def test_signals_carry_their_age(engine: Engine) -> None:
    clock = Clock()
    engine.waiting = 3
    async with fleet_of(spec(engine), clock=clock, poll=60) as fleet:
        clock.now += 20
        (one,) = fleet.candidates("tiny", None)
        assert (one.waiting, one.running, one.cache_usage, one.signal_age) == (3, 0, 0, 20)
        fleet.lease(one.id, 70)
        clock.now += STALE_AFTER * 60
        (one,) = fleet.candidates("tiny", None)
    assert (one.waiting, one.running, one.cache_usage, one.signal_age) == (None, None, None, STALE_AFTER * 60 + 20)
    assert (one.requests, one.tokens) == (1, 70), "what we count ourselves stands"


async def test_an_engine_without_signals_has_no_age(engine: Engine) -> None:
    engine.metrics = b"# nothing\n"
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.candidates("tiny", None)
    assert (one.waiting, one.running, one.cache_usage, one.signal_age) == (None, None, None, None)


async def test_who_comes_later_is_a_newcomer(engine: Engine) -> None:
    clock = Clock()
    async with fleet_of(spec(engine), clock=clock) as fleet:
        assert fleet.candidates("tiny", None)[0].since is None, "it was there from the start"
        fleet.suspect(fleet.engines[0].id, "no connection")
        await fleet._ask(fleet.engines[0], cards=True)
        clock.now += 5
        assert fleet.candidates("tiny", None)[0].since == 5


async def test_who_begins_anew_between_two_polls_is_a_newcomer_and_holds_nothing(engine: Engine) -> None:
    clock, said = Clock(), engine._metrics()
    engine.metrics = said + b"process_start_time_seconds 1000.0\n"
    async with fleet_of(spec(engine), clock=clock) as fleet:
        one = fleet.engines[0]
        fleet.lease(one.id, 8, prefix(1, 2)).prefilled(computed=True)
        for began, since, own in ((b"1000.0", None, 8), (b"1060.5", 0, 0), (b"1060.5", 5, 0)):
            engine.metrics = said + b"process_start_time_seconds %b\n" % began
            await fleet._ask(one, cards=False)
            (candidate,) = fleet.candidates("tiny", None, prefix(1, 2))
            assert (candidate.since, candidate.own_tokens) == (since, own)
            clock.now += 5 if since == 0 else 0


# Ranks


async def test_every_data_parallel_rank_is_an_engine(engine: Engine) -> None:
    engine.metrics = (
        b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
        b'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} 4\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.2\n'
    )
    ranks = [EngineSpec(engine.url, "tiny", rank=rank) for rank in (0, 1)]
    async with fleet_of(*ranks) as fleet:
        zero, one = fleet.candidates("tiny", None)
        assert (zero.id, one.id) == (f"127.0.0.1:{engine.port}#0", f"127.0.0.1:{engine.port}#1")
        assert (zero.running, zero.waiting, zero.cache_usage) == (1, 3, 0.1)
        assert (one.running, one.waiting, one.cache_usage) == (2, 4, 0.2)
        fleet.lease(one.id, 10, prefix(1, 2)).prefilled(computed=True)
        assert [c.own_tokens for c in fleet.candidates("tiny", None, prefix(1, 2))] == [0, 8]
        assert (b"x-data-parallel-rank", b"1") in fleet.engine(one.id).headers


# What is likely there


def marks(*keys: bytes) -> Landmarks:
    return Landmarks(keys, 512)


async def test_what_is_under_way_is_likely_there(engine: Engine) -> None:
    clock = Clock()
    async with fleet_of(spec(engine), clock=clock) as fleet:
        (one,) = fleet.engines
        lease = fleet.lease(one.id, 1024, prefix(1, 2), marks(b"a", b"b"))
        assert fleet.candidates("tiny", None, prefix(1, 3), marks(b"a", b"c"))[0].likely_tokens == 512
        lease.prefilled(computed=True)
        clock.now += 100
        assert fleet.candidates("tiny", None, prefix(1, 3), marks(b"a", b"c"))[0].likely_tokens == 512
        lease.release()
        assert fleet.candidates("tiny", None, prefix(1, 3), marks(b"a", b"c"))[0].likely_tokens == 512, (
            "until it is told"
        )
        clock.now += GRACE + 0.1
        assert fleet.candidates("tiny", None, prefix(1, 3), marks(b"a", b"c"))[0].likely_tokens == 0
        failed = fleet.lease(one.id, 1024, prefix(1, 2), marks(b"a", b"b"))
        failed.release()
        assert fleet.candidates("tiny", None, prefix(1, 3), marks(b"a", b"c"))[0].likely_tokens == 0


async def test_what_was_sent_is_likely_there_where_nothing_tells(engine: Engine) -> None:
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        lease = fleet.lease(one.id, 0, None, marks(b"a", b"b"))
        lease.prefilled(computed=True)
        lease.release()
        assert fleet.candidates("tiny", None, None, marks(b"a", b"b", b"c"))[0].likely_tokens == 1024
        one.lost("gone")
        one.trouble = None
        assert fleet.candidates("tiny", None, None, marks(b"a", b"b", b"c"))[0].likely_tokens == 0


async def test_so_it_is_on_an_engine_that_hashes_otherwise(engine: Engine) -> None:
    async with fleet_of(spec(engine)) as fleet:
        (one,) = fleet.engines
        fleet.lease(one.id, 0, prefix(1), marks(b"a")).prefilled(computed=True)
        one.found(Finding("algorithm", "it hashes otherwise"), 0.0)
        assert fleet.candidates("tiny", None, prefix(1), marks(b"a"))[0].likely_tokens == 512


# Health


async def test_engines_say_how_they_hash(engine: Engine) -> None:
    async with fleet_of(spec(engine)) as fleet:
        assert fleet.facts("tiny") == CacheFacts(32, "sha256_cbor", None)
        assert fleet.engines[0].held.capacity == 8192
        assert fleet.root("tiny") == "/models/tiny"
        assert fleet.facts("other") == NOTHING
        assert fleet.root("other") is None


async def test_an_engine_that_says_little_is_in(engine: Engine) -> None:
    engine.metrics = b"# nothing\n"
    async with fleet_of(spec(engine)) as fleet:
        assert fleet.engines[0].alive
        assert fleet.engines[0].held.capacity == DEFAULT_BLOCKS
        assert fleet.candidates("tiny", None, None)[0].waiting is None
        assert fleet.facts("tiny") == NOTHING


@pytest.mark.parametrize(
    ("fault", "trouble"),
    [
        ("health", "its /health is not 200"),
        ("model", "it does not serve tiny; set its --served-model-name, or the model's name"),
        ("cards", "its /v1/models"),
        ("metrics", "its /metrics"),
        ("refused", "no connection"),
    ],
)
async def test_why_an_engine_is_out(engine: Engine, fault: str, trouble: str) -> None:
    match fault:
        case "health":
            engine.health = 503
        case "model":
            engine.cards[0]["id"] = "other"
        case "cards":
            engine.cards = [{}]
        case "metrics":
            engine.metrics = b'vllm:num_requests_running{engine="0" x\n'
        case "refused":
            await engine.stop()
    async with fleet_of(spec(engine)) as fleet:
        assert (fleet.engines[0].trouble or "").startswith(trouble)
        assert fleet.candidates("tiny", None, None) == []
        assert fleet.facts("tiny") == NOTHING


@pytest.mark.parametrize(
    "said",
    [
        b"vllm:num_requests_running", b"vllm:num_requests_running{", b"vllm:num_requests_running{} x",
        b"vllm:num_requests_running{a=b} 1", b"vllm:kv_cache_usage_perc\xff 1", b"\x00\xff" * 50,
        b'vllm:cache_config_info{block_size="x",num_gpu_blocks="-1"} 1', b"vllm:kv_cache_usage_perc{}} 1 2 3 4",
        b'vllm:cache_config_info{block_size="32', b"vllm:kv_cache_usage_perc NaN", b"vllm:cache_config_info # {} 1",
    ],
)  # fmt: skip
async def test_no_metrics_stop_the_watching(engine: Engine, said: bytes) -> None:
    engine.metrics = said + b"\n"
    async with fleet_of(spec(engine), poll=0.01) as fleet:
        engine.metrics = None
        await becomes(fleet, alive=True, trouble=None)


async def becomes(fleet: Fleet, *, alive: bool, trouble: str | None) -> None:
    one = fleet.engines[0]
    await eventually(lambda: one.alive is alive and one.trouble == trouble)


async def test_an_engine_goes_and_comes_back_empty(engine: Engine) -> None:
    async with fleet_of(spec(engine), poll=0.01) as fleet:
        (one,) = fleet.engines
        one.held.computed(prefix(1, 2))
        await engine.stop()
        await becomes(fleet, alive=False, trouble="no connection")
        assert len(one.held) == 0
        assert fleet.facts("tiny") == NOTHING
        await engine.start()
        await becomes(fleet, alive=True, trouble=None)
        assert fleet.facts("tiny") != NOTHING


async def test_an_engine_that_begins_as_another_model_is_seen_when_it_changes(engine: Engine) -> None:
    engine.cards[0]["id"] = "other"
    async with fleet_of(spec(engine), poll=0.01) as fleet:
        assert not fleet.engines[0].alive
        engine.cards[0]["id"] = "tiny"
        await becomes(fleet, alive=True, trouble=None)


async def test_one_poll_that_fails_takes_nobody_out_and_two_do(engine: Engine) -> None:
    async with fleet_of(spec(engine), poll=0.01) as fleet:
        (one,) = fleet.engines
        one.held.computed(prefix(1))
        one.missed("idle timeout")
        assert one.alive
        assert len(one.held) == 1
        one.missed("idle timeout")
        assert (one.alive, one.trouble, len(one.held)) == (False, "idle timeout", 0)
        await becomes(fleet, alive=True, trouble=None)
        one.missed("idle timeout")
        assert one.alive, "it counts anew once the engine was well"


async def test_a_suspect_gets_no_work_until_it_is_found_well(engine: Engine) -> None:
    async with fleet_of(spec(engine), poll=0.02) as fleet:
        (one,) = fleet.engines
        one.held.computed(prefix(1))
        fleet.suspect(one.id, "refused")
        assert fleet.candidates("tiny", None, None) == []
        assert fleet.facts("tiny") == NOTHING
        assert len(one.held) == 0
        await becomes(fleet, alive=True, trouble=None)


async def test_a_sick_engine_hurts_no_other(engine: Engine) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Engine())
        other.health = 500
        fleet = await stack.enter_async_context(fleet_of(spec(engine), spec(other)))
        assert [c.id for c in fleet.candidates("tiny", None, None)] == [f"127.0.0.1:{engine.port}"]
        assert fleet.facts("tiny") == CacheFacts(32, "sha256_cbor", None)


async def test_most_engines_decide_what_is_believed(engine: Engine) -> None:
    async with AsyncExitStack() as stack:
        odd = await stack.enter_async_context(Engine())
        third = await stack.enter_async_context(Engine())
        odd.facts["block_size"] = "16"
        fleet = await stack.enter_async_context(fleet_of(spec(odd), spec(engine), spec(third)))
        assert fleet.facts("tiny").block_size == 32


async def test_adapters_are_what_engines_list(engine: Engine) -> None:
    engine.cards.append(LORA)
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Engine())
        fleet = await stack.enter_async_context(fleet_of(spec(engine), spec(other)))
        assert fleet.adapter("lora-a") == ("tiny", Adapter("lora-a", "/adapters/a"))
        assert fleet.adapter("lora-b") is None
        assert fleet.adapter("tiny") is None
        found = fleet.candidates("tiny", Adapter("lora-a", "/adapters/a"), None)
        assert [c.id for c in found] == [f"127.0.0.1:{engine.port}"]
        assert len(fleet.candidates("tiny", None, None)) == 2


async def test_models_are_apart(engine: Engine) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Engine("big"))
        fleet = await stack.enter_async_context(fleet_of(spec(engine), spec(other, "big")))
        assert [c.id for c in fleet.candidates("big", None, None)] == [f"127.0.0.1:{other.port}"]
        assert fleet.root("big") == "/models/big"


async def test_an_engine_gets_its_own_key_on_every_call(engine: Engine) -> None:
    async with fleet_of(EngineSpec(engine.url, "tiny", api_key="k")):
        assert {call.path for call in engine.calls} == {"/health", "/v1/models", "/version", "/metrics"}
        assert all(call.headers("authorization") == ["Bearer k"] for call in engine.calls)


async def test_closing_leaves_nothing(engine: Engine) -> None:
    before = asyncio.all_tasks()
    async with fleet_of(spec(engine), poll=0.01):
        pass
    assert asyncio.all_tasks() - before == {task for task in asyncio.all_tasks() if "_play" in repr(task)}
