"""The simulated engine as the makers' own clients see it: nothing is set but the address."""

import asyncio
import io
import json
import threading
import time
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from anthropic import Anthropic, NotFoundError
from openai import OpenAI
from pydantic import BaseModel

from connector.blocks import Algorithm, HashScheme
from connector.simulated.app import Api
from connector.simulated.engine import Engine, Settings
from connector.simulated.metrics import Metrics
from connector.simulated.model import NAME, make
from connector.simulated.serving import Model
from connector.simulated.timing import Speed

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 2},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "note": {"type": "string"},
    },
    "required": ["city", "days", "unit"],
}
FUNCTION: Any = {"name": "weather", "description": "tells it", "parameters": WEATHER}
TOOL: Any = {"type": "function", "function": FUNCTION}
USER: Any = [{"role": "user", "content": "will it rain?"}]


class Place(BaseModel):
    street: str
    number: int


class Person(BaseModel):
    name: str
    age: int
    weight: float
    alive: bool
    nick: str | None
    places: list[Place]


@pytest.fixture(scope="module")
def url(model: Model) -> Iterator[str]:
    """One engine behind a real port, in a thread of its own."""
    with Served(model, 0.001) as served:
        yield served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make(tmp_path_factory.mktemp("models") / NAME), names=("tiny",), max_model_len=8192)


@pytest.fixture(scope="module")
def slow(model: Model) -> Iterator[str]:
    """An engine that no request is done with in less than a second."""
    with Served(model, 1.0, Speed(prefill_tokens_per_second=20, decode_step_seconds=0.05)) as served:
        yield served


class Served:
    def __init__(self, model: Model, time_scale: float, speed: Speed | None = None) -> None:
        self._model = model
        self._speed = speed or Speed()
        self._time_scale = time_scale
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(20)
        return self._url

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _serve(self) -> None:
        scheme = HashScheme(Algorithm.SHA256_CBOR, 16)
        settings = Settings(scheme, self._model.eos, self._speed, blocks=1024, time_scale=self._time_scale)
        async with Engine(settings, Metrics("tiny", 16, 1024, scheme.algorithm)) as engine:
            config = uvicorn.Config(Api(self._model, engine).app(), port=0, log_level="warning", lifespan="off")
            self._server = uvicorn.Server(config)
            task = asyncio.create_task(self._server.serve())
            while not self._server.started:  # noqa: ASYNC110 -- uvicorn has no event for it
                await asyncio.sleep(0.01)
            self._url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
            self._ready.set()
            await task


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
def claude(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as one:
        yield one


def fits(arguments: str) -> bool:
    value = json.loads(arguments)
    return set(value) == {"city", "days", "unit"} and value["days"] == 2 and value["unit"] == "celsius"


def test_a_chat_calls_its_tool_once_and_then_answers(client: OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL])
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "weather"
    assert fits(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns: Any = [*USER, choice.message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
    assert second.choices[0].message.content
    assert second.choices[0].finish_reason == "stop"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    said = (first.usage.prompt_tokens + first.usage.completion_tokens - 1) // 16 * 16
    assert second.usage.prompt_tokens_details.cached_tokens == said, "the call as it was said stays cached"


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop"), ("none", None)],
)
def test_a_choice_of_tools_is_heeded(client: OpenAI, choice: Any, finish: str | None) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], tool_choice=choice)
    assert bool(answer.choices[0].message.tool_calls) is (finish is not None)
    assert finish is None or answer.choices[0].finish_reason == finish


def test_a_streamed_call_is_rebuilt(client: OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=USER, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls is not None
    assert fits(final.choices[0].message.tool_calls[0].function.arguments)


def test_a_call_cut_short_is_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], max_tokens=20)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content is not None
    assert "<tool_call>" in choice.message.content


def test_a_model_of_pydantic_is_parsed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=USER, response_format=Person)
    person = answer.choices[0].message.parsed
    assert person is not None
    assert person.places
    response = client.responses.parse(model="tiny", input="who?", text_format=Person)
    assert response.output_parsed is not None


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json": WEATHER}}},
        {"extra_body": {"structured_outputs": {"json": json.dumps(WEATHER)}}},
    ],
)
def test_json_is_json(client: OpenAI, more: Any) -> None:
    content = client.chat.completions.create(model="tiny", messages=USER, **more).choices[0].message.content
    assert content is not None
    assert isinstance(json.loads(content), dict)
    assert "extra_body" not in more or fits(content)


def test_what_is_no_schema_is_refused(client: OpenAI) -> None:
    schemas: list[Any] = [{"type": "object", "required": 5}, {"properties": [1], "required": ["a"]}, {"anyOf": 7}]
    for schema in schemas:
        with pytest.raises(openai.BadRequestError, match="schema"):
            client.chat.completions.create(
                model="tiny", messages=USER, extra_body={"structured_outputs": {"json": schema}}
            )


def test_a_choice_of_texts_is_one_of_them(client: OpenAI) -> None:
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(model="tiny", messages=USER, extra_body=more)
    assert answer.choices[0].message.content == "yes"


def test_a_response_is_kept_and_gone_on_from(client: OpenAI) -> None:
    first = client.responses.create(model="tiny", input="hello", instructions="be brief", max_output_tokens=40)
    assert first.output_text
    assert first.status == "incomplete"
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(model="tiny", input="go on", previous_response_id=first.id, store=False)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > 40
    assert second.usage.input_tokens_details.cached_tokens < second.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match=second.id):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="go on", previous_response_id="resp_unknown")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(first.id)


def test_a_response_is_streamed_in_order(client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=5) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_response_calls_functions(client: OpenAI) -> None:
    tool: Any = {"type": "function", **FUNCTION, "strict": None}
    with client.responses.stream(model="tiny", input="rain?", tools=[tool]) as stream:
        for _ in stream:
            pass
        streamed: Any = stream.get_final_response().output[0]
    whole: Any = client.responses.create(model="tiny", input="rain?", tools=[tool], tool_choice="required").output[0]
    assert streamed.type == whole.type == "function_call"
    assert streamed.arguments == whole.arguments
    assert fits(whole.arguments)
    turns: Any = [
        {"role": "user", "content": "rain?"},
        whole.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": whole.call_id, "output": "no"},
    ]
    assert client.responses.create(model="tiny", input=turns, tools=[tool]).output_text


def test_a_response_in_the_background_is_waited_for_followed_or_cancelled(client: OpenAI) -> None:
    queued = client.responses.create(model="tiny", input="hello", background=True, max_output_tokens=5)
    assert (queued.status, queued.output) == ("queued", [])
    followed = list(client.responses.retrieve(queued.id, stream=True, starting_after=1))
    assert followed[0].type == "response.output_item.added"
    assert followed[-1].type == "response.completed"
    assert client.responses.retrieve(queued.id).status == "incomplete"
    endless = {"ignore_eos": True}
    long = client.responses.create(model="tiny", input="hello", background=True, extra_body=endless)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_a_message_is_told_in_blocks(claude: Anthropic) -> None:
    system: Any = [{"type": "text", "text": "be brief"}]
    whole = claude.messages.create(model="tiny", max_tokens=9, system=system, messages=USER)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 9
    with claude.messages.stream(model="tiny", max_tokens=9, system="be brief", messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert final.stop_reason == "max_tokens"
    assert final.usage.cache_read_input_tokens == whole.usage.cache_creation_input_tokens
    counted = claude.messages.count_tokens(model="tiny", system=system, messages=USER).input_tokens
    usage = whole.usage
    assert counted == usage.input_tokens + (usage.cache_creation_input_tokens or 0)


def test_a_message_uses_tools(claude: Anthropic) -> None:
    tool: Any = {"name": "weather", "input_schema": WEATHER}
    with claude.messages.stream(model="tiny", max_tokens=200, messages=USER, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        used = stream.get_final_message()
    assert kinds[-1] == "message_stop"
    assert used.stop_reason == "tool_use"
    block: Any = used.content[0]
    assert block.name == "weather"
    assert fits(json.dumps(block.input))
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    turns: Any = [*USER, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(model="tiny", max_tokens=200, messages=turns, tools=[tool])
    assert answer.content[0].type == "text"
    assert claude.messages.create(
        model="tiny", max_tokens=200, messages=USER, tools=[tool], tool_choice={"type": "any"}
    ).content[0].type == "tool_use"  # fmt: skip


def test_a_message_stops_at_its_sequence_and_is_refused_in_its_own_form(claude: Anthropic, url: str) -> None:
    said: Any = claude.messages.create(model="tiny", max_tokens=9, messages=USER).content[0]
    word = said.text.split()[2]
    stopped = claude.messages.create(model="tiny", max_tokens=9, messages=USER, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    with pytest.raises(NotFoundError) as refused:
        claude.messages.create(model="nope", max_tokens=9, messages=USER)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "NotFoundError"
    wrong = httpx.post(f"{url}/v1/messages", json={"model": "tiny", "messages": USER})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "Bad Request")


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("chat/completions", {"messages": USER}, b"data: [DONE]"),
        ("completions", {"prompt": "a"}, b"data: [DONE]"),
        ("responses", {"input": "a"}, b"response.completed"),
        ("messages", {"model": "tiny", "messages": USER, "max_tokens": 4}, b'data: {"type":"message_stop"}'),
    ],
)
def test_each_stream_ends_as_vllms(url: str, path: str, body: dict[str, Any], last: bytes) -> None:
    events = httpx.post(f"{url}/v1/{path}", json={**body, "stream": True}).content.strip().split(b"\n\n")
    assert last in events[-1]
    assert (b"[DONE]" in b"".join(events)) is last.endswith(b"[DONE]")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": USER}),
        ("responses", {"input": USER}),
        ("messages", {"model": "tiny", "messages": USER, "max_tokens": 4}),
    ],
)
def test_a_salt_parts_the_cache_everywhere(url: str, path: str, body: dict[str, Any]) -> None:
    def cached(salt: str) -> int:
        content = [{"role": "user", "content": f"{path} " * 20}]
        asked = {**body, ("input" if path == "responses" else "messages"): content, "cache_salt": salt}
        usage = httpx.post(f"{url}/v1/{path}", json=asked).json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        return int(details.get("cached_tokens", details.get("cache_read_input_tokens")))

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_a_text_has_a_vector_however_it_is_given_and_told(client: OpenAI, url: str) -> None:
    texts = ["the engine loads a block", "a block is loaded by the engine", "0123456789"]
    packed = client.embeddings.create(model="tiny", input=texts)  # base64, unless something else is asked for
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = [one.embedding for one in plain.data]
    assert [one.embedding for one in packed.data] == [pytest.approx(vector) for vector in vectors]
    assert near(vectors[0], vectors[0]) == pytest.approx(1.0)
    assert near(vectors[0], vectors[1]) > near(vectors[0], vectors[2])
    ids = [httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    assert plain.usage.prompt_tokens == sum(map(len, ids))
    for given in (ids[0], ids[:1], texts[0]):
        again = client.embeddings.create(model="tiny", input=given, encoding_format="float")
        assert again.data[0].embedding == vectors[0]
    assert len(client.embeddings.create(model="tiny", input="a", dimensions=8).data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="tiny", input="a", dimensions=9999)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="tiny", input=[])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="a")


def near(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_documents_are_ranked_and_scored(url: str) -> None:
    query, documents = "where is the block now", ["0123456789", "the block is where it was", "%%%%%%%%%%"]
    ranked = httpx.post(f"{url}/v1/rerank", json={"query": query, "documents": documents, "top_n": 2}).json()
    assert list(ranked) == ["id", "model", "usage", "results"]
    assert len(ranked["results"]) == 2
    assert ranked["results"][0]["index"] == 1
    assert ranked["results"][0]["document"] == {"text": documents[1], "multi_modal": None}
    scored = httpx.post(f"{url}/v1/score", json={"text_1": query, "text_2": documents}).json()
    assert scored["data"][1] == {"index": 1, "object": "score", "score": ranked["results"][0]["relevance_score"]}
    assert scored["usage"]["prompt_tokens"] == ranked["usage"]["prompt_tokens"]
    refused = httpx.post(f"{url}/score", json={"queries": ["a", "b"], "documents": documents})
    assert refused.status_code == httpx.codes.BAD_REQUEST


def test_audio_is_transcribed(client: OpenAI, url: str) -> None:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 8000 * 3))
    upload = ("sound.wav", sound.getvalue())
    whole: Any = client.audio.transcriptions.create(model="tiny", file=upload)
    assert whole.text
    assert whole.usage.seconds == 3
    text: Any = client.audio.transcriptions.create(model="tiny", file=upload, response_format="text")
    assert json.loads(text)["text"] == whole.text, "vLLM tells text as JSON too"
    verbose = client.audio.transcriptions.create(model="tiny", file=upload, response_format="verbose_json")
    assert verbose.duration == 3.0
    pieces: Any = client.audio.transcriptions.create(model="tiny", file=upload, stream=True)
    assert "".join(piece.choices[0]["delta"]["content"] for piece in pieces) == whole.text
    streamed = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": upload}, data={"stream": "true"})
    assert streamed.content.endswith(b"data: [DONE]\n\n")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.audio.transcriptions.create(model="tiny", file=upload, response_format="srt")
    assert httpx.post(f"{url}/v1/audio/transcriptions", data={"file": "x"}).status_code == 422
    assert httpx.post(f"{url}/v1/audio/transcriptions", files={"other": upload}).status_code == 400


LONG = "a block of the prefix " * 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": USER, "tools": [TOOL]}),
        ("responses", {"input": LONG}),
        ("messages", {"model": "tiny", "messages": USER, "max_tokens": 400}),
        ("embeddings", {"input": LONG}),
        ("rerank", {"query": LONG, "documents": [LONG]}),
    ],
)
def test_who_leaves_frees_the_place(slow: str, path: str, body: dict[str, Any], *, stream: bool) -> None:
    asked = {**body, "stream": stream, "cache_salt": f"{path} {stream}".replace("/", " ")}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow}/v1/{path}", json=asked, timeout=0.3)
    running = 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0'
    for _ in range(20):
        if running in httpx.get(f"{slow}/metrics").text and httpx.get(f"{slow}/load").json() == {"server_load": 0}:
            return
        time.sleep(0.02)
    pytest.fail("the engine goes on for nobody")
