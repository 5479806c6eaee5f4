"""The endpoints behind --enable-scale-out, closed and open."""

from typing import Any

import httpx
import pytest

from connector.simulated.scale_out import ROUTES
from connector.simulated.serving import Flags, Model

from .conftest import Run
from .exchanges import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    SCALE_OUT,
    chat,
    completion,
    message,
    prompt_tokens,
    response,
)

OPEN = Flags(parses_tools=False, scale_out=True)
IDS = {"prompt_token_ids": [10, 11, 12]}
ASKED: dict[str, dict[str, Any]] = {CHAT: chat(), COMPLETIONS: completion(), MESSAGES: message(), RESPONSES: response()}


def test_the_routes_are_vllms() -> None:
    assert ROUTES == SCALE_OUT


@pytest.mark.parametrize("path", ROUTES)
async def test_without_the_flag_the_routes_are_closed(run: Run, path: str) -> None:
    async with run() as (client, _):
        answer = await client.post(path, json={})
        assert answer.status_code == httpx.codes.FORBIDDEN
        assert answer.json()["error"] == {
            "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
            "type": "PermissionDeniedError",
            "param": None,
            "code": 403,
        }


@pytest.mark.parametrize("path", ASKED)
async def test_a_render_is_what_the_engine_computes_on(run: Run, path: str) -> None:
    async with run(flags=OPEN) as (client, _):
        rendered = (await client.post(f"{path}/render", json=ASKED[path])).json()
        body = {**ASKED[path], "return_token_ids": True}
        answer = (await client.post(path, json=body)).json()
    one = rendered[0] if path == COMPLETIONS else rendered
    assert len(one["token_ids"]) == prompt_tokens(answer["usage"])
    assert one["sampling_params"]["max_tokens"] == 4
    if path == CHAT:
        assert one["token_ids"] == answer["prompt_token_ids"]
    if path == COMPLETIONS:
        assert one["token_ids"] == answer["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_ids_of_its_own_are_taken_and_checked(run: Run, path: str) -> None:
    async with run(flags=OPEN) as (client, _):
        body = {**ASKED[path], "kv_transfer_params": IDS}
        assert (await client.post(f"{path}/render", json=body)).json()["token_ids"] == IDS["prompt_token_ids"]
        assert prompt_tokens((await client.post(path, json=body)).json()["usage"]) == 3
        for wrong in ("x", [], [99_999], [True]):
            refused = await client.post(path, json=body | {"kv_transfer_params": {"prompt_token_ids": wrong}})
            assert refused.status_code == httpx.codes.BAD_REQUEST
            assert "prompt_token_ids" in refused.json()["error"]["message"]


async def test_a_response_begins_with_two_beginnings_where_the_template_writes_one(run: Run, sim_model: Model) -> None:
    begin = sim_model.backend.token_to_id("<|begin|>")
    async with run(flags=OPEN) as (client, _):
        asked = (await client.post(f"{RESPONSES}/render", json=response())).json()["token_ids"]
        same = chat(messages=[{"role": "user", "content": response()["input"]}])
        chatted = (await client.post(f"{CHAT}/render", json=same)).json()["token_ids"]
    assert asked == [begin, *chatted]


async def test_what_a_render_refuses(run: Run) -> None:
    async with run(flags=OPEN) as (client, _):
        earlier = await client.post(f"{RESPONSES}/render", json=response(previous_response_id="resp_1"))
        unknown = await client.post(f"{MESSAGES}/render", json=message(model="nope"))
        several = await client.post(f"{COMPLETIONS}/render", json=completion(prompt=["a", "b"]))
    assert (earlier.status_code, earlier.json()["error"]["param"]) == (400, "previous_response_id")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert [one["request_id"][-2:] for one in several.json()] == ["-0", "-1"]
