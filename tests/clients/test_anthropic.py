"""Anthropic's Python SDK, unchanged, on /v1/messages of `moongate up`."""

from collections.abc import AsyncIterator, Iterator

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam
from anthropic.types.beta import BetaMessageParam
from pydantic import BaseModel

from tests.clients.conftest import MODEL, Fleet, Kill

HELLO: list[MessageParam] = [{"role": "user", "content": "Say something about caches."}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather to come.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


class Verdict(BaseModel):
    """An answer that has a form."""

    title: str
    score: int


@pytest.fixture
def client(fleet: Fleet) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fleet.url, api_key=fleet.key) as client:
        yield client


@pytest.fixture
async def asynchronous(fleet: Fleet) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=fleet.url, api_key=fleet.key) as client:
        yield client


def spoken(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=12, system="Be brief.")
    assert spoken(answer)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 12)
    assert client.messages.create(model=MODEL, messages=HELLO, max_tokens=1_000).stop_reason == "end_turn"


def test_a_token_in_place_of_a_key(fleet: Fleet) -> None:
    with anthropic.Anthropic(base_url=fleet.url, auth_token=fleet.key) as client:
        assert spoken(client.messages.create(model=MODEL, messages=HELLO, max_tokens=2))


async def test_a_message_asynchronously(asynchronous: anthropic.AsyncAnthropic) -> None:
    answer = await asynchronous.messages.create(model=MODEL, messages=HELLO, max_tokens=12)
    assert spoken(answer)


def test_what_was_asked_before_is_found_in_the_cache(client: anthropic.Anthropic) -> None:
    messages: list[MessageParam] = [{"role": "user", "content": "a message's block of the cache " * 40}]
    used = [client.messages.create(model=MODEL, messages=messages, max_tokens=1).usage for _ in range(3)]
    assert used[0].cache_read_input_tokens == 0
    assert used[2].cache_read_input_tokens, "messages are placed by load, but there are only two engines"


def test_a_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, messages=HELLO, max_tokens=12)
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == spoken(final) == spoken(whole)
    assert final.usage.output_tokens == 12
    events = list(client.messages.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


async def test_a_stream_asynchronously(asynchronous: anthropic.AsyncAnthropic) -> None:
    async with asynchronous.messages.stream(model=MODEL, messages=HELLO, max_tokens=12) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        assert await stream.get_final_text() == text


@pytest.mark.parametrize("streamed", [True, False])
def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic, streamed: bool) -> None:
    first: anthropic.types.Message
    if streamed:
        with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=500, tools=[WEATHER]) as stream:
            pieces = [event for event in stream if event.type == "input_json"]
            first = stream.get_final_message()
        assert len(pieces) > 1
    else:
        first = client.messages.create(model=MODEL, messages=HELLO, max_tokens=500, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert isinstance(call.input, dict)
    assert set(call.input) == {"city", "days"}
    messages: list[MessageParam] = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}]},
    ]
    second = client.messages.create(model=MODEL, messages=messages, max_tokens=500, tools=[WEATHER])
    assert second.stop_reason == "end_turn"
    assert spoken(second)


def test_the_tool_runner(client: anthropic.Anthropic) -> None:
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather to come."""
        asked.append(city)
        return "Rain."

    messages: list[BetaMessageParam] = [{"role": "user", "content": "Which weather?"}]
    runner = client.beta.messages.tool_runner(model=MODEL, messages=messages, max_tokens=500, tools=[weather])
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
    assert len(asked) == 1


def test_an_answer_is_parsed_into_a_model(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(model=MODEL, messages=HELLO, max_tokens=500, output_format=Verdict)
    assert isinstance(answer.parsed_output, Verdict)


async def test_tokens_are_counted(client: anthropic.Anthropic, asynchronous: anthropic.AsyncAnthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    usage = client.messages.create(model=MODEL, messages=HELLO, system="Be brief.", max_tokens=1).usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == prompt
    with_tools = await asynchronous.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER])
    assert with_tools.input_tokens > counted.input_tokens


# Errors


def refused(error: anthropic.APIStatusError, kind: str) -> None:
    """It has Anthropic's form and was not tried again."""
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == kind
    assert error.body["error"]["message"]
    assert error.response.request.headers["x-stainless-retry-count"] == "0"


def test_a_wrong_key(fleet: Fleet) -> None:
    with (
        anthropic.Anthropic(base_url=fleet.url, api_key="sk-wrong") as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
    refused(caught.value, "authentication_error")


async def test_what_is_not_there(client: anthropic.Anthropic, asynchronous: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="nobody", messages=HELLO, max_tokens=1)
    refused(caught.value, "not_found_error")
    with pytest.raises(anthropic.NotFoundError) as caught:
        await asynchronous.messages.count_tokens(model="nobody", messages=HELLO)
    refused(caught.value, "not_found_error")


def test_a_bad_request(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="", messages=HELLO, max_tokens=1)
    refused(caught.value, "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError) as caught:  # the engine's refusal
        client.messages.create(model=MODEL, messages=HELLO, max_tokens=500_000, stream=True)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_an_engine_that_dies_in_the_middle_of_a_stream(doomed: Fleet, kill: Kill) -> None:
    with (
        anthropic.Anthropic(base_url=doomed.url, api_key=doomed.key) as client,
        client.messages.stream(model=MODEL, messages=HELLO, max_tokens=500) as stream,
    ):
        assert next(stream).type == "message_start"
        kill(stream.response.headers.get("x-moongate-route"))
        with pytest.raises(anthropic.APIStatusError, match="engine"):
            stream.until_done()
