"""The masters as they are spoken to: a double that decodes and splits as they do, and real ones."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest

from connector.errors import BadAnswer, Disconnected, TimedOut, Unreachable, WireError
from connector.keys import KeyScheme, Ranks
from connector.mooncake import CHUNK_KEYS, Master
from tests.connector.masters import EMPTY, IN_MEMORY, ON_DISK, asked, holding, keys_of, master_with
from tests.connector.objects import Objects, missing
from tests.connector.peer import Line, Peer, Script, answers, free_port, hold, listen, ok, once, until
from tests.real.stack import start_master

ONE_RANK = KeyScheme.of("Qwen3-8B")
PLENTY = 5.0


@asynccontextmanager
async def mastered(*scripts: Script) -> AsyncIterator[tuple[Master, Peer]]:
    async with listen(*scripts) as peer:
        master = Master([peer.url])
        try:
            yield master, peer
        finally:
            master.close()


# which keys have an object


@pytest.mark.parametrize("tier", ["values", "disk_values", "local_disk_values", "nof_values"])
async def test_a_replica_on_any_tier_counts(tier: str) -> None:
    async with mastered(master_with({FIRST: EMPTY | {"ok": True, tier: [{"object_size": 1}]}})) as (master, _):
        assert await master.query([FIRST]) == {FIRST: "memory" if tier == "values" else "disk"}


async def test_a_replica_in_memory_is_better_than_one_on_disk() -> None:
    async with mastered(master_with({FIRST: ON_DISK | {"values": [{"size_": 1}]}})) as (master, _):
        assert await master.query([FIRST]) == {FIRST: "memory"}


@pytest.mark.parametrize(
    "entry",
    [EMPTY, EMPTY | {"ok": True}, EMPTY | {"ok": True, "values": []}, IN_MEMORY | {"ok": False}],
)
async def test_an_object_without_a_replica_does_not(entry: dict[str, object]) -> None:
    async with mastered(master_with({FIRST: entry})) as (master, _):
        assert await master.query([FIRST]) == {}


async def test_any_number_of_keys_is_asked_for_in_order() -> None:
    keys = [ONE_RANK.keys(number.to_bytes(32))[0] for number in range(1000)]
    async with mastered(holding(keys[::2])) as (master, peer):
        assert set(await master.query(keys)) == await master.resident(keys) == set(keys[::2])
        assert [key for request in peer.requests for key in asked(request.target)] == [*keys, *keys]
        assert max(len(asked(request.target)) for request in peer.requests) == CHUNK_KEYS
        assert len(peer.lines) == 1
        assert await master.query([]) == {}


# odd names


@pytest.mark.parametrize(
    "name", ["a b", "a+b", "100%", "%2C", "a&keys=b", "Qwen 3-8Ü 月", "a/b", "a#b?c", "x=y;z", "@"]
)
async def test_odd_names_arrive_as_they_are(name: str) -> None:
    scheme = KeyScheme.of(name, Ranks(tp=2))
    async with mastered(holding(keys_of(scheme, range(3)))) as (master, peer):
        keys = keys_of(scheme, range(5))
        assert await master.resident(sorted(keys)) == keys_of(scheme, range(3))
        assert await master.wait_for((2).to_bytes(32), scheme, PLENTY)
        assert set(asked(peer.requests[0].target)) == keys


async def test_a_name_with_a_comma_is_unknown_and_not_absent() -> None:
    """The master cannot be asked for it at all: it splits after decoding."""
    scheme = KeyScheme.of("a,b")
    async with mastered(holding(keys_of(scheme, range(3)))) as (master, _):
        with pytest.raises(BadAnswer):
            await master.query(scheme.keys(bytes(32)))
        assert not await master.wait_for(bytes(32), scheme, 0.03)


# a sick master


def whole(data: object) -> bytes:
    return ok(orjson.dumps({"success": True, "data": data}))


[FIRST] = keys_of(ONE_RANK, [0])
NO_ANSWERS = {
    "refusal": ok(b"no", status=b"400 Bad Request"),
    "failure": ok(orjson.dumps({"data": {FIRST: IN_MEMORY}}), status=b"500 Internal Server Error"),
    "html": ok(b"<html>hello</html>"),
    "nothing": ok(b""),
    "no object": ok(b"[]"),
    "a number": ok(b"7"),
    "null": ok(b"null"),
    "no data": ok(b'{"success":true}'),
    "data is null": whole(None),
    "data is a list": whole([]),
    "data is a list of keys": whole([FIRST]),
    "data is text": whole("x"),
    "the key is not there": whole({}),
    "another key": whole({"x": IN_MEMORY}),
    "the entry is null": whole({FIRST: None}),
    "the entry is a list": whole({FIRST: []}),
    "the entry is text": whole({FIRST: "ok"}),
    "the entry is a number": whole({FIRST: 1}),
    "the entry is empty": whole({FIRST: {}}),
    "no ok": whole({FIRST: {name: value for name, value in IN_MEMORY.items() if name != "ok"}}),
    "no tiers": whole({FIRST: {"ok": True}}),
    "not UTF-8": ok(b'{"data":{"\xff":1}}'),
    "deep": ok(b"[" * 100_000),
}


@pytest.mark.parametrize("said", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_a_wrong_answer_is_unknown(said: bytes) -> None:
    async with mastered(answers(said)) as (master, _):
        with pytest.raises(BadAnswer):
            await master.query([FIRST])


@pytest.mark.parametrize(
    "script", [once(), once(b"SSH-2.0\r\n"), once(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")], ids=str
)
async def test_a_broken_exchange_is_unknown(script: Script) -> None:
    async with mastered(script) as (master, _):
        with pytest.raises(WireError):
            await master.query([FIRST])


async def test_a_refused_connection_is_unknown() -> None:
    with pytest.raises(Unreachable):
        await Master([f"http://127.0.0.1:{free_port()}"]).query([FIRST])


async def test_an_answer_without_an_end_is_unknown() -> None:
    async def script(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await line.send(b" " * 65536)

    async with mastered(script) as (master, _):
        with pytest.raises(WireError):
            await master.query([FIRST])


async def drips(line: Line) -> None:
    """An answer that is always about to come."""
    await line.request()
    await line.send(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await asyncio.sleep(0.001)
        await line.send(b" ")


@pytest.mark.parametrize("script", [hold, drips])
async def test_the_deadline_bounds_a_silent_master(script: Script) -> None:
    """The bound is loose for slow machines; the wire's own limits begin at a second."""
    async with mastered(script) as (master, peer):
        async with asyncio.timeout(0.8):
            with pytest.raises(TimedOut):
                await master.query([FIRST], 0.02)
        assert len(peer.lines) == 1
        await until(lambda: master._wires[0].busy == 0)


async def test_a_question_that_is_cancelled_stays_cancelled() -> None:
    async with mastered(hold) as (master, peer):
        asking = asyncio.create_task(master.query([FIRST]))
        await until(lambda: peer.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


# several masters


async def test_the_next_master_is_asked_when_one_fails() -> None:
    async with listen(holding([FIRST])) as peer:
        master = Master([f"http://127.0.0.1:{free_port()}", peer.url])
        with pytest.raises(Unreachable):
            await master.query([FIRST])
        for _ in range(3):
            assert await master.query([FIRST])
        master.close()


@pytest.mark.parametrize("together", [1, 2, 3, 4])
async def test_questions_that_fail_together_do_not_pass_over_the_next_master(together: int) -> None:
    async with listen(holding([FIRST])) as peer:
        master = Master([f"http://127.0.0.1:{free_port()}", peer.url])
        failed = await asyncio.gather(*(master.query([FIRST]) for _ in range(together)), return_exceptions=True)
        assert all(isinstance(error, Unreachable) for error in failed)
        assert await master.query([FIRST])
        master.close()


# which master serves, and what the pool lost


READY: dict[str, object] = {"status": "ok", "role": "leader", "service_ready": True}
STANDBY: dict[str, object] = {"status": "ok", "role": "standby", "service_ready": False}


class Said:
    """What a master tells of itself."""

    def __init__(self, *segments: str) -> None:
        self.health: object = READY
        self.segments: object = {"segments": [segment(name) for name in segments]}
        self.quotas = ok(b"{}", status=b"409 Conflict")
        self.keys = {FIRST}

    async def script(self, line: Line) -> None:
        while True:
            target = (await line.request()).target
            if target == "/health":
                await line.send(ok(self.health if isinstance(self.health, bytes) else orjson.dumps(self.health)))
            elif target == "/get_segments_detail":
                await line.send(ok(orjson.dumps(self.segments)))
            elif target == "/api/v1/tenant_quotas":
                await line.send(self.quotas)
            else:
                await line.send(whole({key: IN_MEMORY if key in self.keys else EMPTY for key in asked(target)}))


def segment(name: str, client: str = "c", status: str = "OK") -> dict[str, object]:
    return {"segment_name": name, "client_id": client, "status": status, "size_bytes": 1}


@asynccontextmanager
async def watched(*said: Said) -> AsyncIterator[tuple[Master, list[Peer]]]:
    """A master that was looked at once, with a clock that counts the times that it is read."""
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(listen(one.script)) for one in said]
        master = Master([peer.url for peer in peers], itertools.count(1.0).__next__)
        stack.callback(master.close)
        await master.look()
        yield master, peers


async def test_a_pool_that_stays_has_lost_nothing() -> None:
    said = Said("a", "b")
    async with watched(said) as (master, _):
        changed = master.changed
        await master.look()
        said.segments = {"segments": [segment(name) for name in "abc"]}
        await master.look()
        assert (master.changed, master.serving) == (changed, True)


@pytest.mark.parametrize(
    "left",
    [
        [],
        [segment("a")],
        [segment("a"), segment("b", client="another")],
        [segment("a"), segment("b", status="UNMOUNTING")],
        None,
    ],
)
async def test_a_segment_that_is_gone_is_a_loss(left: object) -> None:
    said = Said("a", "b")
    async with watched(said) as (master, _):
        changed = master.changed
        said.segments = {"segments": left}
        await master.look()
        assert master.changed > changed


async def test_a_master_that_serves_no_longer_is_a_loss_and_so_is_its_return() -> None:
    said = Said("a")
    async with watched(said) as (master, _):
        for health, serving in ((STANDBY, False), (READY, True)):
            changed = master.changed
            said.health = health
            await master.look()
            assert master.serving is serving
            assert master.changed > changed


@pytest.mark.parametrize("health", [b"OK", b"[]", b"7", b"{}", READY])
async def test_older_masters_say_less_of_their_health(health: object) -> None:
    said = Said()
    said.health = health
    async with watched(said) as (master, _):
        assert master.serving


async def test_the_master_that_serves_is_asked_and_followed() -> None:
    first, second = Said("a"), Said("a")
    first.health = STANDBY
    first.keys = set()
    async with watched(first, second) as (master, peers):
        assert await master.resident([FIRST]) == {FIRST}
        changed = master.changed
        first.keys, second.keys = second.keys, first.keys
        first.health, second.health = READY, STANDBY
        await master.look()
        assert await master.resident([FIRST]) == {FIRST}
        assert master.changed > changed
        assert [len([r for r in peer.requests if r.target.startswith("/batch")]) for peer in peers] == [1, 1]


async def test_a_question_that_fails_is_not_put_to_a_standby() -> None:
    standby = Said()
    standby.health, standby.keys = STANDBY, set()
    serving = Said("a")
    async with watched(standby, serving) as (master, peers):
        for line in peers[1].lines:
            line.reset()
        serving.keys = set()
        with pytest.raises(BadAnswer):
            await master.query(["a,b"])
        assert await master.query([FIRST]) == {}
        assert not [request for request in peers[0].requests if request.target.startswith("/batch")]


async def test_a_look_at_a_silent_master_ends() -> None:
    async with listen(hold) as peer, asyncio.timeout(4):
        master = Master([peer.url, f"http://127.0.0.1:{free_port()}"])
        await master.look()
        assert not master.serving
        master.close()


async def test_a_master_of_several_tenants_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    said = Said("a")
    said.quotas = ok(b"[]")
    async with watched(said) as (master, _):
        await master.look()
    [told] = [record.message for record in caplog.records if "multi-tenant" in record.message]
    assert master._wires[0].origin in told


async def test_the_watch_goes_on_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.mooncake.WATCH_SECONDS", 0.05)
    said = Said("a")
    async with watched(said) as (master, _):
        watch = asyncio.create_task(master.watch())
        said.health = STANDBY
        await until(lambda: not master.serving)
        said.health = READY
        await until(lambda: master.serving)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch


@pytest.mark.skipif((reason := missing()) is not None, reason=reason or "")
def test_a_real_master_of_several_tenants_shows_the_default_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n- name: default\n  quota: 16MB\n- name: other\n  quota: 16MB\n")
    flags = ("--enable_multi_tenants=true", "--tenant_quota_connector_type=file")

    async def look(url: str) -> None:
        master = Master([url])
        await master.look()
        assert master.serving
        assert await master.resident([FIRST, "of another"]) == {FIRST}
        master.close()

    with (
        start_master(tmp_path, extra_args=(*flags, f"--tenant_quota_connector_uri={quotas}")) as master,
        Objects(master.rpc) as objects,
        Objects(master.rpc, tenant="other") as others,
    ):
        objects.put([FIRST])
        others.put(["of another"])
        assert others.exist([FIRST, "of another"]) == 1
        asyncio.run(look(master.admin))
    assert "multi-tenant" in caplog.text


# waiting for a block


def appears(after: int, sick: bytes | None = None) -> Script:
    """The block is there from the n-th question on; before that it is not, or the master is sick."""

    async def script(line: Line) -> None:
        while True:
            keys = asked((await line.request()).target)
            there = len(line.requests) > after
            nothing = sick if sick is not None else whole(dict.fromkeys(keys, EMPTY))
            await line.send(whole(dict.fromkeys(keys, IN_MEMORY)) if there else nothing)

    return script


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_block_that_comes_is_seen(after: int) -> None:
    async with mastered(appears(after)) as (master, peer):
        assert await master.wait_for(bytes(32), ONE_RANK, PLENTY) is True
        assert len(peer.requests) == after + 1


async def test_a_block_that_never_comes_is_not_waited_for_beyond_the_deadline() -> None:
    async with mastered(holding(())) as (master, peer), asyncio.timeout(0.8):
        assert await master.wait_for(bytes(32), ONE_RANK, 0.05) is False
        assert 1 < len(peer.requests) < 20, "asked again, and not without a pause"


async def test_a_silent_master_is_not_waited_for_either() -> None:
    async with mastered(hold) as (master, _), asyncio.timeout(0.8):
        assert await master.wait_for(bytes(32), ONE_RANK, 0.03) is False


async def test_a_block_is_there_when_all_its_ranks_are() -> None:
    scheme = KeyScheme.of("m", Ranks(tp=2))
    async with mastered(holding(scheme.keys(bytes(32))[:1])) as (master, _):
        assert await master.wait_for(bytes(32), scheme, 0.03) is False


@pytest.mark.parametrize("said", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_errors_in_between_are_survived(said: bytes) -> None:
    async with mastered(appears(1, sick=said)) as (master, _):
        assert await master.wait_for(bytes(32), ONE_RANK, PLENTY) is True


@pytest.mark.parametrize("broken", [once, lambda: once(b"SSH-2.0\r\n")])
async def test_broken_connections_in_between_are_survived(broken: Callable[[], Script]) -> None:
    async with mastered(broken(), broken(), holding([FIRST])) as (master, peer):
        assert await master.wait_for(bytes(32), ONE_RANK, PLENTY) is True
        assert len(peer.lines) == 3


async def test_another_master_may_know_of_the_block() -> None:
    async with listen(holding([FIRST])) as peer:
        master = Master([f"http://127.0.0.1:{free_port()}", peer.url])
        assert await master.wait_for(bytes(32), ONE_RANK, PLENTY) is True
        master.close()


# names that are learned


STRANGE = "space@Qwen3-8B@cfg:0123456789ab@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"


def telling(listing: bytes, held: Iterable[str]) -> Script:
    """A master that lists all its keys, and holds some."""
    stored = frozenset(held)

    async def script(line: Line) -> None:
        while True:
            target = (await line.request()).target
            if target == "/get_all_keys":
                await line.send(ok(listing))
            else:
                await line.send(whole({key: IN_MEMORY if key in stored else EMPTY for key in asked(target)}))

    return script


def listed(keys: Iterable[str]) -> bytes:
    return "".join(f"{key}\n" for key in keys).encode()


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32) for number in numbers]


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2), Ranks(tp=4, pp=2, dcp=2), Ranks(groups=(0, 1))])
async def test_engines_name_their_blocks_otherwise_and_are_understood(ranks: Ranks) -> None:
    scheme = KeyScheme.of("space@Qwen3-8B@cfg:0123456789ab", ranks)
    stored = keys_of(scheme, range(8))
    others = {f"other-{number}" for number in range(1000)} | keys_of(ONE_RANK, range(100, 200))
    async with mastered(telling(listed(stored | others), stored | others)) as (master, peer):
        learnt = KeyScheme.from_found(prefixes(await master.keys_of(hashes(3, 4))))
        assert [request.target for request in peer.requests] == ["/get_all_keys"]
        assert set(learnt.prefixes) == set(scheme.prefixes)
        assert await master.resident(sorted(stored)) == stored


def prefixes(keys: Collection[str]) -> set[str]:
    """What stands before the hash."""
    return {key.rpartition("@")[0] + "@" for key in keys}


async def test_a_prefix_is_one_that_any_of_the_blocks_is_under() -> None:
    window = STRANGE.replace("group:0", "group:1")
    stored = [STRANGE + block.hex() for block in hashes(0, 1)] + [window + hashes(1)[0].hex()]
    async with mastered(telling(listed(stored), stored)) as (master, _):
        assert prefixes(await master.keys_of(hashes(0, 1))) == {STRANGE, window}
        assert prefixes(await master.keys_of(hashes(0, 2))) == {STRANGE}
        assert prefixes(await master.keys_of(hashes(2))) == set()


@pytest.mark.parametrize("listing", [b"", b"\n\n", b"@", b"no hash\n@@\n", b"\xff@\n", bytes(32).hex().encode()])
async def test_a_list_without_a_name_for_the_block_finds_none(listing: bytes) -> None:
    async with mastered(telling(listing, ())) as (master, _):
        assert prefixes(await master.keys_of(hashes(0))) == set()


async def test_the_last_line_needs_no_end() -> None:
    stored = [STRANGE + hashes(0)[0].hex()]
    async with mastered(telling(listed(stored).strip(), stored)) as (master, _):
        assert prefixes(await master.keys_of(hashes(0))) == {STRANGE}


async def test_an_endless_list_is_read_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.mooncake.MAX_LISTING", 256 * 1024)
    stored = [STRANGE + hashes(0)[0].hex()]

    async def endless(line: Line) -> None:
        await line.request()
        await line.send(b"HTTP/1.1 200 OK\r\n\r\n" + listed(stored))
        while True:
            await line.send(listed(f"key-{number}" for number in range(5000)))

    async with mastered(endless, holding(stored)) as (master, _):
        assert prefixes(await master.keys_of(hashes(0))) == {STRANGE}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (answers(ok(b"", status=b"404 Not Found")), BadAnswer),
        (answers(ok(b"x" * 200_000)), BadAnswer),
        (telling(b"\xff@" + bytes(32).hex().encode(), ()), BadAnswer),
        (once(b"SSH-2.0\r\n"), BadAnswer),
        (once(), Disconnected),
    ],
)
async def test_a_master_that_does_not_tell_is_an_error(script: Script, error: type[WireError]) -> None:
    async with mastered(script) as (master, _):
        with pytest.raises(error):
            prefixes(await master.keys_of(hashes(0)))


@pytest.mark.parametrize("script", [hold, drips])
async def test_a_master_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    monkeypatch.setattr("connector.mooncake.LEARN_SECONDS", 0.02)
    async with mastered(script) as (master, _):
        with pytest.raises(TimedOut):
            prefixes(await master.keys_of(hashes(0)))


async def test_the_next_master_is_asked_for_names_too() -> None:
    stored = [STRANGE + hashes(0)[0].hex()]
    async with listen(telling(listed(stored), stored)) as peer:
        master = Master([f"http://127.0.0.1:{free_port()}", peer.url])
        with pytest.raises(Unreachable):
            prefixes(await master.keys_of(hashes(0)))
        assert prefixes(await master.keys_of(hashes(0))) == {STRANGE}
        master.close()
