"""Engines and a pool of numbers do as vLLM and Mooncake do."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.blocks import Prefix
from connector.landmarks import of_prefix
from connector.simulated.timing import Speed
from gateway.miniature import Engine, Leg, Pool, Timeline

SPEED = Speed(
    prefill_tokens_per_second=100.0,
    decode_step_seconds=0.5,
    decode_seconds_per_request=0.0,
    load_bytes_per_second=1000.0,
    load_latency_seconds=0.25,
    kv_bytes_per_token=1,
)
SIZE = 100


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{place:07}".encode() for place in range(length))


class Stage:
    """One timeline, and what happened on it."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.time = Timeline()
        self.pool = pool
        self.happened: list[tuple[str, str, float]] = []

    def engine(self, blocks: int = 20, name: str = "one") -> Engine:
        return Engine(name, "both", self.time, self.pool, blocks=blocks, speed=SPEED, put_delay=1.0)

    def leg(self, name: str, tokens: int, output: int = 1) -> Leg:
        blocks = chain(name[0], 50)
        prefix = Prefix(tokens, SIZE, blocks[: tokens // SIZE])
        return Leg(
            prefix,
            of_prefix(prefix),
            answer=blocks[len(prefix.hashes) :],
            output=output,
            backlog=tokens,
            begun=partial(self._note, "begun", name),
            ended=partial(self._note, "ended", name),
        )

    def play(self) -> None:
        while self.time.next():
            pass

    def _note(self, what: str, name: str, _: Leg) -> None:
        self.happened.append((what, name, round(self.time.now, 6)))


def test_a_request_is_prefilled_and_decoded() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.submit(stage.leg("a", 250, output=4))
    assert (engine.requests, engine.backlog) == (1, 250)
    stage.play()
    assert stage.happened == [("begun", "a", 3.0), ("ended", "a", 4.5)]
    assert (engine.requests, engine.backlog) == (0, 0)
    assert (engine.tally.prefill_tokens, engine.tally.prefill_seconds, engine.tally.busy_seconds) == (250, 2.5, 4.5)


def test_who_comes_while_others_decode_waits_for_the_step_and_no_more() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.submit(stage.leg("a", 50, output=20))
    stage.time.at(2.2, engine.submit, stage.leg("b", 50))
    stage.play()
    assert stage.happened == [("begun", "a", 1.0), ("begun", "b", 3.5), ("ended", "b", 3.5), ("ended", "a", 11.0)]


def test_what_is_held_is_not_computed_again_and_answers_are_held_too() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.submit(stage.leg("a", 250, output=60))
    stage.play()
    again = stage.leg("a", 420)
    prefix = again.prefix
    assert engine.candidate(prefix, of_prefix(prefix)).own_tokens == 300  # 309 tokens were computed
    engine.submit(again)
    stage.play()
    assert (again.own, again.loaded, engine.tally.prefill_tokens) == (300, 0, 250 + 120)


def test_at_least_one_token_is_computed() -> None:
    stage = Stage()
    engine = stage.engine()
    for _ in range(2):
        engine.submit(leg := stage.leg("a", 300))
        stage.play()
    assert leg.own == 200


def test_what_finds_no_blocks_waits_for_them() -> None:
    stage = Stage()
    engine = stage.engine(blocks=6)
    engine.submit(stage.leg("a", 350, output=10))
    engine.submit(stage.leg("b", 250, output=10))
    engine.submit(stage.leg("c", 50, output=1))
    engine.poll()
    stage.time.at(5.0, engine.poll)
    stage.play()
    ends = {(what, name): at for what, name, at in stage.happened}
    assert ends["begun", "b"] > ends["ended", "a"]
    assert ends["begun", "c"] >= ends["begun", "b"]  # nobody passes
    prefix = Prefix(50, SIZE, ())
    candidate = engine.candidate(prefix, of_prefix(prefix))
    assert (candidate.waiting, candidate.running) == (2.0, 1.0)
    assert candidate.cache_usage == pytest.approx(4 / 6)
    assert engine.tally.evicted > 0


def test_blocks_beyond_its_own_come_from_the_pool() -> None:
    stage = Stage(Pool(100, lease=5.0))
    one, other = stage.engine(), stage.engine(name="other")
    first = stage.leg("a", 500)
    one.submit(first)
    stage.play()
    one.put(first, first.prefix.hashes)
    one.put(first, first.prefix.hashes)
    other.submit(stage.leg("a", 250))
    stage.play()
    other.submit(leg := stage.leg("a", 600))
    began = stage.time.now
    stage.play()
    assert (leg.own, leg.loaded) == (200, 300)
    assert (other.tally.load_tokens, other.tally.load_seconds) == (300, 0.25 + 0.3)
    assert round(leg.first - began, 6) == 0.25 + 0.3 + 0.5 + 1.0


def test_a_put_is_there_after_its_delay_and_its_way() -> None:
    stage = Stage(Pool(100, lease=5.0))
    engine = stage.engine()
    leg = stage.leg("a", 500)
    there: list[float] = []
    engine.put(leg, leg.prefix.hashes, lambda: there.append(stage.time.now))
    stage.play()
    engine.put(leg, leg.prefix.hashes, lambda: there.append(stage.time.now))
    stage.play()
    assert there == [1.0 + 0.25 + 0.5, 1.75 + 1.0]


def test_an_engine_can_get_slower_in_the_middle() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.submit(stage.leg("a", 50, output=11))
    stage.time.at(3.1, engine.slow, 0.5)
    stage.play()
    assert stage.happened[-1] == ("ended", "a", 1.0 + 5 * 0.5 + 5 * 1.0)


def test_the_pool_evicts_the_oldest_deadline_and_nobody_with_a_lease() -> None:
    pool = Pool(4, lease=5.0)
    pool.put([b"a", b"b"], now=0.0)
    pool.put([b"c", b"d"], now=1.0)
    pool.touch([b"a", b"unknown"], now=1.5)
    assert pool.run([b"a", b"b", b"x", b"c"]) == 2
    pool.put([b"e"], now=2.0)
    assert b"b" not in pool
    pool.put([b"f", b"g", b"h"], now=2.0)
    assert b"a" in pool
    assert (len(pool), pool.evicted, pool.refused) == (4, 4, 0)
    pool.touch([b"f", b"g", b"h"], now=2.0)
    pool.put([b"i"], now=3.0)
    assert (b"i" in pool, pool.refused) == (False, 1)
    pool.put([b"i"], now=6.5)
    assert b"a" not in pool


def test_a_share_of_the_pool_is_lost() -> None:
    pool = Pool(1000, lease=5.0)
    pool.put(chain("a", 1000), now=0.0)
    pool.lose(0.25, random.Random(1))
    assert 200 < pool.lost < 300
    assert len(pool) == 1000 - pool.lost


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 900), st.integers(1, 99)), max_size=20), st.randoms())
def test_who_holds_a_block_holds_those_before_it(asks: list[tuple[str, int, int]], chance: random.Random) -> None:
    stage = Stage()
    engine = stage.engine(blocks=12)
    for name, tokens, output in asks:
        stage.time.at(chance.uniform(0, 30), engine.submit, stage.leg(name, tokens, output))
    while stage.time.next():
        for name in "abcd":
            blocks = chain(name, 12)
            assert engine.run(blocks) == engine.cache.run(blocks) == sum(block in engine.cache for block in blocks)
    assert engine.requests == engine.backlog == 0
    assert engine.cache.free == 12
