"""OpenAI's Python SDK, unchanged, against `moongate up`."""

import io
import json
import math
import struct
import wave
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, ResponseInputParam
from pydantic import BaseModel

from tests.clients.conftest import MODEL, Fleet, Kill

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something about caches."}]
PLACE: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather to come.", "parameters": PLACE, "strict": True},
}
FORECAST: FunctionToolParam = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}
LONG = 300


class Verdict(BaseModel):
    """An answer that has a form."""

    title: str
    score: int
    tags: list[str]
    sure: bool


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.openai, api_key=fleet.key) as client:
        yield client


@pytest.fixture
async def asynchronous(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=fleet.openai, api_key=fleet.key) as client:
        yield client


def recording(seconds: float = 0.5, rate: int = 16_000) -> bytes:
    """A tone."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        tone = (int(8_000 * math.sin(2 * math.pi * 440 * place / rate)) for place in range(int(seconds * rate)))
        file.writeframes(b"".join(struct.pack("<h", value) for value in tone))
    return out.getvalue()


# Chat


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_a_chat_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    answer = await asynchronous.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=12, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)


def test_what_was_asked_before_is_found_in_the_cache(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "a block of the cache " * 40}]
    cached = []
    for _ in range(2):
        usage = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream(client: openai.OpenAI, usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True, **options) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    if usage:
        assert chunks[-1].usage is not None
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)
    else:
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_a_stream_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    stream = await asynchronous.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_stream_helper(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(model=MODEL, messages=HELLO, stream_options=options) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas)
    assert final.usage is not None
    assert final.usage.completion_tokens > len(deltas) // 2


async def test_the_stream_helper_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    async with asynchronous.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


# Tools


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    messages = list(HELLO)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls is not None
    (call,) = first.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    messages.append(first.message.to_dict())  # type: ignore[arg-type]  # as OpenAI's guides have it
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain, then snow."})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0]
    assert second.message.content
    assert not second.message.tool_calls


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_a_streamed_call_is_rebuilt(client: openai.OpenAI, choice: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice=choice, stream=True
    )
    names, identities, arguments, pieces = "", "", "", 0
    for chunk in stream:
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.index == 0
            assert piece.function is not None
            identities += piece.id or ""
            names += piece.function.name or ""
            arguments += piece.function.arguments or ""
            pieces += 1
    assert names == "weather"
    assert identities
    assert pieces > 2
    assert set(json.loads(arguments)) == {"city", "days"}


def test_the_stream_helper_rebuilds_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["weather"]
    message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    parsed = message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, dict)
    assert isinstance(parsed["days"], int)


async def test_a_whole_conversation_with_a_tool_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    messages = list(HELLO)
    for turn in range(2):
        async with asynchronous.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            final = (await stream.get_final_completion()).choices[0].message
        messages.append(final.to_dict())  # type: ignore[arg-type]  # as OpenAI's guides have it
        called = [call.id for call in final.tool_calls or []]
        messages += [{"role": "tool", "tool_call_id": identity, "content": "Sun."} for identity in called]
        assert (len(called), bool(final.content)) == (1, False) if turn == 0 else (0, True)


# Answers that have a form


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Verdict).choices[0].message
    assert isinstance(parsed.parsed, Verdict)


async def test_an_answer_is_parsed_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    parsed = await asynchronous.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_a_streamed_answer_is_parsed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Verdict) as stream:
        stream.until_done()
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)


def test_a_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}},
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city", "days"}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


# Completions and embeddings


def test_a_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8)
    streamed = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    several = client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1]


async def test_a_completion_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    answer = await asynchronous.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4, echo=True)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_embeddings(client: openai.OpenAI) -> None:
    asked = ["one text", "another"]
    floats = client.embeddings.create(model=MODEL, input=asked, encoding_format="float").data
    decoded = client.embeddings.create(model=MODEL, input=asked).data  # asks for base64 and decodes it
    packed: Any = client.embeddings.create(model=MODEL, input=asked, encoding_format="base64").data
    assert [one.index for one in floats] == [0, 1]
    for plain, unpacked, text in zip(floats, decoded, packed, strict=True):
        assert unpacked.embedding == pytest.approx(plain.embedding, abs=1e-6)
        assert isinstance(text.embedding, str)


async def test_embeddings_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    answer = await asynchronous.embeddings.create(model=MODEL, input="one text")
    assert len(answer.data) == 1
    assert answer.usage.prompt_tokens > 0


# Responses


def test_a_response_is_made_found_and_built_upon(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Say something.", instructions="Be brief.")
    assert first.status == "completed"
    assert first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(model=MODEL, input="And more?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.output_tokens


def test_a_response_is_streamed(client: openai.OpenAI) -> None:
    with client.responses.create(model=MODEL, input="Say something.", stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1]
    assert final.type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert final.response.output_text == text
    assert client.responses.retrieve(final.response.id).output_text == text


async def test_the_stream_helper_of_responses(asynchronous: openai.AsyncOpenAI) -> None:
    async with asynchronous.responses.stream(model=MODEL, input="Judge.", text_format=Verdict) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert isinstance(final.output_parsed, Verdict)
    parsed = await asynchronous.responses.parse(model=MODEL, input="Judge.", text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)


def test_a_tool_of_a_response(client: openai.OpenAI) -> None:
    asked: ResponseInputParam = [{"role": "user", "content": "Which weather?"}]
    with client.responses.stream(model=MODEL, input=asked, tools=[FORECAST]) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result: ResponseInputParam = [{"type": "function_call_output", "call_id": call.call_id, "output": "Fog."}]
    said: Any = [*asked, *first.output, *result]  # as OpenAI's guides have it
    assert client.responses.create(model=MODEL, input=said, tools=[FORECAST]).output_text
    assert client.responses.create(
        model=MODEL, input=result, tools=[FORECAST], previous_response_id=first.id
    ).output_text


def test_a_background_response_is_cancelled(client: openai.OpenAI) -> None:
    endless = {"ignore_eos": True}
    made = client.responses.create(
        model=MODEL, input="Go on.", background=True, max_output_tokens=5_000, extra_body=endless
    )
    assert made.status in ("queued", "in_progress")
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_a_background_stream_is_left_and_taken_up_again(client: openai.OpenAI) -> None:
    seen, identity = -1, ""
    with client.responses.create(model=MODEL, input="Go on.", background=True, stream=True) as stream:
        for event in stream:
            seen = event.sequence_number
            if event.type == "response.created":
                identity = event.response.id
            if event.type == "response.output_text.delta":
                break
    with client.responses.retrieve(identity, stream=True, starting_after=seen) as rest:
        events = list(rest)
    assert [event.sequence_number for event in events] == list(range(seen + 1, seen + 1 + len(events)))
    assert events[-1].type == "response.completed"


# Audio and models


@pytest.mark.parametrize("form", ["json", "verbose_json"])
def test_a_recording_is_transcribed(client: openai.OpenAI, form: Any) -> None:
    heard: Any = client.audio.transcriptions.create(
        model=MODEL, file=("a.wav", recording(), "audio/wav"), response_format=form, language="en"
    )
    assert heard.text
    if form == "verbose_json":
        assert float(heard.duration) == pytest.approx(0.5)


async def test_a_recording_is_transcribed_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    heard = await asynchronous.audio.transcriptions.create(model=MODEL, file=("a.wav", io.BytesIO(recording())))
    assert heard.text


def test_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


async def test_the_models_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in asynchronous.models.list()] == [MODEL]


# Errors


def refused(error: openai.APIStatusError) -> None:
    """It has OpenAI's form, says what is wrong, and was not tried again."""
    assert error.response.request.headers["x-stainless-retry-count"] == "0"
    assert error.request_id
    assert isinstance(error.body, dict)
    assert error.body["message"]
    assert error.body["message"] in str(error)


def test_a_wrong_key(fleet: Fleet) -> None:
    with openai.OpenAI(base_url=fleet.openai, api_key="sk-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO)
        refused(caught.value)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_what_is_not_there(client: openai.OpenAI, fleet: Fleet) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=HELLO, stream=True)
    refused(caught.value)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for name in ("nobody", "no/body"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve("resp_nobody")
    refused(caught.value)
    mine = client.responses.create(model=MODEL, input="Mine.", max_output_tokens=1).id
    with openai.OpenAI(base_url=fleet.openai, api_key=fleet.other_key) as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(mine)
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="A moon.")
    refused(caught.value)


def test_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:  # the engine's refusal
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    refused(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:  # the gateway's
        client.chat.completions.create(model="", messages=HELLO)
    refused(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.cancel(client.responses.create(model=MODEL, input="Done.", max_output_tokens=1).id)
    refused(caught.value)


async def test_a_bad_request_asynchronously(asynchronous: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await asynchronous.completions.create(model=MODEL, prompt="word " * 40_000)
    refused(caught.value)


def test_an_engine_that_dies_in_the_middle_of_a_stream(doomed: Fleet, kill: Kill) -> None:
    with openai.OpenAI(base_url=doomed.openai, api_key=doomed.key) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(raw.parse())
        assert next(chunks).choices
        kill(raw.headers.get("x-moongate-route"))
        with pytest.raises(openai.APIError, match="engine"):
            list(chunks)
        assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices


def test_an_engine_that_dies_in_the_middle_of_a_response(doomed: Fleet, kill: Kill) -> None:
    with openai.OpenAI(base_url=doomed.openai, api_key=doomed.key) as client:
        raw = client.responses.with_raw_response.create(
            model=MODEL, input="Go on.", max_output_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        events = iter(raw.parse())
        assert next(events).type == "response.created"
        kill(raw.headers.get("x-moongate-route"))
        with pytest.raises(openai.APIError, match="engine"):
            list(events)
