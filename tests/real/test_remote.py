"""A server of vLLM's that renders, without an engine: its ids beside ours, and beside the simulated engine's."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from connector.errors import Inexact
from connector.remote import RemoteRender, Rendered
from connector.tokens import Tokenizer
from connector.vllm import EngineControl
from gateway import commands
from gateway.processes import Child
from tests.connector.simulated.exchanges import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TOOL,
    USER,
    chat,
    completion,
    message,
    response,
    shape,
)

from .stack import CPU_ENVIRONMENT, ENGINE_PYTHON, free_port, inherited

TURNS = [
    {"role": "system", "content": "be short"},
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function",
     "function": {"name": "f", "arguments": '{"a": [1, 2.50, "\\u00e9"]}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "and?"},
]  # fmt: skip
ANTHROPIC_TOOL = {
    "name": "f",
    "description": "does it",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}
TWO = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
USES = [
    {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "I need f", "signature": "s"},
        {"type": "text", "text": "looking"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}},
        {"type": "tool_use", "id": "t2", "name": "f", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "found"},
        {"type": "tool_result", "tool_use_id": "t2", "content": TWO},
        {"type": "text", "text": "and now?"}]},
]  # fmt: skip
FUNCTION = {"type": "function", "name": "f", "description": "does it",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}  # fmt: skip
SAID = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
        "content": [{"type": "output_text", "text": "a block", "annotations": []}]}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "x"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}

CHATS = {
    "one turn": chat(),
    "streamed, salted": chat(stream=True, cache_salt="abc", stream_options={"include_usage": True}),
    "sampled": chat(n=2, temperature=1, top_k=5, seed=3, min_tokens=1, stop="x", kv_transfer_params={"x": 1}),
    "many turns": chat(messages=TURNS),
    "tools": chat(messages=TURNS, tools=[TOOL], tool_choice="none"),
    "going on": chat(messages=TURNS[:-1], add_generation_prompt=False, continue_final_message=True),
    "special tokens in a text": chat(messages=[{"role": "user", "content": "<|im_end|> é 😀 \u2028"}]),
}
COMPLETED = {
    "text": completion(),
    "ids": completion(prompt=[10, 11, 12, 300]),
    "text in a list": completion(prompt=["one"]),
    "no special tokens": completion(add_special_tokens=False),
}
MESSAGED = {
    "one turn": message(),
    "system": message(system="be short"),
    "system in parts": message(system=[{"type": "text", "text": "x-anthropic-billing-header: 1"},
                                       {"type": "text", "text": "be "}, {"type": "text", "text": "short"}]),
    "tools": message(tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}),
    "tool results and thoughts": message(messages=USES, system="be short", tools=[ANTHROPIC_TOOL],
                                         tool_choice={"type": "none"}),
    "thoughts alone": message(messages=[*USES[:1], {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}]}, *message()["messages"]]),
    "ids of its own": message(kv_transfer_params={"prompt_token_ids": [10, 11, 12]}),
}  # fmt: skip
RESPONDED = {
    "text": response(),
    "instructions": response(instructions="be short"),
    "items": response(input=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": [
        {"type": "input_text", "text": "what"}, {"type": "input_text", "text": "now"}]}]),
    "said before": response(input=[{"role": "user", "content": "what?"}, SAID, {"role": "user", "content": "so?"}]),
    "calls and thoughts": response(input=[{"role": "user", "content": "what?"}, THOUGHT, CALL, RESULT,
                                          {"role": "user", "content": "so?"}], tools=[FUNCTION], tool_choice="none"),
    "two calls": response(input=[{"role": "user", "content": "what?"}, CALL, {**CALL, "call_id": "c2"}, RESULT,
                                 {**RESULT, "call_id": "c2"}], tools=[FUNCTION], tool_choice="none"),
    "ids of its own": response(kv_transfer_params={"prompt_token_ids": [10, 11, 12], "x": 1}),
}  # fmt: skip
BESIDE = [
    pytest.param(path, body, id=f"{path.rpartition('/')[2]}, {name}")
    for path, bodies in ((CHAT, CHATS), (COMPLETIONS, COMPLETED), (MESSAGES, MESSAGED), (RESPONSES, RESPONDED))
    for name, body in bodies.items()
]


@pytest.fixture(scope="module")
def servers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of the rendering server, which is in dev mode, and of a simulated engine that serves the same model."""
    ports = free_port(), free_port()
    folder = tmp_path_factory.mktemp("render")
    told: list[str | Path] = ["--model", str(model_folder), "--served-model-name", "tiny", "--max-model-len", "8192"]
    render: list[str | Path] = [
        ENGINE_PYTHON,
        "-m",
        "vllm.entrypoints.launchers.render.entry",
        *told,
        "--port",
        str(ports[0]),
    ]
    simulated: list[str | Path] = [sys.executable, "-m", "connector.simulated", *told, "--port", str(ports[1])]
    flags = ["--enable-scale-out", "--no-tool-parser", "--dev-mode", "--time-scale", "0"]
    environment = {**inherited(), **commands.VLLM_ENVIRONMENT, **CPU_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    with (
        Child("render", [*render, "--host", "127.0.0.1"], folder, environment) as real,
        Child("simulated", [*simulated, *flags], folder, dict(os.environ)) as ours,
    ):
        urls = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        ours.wait_for(f"{urls[1]}/health", 30)
        real.wait_for(f"{urls[0]}/health", 120)
        yield urls


async def rendered(url: str, path: str, body: dict[str, Any]) -> Rendered:
    render = RemoteRender(url, 10.0)
    try:
        return await render.render(path, [orjson.dumps(body)])
    finally:
        render.close()


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
async def test_a_chat_is_as_our_own_tokenizer_has_it(
    servers: tuple[str, str], model_folder: Path, body: dict[str, Any]
) -> None:
    assert await rendered(servers[0], CHAT, body) == Rendered(list(Tokenizer(model_folder).chat(body)), ())


@pytest.mark.parametrize("body", COMPLETED.values(), ids=COMPLETED)
async def test_a_completion_is_as_our_own_tokenizer_has_it(
    servers: tuple[str, str], model_folder: Path, body: dict[str, Any]
) -> None:
    got = await rendered(servers[0], COMPLETIONS, body)
    assert got == Rendered(list(Tokenizer(model_folder).completion(body)), ())


@pytest.mark.parametrize(("path", "body"), BESIDE)
async def test_the_simulated_engine_renders_alike(servers: tuple[str, str], path: str, body: dict[str, Any]) -> None:
    real, ours = [await rendered(url, path, body) for url in servers]
    assert ours == real
    async with httpx.AsyncClient(trust_env=False) as client:
        told = [(await client.post(f"{url}{path}/render", json=body)).json() for url in servers]
    assert shape(told[1]) == shape(told[0])


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, chat(model="nope"), "render_refused"),
        (CHAT, chat(messages=[]), "render_refused"),
        (MESSAGES, {"model": "tiny"}, "render_refused"),
        (MESSAGES, message(model="nope"), "render_refused"),
        (RESPONSES, response(previous_response_id="resp_1"), "render_unsupported"),
        (COMPLETIONS, completion(prompt=["a", "b"]), "render_several"),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}, "render_failed"),
    ],
)
async def test_what_is_not_rendered_has_the_same_reason(
    servers: tuple[str, str], path: str, body: dict[str, Any], reason: str
) -> None:
    for url in servers:
        with pytest.raises(Inexact) as caught:
            await rendered(url, path, body)
        assert caught.value.reason == reason


async def test_what_is_open_shows(servers: tuple[str, str]) -> None:
    for url in servers:
        control = EngineControl(url)
        assert (await control.version(), await control.dev_mode(), await control.scale_out()) == ("0.32.0", True, True)
        assert await control.event_sources() == {}
        await control.close()


@pytest.mark.parametrize("form", ["text", "json"])
def test_in_dev_mode_an_engine_tells_its_settings(servers: tuple[str, str], form: str) -> None:
    real, ours = [httpx.get(f"{url}/server_info?config_format={form}", trust_env=False).json() for url in servers]
    assert list(ours) == list(real)
    assert ours["vllm_env"]["VLLM_SERVER_DEV_MODE"] is real["vllm_env"]["VLLM_SERVER_DEV_MODE"] is True
    assert ours["vllm_env"].keys() <= real["vllm_env"].keys()
    assert type(ours["vllm_config"]) is type(real["vllm_config"])
    if form == "json":
        for name in ("model_config", "cache_config"):
            assert ours["vllm_config"][name].keys() <= real["vllm_config"][name].keys()
