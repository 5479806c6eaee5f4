"""What comes through the gateway is what the engine says."""

from typing import Any

import httpx
import openai
import orjson
import pytest

from .ask import CHAT, COMPLETIONS, chat, completion, post, stream, words
from .conftest import KEYS
from .stack import Gateway, Pool

VOLATILE = ("id", "created", "system_fingerprint")


def cases() -> list[tuple[str, dict[str, Any]]]:
    return [
        (CHAT, chat(words(200), max_tokens=40)),
        (CHAT, chat(words(40), max_tokens=12, logprobs=True, top_logprobs=2)),
        (COMPLETIONS, completion(words(200), max_tokens=40)),
        (COMPLETIONS, completion("def f(x):", max_tokens=12, echo=True)),
        (COMPLETIONS, completion(["one", "two words"], max_tokens=12)),
    ]


def lasting(answer: Any) -> Any:
    """An answer without what differs between two askings."""
    kept = {name: value for name, value in answer.items() if name not in VOLATILE}
    if isinstance(kept.get("usage"), dict):
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name != "prompt_tokens_details"}
    return kept


@pytest.mark.parametrize(("path", "body"), cases())
def test_answers_equal_the_engines_own(pool: Pool, gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    own = post(pool.urls[0], path, body)
    through = post(gateway.url, path, body, KEYS["team-a"])
    assert (own.status, through.status) == (200, 200)
    assert lasting(through.data) == lasting(own.data)


@pytest.mark.parametrize(("path", "body"), cases())
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_streams_equal_the_engines_own(
    pool: Pool, gateway: Gateway, path: str, body: dict[str, Any], options: dict[str, bool] | None
) -> None:
    body = body if options is None else {**body, "stream_options": options}
    own, own_events = stream(pool.urls[0], path, body)
    through, events = stream(gateway.url, path, body, KEYS["team-a"])
    assert through == own
    assert ends(events) == ends(own_events)


def ends(events: list[bytes]) -> set[object]:
    """The shapes of the events that end something; how many tokens come before in one is haste."""
    shapes = {shape(event) for event in events}
    return {one for one in shapes if not isinstance(one, tuple) or one[2] == 0 or one[3] != (None,)}


def shape(event: bytes) -> object:
    """Which fields an event has. How many tokens stand in one is a matter of the engine's haste."""
    if event == b"[DONE]":
        return event
    data = orjson.loads(event)
    usage = tuple(data["usage"]) if data.get("usage") else None
    names = frozenset(name for name in data if name != "system_fingerprint")
    return names, usage, len(data["choices"]), tuple(choice["finish_reason"] for choice in data["choices"])


@pytest.mark.parametrize(
    "body",
    [
        chat(words(9000)),
        chat("hi", temperature=-1),
        chat("hi", n=2),
        chat("", messages=[]),
        chat("hi", tool_choice="required"),
        chat("hi", max_tokens=100_000),
        chat("hi", messages="no list"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_refusals_are_the_engines_own(pool: Pool, gateway: Gateway, body: dict[str, Any], *, streamed: bool) -> None:
    body = {**body, "stream": streamed}
    own = post(pool.urls[0], CHAT, body)
    through = post(gateway.url, CHAT, body, KEYS["team-a"])
    assert own.status == httpx.codes.BAD_REQUEST
    assert (through.status, through.data) == (own.status, own.data)


def test_kv_transfer_params_of_a_client_reach_no_engine(gateway: Gateway) -> None:
    for harmful in ({"do_remote_prefill": True}, {"do_remote_decode": True}, {"remote_host": "169.254.169.254"}):
        answer = post(gateway.url, CHAT, chat("hi", kv_transfer_params=harmful), KEYS["team-a"])
        assert answer.status == httpx.codes.OK
        hidden = chat("hi", vllm_xargs={"kv_transfer_params": "x", "cache_salt": "x"})
        assert post(gateway.url, CHAT, hidden, KEYS["team-a"]).status == httpx.codes.OK


def test_the_openai_sdk_works_unchanged(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS["team-a"])
    messages: Any = [{"role": "user", "content": "What is a block?"}]
    with client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

        plain = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=True)
        assert all(chunk.choices for chunk in plain)
        assert client.completions.create(model="tiny", prompt="def f", max_tokens=4).choices[0].text

        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="no-such-model", messages=messages)

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model="tiny", messages=messages)


async def test_the_async_openai_sdk_works_unchanged(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS["team-b"]) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
