"""What users of other gateways met, seen from outside: engines with much to do, away, or back; prompts of every shape.

Placements are read from what engines got and from x-moongate-route, predictions from /admin/explain.
"""

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from connector.simulated.model import NAME, make
from tests.double import CHAT, COMPLETIONS, Call, Engine, Script, completed, whole
from tests.gateway.house import House, Street, chat, eventually, serving, settings
from tests.gateway.simfleet import Fleet, simulated_fleet
from tests.real.shapes import ANSWER, SYSTEM, USER, WEATHER, body, call, calling, parts, result, text
from tests.real.stack import MASTER

needs_master = pytest.mark.skipif(not MASTER.exists(), reason="mooncake_master is not installed")
LONG = "the engine loads a block of the prefix from the pool " * 60
BLOCK = 16
BUSY = 20
"""Requests under way on each engine that is busy."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with simulated_fleet(tmp_path_factory.mktemp("cases")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def adapted(fleet: Fleet) -> list[dict[str, Any]]:
    """Two engines with two adapters."""
    return fleet.engines(
        2, "--lora", "summary=/adapters/one", "--lora", "poems=/adapters/two", events=True, replay=True
    )


def route(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return dict(part.split("=", 1) for part in answer.headers["x-moongate-route"].split("; "))


def name(engine: dict[str, Any] | Engine) -> str:
    url = engine["url"] if isinstance(engine, dict) else engine.url
    return str(url).removeprefix("http://")


async def explained(house: House, asked: dict[str, Any], path: str = CHAT, **question: Any) -> dict[str, Any]:
    question = {"tenant": "team-a", "path": path, "body": asked, **question}
    answer = await house.client.post("/admin/explain", json=question)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def told(house: House, asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What would become of a request, by engine."""
    return {engine["id"]: engine for engine in (await explained(house, asked))["engines"]}


# Engines that are busy, out, or new


@asynccontextmanager
async def many(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """A client with as many connections as it likes."""
    async with httpx.AsyncClient(
        base_url=house.url,
        headers=house.client.headers,
        timeout=60,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        yield client


class Waiting:
    """Engines whose answers wait for a gate, and what is asked of them."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.gate = asyncio.Event()
        self.asked: list[asyncio.Task[httpx.Response]] = []
        for engine in engines:
            engine.script = self._answer

    def _answer(self, _: Call) -> Script:
        return [self.gate, *whole(200, completed(prompt=None))]

    def send(self, client: httpx.AsyncClient, *bodies: dict[str, Any]) -> None:
        self.asked += [asyncio.create_task(client.post(CHAT, json=asked)) for asked in bodies]

    async def arrived(self, number: int) -> list[int]:
        """How many each engine has, once so many are there."""
        await eventually(lambda: sum(len(engine.asked) for engine in self.engines) >= number, 30)
        return [len(engine.asked) for engine in self.engines]

    async def answers(self) -> list[httpx.Response]:
        self.gate.set()
        found = await asyncio.gather(*self.asked)
        self.asked = []
        return list(found)


def often(*engines: Engine, folder: Path, policy: str = "cache_aware") -> dict[str, Any]:
    """Sections for a gateway that looks at these engines often and knows their tokenizer."""
    tree = settings(*engines)
    return {
        "engines": {"static": tree["engines"]["static"], "poll_seconds": 0.05},
        "models": [{"name": "tiny", "tokenizer": str(folder), "block_size": BLOCK}],
        "policy": {"use": policy},
        "telemetry": {"expose_routing": True},
    }


def unlike(count: int, words: str, times: int = 100) -> list[dict[str, Any]]:
    """Prompts that have nothing in common, of some hundreds of tokens."""
    return [chat(f"{number} {words} " * times) for number in range(count)]


@pytest.mark.parametrize("restarts", [False, True], ids=["added", "restarted"])
@pytest.mark.parametrize("policy", ["cache_aware", "cost", "least_loaded"])
async def test_a_newcomer_gets_half_of_a_burst_at_most(
    street: Street, folder: Path, policy: str, restarts: bool
) -> None:
    engines = await street.engines(4)
    *old, new = engines
    if not restarts:
        await new.stop()
    fleet = Waiting(*engines)
    house = await street.house(*engines, **often(*engines, folder=folder, policy=policy))
    async with many(house) as client:
        if restarts:
            await new.stop()
            await house.until("engine_up", 0, engine=name(new))
        fleet.send(client, *unlike(BUSY * len(old), "before"))
        assert min((await fleet.arrived(BUSY * len(old)))[:-1]) >= BUSY - 5
        await new.start()
        await house.until("engine_up", 1, engine=name(new))
        fleet.send(client, *unlike(64, "burst", 300))
        burst = (await fleet.arrived(BUSY * len(old) + 64))[-1]
        assert {answer.status_code for answer in await fleet.answers()} == {200}
    assert burst <= 32


@pytest.mark.parametrize("out", ["sick", "gone"])
@pytest.mark.parametrize("busy", [5, 9])
async def test_an_idle_engine_that_is_out_changes_nothing(street: Street, folder: Path, busy: int, out: str) -> None:
    engines = await street.engines(3)
    *well, away = engines
    fleet = Waiting(*engines)
    house = await street.house(*engines, **often(*engines, folder=folder))
    if out == "sick":
        away.health = 503
    else:
        await away.stop()
    await house.until("engine_up", 0, engine=name(away))
    async with many(house) as client:
        turns = [{"role": "user", "content": LONG}]
        fleet.send(client, {"model": "tiny", "messages": turns})
        home = route((await fleet.answers())[0])["engine"]
        turns += [ANSWER, USER]
        fleet.gate.clear()
        fleet.send(client, *unlike(2 * busy, "other"))
        await fleet.arrived(2 * busy + 1)
        loads = {engine: found["requests"] for engine, found in (await told(house, chat())).items()}
        assert loads == {name(well[0]): busy, name(well[1]): busy, name(away): 0}
        fleet.send(client, {"model": "tiny", "messages": turns})
        assert route((await fleet.answers())[-1])["engine"] == home


@pytest.mark.parametrize("order", ["ab", "aab", "abb"])
async def test_models_in_any_order_have_turns_of_their_own(street: Street, order: str) -> None:
    engines = {model: [await street.engine(model) for _ in range(2)] for model in "ab"}
    static = [{"url": engine.url, "model": model} for model, some in engines.items() for engine in some]
    house = await street.house(*static, models=[{"name": "a"}, {"name": "b"}])
    for model in islice(cycle(order), 12 * len(order)):
        assert (await house.client.post(CHAT, json=chat() | {"model": model})).status_code == 200
    for model, some in engines.items():
        assert [len(engine.asked) for engine in some] == [6 * order.count(model)] * 2


# What a prompt is known by


def picture(seed: int) -> dict[str, Any]:
    data = base64.b64encode(seed.to_bytes(2, "big") * 4000).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def uncounting(street: Street, count: int) -> House:
    """A gateway that cannot know prompts' tokens, before engines that count none."""
    engines = await street.engines(count)
    for engine in engines:
        engine.script = lambda _: whole(200, completed(prompt=None))
    return await street.house(*engines, policy={"use": "cache_aware"}, telemetry={"expose_routing": True})


async def test_a_picture_among_a_tools_results_is_recognised(street: Street) -> None:
    house = await uncounting(street, 2)

    def looked(seed: int) -> dict[str, Any]:
        seen = result([text(LONG), picture(seed)])
        return {"model": "tiny", **body(USER, calling(call()), seen, USER)}

    places = []
    for seed in (1, 2, 1):
        likely = [engine["likely_tokens"] for engine in (await told(house, looked(seed))).values()]
        places.append((max(likely), route(await house.client.post(CHAT, json=looked(seed)))["engine"]))
    (first, home), (other, _), (again, back) = places
    assert first == 0
    assert 512 <= other < 2000, "the text before it alone"
    assert again > 3000
    assert back == home


async def test_conversations_that_begin_with_one_picture_are_told_apart(street: Street) -> None:
    house = await uncounting(street, 4)
    chosen: dict[int, list[str]] = {number: [] for number in range(16)}
    opening = parts(picture(7), text("What is this?"))
    for turns in (1, 2, 3):
        for number, places in chosen.items():
            said = [ANSWER, {"role": "user", "content": f"{number} {LONG}"}] * turns
            asked = {"model": "tiny", **body(opening, *said)}
            places.append(route(await house.client.post(CHAT, json=asked))["engine"])
    assert max(Counter(places[0] for places in chosen.values()).values()) <= 8
    stayed = [place == places[0] for places in chosen.values() for place in places[1:]]
    assert sum(stayed) >= 0.9 * len(stayed)


@needs_master
async def test_tools_are_part_of_a_prompt(fleet: Fleet, adapted: list[dict[str, Any]]) -> None:
    asked = chat(f"tools {LONG}", max_tokens=1)
    other = {**WEATHER, "function": {**WEATHER["function"], "name": "climate"}}
    async with serving(quiet(fleet, *adapted)) as house:
        await house.client.post(CHAT, json=asked | {"tools": [WEATHER]})
        await known(house, asked | {"tools": [WEATHER]})
        for different in (asked, asked | {"tools": [other]}, asked | {"tools": [WEATHER, other]}):
            found = await explained(house, different)
            assert max(engine["own_tokens"] for engine in found["engines"]) < 100
            assert found["pool"]["tokens"] < 100


def quiet(fleet: Fleet, *engines: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A configuration that looks often, and asks engines nothing beside the requests."""
    return fleet.tree(*engines, **model) | {
        "engines": {"static": list(engines), "poll_seconds": 0.1},
        "self_check": {"audit_every": 0, "calibrate": False},
    }


async def known(house: House, asked: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """The explanation of a request once all that a cache can give is held by an engine and in the pool."""
    found: dict[str, Any] = {}

    async def so() -> bool:
        found.update(await explained(house, asked, path))
        held = found["prompt"]["blocks"]["reusable"] * BLOCK
        return held in [engine["own_tokens"] for engine in found["engines"]] and found["pool"]["tokens"] in (held, None)

    try:
        await eventually(so)
    except TimeoutError:
        pytest.fail(f"not known: {found['prompt']} {found['engines']} {found['pool']}")
    return found


@needs_master
async def test_adapters_share_nothing_and_aliases_all(fleet: Fleet, adapted: list[dict[str, Any]]) -> None:
    names = {"base": "tiny", "alias": "small", "summary": "summary", "poems": "poems"}
    async with serving(quiet(fleet, *adapted, aliases=["small"])) as house:

        async def ask(who: str) -> tuple[int, int]:
            """Tokens predicted of engines' own and the pool's, and found."""
            answer = await house.client.post(CHAT, json=asked(who))
            told = route(answer)
            cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return int(told["own"]) + int(told["pool"]), cached

        def asked(who: str) -> dict[str, Any]:
            return chat(f"adapters {LONG}", max_tokens=1) | {"model": names[who]}

        for who in ("base", "summary", "poems"):
            assert await ask(who) == (0, 0), who
            await known(house, asked(who))
        for who in names:
            found = await known(house, asked(who))
            whole = found["prompt"]["blocks"]["reusable"] * BLOCK
            assert whole > 500
            assert await ask(who) == (whole, whole), who


# Token ids and hashes

COMPLETED: dict[str, dict[str, Any]] = {
    "a text": {"prompt": LONG},
    "a text with its first token": {"prompt": f"<|begin|>{LONG}"},
    "a text without special tokens": {"prompt": LONG, "add_special_tokens": False},
    "ids": {"prompt": [number % 4000 + 4 for number in range(200)]},
    "cut short": {"prompt": LONG, "truncate_prompt_tokens": 100},
    "decomposed": {"prompt": f"Cafe\u0301 A\u030a {LONG}"},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": body(USER),
    "a system prompt": body(SYSTEM, USER),
    "tools": body(SYSTEM, USER, tools=[WEATHER]),
    "no tool to be called": body(USER, tools=[WEATHER], tool_choice="none"),
    "a tool was called": body(USER, calling(call()), result(), ANSWER, USER, tools=[WEATHER]),
    "parts": body(parts(text("one"), text("two"))),
    "a template's variable": body(USER, chat_template_kwargs={"enable_thinking": False}),
    "goes on": body(USER, ANSWER, continue_final_message=True, add_generation_prompt=False),
    "nothing to be generated": body(USER, ANSWER, add_generation_prompt=False),
    "a developer": body({"role": "developer", "content": "Be exact."}, USER),
    "decomposed": body({"role": "user", "content": "Cafe\u0301 A\u030a"}),
    "the first token is in it": body({"role": "user", "content": "<|begin|>again"}),
    "reasoning": body(USER, {**ANSWER, "reasoning_content": "hm"}, USER),
}
EARLIER = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}]


@needs_master
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_ids_and_hashes_are_the_engines_or_unknown(
    fleet: Fleet, adapted: list[dict[str, Any]], path: str
) -> None:
    shapes = CHATS if path == CHAT else COMPLETED
    exact = 0
    async with serving(quiet(fleet, *adapted)) as house:
        for label, shape in shapes.items():
            asked = {"model": "tiny", "max_tokens": 1, **shape}
            if path == CHAT:
                asked["messages"] = [{"role": "user", "content": label}, *EARLIER, *shape["messages"]]
            found = await explained(house, asked, path, ids=True)
            if found["prompt"]["inexact"] is not None:
                assert {engine["own_tokens"] for engine in found["engines"]} == {None}, label
                continue
            said = (await house.client.post(path, json=asked | {"return_token_ids": True})).json()
            theirs = said.get("prompt_token_ids") or said["choices"][0].get("prompt_token_ids")
            assert found["prompt"]["ids"] == theirs, label
            assert found["prompt"]["tokens"] == said["usage"]["prompt_tokens"], label
            await known(house, asked, path)
            exact += 1
        assert not await house.metric("agreement_checks_total", check="count", result="differs")
        assert await house.metric("agreement_checks_total", check="count", result="agrees") == exact
        unknown = len(shapes) - exact
        assert unknown == (0 if path == CHAT else 1), "a prompt that the engine cuts"


@pytest.mark.parametrize(
    ("shape", "same"),
    [
        ({}, {}),
        ({"tools": [WEATHER]}, {"tools": [WEATHER]}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
    ids=["plain", "tools", "nothing to be generated"],
)
async def test_ids_are_those_of_transformers(
    street: Street, folder: Path, shape: dict[str, Any], same: dict[str, Any]
) -> None:
    """An implementation that shares nothing with ours."""
    reference: Any = AutoTokenizer.from_pretrained(str(folder))
    engine = await street.engine()
    house = await street.house(engine, **often(engine, folder=folder))
    for messages in ([USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, {"role": "user", "content": f"Cafe\u0301 {LONG}"}]):
        found = await explained(house, {"model": "tiny", "messages": messages, **shape}, ids=True)
        rendered = reference.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **same})
        assert found["prompt"]["ids"] == reference.encode(rendered, add_special_tokens=False)


# Engines that hash otherwise


async def warm(house: House, engines: Sequence[dict[str, Any]], words: str, times: int) -> list[str]:
    """The same prompt over and over: where it went."""
    asked = chat(f"{words} {LONG}", max_tokens=1)
    return [route(await house.client.post(CHAT, json=asked))["engine"] for _ in range(times)]


@needs_master
@pytest.mark.parametrize("flags", [("--block-size", "64"), ("--hash-seed", "7")], ids=str)
async def test_hashes_that_never_agree_raise_an_alarm_and_keep_affinity(fleet: Fleet, flags: tuple[str, ...]) -> None:
    engines = fleet.engines(2, *flags, events=True)
    tree = quiet(fleet, *engines, block_size=BLOCK) | {"self_check": {"audit_every": 0}}
    async with serving(tree) as house:
        await warm(house, engines, "warm", 100)

        async def alarm() -> bool:
            return sum([await house.metric("engine_agrees", engine=name(engine)) for engine in engines]) == 0

        await eventually(alarm, 30)
        for words in ("one", "two", "three"):
            assert len(set(await warm(house, engines, words, 10))) == 1
        assert max(engine["likely_tokens"] for engine in (await told(house, chat(f"one {LONG}"))).values()) > 500


@needs_master
async def test_a_seed_that_changes_with_a_restart_raises_the_alarm(fleet: Fleet) -> None:
    engine = fleet.engine(events=True)
    tree = quiet(fleet, engine) | {"self_check": {"audit_every": 0}}
    async with serving(tree) as house:

        async def agrees(so: float) -> bool:
            checked = await house.metric("agreement_checks_total", check="keys")
            return checked > 0 and await house.metric("engine_agrees") == so

        await eventually(lambda: agrees(1), 30)
        await asyncio.to_thread(fleet.restart, engine, "--hash-seed", "11")
        await eventually(lambda: agrees(0), 30)


@needs_master
async def test_short_and_whole_hashes_name_the_same_blocks(fleet: Fleet) -> None:
    engines = [fleet.engine("--int-block-hashes", events=True), fleet.engine(events=True)]
    async with serving(quiet(fleet, *engines) | {"policy": {"use": "round_robin"}}) as house:
        asked = chat(f"short {LONG}", max_tokens=1)
        for _ in engines:
            await house.client.post(CHAT, json=asked)

        async def both() -> bool:
            found = await explained(house, asked)
            whole = found["prompt"]["blocks"]["reusable"] * BLOCK
            return [engine["own_tokens"] for engine in found["engines"]] == [whole, whole]

        await eventually(both)
