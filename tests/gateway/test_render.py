"""Prompts that a server renders: pictures aside, /v1/responses, /v1/messages and models without a tokenizer here."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.gateway.house import House, Street, serving
from tests.gateway.simfleet import Fleet, simulated_fleet
from tests.real.stack import MASTER

pytestmark = pytest.mark.skipif(not MASTER.exists(), reason="mooncake_master is not installed")

LONG = "the engine loads a block of the prefix from the pool " * 12
CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/responses": {"input": LONG, "instructions": "Be brief.", "max_output_tokens": 4},
    "/v1/messages": {**CHAT, "system": "Be brief."},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with simulated_fleet(tmp_path_factory.mktemp("render")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> list[dict[str, Any]]:
    return [fleet.engine("--enable-scale-out"), fleet.engine("--enable-scale-out", role="prefill")]


async def route(house: House, path: str, first: str = "") -> dict[str, str]:
    """What the gateway tells of a request, in which `first` stands before everything else."""
    text = (
        orjson.dumps({"model": "tiny", **BODIES[path]})
        .decode()
        .replace("the engine loads", f"{first}the engine loads", 1)
    )
    answer = await house.client.post(path, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    return dict(part.strip().split("=") for part in answer.headers["x-moongate-route"].split(";"))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("here", [True, False], ids=["tokenizer", "no tokenizer"])
async def test_a_second_request_is_predicted(
    fleet: Fleet, engines: list[dict[str, Any]], path: str, here: bool
) -> None:
    model: dict[str, Any] = {"render": {"url": engines[0]["url"], "deadline_ms": 5000}}
    if not here:
        model["tokenizer"] = None
    async with serving(fleet.tree(engines[0], **model)) as house:
        await route(house, path)
        second = await route(house, path)
        assert int(second["own"]) >= 96
        assert await house.metric("prediction_error_tokens_sum") <= 16
        assert not await house.metric("inexact_total")
        assert await house.metric("agreement_checks_total", check="count", result="agrees") == 2
        assert not await house.metric("agreement_checks_total", check="count", result="differs")


@pytest.mark.parametrize("path", BODIES)
async def test_prefill_apart(fleet: Fleet, engines: list[dict[str, Any]], path: str) -> None:
    """Responses and messages have their prompt computed as a completion of its ids."""
    tree = fleet.tree(
        fleet.engine("--enable-scale-out", role="decode"),
        engines[1],
        render={"url": engines[0]["url"], "deadline_ms": 5000},
    )
    async with serving(tree | {"policy": {"use": "disaggregated", "settings": {"min_prefill_tokens": 16}}}) as house:
        first = await route(house, path, "apart ")
        assert await house.metric("handoffs_total", result="seen") == 1, first
        assert first["prefill"].split(":")[-1] == engines[1]["url"].split(":")[-1]


async def test_a_server_that_does_not_render(fleet: Fleet, street: Street) -> None:
    plain = fleet.engine()
    async with serving(fleet.tree(plain, render={"url": plain["url"]})) as house:
        assert int((await route(house, "/v1/messages"))["own"]) == 0
        assert await house.metric("inexact_total", reason="render_forbidden") == 1
        await route(house, "/v1/chat/completions")
        assert await house.metric("inexact_total") == 1, "what is rendered here needs no server"
