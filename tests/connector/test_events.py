"""An engine's events, in order: decoded, repaired, forgotten. First without sockets, then over ZMQ."""

import asyncio
import gc
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq

from connector import events, follower
from connector.batches import MAX_BLOCKS, witness
from connector.blocks import Prefix
from connector.events import Inbox, NoEvents, Subscription
from connector.follower import END, Follower
from connector.held import Reported
from connector.simulated.events import Chain
from connector.simulated.events import cleared as clear_event
from connector.simulated.events import removed as remove_event
from connector.simulated.events import stored as store_event
from connector.simulated.publisher import Publisher

SIZE = 4


def digest(*path: int) -> bytes:
    """The hash of the block at the end of this path: it hangs on all blocks before it."""
    return b"\x01" * 24 + (hash(path) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")


def chain(path: Sequence[int]) -> list[bytes]:
    return [digest(*path[: count + 1]) for count in range(len(path))]


def prefix(*path: int) -> Prefix:
    """A prompt of these blocks and one token more."""
    return Prefix(tokens=len(path) * SIZE + 1, block_size=SIZE, hashes=tuple(chain(path)))


def stored(*path: int, start: int = 0, short: bool = False, **fields: object) -> dict[str, object]:
    """The event of a prompt's blocks from `start` on as vLLM writes it, hashes in full or as 64 bits."""
    hashes = [written(block, short) for block in chain(path)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes[start:],
        "parent_block_hash": hashes[start - 1] if start else None,
        "token_ids": list(range(SIZE * (len(path) - start))),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (len(path) - start),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields


def written(block: bytes, short: bool) -> bytes | int:
    return int.from_bytes(block[-8:], "big") if short else block


def removed(*path: int, short: bool = False, **fields: object) -> dict[str, object]:
    """The event of the last of these blocks."""
    block = written(digest(*path), short)
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0} | fields


CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}


def payload(*batch: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(batch), rank])


def message(number: int, *batch: object) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), payload(*batch)]


class Following:
    """A follower, and the questions that it asked."""

    def __init__(self, *, replay: bool = False) -> None:
        self.held = Reported()
        self.asked: list[int] = []
        self.follower = Follower(self.held, (lambda start, _: self.asked.append(start)) if replay else None)

    def live(self, number: int, *batch: object) -> None:
        self.follower.live(message(number, *batch))

    def replayed(self, number: int, *batch: object) -> None:
        self.follower.replayed([b"", *message(number, *batch)])

    def end(self) -> None:
        self.follower.replayed([b"", b"", END, b""])

    def run(self, *path: int) -> int:
        return self.held.run(prefix(*path))


# One message


def test_a_message_that_would_hold_requests_up_is_not_taken_in() -> None:
    one = Following()
    one.live(0, stored(1, 2, 3))
    one.live(1, stored(4) | {"block_hashes": list(range(3 * MAX_BLOCKS))})
    assert (one.held.bad, len(one.held)) == (1, 0), "what it told is not known"
    one.live(2, *({"type": "BlockRemoved", "block_hashes": []} for _ in range(3 * MAX_BLOCKS)))
    one.live(3, {"type": 7}, *(stored(1) for _ in range(MAX_BLOCKS)))
    assert (one.held.bad, len(one.held)) == (3, 0)
    one.live(4, stored(1, 2))
    assert one.run(1, 2) == 2


@pytest.mark.parametrize("short", [False, True])
def test_what_is_stored_is_held_until_it_is_removed(short: bool) -> None:
    one = Following()
    one.live(0, stored(1, 2, 3, short=short))
    assert one.run(1, 2, 3) == 3
    one.live(1, removed(1, 2, 3, short=not short))
    assert one.run(1, 2, 3) == 2
    assert (one.held.received, one.held.events) == (2, 2)


def test_a_hash_may_be_a_signed_number() -> None:
    one = Following()
    low = int.from_bytes(digest(1)[-8:], "big", signed=True)
    one.live(0, stored(1, block_hashes=[low]), stored(1, 2, start=1, parent_block_hash=low))
    assert one.run(1, 2) == 2


def test_the_pools_blocks_are_not_the_engines() -> None:
    one = Following()
    one.live(0, stored(1, medium="cpu"), stored(1, locality="REMOTE"))
    assert one.run(1) == 0
    one.live(1, stored(1), removed(1, medium="cpu"))
    assert one.run(1) == 1


def test_a_cleared_cache_is_empty_and_others_are_not() -> None:
    one, other = Following(), Following()
    other.live(0, stored(1, 2))
    one.live(0, stored(1, 2), CLEARED, stored(3))
    assert [one.run(name) for name in (1, 3)] == [0, 1]
    assert other.run(1, 2) == 2
    assert one.held.forgotten == 0


@pytest.mark.parametrize(
    "batch",
    [
        [0.5, [stored(1, zz_new=[1], token_ids="?"), {"type": "BlockMoved", "block_hashes": "x"}], None, "and more"],
        [0, [{name: value for name, value in stored(1).items() if name in ("type", "block_hashes", "medium")}]],
        {"ts": 1.5, "events": [stored(1)], "data_parallel_rank": 0},
        {"events": [stored(1), {"type": "BlockMoved", "block_hashes": 7}]},
    ],
    ids=["more", "less", "named", "named, more"],
)
def test_new_and_missing_fields_and_new_kinds_do_no_harm(batch: object) -> None:
    one = Following()
    one.follower.live([b"kv", (0).to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
    assert (one.run(1), one.held.bad) == (1, 0)


@pytest.mark.parametrize(
    "event",
    [
        stored(2, block_hashes=[digest(2).hex()]),
        stored(2, block_hashes=[None]),
        {"type": "BlockStored"},
        removed(2, block_hashes=[digest(2).hex()]),
        stored(2, group_idx="full"),
        ["BlockStored", [digest(2)], None, [1, 2, 3, 4], SIZE, None],
        {"type": ["BlockStored"]},
        7,
    ],
)
def test_an_event_that_cannot_be_read_takes_what_came_before_it(event: object) -> None:
    one = Following()
    one.live(0, stored(1))
    one.live(1, stored(2), event, stored(3))
    assert (one.held.bad, one.held.forgotten) == (1, 1)
    assert [one.run(name) for name in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"\0" * 8],
        [b"", b"\0\0\1", payload(stored(2))],
        [b"", END, payload(stored(2))],
        [b"", b"\0" * 7 + b"\1", b"garbage"],
        [b"", b"\0" * 7 + b"\1", b""],
        [b"", b"\0" * 7 + b"\1", b"\x91" * 200_000 + b"\xc0"],
        [b"", b"\0" * 7 + b"\1", msgspec.msgpack.encode([])],
        [b"", b"\0" * 7 + b"\1", msgspec.msgpack.encode({"ts": 1})],
        [b"", b"\0" * 7 + b"\1", msgspec.msgpack.encode([0, 7, 0])],
    ],
)
def test_what_cannot_be_read_is_counted_and_trusted_in_nothing(frames: list[bytes]) -> None:
    one = Following()
    one.live(0, stored(1))
    one.follower.live(frames)
    assert (one.held.bad, len(one.held)) == (1, 0)
    one.live(2, stored(3))
    assert one.run(3) == 1


def test_the_newest_first_block_is_told_whole_and_once() -> None:
    one = Following()
    assert witness(one.held) is None
    one.live(0, stored(1), stored(2, extra_keys=[["salt"]], token_ids=[7, 8, 9, 10]), stored(2, 3, start=1))
    one.live(1, stored(2, 4, start=1), stored(5, medium="cpu"))
    event = witness(one.held)
    assert event is not None
    assert (event["token_ids"], event["extra_keys"], event["block_hashes"]) == ([7, 8, 9, 10], [["salt"]], [digest(2)])
    assert witness(one.held) is None


# Without a replay socket


def test_a_gap_forgets_what_came_before_it() -> None:
    one = Following()
    one.live(57, stored(1))
    assert one.held.gaps == 0, "one may come late"
    one.live(59, stored(2))
    assert (one.held.gaps, one.held.forgotten, one.run(1), one.run(2)) == (1, 1, 0, 1)


def test_an_engine_that_begins_anew_is_known_anew() -> None:
    one = Following()
    for number in range(500):
        one.live(number, stored(number, 1))
    one.live(0, stored(1000))
    assert len(one.held) == 1
    one.live(1, stored(1000, 1, start=1))
    assert one.run(1000, 1) == 2


def test_a_lost_connection_forgets_at_once() -> None:
    one = Following()
    one.live(7, stored(1))
    one.follower.lost()
    assert one.run(1) == 0
    one.follower.anew()
    one.live(0, stored(2))
    assert (one.run(2), one.held.gaps) == (1, 0)


@pytest.mark.parametrize("first", [0, 57])
@pytest.mark.parametrize("lost", [range(60, 61), range(70, 81)], ids=["one", "eleven"])
def test_what_came_before_lost_messages_is_believed_only_as_far_as_it_is_told_again(first: int, lost: range) -> None:
    """Each message stores a prompt of its own and takes the one of five messages before back."""
    said = {
        number: message(number, stored(number, 1), removed(number - 5, 1), removed(number - 5)) for number in range(100)
    }

    def known(one: Following) -> list[int]:
        return [number for number in range(100) if one.run(number, 1) == 2]

    for replay in (False, True):
        one = Following(replay=replay)
        if replay:
            one.follower.anew()
            for number in range(first):
                one.follower.replayed([b"", *said[number]])
            one.end()
        for number in range(first, 100):
            if number in lost:
                continue
            one.follower.live(said[number])
            if one.follower.asking:
                for again in range(one.asked[-1], number + 1):
                    one.follower.replayed([b"", *said[again]])
                one.end()
            if number == lost.stop:
                assert known(one) == [*range(number - 4, number + 1)] if replay else [number]
        assert known(one) == [95, 96, 97, 98, 99]
        assert (one.held.gaps, one.held.replays) == (1, 2 if replay else 0)


# With one


def test_the_first_contact_asks_for_everything() -> None:
    one = Following(replay=True)
    one.follower.anew()
    assert one.asked == [0]
    one.live(2, stored(1, 2, start=1))
    one.replayed(0, stored(1))
    one.replayed(1, stored(9), removed(9))
    one.replayed(2, stored(1, 2, start=1))
    one.end()
    one.live(3, stored(1, 2, 3, start=2))
    assert (one.run(1, 2, 3), one.run(9), one.held.replays, one.held.gaps) == (3, 0, 1, 0)


def test_a_gap_is_repaired_before_what_comes_after_it() -> None:
    one = Following(replay=True)
    one.live(9, stored(1))
    one.live(21, stored(2))
    one.live(22, stored(3), removed(2))
    assert one.asked == [10]
    assert one.run(2) == 0, "in order"
    for number in range(10, 22):
        one.replayed(number, stored(2) if number == 21 else stored(number))
    one.end()
    assert [one.run(name) for name in (1, 2, 3, 10, 20)] == [1, 0, 1, 1, 1]
    assert (one.held.gaps, one.held.replays, one.held.failed, one.held.forgotten) == (1, 1, 0, 0)


def test_what_is_told_twice_is_applied_once() -> None:
    one = Following(replay=True)
    one.follower.anew()
    for number in range(3):
        one.replayed(number, stored(1))
    one.end()
    for number in range(3):
        one.live(number, stored(1))
    one.live(3, removed(1), removed(1))
    assert one.run(1) == 1
    one.live(4, removed(1))
    assert one.run(1) == 0


def test_a_replay_without_topics_is_read_as_well() -> None:
    one = Following(replay=True)
    one.follower.anew()
    one.follower.replayed([b"", *message(0, stored(1))[1:]])
    one.follower.replayed([b"", END, b""])
    assert (one.run(1), one.held.replays) == (1, 1)


def test_a_replay_that_begins_late_forgets_what_came_before_it() -> None:
    one = Following(replay=True)
    one.live(0, stored(1))
    one.live(9, stored(4))
    one.replayed(7, stored(2))
    one.replayed(8, stored(3))
    one.replayed(9, stored(4))
    one.end()
    assert [one.run(name) for name in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert (one.held.failed, one.held.replays, one.held.forgotten) == (1, 0, 1)


def test_the_rest_of_a_replay_is_asked_for_while_more_of_it_comes() -> None:
    one = Following(replay=True)
    one.live(0, stored(1))
    one.live(9, stored(9))
    one.replayed(1, stored(11))
    one.replayed(2, stored(12))
    one.replayed(5, stored(15))
    assert one.asked == [1, 3]
    for number in range(3, 6):
        one.replayed(number, stored(10 + number))
    one.end()
    assert one.asked == [1, 3, 6]
    for number in range(6, 10):
        one.replayed(number, stored(10 + number))
    one.end()
    assert [one.run(name) for name in (1, 12, 15, 18, 9)] == [1, 1, 1, 1, 0]
    assert (one.held.replays, one.held.failed, one.held.forgotten) == (1, 0, 0)


def test_a_replay_that_has_nothing_forgets() -> None:
    one = Following(replay=True)
    one.live(0, stored(1))
    one.live(9, stored(2))
    one.end()
    assert (one.run(1), one.run(2), one.held.failed) == (0, 1, 1)
    one.live(10, stored(3))
    assert one.asked == [1]
    assert one.run(3) == 1


@pytest.mark.parametrize("frames", [[], [b""], [b"", b""], [b"", b"\0\0\1", b""]])
def test_a_late_or_broken_replay_forgets_and_goes_on(frames: list[bytes]) -> None:
    one = Following(replay=True)
    one.live(0, stored(1))
    one.live(9, stored(2))
    one.live(10, removed(2), stored(3))
    if frames:
        one.follower.replayed(frames)
    else:
        one.follower.failed()
    assert [one.run(name) for name in (1, 2, 3)] == [0, 0, 1]
    one.replayed(1, stored(7))
    one.live(11, stored(4))
    assert [one.run(name) for name in (3, 4, 7)] == [1, 1, 0]
    assert (one.held.failed, one.asked) == (1, [1])


def test_what_waits_for_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MAX_PENDING", 1000)
    one = Following(replay=True)
    one.live(0, stored(1))
    for number in range(5, 30):
        one.live(number, stored(number))
    assert (one.held.failed, one.run(1), one.run(5), one.run(29)) == (1, 0, 1, 1)


def test_a_restart_forgets_at_once_and_asks_for_everything() -> None:
    one = Following(replay=True)
    one.live(499, stored(1))
    one.live(3, stored(2, 3, start=1))
    assert one.run(1) == 0
    assert one.asked == [0]
    one.live(0, stored(5))
    assert one.asked == [0, 0], "and once more while it waits"
    one.replayed(0, stored(5))
    one.end()
    assert (one.run(5), one.run(2, 3)) == (1, 0)


# Against a model


@dataclass
class Engine:
    """What a real engine has and tells: blocks by copies, children given up before their parents."""

    chance: random.Random
    buffer: int = 1000
    number: int = 0
    copies: Counter[tuple[int, ...]] = field(default_factory=Counter)
    told: deque[tuple[int, list[bytes]]] = field(default_factory=deque)

    def step(self) -> None:
        """Tell of something."""
        self.told.append(
            (self.number, message(self.number, *[self._event() for _ in range(self.chance.randrange(1, 4))]))
        )
        while len(self.told) > self.buffer:
            self.told.popleft()
        self.number += 1

    def restart(self) -> None:
        self.number = 0
        self.copies.clear()
        self.told.clear()

    def _event(self) -> dict[str, object]:
        short = self.chance.random() < 0.5
        what = self.chance.random()
        if what < 0.6 or not self.copies:
            path = tuple(self.chance.randrange(2) for _ in range(self.chance.randrange(1, 6)))
            start = self.chance.randrange(len(path))
            while start and path[:start] not in self.copies:
                start -= 1
            self.copies.update(path[: at + 1] for at in range(start, len(path)))
            return stored(*path, start=start, short=short)
        if what < 0.98:
            tails = [path for path in self.copies if not any(other[:-1] == path for other in self.copies)]
            path = self.chance.choice(tails)
            self.copies -= Counter([path])
            return removed(*path, short=short)
        self.copies.clear()
        return CLEARED


def paths() -> Iterator[tuple[int, ...]]:
    for length in range(1, 6):
        for bits in range(2**length):
            yield tuple(bits >> at & 1 for at in range(length))


def runs(there: Callable[[tuple[int, ...]], bool]) -> dict[tuple[int, ...], int]:
    """For each prompt, how many of its leading blocks are there."""
    found = {}
    for path in paths():
        count = 0
        while count < len(path) and there(path[: count + 1]):
            count += 1
        found[path] = count
    return found


def copies_of(told: Sequence[list[bytes]]) -> Counter[bytes]:
    """What is known of blocks from consecutive messages alone, from scratch."""
    copies: Counter[bytes] = Counter()
    for frames in told:
        for event in msgspec.msgpack.decode(frames[2])[1]:
            names = [key_of(one) for one in event.get("block_hashes", ())]
            if event["type"] == "AllBlocksCleared":
                copies.clear()
            elif event["type"] == "BlockRemoved":
                copies -= Counter(names)
            else:
                parent = event["parent_block_hash"]
                above = None if parent is None else key_of(parent)
                for name in names:
                    if above is None or above in copies:
                        copies[name] += 1
                    above = name
    return copies


def key_of(block: bytes | int) -> bytes:
    return block[-8:] if isinstance(block, bytes) else block.to_bytes(8, "big")


class Wire:
    """What lies between an engine and its follower: messages are lost, questions are answered badly or not at all.

    Beside them the model: the messages that arrived, of which those count that lead without a hole to the newest.
    """

    def __init__(self, engine: Engine, one: Following, replay: str) -> None:
        self.engine = engine
        self.one = one
        self.replay = replay
        self.arrived: dict[int, list[bytes]] = {}
        self.live = False
        """A message has come by itself."""

    def connect(self) -> None:
        self.one.follower.lost()
        self.arrived = {}
        assert len(self.one.held) == 0
        self.live = False
        self.one.follower.anew()
        self._answer({})
        self.check()

    def deliver(self, *, restarted: bool = False) -> None:
        number, frames = self.engine.told[-1]
        if restarted:
            self.arrived = {}
        self.live = True
        self.one.follower.live(frames)
        assert not (restarted and self.replay != "none" and len(self.one.held))
        self.arrived[number] = frames
        self._answer({number: frames})
        self.check()

    def _answer(self, waiting: dict[int, list[bytes]]) -> None:
        """Answer the last question, if one is open."""
        if not self.one.follower.asking:
            return
        topic = [] if self.replay == "no topics" else [b""]
        told = [(number, frames) for number, frames in self.engine.told if number >= self.one.asked[-1]]
        if self.replay in ("whole", "partial", "no topics"):
            for number, frames in told:
                self.one.follower.replayed([b"", *topic, *frames[1:]])
                self.arrived[number] = frames
            self.one.follower.replayed([b"", *topic, END, b""])
            return
        if self.replay == "slow":
            for _, frames in told[: self.engine.chance.randrange(len(told) + 1)]:
                self.one.follower.replayed([b"", *topic, *frames[1:]])
        if self.replay == "garbage":
            self.one.follower.replayed([b"", b"?", b"?"])
        else:
            self.one.follower.failed()
        self.arrived = waiting

    def check(self) -> None:
        believed = {path: self.one.run(*path) for path in paths()}
        newest = first = max(self.arrived, default=-1)
        while first - 1 in self.arrived:
            first -= 1
        names = copies_of([self.arrived[number] for number in range(first, newest + 1)] if self.arrived else [])
        assert believed == runs(lambda path: digest(*path)[-8:] in names)
        if self.replay in ("whole", "no topics"):
            assert believed == runs(lambda path: path in self.engine.copies)


@pytest.mark.parametrize("replay", ["none", "whole", "partial", "silent", "slow", "garbage", "no topics"])
@pytest.mark.parametrize("seed", range(30))
def test_it_follows_a_model_of_the_engine(seed: int, replay: str) -> None:
    chance = random.Random(seed)
    engine = Engine(chance, buffer=4 if replay == "partial" else 1000)
    wire = Wire(engine, Following(replay=replay != "none"), replay)
    for _ in range(chance.randrange(10)):
        engine.step()
    wire.connect()
    for _ in range(40):
        what = chance.random()
        if what < 0.03:
            engine.restart()
            wire.connect()
        elif what < 0.06 and wire.live:
            engine.restart()
            engine.step()
            wire.deliver(restarted=True)
        else:
            engine.step()
            if what < 0.8:
                wire.deliver()


# Over ZMQ


def free_address() -> str:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}"


def everywhere(address: str) -> str:
    """As an engine is told, so that it binds the port."""
    return address.replace("127.0.0.1", "*")


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def subscribed(
    address: str, held: Reported, *, bind: bool = False, replay: str | None = None
) -> AsyncIterator[Subscription]:
    inbox = Inbox(asyncio.get_running_loop())
    subscription = Subscription(inbox, address, bind=bind, replay=replay, held=held)
    try:
        subscription.open()
        yield subscription
    finally:
        subscription.close()
        inbox.close()


def told(*path: int, start: int = 0) -> dict[str, object]:
    """What a simulated engine writes of a prompt's blocks."""
    blocks = chain(path)
    keys: list[tuple[str, ...] | None] = [None] * (len(path) - start)
    tokens = list(range(SIZE * (len(path) - start)))
    above = blocks[start - 1] if start else None
    return store_event(Chain(blocks[start:], above, tokens, SIZE, keys), Publisher("", None, float).numbers)


def publisher(address: str, replay: str | None = None) -> Publisher:
    return Publisher(everywhere(address), replay, lambda: 0.0)


async def known(engine: Publisher, held: Reported, *path: int) -> None:
    """Publish until it arrives: a subscription takes a moment to be heard of."""
    async with asyncio.timeout(20):
        while held.run(prefix(*path)) < len(path):
            engine.publish([clear_event(), told(*path)])
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("replay", [False, True])
async def test_a_restart_in_place_that_says_nothing_is_noticed(replay: bool) -> None:
    address, again = free_address(), free_address()
    source = again if replay else None
    held = Reported()
    async with subscribed(address, held, replay=source):
        async with publisher(address, source) as engine:
            await known(engine, held, *range(10))
            for name in range(100, 600):
                engine.publish([told(name, 1)])
            await until(lambda: len(held) == 1010)
        async with publisher(address, source) as engine:
            await until(lambda: len(held) == 0)
            assert held.run(prefix(*range(10))) == 0
            await known(engine, held, 7, 8)
            assert len(held) == 2
            engine.publish([told(7, 8, 9, start=2)])
            await until(lambda: held.run(prefix(7, 8, 9)) == 3)


async def test_what_was_told_before_the_first_contact_is_known_by_replay() -> None:
    address, again = free_address(), free_address()
    held = Reported()
    async with publisher(address, again) as engine:
        engine.publish([told(1, 2, 3)])
        engine.publish([remove_event(digest(1, 2, 3), engine.numbers)])
        async with subscribed(address, held, replay=again):
            await until(lambda: held.replays == 1)
            assert (held.run(prefix(1, 2, 3)), held.received) == (2, 0)


async def test_an_engine_that_connects_is_heard_and_lost() -> None:
    address = free_address()
    held = Reported()
    async with subscribed(address, held, bind=True):
        async with Publisher(address, None, lambda: 0.0) as engine:
            await known(engine, held, 1)
        await until(lambda: held.run(prefix(1)) == 0)


async def test_a_message_that_is_too_large_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_MESSAGE", 1024 * 1024)
    address = free_address()
    held = Reported()
    async with subscribed(address, held), publisher(address) as engine:
        await known(engine, held, 1)
        received = held.received
        engine._socket.send_multipart([b"", b"\0" * 8, b"\0" * 50_000_000])
        await until(lambda: len(held) == 0)
        assert (held.bad, held.received) == (0, received)
        await known(engine, held, 2)


async def test_what_is_no_event_does_not_stop_those_that_follow() -> None:
    address = free_address()
    held = Reported()
    async with subscribed(address, held), publisher(address) as engine:
        await known(engine, held, 1)
        for frames in ([b"noise"], [b"", b"\0\0\1", b"x"], [b"", b"\0" * 8, b"x"], [b""] * 9):
            engine._socket.send_multipart(frames)
        await until(lambda: held.bad == 4)
        await known(engine, held, 2)


class Mute:
    """An engine whose replay socket takes questions and gives what a test says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, replay: str) -> None:
        self.events = context.socket(zmq.PUB)
        self.events.sndhwm = 0
        self.events.bind(address)
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(replay)

    async def asked(self) -> tuple[bytes, int]:
        """Who asks, and from where on."""
        async with asyncio.timeout(20):
            while not self.router.poll(0):  # noqa: ASYNC110 -- a plain socket
                await asyncio.sleep(0.005)
        client, empty, start = self.router.recv_multipart()
        assert empty == b""
        return client, int.from_bytes(start, "big")


@pytest.fixture
def mute() -> Iterator[tuple[Mute, str, str]]:
    address, again = free_address(), free_address()
    with zmq.Context() as context:
        engine = Mute(context, address, again)
        yield engine, address, again
        engine.events.close(linger=0)
        engine.router.close(linger=0)


async def test_a_silent_replay_ends_by_itself(mute: tuple[Mute, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SILENCE", 0.2)
    engine, address, again = mute
    held = Reported()
    async with subscribed(address, held, replay=again):
        assert (await engine.asked())[1] == 0
        await until(lambda: held.failed == 1)
        engine.events.send_multipart(message(5, stored(1)))
        await until(lambda: held.run(prefix(1)) == 1)
        engine.events.send_multipart(message(9, stored(2)))
        assert (await engine.asked())[1] == 6
        await until(lambda: held.failed == 2)
        assert (held.run(prefix(1)), held.run(prefix(2))) == (0, 1)


async def test_an_endless_replay_ends_by_itself(mute: tuple[Mute, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SILENCE", 0.2)
    monkeypatch.setattr(events, "REPLAY", 0.5)
    engine, address, again = mute
    held = Reported()
    async with subscribed(address, held, replay=again):
        client, number = await engine.asked()
        while not held.failed:
            engine.router.send_multipart([client, b"", *message(number, stored(1))])
            number += 1
            await asyncio.sleep(0.01)
        assert number > 1


async def test_a_replay_that_always_lacks_some_ends_by_itself(
    mute: tuple[Mute, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "REPLAY", 0.5)
    engine, address, again = mute
    held = Reported()
    async with subscribed(address, held, replay=again):
        async with asyncio.timeout(20):
            while not held.failed:
                if engine.router.poll(0):
                    client, start = await engine.asked()
                    for number in (start, start + 2):
                        engine.router.send_multipart([client, b"", *message(number, stored(1))])
                await asyncio.sleep(0.005)
        assert held.run(prefix(1)) == 0


async def test_engines_that_share_an_address_do_not_cause_a_connection_with_each_message(
    mute: tuple[Mute, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "APART", 60.0)
    engine, address, again = mute
    held = Reported()
    async with subscribed(address, held, replay=again):
        assert (await engine.asked())[1] == 0
        for _ in range(300):
            engine.events.send_multipart(message(0, stored(1)))
        await until(lambda: held.received == 300)
        assert not engine.router.poll(50)
        assert held.run(prefix(1)) == 0


async def test_the_rest_of_a_replay_that_falls_silent_is_asked_for(mute: tuple[Mute, str, str]) -> None:
    engine, address, again = mute
    held = Reported()
    async with subscribed(address, held, replay=again):
        client, _ = await engine.asked()
        engine.router.send_multipart([client, b"", *message(0, stored(1))])
        client, start = await engine.asked()
        assert start == 1
        engine.router.send_multipart([client, b"", b"", END, b""])
        await until(lambda: held.replays == 1)
        assert held.run(prefix(1)) == 1


async def test_the_fleet_may_tell_of_a_restart(mute: tuple[Mute, str, str]) -> None:
    engine, address, again = mute
    held = Reported()
    async with subscribed(address, held, replay=again) as subscription:
        client, _ = await engine.asked()
        engine.router.send_multipart([client, b"", *message(0, stored(1))])
        await until(lambda: held.run(prefix(1)) == 1)
        subscription.restarted()
        assert held.run(prefix(1)) == 0
        other, start = await engine.asked()
        engine.router.send_multipart([client, b"", *message(1, stored(3))])
        engine.router.send_multipart([other, b"", *message(0, stored(2))])
        engine.router.send_multipart([other, b"", b"", END, b""])
        await until(lambda: held.replays == 1)
        assert (start, held.run(prefix(2)), held.run(prefix(3))) == (0, 1, 0), "the first question's answer is late"


async def test_requests_have_their_turn_while_messages_come(mute: tuple[Mute, str, str]) -> None:
    engine, address, _ = mute
    held = Reported()
    async with subscribed(address, held):
        while not held.received:
            engine.events.send_multipart(message(0, CLEARED))
            await asyncio.sleep(0.01)
        for number in range(1, 5001):
            engine.events.send_multipart(message(number, stored(number)))
        seen = {len(held)}
        async with asyncio.timeout(20):
            while len(held) < 5000:
                await asyncio.sleep(0)
                seen.add(len(held))
        assert len(seen) > 5
        assert held.gaps == 0


async def test_engines_come_and_go_and_leave_nothing() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    free = free_address()
    before = left()
    for _ in range(3):
        opened = []
        for _ in range(50):
            held = Reported()
            held.stored([block[-8:] for block in chain(range(200))], None, SIZE, 0, None)
            opened.append(Subscription(inbox, free, bind=False, replay=free, held=held))
            opened[-1].open()
        assert left() > before
        for subscription in opened:
            subscription.close()
    del held, opened, subscription
    await until(lambda: left() <= before + 10)
    inbox.close()


def left() -> int:
    """Descriptors that are open, and objects that are there, of which fifty engines have hundreds."""
    gc.collect()
    objects = sum(isinstance(one, Reported | Subscription | Follower) for one in gc.get_objects())
    return objects + len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("address", ["tcp://", "nonsense", "tcp://300.1.1.1:1", "udp://127.0.0.1:1"])
async def test_an_address_that_is_none_is_told(address: str) -> None:
    held = Reported()
    with pytest.raises(NoEvents):
        async with subscribed(address, held, bind=True):
            pass
    if "300" not in address:  # a name, which may come to be
        with pytest.raises(NoEvents):
            async with subscribed(free_address(), held, replay=address):
                pass
