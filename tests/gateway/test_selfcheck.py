"""What the running gateway finds out by itself: engines that render, hash or name blocks otherwise than believed.

Simulated engines and a real Mooncake master, all on the loopback.
"""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector.errors import Inexact
from connector.tokens import Tokenizer
from tests.double import Call, Script, completed, refused, whole
from tests.gateway.house import House, Street, eventually, serving
from tests.gateway.simfleet import Fleet, simulated_fleet
from tests.real.stack import MASTER

REQUESTS = 20
LONG = "the engine loads a block of the prefix from the pool " * 12

pytestmark = pytest.mark.skipif(not MASTER.exists(), reason="mooncake_master is not installed")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with simulated_fleet(tmp_path_factory.mktemp("selfcheck")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> dict[str, Any]:
    return fleet.engine()


async def found(house: House, check: str, result: str) -> bool:
    return await house.metric("agreement_checks_total", check=check, result=result) > 0


async def ask(house: House, requests: int = REQUESTS) -> None:
    for number in range(requests):
        assert (await house.chat(f"{number} {LONG}", max_tokens=2)).status_code == 200


async def test_healthy_engines_agree(fleet: Fleet, engine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async with serving(fleet.tree(engine)) as house:
        await ask(house)
        await eventually(lambda: found(house, "keys", "agrees"))
        await eventually(lambda: found(house, "ids", "agrees"))
        assert await found(house, "count", "agrees")
        for line in (await house.metrics()).splitlines():
            if line.startswith("moongate_agreement_checks_total"):
                assert 'result="agrees"' in line, line
    assert "until" not in caplog.text


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"hash_seed": "0"}, "seed"),
        ({"hash_seed": "31337"}, "seed"),
        ({"hash": "sha256"}, "algorithm"),
        ({"block_size": 32}, "block_size"),
        ({"keys": {"prefix": "another"}}, "key_prefix"),
        ({"keys": {"tp": 2}}, "ranks"),
    ],
    ids=str,
)
async def test_wrong_names_of_blocks_are_found(
    fleet: Fleet, engine: dict[str, Any], wrong: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(fleet.tree(engine, **wrong)) as house:
        await ask(house)
        await eventually(lambda: found(house, "keys", kind), 20)
        route = (await house.chat(LONG)).headers["x-moongate-route"]
    assert route.endswith("pool=0")
    assert "nothing of the pool is expected of it" in caplog.text


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (("--vllm-version", "0.30.0"), "tagging"),
        (("--vllm-version", "0.28.0"), "random_seed"),
        (("--block-size", "64"), "block_size"),
        (("--prefix-caching-hash-algo", "xxhash_cbor", "--hash-seed", "0"), "algorithm"),
        (("--hash-seed", "7"), "seed"),
    ],
    ids=str,
)
async def test_one_engine_of_three_that_is_otherwise(
    fleet: Fleet, engine: dict[str, Any], flags: tuple[str, ...], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others stay exact."""
    caplog.set_level(logging.WARNING)
    odd = fleet.engine(*flags)
    async with serving(fleet.tree(engine, fleet.engine(), odd)) as house:
        await ask(house)
        await eventually(lambda: found(house, "keys", kind), 20)
        await eventually(lambda: found(house, "keys", "agrees"), 20)
        assert not await house.metric("inexact_total")
    assert odd["url"].removeprefix("http://") in caplog.text


async def test_what_cannot_be_found_out_again_is_no_less_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.audit.AGAIN", 0.5)
    with simulated_fleet(tmp_path) as own:
        async with serving(own.tree(own.engine("--hash-seed", "7"))) as house:
            await eventually(lambda: found(house, "keys", "seed"), 20)
            await asyncio.to_thread(own.master.stop)
            await eventually(lambda: found(house, "keys", "pool_unreachable"), 20)
            assert await house.metric("engine_agrees") == 0


async def test_events_tell_of_another_seed(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    odd = fleet.engine("--hash-seed", "42", events=True)
    tree = fleet.tree(odd, pool=None)
    async with serving(tree) as house:
        await eventually(lambda: heard(house))
    assert "PYTHONHASHSEED=42" in caplog.text


async def heard(house: House) -> bool:
    await ask(house, 1)
    return await found(house, "events", "seed")


async def test_another_template_is_found(
    fleet: Fleet, engine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(fleet.tree(engine, tokenizer=str(fleet.other_template()))) as house:
        await ask(house)
        await eventually(lambda: found(house, "ids", "template"))
        assert await house.metric("inexact_total", reason="template") > 0
        route = (await house.chat(LONG)).headers["x-moongate-route"]
        assert route.endswith("own=0; pool=0")
        body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
        for _ in range(2):
            route = (await house.client.post("/v1/completions", json=body)).headers["x-moongate-route"]
        assert "own=0" not in route, "what the template has no part in is not held up"
    assert "renders chats with another template" in caplog.text
    assert "the engine loads" not in caplog.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_ids_are_sent_once_they_agreed_often_enough(street: Street, fleet: Fleet, path: str) -> None:
    """The double counts what it is sent as the simulated model would."""
    tokenizer = Tokenizer(fleet.folder)
    wrong = False

    def ids_of(body: dict[str, Any]) -> list[int]:
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
        if isinstance(given, list):
            return given
        made = list(tokenizer.chat(body) if "messages" in body else tokenizer.completion(body))
        return [*made, 1] if wrong else made

    def answer(call: Call) -> Script:
        try:
            ids = ids_of(call.json())
        except Inexact:
            return refused(400, "not known here")
        said = completed("A", "length", prompt=len(ids))
        if call.json().get("return_token_ids"):
            said |= {"prompt_token_ids": ids}
        return whole(200, said)

    engine = await street.engine()
    engine.script = answer
    model = {"name": "tiny", "tokenizer": str(fleet.folder), "send_tokens": "verified"}
    house = await street.house(engine, models=[model], self_check={"audit_every": 1, "calibrate": False})

    def sent() -> list[dict[str, Any]]:
        return [call.json() for call in engine.asked if not call.json().get("return_token_ids")]

    async def one(number: int) -> dict[str, Any]:
        text = f"{number} {LONG}"
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "prompt": text}
        del body["prompt" if path == "/v1/chat/completions" else "messages"]
        assert (await house.client.post(path, json=body)).status_code == 200
        await asyncio.sleep(0.02)
        return sent()[-1]

    def has_ids(body: dict[str, Any]) -> bool:
        return isinstance(body.get("prompt"), list) or "kv_transfer_params" in body

    asked = [await one(number) for number in range(24)]
    assert not any(has_ids(body) for body in asked[:20]), "not before they agreed often"
    assert has_ids(asked[-1])
    chats = path == "/v1/chat/completions"
    text = {"messages": [{"role": "user", "content": f"23 {LONG}"}]} if chats else {"prompt": f"23 {LONG}"}
    assert ids_of(asked[-1]) == ids_of(text)
    wrong = True
    await one(24)
    await eventually(lambda: found(house, "ids", "tokenizer"))
    assert not has_ids(await one(25)), "a disagreement ends it at once"
