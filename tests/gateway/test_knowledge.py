"""What the gateway believes of engines that come, go and hash otherwise; and what it goes by where it knows nothing."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.double import CHAT, completed, whole
from tests.gateway.house import House, Street, chat, eventually, serving
from tests.gateway.simfleet import Fleet, simulated_fleet
from tests.real.stack import MASTER

needs_master = pytest.mark.skipif(not MASTER.exists(), reason="mooncake_master is not installed")
LONG = "the engine loads a block of the prefix from the pool " * 60


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with simulated_fleet(tmp_path_factory.mktemp("knowledge")) as fleet:
        yield fleet


def watched(fleet: Fleet, *engines: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A configuration that looks often."""
    return fleet.tree(*engines, **model) | {
        "engines": {"static": list(engines), "poll_seconds": 0.1},
        "self_check": {"audit_every": 0, "calibrate": False},
    }


def route(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return dict(part.split("=", 1) for part in answer.headers["x-moongate-route"].split("; "))


def name(engine: dict[str, Any]) -> str:
    return str(engine["url"]).removeprefix("http://")


async def told(house: House, body: dict[str, Any], tenant: str = "team-a") -> dict[str, Any]:
    """What would become of a request, by engine."""
    answer = await house.client.post("/admin/explain", json={"tenant": tenant, "body": body})
    assert answer.status_code == 200, answer.text
    return {engine["id"]: engine for engine in answer.json()["engines"]}


# Restarts and clearings


@needs_master
@pytest.mark.parametrize("replay", [True, False])
async def test_what_an_engine_held_before_its_restart_is_forgotten(fleet: Fleet, replay: bool) -> None:
    engine, other = fleet.engine(events=True, replay=replay), fleet.engine(events=True, replay=replay)
    async with serving(watched(fleet, engine, other)) as house:
        kept, lost = chat(f"kept {LONG}"), chat(f"lost {LONG}")
        places = {}
        for body in (kept, lost, *(chat(f"{n} {LONG}") for n in range(4))):
            places[str(body)] = route(await house.client.post(CHAT, json=body))["engine"]
        engine, other = (engine, other) if places[str(lost)] == name(engine) else (other, engine)

        async def known() -> bool:
            return bool((await told(house, lost))[name(engine)]["own_tokens"] > 0)

        await eventually(known)
        held = (await told(house, kept))[name(other)]["own_tokens"]
        await asyncio.to_thread(fleet.restart, engine)

        async def gone() -> bool:
            found = (await told(house, lost))[name(engine)]
            return (found["out"], found["own_tokens"]) == (None, 0)

        await eventually(gone)
        assert await house.metric("engine_held_blocks", engine=name(engine)) == 0
        assert (await told(house, kept))[name(other)]["own_tokens"] == held, "the other's stand"
        tree = watched(fleet, engine)
    async with serving(tree) as house:
        await house.client.post(CHAT, json=lost)

        async def again() -> bool:
            return bool((await told(house, lost))[name(engine)]["own_tokens"] > 0)

        await eventually(again)


@needs_master
async def test_a_gateway_that_comes_later_is_told_what_engines_hold(fleet: Fleet) -> None:
    engine = fleet.engine(events=True, replay=True)
    body = chat(f"before it came {LONG}")
    async with serving(watched(fleet, engine)) as house:
        assert route(await house.client.post(CHAT, json=body))["own"] == "0"
    async with serving(watched(fleet, engine)) as house:

        async def known() -> bool:
            return bool((await told(house, body))[name(engine)]["own_tokens"] > 0)

        await eventually(known)


@needs_master
async def test_an_engine_that_clears_its_cache_holds_nothing(fleet: Fleet) -> None:
    engines = [fleet.engine("--dev-mode", events=True) for _ in range(2)]
    async with serving(watched(fleet, *engines)) as house:
        for number in range(4):
            await house.client.post(CHAT, json=chat(f"{number} {LONG}"))

        async def held(engine: dict[str, Any]) -> float:
            return await house.metric("engine_held_blocks", engine=name(engine))

        async def both() -> bool:
            return min([await held(engine) for engine in engines]) > 0

        await eventually(both)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{engines[0]['url']}/reset_prefix_cache")).status_code == 200
            short = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
            await client.post(engines[0]["url"] + CHAT, json=short)  # it says so with its next step

        async def one() -> bool:
            return await held(engines[0]) <= 1

        await eventually(one)
        assert await held(engines[1]) > 1


# Engines that hash otherwise


@needs_master
async def test_an_engine_that_hashes_otherwise_keeps_its_conversations(fleet: Fleet) -> None:
    engines = [fleet.engine(events=True) for _ in range(3)]
    tree = watched(fleet, *engines, block_size=32) | {"self_check": {"audit_every": 5}}
    talks: list[list[dict[str, str]]] = [[] for _ in range(8)]
    places: list[list[str]] = [[] for _ in talks]
    async with serving(tree) as house:
        for turn in range(12):
            for number, messages in enumerate(talks):
                messages.append({"role": "user", "content": f"{number} {turn} {LONG[:2500]}"})
                body = {"model": "tiny", "messages": messages, "max_tokens": 4}
                places[number].append(route(await house.client.post(CHAT, json=body))["engine"])
                messages.append({"role": "assistant", "content": "Yes."})

        async def alarm() -> bool:
            return await house.metric("engine_agrees") == 0

        await eventually(alarm, 20)
        assert await house.metric("agreement_checks_total", check="keys", result="block_size") > 0
    stayed = [engine == visited[-1] for visited in places for engine in visited[4:]]
    assert sum(stayed) >= 0.9 * len(stayed)


# Prompts whose tokens are not known


def picture(seed: int) -> dict[str, Any]:
    data = base64.b64encode(seed.to_bytes(2, "big") * 4000).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def looking(*content: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": [*content, {"type": "text", "text": LONG}]}]}


async def test_a_picture_is_part_of_what_is_recognised(street: Street) -> None:
    engines = await street.engines(2)
    for engine in engines:
        engine.script = lambda _: whole(200, completed(prompt=None))
    house = await street.house(*engines, policy={"use": "cache_aware"}, telemetry={"expose_routing": True})
    place = route(await house.client.post(CHAT, json=looking(picture(1))))["engine"]
    again, other = await told(house, looking(picture(1))), await told(house, looking(picture(2)))
    assert again[place]["likely_tokens"] > 3000
    assert max(engine["likely_tokens"] for engine in other.values()) < 100
    assert route(await house.client.post(CHAT, json=looking(picture(1))))["engine"] == place


async def test_so_are_the_ends_of_long_links_and_tools(street: Street) -> None:
    engine = await street.engine()
    engine.script = lambda _: whole(200, completed(prompt=None))
    house = await street.house(engine, policy={"use": "cache_aware"}, telemetry={"expose_routing": True})

    def link(end: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"https://pictures.example/{'a' * 2000}{end}"}}

    tool = {"type": "function", "function": {"name": "look", "description": LONG, "parameters": {}}}
    body = looking(link("1"))
    likely = []
    await house.client.post(CHAT, json=body | {"tools": [tool]})
    for asked in (body | {"tools": [tool]}, looking(link("2")) | {"tools": [tool]}, body):
        (found,) = (await told(house, asked)).values()
        likely.append(found["likely_tokens"])
    assert likely[0] > likely[1] > likely[2] == 0


async def test_what_changes_with_each_request_of_one_client_is_left_out(street: Street) -> None:
    engine = await street.engine()
    engine.script = lambda _: whole(200, {"id": "msg", "type": "message", "usage": {"input_tokens": 5}})
    house = await street.house(engine, policy={"use": "cache_aware"})

    def body(number: int) -> dict[str, Any]:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system = [billing, {"type": "text", "text": LONG}]
        return {"model": "tiny", "max_tokens": 4, "system": system, "messages": [{"role": "user", "content": "?"}]}

    await house.client.post("/v1/messages", json=body(1))
    question = {"tenant": "team-a", "path": "/v1/messages", "body": body(2)}
    (found,) = (await house.client.post("/admin/explain", json=question)).json()["engines"]
    assert found["likely_tokens"] > 500


# Sessions


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ([("x-session-id", "chat-7")], [("X-SESSION-ID", "chat-7")]),
        ([("x-session-id", "a"), ("x-session-id", "b")], [("x-session-id", "a")]),
        ([("x-session-id", "s" * 10_000)], [("X-Session-Id", "s" * 10_000)]),
        ([("x-session-id", "ü\t|")], [("x-session-id", "ü\t|")]),
    ],
)
async def test_a_session_stays(street: Street, first: list[tuple[str, str]], again: list[tuple[str, str]]) -> None:
    engines = await street.engines(5)
    house = await street.house(*engines, policy={"use": "session"}, telemetry={"expose_routing": True})

    async def ask(headers: list[tuple[str, str]], text: str) -> dict[str, str]:
        given = [*headers, ("authorization", house.client.headers["authorization"])]
        encoded = [(key.encode(), value.encode()) for key, value in given]
        return route(await house.client.post(CHAT, json=chat(text), headers=encoded))

    places = {(await ask(first, "one"))["engine"]} | {(await ask(again, text))["engine"] for text in ("two", "three")}
    assert len(places) == 1
    assert (await ask(again, "four"))["reason"] == "session"
    seen = [call for engine in engines for call in engine.calls if call.path == CHAT]
    assert not any(call.headers("x-session-id") for call in seen), "it is the gateway's"


async def test_an_empty_session_is_none(street: Street) -> None:
    house = await street.house(*await street.engines(3), policy={"use": "session"}, telemetry={"expose_routing": True})
    answer = await house.client.post(CHAT, json=chat(), headers={"x-session-id": ""})
    assert route(answer)["reason"] != "session"


async def test_the_sessions_header_can_have_another_name(street: Street) -> None:
    house = await street.house(
        *await street.engines(2),
        policy={"use": "session", "session_header": "X-Chat"},
        telemetry={"expose_routing": True},
    )
    assert route(await house.client.post(CHAT, json=chat(), headers={"x-chat": "1"}))["reason"] == "session"
    assert route(await house.client.post(CHAT, json=chat(), headers={"x-session-id": "1"}))["reason"] != "session"
