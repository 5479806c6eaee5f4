"""Where traffic goes: four simulated engines over a real pool, the default policy, and what users of gateways met.

What is counted is what the gateway says of each placement (x-moongate-route).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.config import PolicyChoice
from tests.double import CHAT
from tests.gateway.house import House, chat, serving
from tests.gateway.simfleet import Fleet, simulated_fleet
from tests.real.stack import MASTER

pytestmark = pytest.mark.skipif(not MASTER.exists(), reason="mooncake_master is not installed")

ENGINES = 4
WORDS = ("engine", "loads", "a", "block", "of", "its", "prefix", "from", "the", "pool", "and", "decodes", "what")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with simulated_fleet(tmp_path_factory.mktemp("spread")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> list[dict[str, Any]]:
    """A prompt of 8k tokens takes half a second there, in a tenth of it."""
    flags = ("--time-scale", "0.1", "--prefill-tokens-per-second", "16000", "--blocks", "8192")
    return [fleet.engine(*flags, events=True) for _ in range(ENGINES)]


@pytest.fixture
def tree(fleet: Fleet, engines: list[dict[str, Any]]) -> dict[str, Any]:
    return fleet.tree(*engines) | {
        "engines": {"static": engines, "poll_seconds": 0.5},
        "policy": {"use": PolicyChoice().use},
        "self_check": {"audit_every": 0, "calibrate": False},
    }


def text(seed: object, tokens: int) -> str:
    """Words that come to about so many tokens."""
    chance = random.Random(str(seed))
    return f"{seed} " + " ".join(chance.choice(WORDS) for _ in range(tokens * 2 // 3))


def route(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return dict(part.split("=", 1) for part in answer.headers["x-moongate-route"].split("; "))


class Talk:
    """A conversation: each turn sends all that was said before."""

    def __init__(self, name: object, system: str | None = None) -> None:
        self.name = name
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.engines: list[str] = []

    async def turn(self, house: House, tokens: int = 60, **fields: Any) -> dict[str, str]:
        self.messages.append({"role": "user", "content": text(f"{self.name} {len(self.messages)}", tokens)})
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 8, **fields}
        answer = await house.client.post(CHAT, json=body, timeout=60)
        told = route(answer)
        self.messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        self.engines.append(told["engine"])
        return told


async def test_a_system_prompt_that_all_share_makes_no_hot_spot(tree: dict[str, Any]) -> None:
    system = text("hot", 8000)
    users = [Talk(f"user {number}", system) for number in range(60)]
    waiting = [user for user in users for _ in range(3)]
    busy: set[Talk] = set()
    async with serving(tree) as house:

        async def client() -> None:
            while waiting:
                user = next((user for user in waiting if user not in busy), None)
                if user is None:
                    await asyncio.sleep(0.01)
                    continue
                waiting.remove(user)
                busy.add(user)
                await user.turn(house)
                busy.remove(user)

        await asyncio.gather(*(client() for _ in range(16)))
    chosen = Counter(engine for user in users for engine in user.engines)
    assert max(chosen.values()) <= 0.4 * sum(chosen.values()), chosen
    later = [engine == user.engines[0] for user in users for engine in user.engines[1:]]
    assert sum(later) >= 0.8 * len(later)


@pytest.mark.parametrize("shared", [0, 8000])
@pytest.mark.parametrize("own", [60, 1500])
async def test_sessions_one_after_another_spread(tree: dict[str, Any], shared: int, own: int) -> None:
    system = text(f"sequential {own}", shared) if shared else None
    async with serving(tree) as house:
        chosen = Counter(
            [(await Talk(f"{shared} {own} {number}", system).turn(house, own))["engine"] for number in range(40)]
        )
    assert len(chosen) == ENGINES, chosen
    assert max(chosen.values()) <= 2 * 40 / ENGINES, chosen


async def test_a_conversation_stays_where_it_is(tree: dict[str, Any]) -> None:
    talks = [Talk(f"stays {number}") for number in range(20)]
    async with serving(tree) as house:
        for _ in range(10):
            await asyncio.gather(*(talk.turn(house) for talk in talks))
    stayed = [engine == talk.engines[0] for talk in talks for engine in talk.engines[1:]]
    assert sum(stayed) >= 0.9 * len(stayed)


async def test_two_gateways_choose_alike(tree: dict[str, Any]) -> None:
    talks = [Talk(f"alternates {number}") for number in range(10)]
    async with serving(tree) as one, serving(tree) as other:
        for turn in range(6):
            for talk in talks:
                await talk.turn((one, other)[turn % 2])
    stayed = [engine == talk.engines[0] for talk in talks for engine in talk.engines[1:]]
    assert sum(stayed) >= 0.9 * len(stayed)


async def test_identical_cold_prompts_are_computed_once_or_twice(tree: dict[str, Any]) -> None:
    body = chat(text("herd", 8000), max_tokens=4)
    async with serving(tree) as house:
        answers = await asyncio.gather(*(house.client.post(CHAT, json=body, timeout=60) for _ in range(60)))
    assert len({route(answer)["engine"] for answer in answers}) <= 2


async def test_a_short_prompt_is_followed_by_its_longer_one(tree: dict[str, Any]) -> None:
    async with serving(tree) as house:
        for number in range(8):
            talk = Talk(f"short {number}")
            await talk.turn(house, 20)
            await talk.turn(house, 200)
            assert len(set(talk.engines)) == 1


async def test_what_another_tenant_sent_is_not_held(tree: dict[str, Any]) -> None:
    body = chat(text("tenants", 4000), max_tokens=4)
    async with serving(tree) as house:
        assert route(await house.client.post(CHAT, json=body))["own"] == "0"
        other = {"authorization": "Bearer sk-team-b"}
        assert route(await house.client.post(CHAT, json=body, headers=other))["own"] == "0"
        again = route(await house.client.post(CHAT, json=body))
    own = int(again["own"])
    assert own > 2000
    assert own % 16 == 0


async def test_conversations_that_begin_alike_spread(tree: dict[str, Any]) -> None:
    first = text("begins alike", 300)
    async with serving(tree) as house:
        chosen: Counter[str] = Counter()
        for number in range(16):
            messages = [
                {"role": "user", "content": first},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": text(f"goes on {number}", 800)},
            ]
            body = {"model": "tiny", "messages": messages, "max_tokens": 4}
            chosen[route(await house.client.post(CHAT, json=body, timeout=60))["engine"]] += 1
    assert max(chosen.values()) <= 8, chosen
