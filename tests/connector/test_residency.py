"""The leading run of a prompt, found with few keys in doubles of a master and in real ones."""

import asyncio
import itertools
import os
import random
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import orjson
import pytest

from connector.blocks import Prefix
from connector.keys import KeyScheme, Ranks
from connector.mooncake import CHUNK_KEYS, Master
from connector.probe import FIRST_KEYS, MAX_KEYS, MORE_SAMPLES, SAMPLES, WHOLE_KEYS
from connector.residency import OVER, PAUSES, VERIFIED_SECONDS, Residence, Residency
from connector.seen import STRIDE, Chain, Mark, Seen
from tests.connector.masters import EMPTY, IN_MEMORY, ON_DISK, asked, holding, keys_of, master_with, standby
from tests.connector.objects import Objects, missing
from tests.connector.peer import Line, Peer, Script, answers, free_port, hold, listen, ok, once, until
from tests.real.stack import Master as RealMaster
from tests.real.stack import start_master

ONE_RANK = KeyScheme.of("Qwen3-8B")
TWO_RANKS = KeyScheme.of("Qwen3-8B", Ranks(tp=2))
PLENTY = 5.0
BLOCK_SIZE = 32
LONG = 8000
"""Blocks of 128,000 tokens, at 16 in a block."""
SAMPLED = SAMPLES + FIRST_KEYS


def prefix(blocks: int) -> Prefix:
    """A prompt of `blocks` reusable blocks, each with a hash of its own; a longer one begins with a shorter one's."""
    return Prefix(blocks * BLOCK_SIZE + 1, BLOCK_SIZE, tuple(number.to_bytes(32) for number in range(blocks)))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pool:
    """A master that holds a set of keys, and a `Residence` that asks it."""

    def __init__(self, peer: Peer, held: set[str], deadline: float, scan_every: int) -> None:
        self.clock = Clock()
        self.held = held
        self.peer = peer
        self.residence = Residence(
            Master([peer.url], self.clock), deadline, clock=self.clock, chance=random.Random(1), scan_every=scan_every
        )

    async def look_up(self, blocks: int, scheme: KeyScheme = ONE_RANK) -> Residency:
        return await self.residence.look_up(prefix(blocks), scheme)

    def later(self) -> None:
        """Let what was verified grow old."""
        self.clock.now += VERIFIED_SECONDS + 1


@asynccontextmanager
async def pool(
    held: Iterable[str] = (), *scripts: Script, deadline: float = PLENTY, scan_every: int = 10**9
) -> AsyncIterator[Pool]:
    keys = set(held)

    async def script(line: Line) -> None:
        while True:
            wanted = asked((await line.request()).target)
            data = {key: IN_MEMORY if key in keys else EMPTY for key in wanted}
            await line.send(ok(orjson.dumps({"success": True, "data": data})))

    async with listen(*(scripts or (script,))) as peer:
        pool = Pool(peer, keys, deadline, scan_every)
        try:
            yield pool
        finally:
            await pool.residence.close()


def lose(held: set[str], blocks: Collection[int], scheme: KeyScheme = ONE_RANK) -> None:
    held -= keys_of(scheme, blocks)


# what was never looked up


@pytest.mark.parametrize("held", [0, 1, 15, 16, 17, 111, 112, 239, 240, 241, 299, 300])
async def test_the_run_is_the_blocks_before_the_first_gap(held: int) -> None:
    stored = keys_of(ONE_RANK, itertools.chain(range(held), range(held + 1, WHOLE_KEYS)))
    if held > WHOLE_KEYS:
        stored = keys_of(ONE_RANK, range(held))
    async with pool(stored) as there:
        assert (await there.look_up(300)).run == held
        assert len(there.peer.lines) == 1


async def test_chunks_grow_and_nothing_is_asked_behind_the_one_with_the_gap() -> None:
    async with pool(keys_of(ONE_RANK, range(60))) as there:
        assert await there.look_up(300) == Residency(60, 16 + 32 + 64)
        order = [key for request in there.peer.requests for key in asked(request.target)]
        assert order == [ONE_RANK.keys(number.to_bytes(32))[0] for number in range(112)]
        assert len(there.peer.requests) == 3


async def test_a_prompt_without_a_reusable_block_asks_nothing() -> None:
    async with pool() as there:
        whole = Prefix(BLOCK_SIZE, BLOCK_SIZE, (bytes(32),))
        assert await there.residence.look_up(whole, ONE_RANK) == Residency(0, 0)
        assert there.peer.lines == []


async def test_the_last_full_block_of_a_full_prompt_is_not_asked_for() -> None:
    async with pool(keys_of(ONE_RANK, range(3))) as there:
        full = Prefix(3 * BLOCK_SIZE, BLOCK_SIZE, prefix(3).hashes)
        assert await there.residence.look_up(full, ONE_RANK) == Residency(2, 2)


@pytest.mark.parametrize("missing", range(8))
async def test_a_block_needs_the_object_of_every_rank_and_group(missing: int) -> None:
    scheme = KeyScheme.of("m", Ranks(tp=2, pp=2, groups=(0, 1)))
    stored = keys_of(scheme, range(8)) - {scheme.keys((5).to_bytes(32))[missing]}
    async with pool(stored) as there:
        assert (await there.look_up(8, scheme)).run == 5


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, CHUNK_KEYS, 2 * CHUNK_KEYS])
async def test_a_long_prompt_takes_few_keys_whatever_its_ranks(ranks: int) -> None:
    scheme = KeyScheme.of("m", Ranks(tp=ranks))

    async def everything(line: Line) -> None:
        while True:
            keys = asked((await line.request()).target)
            assert len(keys) <= CHUNK_KEYS
            await line.send(ok(orjson.dumps({"data": dict.fromkeys(keys, IN_MEMORY)})))

    async with pool((), everything) as there:
        for _ in range(2):
            residency = await there.look_up(LONG, scheme)
            assert residency.run == LONG or ranks > CHUNK_KEYS
            assert residency.asked <= MAX_KEYS
            there.later()


@pytest.mark.parametrize("scheme", [ONE_RANK, TWO_RANKS])
@pytest.mark.parametrize("end", [241, 250, 1000, 4321, 7998, 7999])
async def test_the_end_of_what_is_there_is_found_in_a_long_prompt(end: int, scheme: KeyScheme) -> None:
    async with pool(keys_of(scheme, range(end))) as there:
        residency = await there.look_up(LONG, scheme)
        assert residency.run == end
        assert residency.asked <= MAX_KEYS


# what was looked up before


@pytest.mark.parametrize("blocks", [1, STRIDE - 1, STRIDE, 5000])
async def test_what_was_seen_just_now_is_not_asked_for(blocks: int) -> None:
    async with pool(keys_of(ONE_RANK, range(blocks))) as there:
        assert (await there.look_up(blocks)).run == blocks
        requests = len(there.peer.requests)
        assert await there.look_up(blocks) == Residency(blocks, 0)
        assert len(there.peer.requests) == requests
        there.later()
        await there.look_up(blocks)
        there.later()
        assert 0 < (await there.look_up(blocks)).asked <= SAMPLES


async def test_only_what_follows_is_asked_for_when_a_prompt_has_grown() -> None:
    async with pool(keys_of(ONE_RANK, range(1010))) as there:
        await there.look_up(1000)
        assert await there.look_up(1100) == Residency(1010, FIRST_KEYS)


async def test_prompts_share_what_is_known_of_their_beginning() -> None:
    async with pool(keys_of(ONE_RANK, range(640))) as there:
        await there.look_up(640)
        branch = Prefix(
            1000 * BLOCK_SIZE + 1, BLOCK_SIZE, (*prefix(320).hashes, *(n.to_bytes(32, "little") for n in range(1, 681)))
        )
        assert await there.residence.look_up(branch, ONE_RANK) == Residency(320, FIRST_KEYS)


async def test_a_prefix_is_as_old_as_its_oldest_part() -> None:
    async with pool(keys_of(ONE_RANK, range(64))) as there:
        await there.look_up(32)
        there.clock.now += VERIFIED_SECONDS - 1
        await there.look_up(64)
        there.clock.now += 2
        assert (await there.look_up(64)).asked == 64


@pytest.mark.parametrize("scheme", [ONE_RANK, TWO_RANKS])
async def test_a_turn_takes_samples_and_a_few_keys_behind_them(scheme: KeyScheme) -> None:
    """What the engine computed and stored of the last turn was looked up before, too, though it was not there."""
    async with pool() as there:
        for turn, asked in enumerate((FIRST_KEYS, SAMPLED + MORE_SAMPLES, SAMPLED, SAMPLED, SAMPLED)):
            blocks = 2000 + 128 * turn
            residency = await there.look_up(blocks, scheme)
            assert residency.run == (blocks - 128 if turn else 0)
            assert residency.asked == asked
            there.held |= keys_of(scheme, range(blocks))
            there.later()


@pytest.mark.parametrize("end", [0, 1, 63, 64, 65, 500, 1999, 3998, 3999])
@pytest.mark.parametrize("scheme", [ONE_RANK, TWO_RANKS])
async def test_an_end_that_is_gone_is_found(end: int, scheme: KeyScheme) -> None:
    async with pool(keys_of(scheme, range(4000))) as there:
        assert (await there.look_up(4000, scheme)).run == 4000
        there.later()
        lose(there.held, range(end, 4000), scheme)
        residency = await there.look_up(4000, scheme)
        assert residency.run == end
        assert residency.asked <= 5 * CHUNK_KEYS


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
async def test_blocks_lost_at_random_are_found(share: float, seed: int) -> None:
    """As an eviction leaves the prompt at its boundary."""
    chance = random.Random(seed)
    async with pool(keys_of(ONE_RANK, range(4000))) as there:
        await there.look_up(4000)
        there.later()
        lost = [block for block in range(4000) if chance.random() < share]
        lose(there.held, lost)
        residency = await there.look_up(4000)
        assert residency.run == lost[0]
        assert residency.asked <= MAX_KEYS


async def test_a_rank_that_lost_all_its_objects_is_noticed() -> None:
    async with pool(keys_of(TWO_RANKS, range(4000))) as there:
        await there.look_up(4000, TWO_RANKS)
        there.later()
        there.held -= {TWO_RANKS.keys(block.to_bytes(32))[1] for block in range(4000)}
        assert (await there.look_up(4000, TWO_RANKS)).run == 0


async def test_models_that_share_hashes_share_no_memory() -> None:
    async with pool(keys_of(ONE_RANK, range(64))) as there:
        assert (await there.look_up(64)).run == 64
        assert (await there.look_up(64, KeyScheme.of("Qwen3-4B"))).run == 0
        assert await there.look_up(64) == Residency(64, 0)


async def test_what_was_seen_before_the_pool_lost_something_is_asked_for() -> None:
    async with pool(keys_of(ONE_RANK, range(64))) as there:
        await there.look_up(64)
        there.clock.now += 1
        there.residence.master.changed = there.clock.now
        lose(there.held, range(40, 64))
        assert (await there.look_up(64)).run == 40


async def test_what_was_seen_while_the_pool_lost_something_is_not_remembered_as_seen() -> None:
    ask = asyncio.Event()

    async def script(line: Line) -> None:
        while True:
            keys = asked((await line.request()).target)
            await ask.wait()
            await line.send(ok(orjson.dumps({"data": dict.fromkeys(keys, IN_MEMORY)})))

    async with pool((), script) as there:
        looking = asyncio.create_task(there.look_up(8))
        await until(lambda: there.peer.requests)
        there.clock.now += 1
        there.residence.master.changed = there.clock.now
        ask.set()
        assert (await looking).run == 8
        assert (await there.look_up(8)).asked == 8


def test_seen_are_bounded_in_number_and_bytes() -> None:
    capacity = 4096
    tracemalloc.start()
    try:
        seen = Seen(capacity)
        for number in range(capacity // 8):
            hashes = tuple(place.to_bytes(16) + (32 * number + place).to_bytes(16) for place in range(32))
            chain = Chain(Prefix(32 * 16 + 1, 16, hashes), ONE_RANK)
            seen.keep(chain, range(1, 33, 2), lambda end, at=float(number): Mark(at, there=True, disk=end))  # type: ignore[misc]
            assert len(seen) <= capacity
        del hashes, chain
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) == capacity
    assert size / capacity <= 272


async def test_what_is_as_old_as_what_was_lost_is_sampled_more_densely() -> None:
    old = Prefix(4000 * BLOCK_SIZE + 1, BLOCK_SIZE, tuple(n.to_bytes(32) for n in range(9000, 13000)))
    async with pool(keys_of(ONE_RANK, [*range(4000), *range(9000, 13000)])) as there:
        for prompt in (old, prefix(4000)):
            assert (await there.residence.look_up(prompt, ONE_RANK)).run == 4000
        there.clock.now += 60
        lose(there.held, range(9000, 13000))
        assert (await there.residence.look_up(old, ONE_RANK)).run == 0
        assert await there.look_up(4000) == Residency(4000, SAMPLES + MORE_SAMPLES)
        there.later()
        assert await there.look_up(4000) == Residency(4000, SAMPLES), "young again"


async def test_until_a_loss_is_seen_what_is_older_than_all_that_was_whole_is_sampled_more_densely() -> None:
    async with pool(keys_of(ONE_RANK, range(4000))) as there:
        await there.look_up(4000)
        for age, asked in ((10, SAMPLES + MORE_SAMPLES), (10, SAMPLES), (20, SAMPLES + MORE_SAMPLES), (15, SAMPLES)):
            there.clock.now += age
            assert await there.look_up(4000) == Residency(4000, asked)


async def test_what_was_never_looked_up_is_sampled_more_densely() -> None:
    async with pool(keys_of(ONE_RANK, range(4000))) as there:
        assert await there.look_up(4000) == Residency(4000, WHOLE_KEYS + SAMPLES + MORE_SAMPLES)


async def test_what_was_not_there_when_it_was_looked_up_is_sampled_more_densely() -> None:
    """Nobody has seen all of what an engine has put since, and a put gives no lease."""
    async with pool(keys_of(ONE_RANK, range(8))) as there:
        await there.look_up(4000)
        there.held |= keys_of(ONE_RANK, range(4000))
        assert await there.look_up(4000) == Residency(4000, SAMPLES + MORE_SAMPLES)
        there.later()
        await there.look_up(4000)
        there.later()
        assert await there.look_up(4000) == Residency(4000, SAMPLES)


async def test_what_has_lost_its_end_is_searched_for_other_losses() -> None:
    """96 samples miss 40 blocks of 4000 in four of ten cases."""
    chance = random.Random(1)
    cases, over = 30, 0
    for _ in range(cases):
        async with pool(keys_of(ONE_RANK, range(4000))) as there:
            for _ in range(2):
                assert (await there.look_up(4000)).run == 4000
                there.later()
            lost = sorted(chance.sample(range(3500), 40))
            lose(there.held, [*lost, *range(3900, 4000)])
            run = (await there.look_up(4000)).run
            assert run is not None
            over += run > lost[0]
    assert over <= 0.25 * cases


async def test_few_prompts_at_the_boundary_of_an_eviction_look_whole() -> None:
    """Any part of it may be lost: of 480 samples all survive in one of 481 cases."""
    chance = random.Random(1)
    cases, over = 300, 0
    async with pool(keys_of(ONE_RANK, range(2000))) as there:
        assert (await there.look_up(2000)).run == 2000
        for _ in range(cases):
            there.later()
            lost = sorted(chance.sample(range(2000), chance.randrange(1, 2000)))
            lose(there.held, lost)
            run = (await there.look_up(2000)).run
            assert run is not None
            over += run > lost[0]
            there.held |= keys_of(ONE_RANK, lost)
    assert over <= 0.015 * cases


# tiers


async def test_blocks_on_disk_alone_are_counted() -> None:
    stored = dict.fromkeys(keys_of(ONE_RANK, range(40)), ON_DISK) | dict.fromkeys(
        keys_of(ONE_RANK, range(40, 64)), IN_MEMORY
    )
    async with pool((), master_with(stored)) as there:
        assert await there.look_up(64) == Residency(64, 112 - 48, disk=40)
        assert await there.look_up(64) == Residency(64, 0, disk=40), "remembered with the rest"
        assert (await there.look_up(32)).disk == 32
        assert (await there.look_up(100)).disk == 40
        there.later()
        assert (await there.look_up(64)).disk == 40


async def test_a_block_is_on_disk_when_one_of_its_objects_is() -> None:
    first, second = TWO_RANKS.keys(bytes(32))
    async with pool((), master_with({first: IN_MEMORY, second: ON_DISK})) as there:
        assert await there.look_up(1, TWO_RANKS) == Residency(1, 2, disk=1)


async def test_the_share_on_disk_is_reckoned_from_samples() -> None:
    stored = dict.fromkeys(keys_of(ONE_RANK, range(2000)), ON_DISK) | dict.fromkeys(
        keys_of(ONE_RANK, range(2000, 4000)), IN_MEMORY
    )
    async with pool((), master_with(stored)) as there:
        for _ in range(2):
            residency = await there.look_up(4000)
            assert residency.run == 4000
            assert abs(residency.disk - 2000) <= 2 * 4000 / SAMPLES
            there.later()


# equal prompts at once


async def test_equal_prompts_share_one_question() -> None:
    async with pool(keys_of(ONE_RANK, range(8))) as there:
        found = await asyncio.gather(*(there.look_up(8) for _ in range(20)), there.look_up(4))
        assert [residency.run for residency in found] == [8] * 20 + [4]
        assert len(there.peer.requests) == 2


def after(answering: asyncio.Event) -> Script:
    async def script(line: Line) -> None:
        while True:
            keys = asked((await line.request()).target)
            await answering.wait()
            await line.send(ok(orjson.dumps({"data": dict.fromkeys(keys, IN_MEMORY)})))

    return script


async def test_who_leaves_does_not_take_the_question_along() -> None:
    answering = asyncio.Event()
    async with pool((), after(answering)) as there:
        first, second = (asyncio.create_task(there.look_up(8)) for _ in range(2))
        await until(lambda: there.peer.requests)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        answering.set()
        assert (await second).run == 8
        assert len(there.peer.requests) == 1


async def test_who_comes_late_has_a_deadline_of_its_own() -> None:
    async with pool((), hold, holding(keys_of(ONE_RANK, range(8))), deadline=0.5) as there:
        first = asyncio.create_task(there.look_up(8))
        await until(lambda: there.peer.requests)
        await asyncio.sleep(0.3)
        second = asyncio.create_task(there.look_up(8))
        assert await first == Residency(None, 8, "timeout")
        assert (await second).run == 8


# a sick pool


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        (hold, "timeout"),
        (once(), "error"),
        (once(b"SSH-2.0\r\n"), "answer"),
        (answers(ok(b"[]")), "answer"),
        (answers(ok(b"", status=b"500 Internal Server Error")), "answer"),
    ],
)
async def test_a_sick_master_is_unknown_and_not_empty(script: Script, trouble: Any) -> None:
    async with pool((), script, deadline=0.05) as there:
        assert await there.look_up(1) == Residency(None, 1, trouble)


async def test_the_deadline_covers_all_chunks_together() -> None:
    async def slow(line: Line) -> None:
        while True:
            keys = asked((await line.request()).target)
            await asyncio.sleep(0.03)
            await line.send(ok(orjson.dumps({"data": dict.fromkeys(keys, IN_MEMORY)})))

    async with pool((), slow, deadline=0.05) as there:
        residency = await there.look_up(1000)
    assert (residency.run, residency.trouble) == (None, "timeout")


async def test_trouble_behind_a_chunk_that_is_there_is_unknown_as_a_whole() -> None:
    async def script(line: Line) -> None:
        keys = asked((await line.request()).target)
        await line.send(ok(orjson.dumps({"data": dict.fromkeys(keys, IN_MEMORY)})))
        await line.request()
        await line.send(ok(b"", status=b"503 Service Unavailable"))

    async with pool((), script) as there:
        assert await there.look_up(200) == Residency(None, 48, "answer")


OPEN = Residency(None, 0, "open")


async def test_after_failures_nothing_is_asked_for_a_while_that_doubles() -> None:
    sick = answers(ok(b"no", status=b"500 Internal Server Error"))
    async with pool((), sick) as there:
        for blocks in (1, 2, 3):
            assert (await there.look_up(blocks)).trouble == "answer"
        pause = PAUSES[0]
        for _ in range(8):
            requests = len(there.peer.requests)
            there.clock.now += pause - 0.01
            assert await there.look_up(1) == OPEN
            assert len(there.peer.requests) == requests
            there.clock.now += 0.02
            assert [r.trouble for r in await asyncio.gather(there.look_up(1), there.look_up(2))] == ["answer", "open"]
            assert len(there.peer.requests) == requests + 1, "one at a time, until one succeeds"
            pause = min(2 * pause, PAUSES[1])


async def test_a_success_ends_the_pause() -> None:
    sick = answers(*[ok(b"[]")] * 3, ok(orjson.dumps({"data": dict.fromkeys(ONE_RANK.keys(bytes(32)), IN_MEMORY)})))
    async with pool((), sick) as there:
        for _ in range(3):
            assert (await there.look_up(1)).trouble == "answer"
        assert await there.look_up(1) == OPEN
        there.clock.now += PAUSES[0]
        assert (await there.look_up(1)).run == 1
        there.later()
        assert (await there.look_up(1)).run == 1


async def test_failures_that_do_not_follow_each_other_do_no_harm() -> None:
    good = ok(orjson.dumps({"data": dict.fromkeys(ONE_RANK.keys(bytes(32)), IN_MEMORY)}))
    async with pool((), answers(*[ok(b"[]"), ok(b"[]"), good] * 4)) as there:
        for trouble in ["answer", "answer", None] * 4:
            assert (await there.look_up(1)).trouble == trouble
            there.later()


async def test_while_no_master_serves_nothing_is_asked() -> None:
    async with pool(keys_of(ONE_RANK, range(8))) as there:
        await there.look_up(8)
        there.residence.master.serving = False
        assert await there.look_up(8) == OPEN
        there.residence.master.serving = True
        assert (await there.look_up(8)).run == 8


async def test_a_pool_without_a_master_is_opened_and_closed() -> None:
    residence = Residence(Master([f"http://127.0.0.1:{free_port()}"]), 0.1)
    await residence.open()
    assert await residence.look_up(prefix(1), ONE_RANK) == OPEN
    await residence.close()


# scans


@pytest.mark.parametrize(
    ("lost", "over"), [((), 0), ((1000 - OVER,), 0), ((1000 - OVER - 1,), 1), ((0,), 1), ((999,), 0)]
)
async def test_what_was_said_is_compared_with_every_object(lost: Collection[int], over: int) -> None:
    async with pool(keys_of(TWO_RANKS, range(1000)), scan_every=2) as there:
        assert (await there.look_up(1000, TWO_RANKS)).run == 1000
        there.held -= {TWO_RANKS.keys(block.to_bytes(32))[1] for block in lost}
        assert await there.look_up(1000, TWO_RANKS) == Residency(1000, 0)
        await until(lambda: there.residence.scans)
        assert (there.residence.over_predicted, there.residence.under_predicted) == (over, 0)
        assert max(len(asked(request.target)) for request in there.peer.requests) <= CHUNK_KEYS


async def test_a_run_that_was_said_too_short_is_counted_apart() -> None:
    late = {TWO_RANKS.keys((100).to_bytes(32))[0]}
    async with pool(keys_of(TWO_RANKS, range(200)) - late, scan_every=1) as there:
        assert (await there.look_up(200, TWO_RANKS)).run == 100
        there.held |= late
        await until(lambda: there.residence.scans)
        assert (there.residence.over_predicted, there.residence.under_predicted) == (0, 1)


async def test_one_scan_is_made_at_a_time() -> None:
    async with pool(keys_of(ONE_RANK, range(1000)), scan_every=1) as there:
        for _ in range(5):
            assert (await there.look_up(1000)).run == 1000
        await until(lambda: there.residence.scans)
        assert there.residence.scans == 1


async def test_a_scan_that_fails_counts_nothing() -> None:
    async def script(line: Line) -> None:
        keys = asked((await line.request()).target)
        await line.send(ok(orjson.dumps({"data": dict.fromkeys(keys, IN_MEMORY)})))
        await line.request()
        line.close()

    async with pool((), script, once(), scan_every=1) as there:
        assert (await there.look_up(8)).run == 8
        await until(lambda: there.residence._scan is not None and there.residence._scan.done())
        assert there.residence.scans == 0


# real masters

needs_a_master = pytest.mark.skipif((reason := missing()) is not None, reason=reason or "")
SOON = 30.0
"""Seconds after which a wait for a real master is hopeless."""


@asynccontextmanager
async def opened(*urls: str, deadline: float = PLENTY, verified: float = 1000.0) -> AsyncIterator[Residence]:
    residence = Residence(Master(urls), deadline, verified=verified, chance=random.Random(1), scan_every=10**9)
    await residence.open()
    try:
        yield residence
    finally:
        await residence.close()


async def sees(residence: Residence, blocks: int, scheme: KeyScheme, holds: Callable[[Residency], bool]) -> Residency:
    """Look up until it is as expected."""
    async with asyncio.timeout(SOON):
        while not holds(residency := await residence.look_up(prefix(blocks), scheme)):  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(0.05)
    return residency


def all_keys(scheme: KeyScheme, blocks: Iterable[int]) -> list[str]:
    return [key for number in blocks for key in scheme.keys(number.to_bytes(32))]


@needs_a_master
@pytest.mark.parametrize("scheme", [ONE_RANK, KeyScheme.of("m", Ranks(tp=2, groups=(0, 1)))])
def test_a_real_pool_is_seen_as_an_engine_sees_it(tmp_path: Path, scheme: KeyScheme) -> None:
    async def look(url: str, objects: Objects) -> None:
        async with opened(url) as residence:
            assert await residence.look_up(prefix(500), scheme) == Residency(300, ANY)
            objects.remove([scheme.keys((30).to_bytes(32))[-1]])
            assert await residence.look_up(prefix(300), scheme) == Residency(300, 0), "seen just now"
            residence.master.changed = time.monotonic()
            assert (await residence.look_up(prefix(31), scheme)).run in (30, 31)
        async with opened(url) as other:
            assert (await other.look_up(prefix(300), scheme)).run == 30

    with start_master(tmp_path) as master, Objects(master.rpc) as objects:
        objects.put(all_keys(scheme, range(300)))
        asyncio.run(look(master.admin, objects))


@needs_a_master
def test_what_a_real_pool_evicts_is_not_said_to_be_there(tmp_path: Path) -> None:
    """Prompts come until the first ones are gone, one of them in part."""
    number, blocks, size = 30, 500, 1536

    def prompt(which: int) -> Prefix:
        return Prefix(blocks * 16 + 1, 16, tuple(sha256(b"%d %d" % (which, n)).digest() for n in range(blocks)))

    async def look(url: str, objects: Objects) -> None:
        async with opened(url, verified=0.0) as residence:
            for which in range(number):
                objects.put([key for block in prompt(which).hashes for key in ONE_RANK.keys(block)], size)
                assert (await residence.look_up(prompt(which), ONE_RANK)).run is not None
            gone = 0
            for which in range(number):
                said = await residence.look_up(prompt(which), ONE_RANK)
                keys = [ONE_RANK.keys(block)[0] for block in prompt(which).hashes]
                there = await residence.master.resident(keys)
                real = next((at for at, key in enumerate(keys) if key not in there), blocks)
                assert said.run is not None
                assert said.run - real <= OVER
                assert said.run == real or 0 < len(there) < blocks, "only what is lost in part is ever misjudged"
                gone += not there
            assert 0 < gone < number

    flags = ("--default_kv_lease_ttl=100",)
    with start_master(tmp_path, extra_args=flags) as master, Objects(master.rpc) as objects:
        asyncio.run(look(master.admin, objects))


@needs_a_master
def test_the_segment_of_an_engine_that_was_killed_is_missed(tmp_path: Path) -> None:
    """It is dropped by the master after its client_ttl, and here with the next look at the segments."""

    async def look(url: str, objects: Objects) -> None:
        async with opened(url) as residence:
            assert (await residence.look_up(prefix(64), ONE_RANK)).run == 64
            assert (await residence.look_up(prefix(64), ONE_RANK)).asked == 0
            killed = time.monotonic()
            objects.kill()
            seen = await sees(residence, 64, ONE_RANK, lambda residency: residency.asked > 0)
            assert seen.run == 0
            assert residence.master.changed > killed

    with start_master(tmp_path, extra_args=("--client_ttl=2",)) as master, Objects(master.rpc) as objects:
        objects.put(all_keys(ONE_RANK, range(64)))
        asyncio.run(look(master.admin, objects))


@needs_a_master
def test_a_master_that_comes_back_has_forgotten_and_so_has_the_gateway(tmp_path: Path) -> None:
    async def look(master: RealMaster) -> None:
        async with opened(master.admin) as residence:
            assert (await residence.look_up(prefix(64), ONE_RANK)).run == 64
            master.kill()
            assert await sees(residence, 64, ONE_RANK, lambda residency: residency.trouble == "open") == OPEN
            with start_master(tmp_path, master.rpc_port, master.admin_port):
                back = await sees(residence, 64, ONE_RANK, lambda residency: residency.run is not None)
                assert back.run == 0
                assert back.asked > 0

    with start_master(tmp_path) as master, Objects(master.rpc) as objects:
        objects.put(all_keys(ONE_RANK, range(64)))
        asyncio.run(look(master))


@needs_a_master
def test_a_real_master_that_hangs_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    async def look(master: RealMaster) -> None:
        async with opened(master.admin, deadline=0.1) as residence:
            await sees(residence, 64, ONE_RANK, lambda residency: residency.run == 64)
            os.killpg(master.process.pid, signal.SIGSTOP)
            try:
                sick = await sees(residence, 65, ONE_RANK, lambda residency: residency.run is None)
                assert sick.trouble in ("timeout", "open")
                assert await sees(residence, 65, ONE_RANK, lambda residency: residency.trouble == "open") == OPEN
            finally:
                os.killpg(master.process.pid, signal.SIGCONT)
            back = await sees(residence, 65, ONE_RANK, lambda residency: residency.run is not None)
            assert back.run == 64

    with start_master(tmp_path) as master, Objects(master.rpc) as objects:
        objects.put(all_keys(ONE_RANK, range(64)))
        asyncio.run(look(master))


@needs_a_master
def test_the_master_that_serves_is_asked(tmp_path: Path) -> None:
    """A standby answers as well; that it knows nothing would look like an empty pool."""

    async def look(url: str) -> None:
        async with listen(standby) as peer, opened(peer.url, url) as residence:
            for _ in range(3):
                assert (await residence.look_up(prefix(64), ONE_RANK)).run == 64
            assert all(request.target == "/health" for request in peer.requests)

    with start_master(tmp_path) as master, Objects(master.rpc) as objects:
        objects.put(all_keys(ONE_RANK, range(64)))
        asyncio.run(look(master.admin))


@needs_a_master
def test_a_real_pool_tells_memory_from_disk(tmp_path: Path) -> None:
    """With offloading every object goes to disk as well; under pressure some stay there alone."""
    blocks, size = 100, 64 * 1024

    async def look(url: str, objects: Objects) -> None:
        async with opened(url, verified=0.0) as residence:
            assert (await residence.look_up(prefix(blocks), ONE_RANK)) == Residency(blocks, ANY, disk=0)
            others = iter(range(1000, 2000, 20))
            async with asyncio.timeout(SOON):
                while not (residency := await residence.look_up(prefix(blocks), ONE_RANK)).disk:
                    assert residency.run == blocks
                    objects.put(all_keys(ONE_RANK, range(start := next(others), start + 20)), size)
                    await asyncio.sleep(1.0)
            assert residency.run == blocks
            assert objects.exist(all_keys(ONE_RANK, range(blocks))) == blocks

    flags = ("--enable_offload=true", "--default_kv_lease_ttl=100")
    (folder := tmp_path / "disk").mkdir()
    with start_master(tmp_path, extra_args=flags) as master, Objects(master.rpc, folder) as objects:
        objects.put(all_keys(ONE_RANK, range(blocks)), size)
        asyncio.run(look(master.admin, objects))
