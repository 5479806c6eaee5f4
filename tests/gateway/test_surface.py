"""Every endpoint that vLLM serves: forwarded as it is, salted where it can be, with errors in its own form."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.double import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    DONE,
    EMBEDDINGS,
    HOT,
    LAST_CHUNK,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    TRANSCRIPTIONS,
    Call,
    End,
    Engine,
    Script,
    Step,
    bytewise,
    refused,
    stream,
    usage,
    whole,
)
from tests.gateway.heard import refusal, serves_on
from tests.gateway.house import KEY, OTHER_KEY, House, Street, digest

pytestmark = pytest.mark.usefixtures("calm")

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x", "instructions": "y", "store": True, "reasoning": {"effort": "low"}},
    MESSAGES: {"max_tokens": 5, "system": "s", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
    COUNT_TOKENS: {"messages": [{"role": "user", "content": "x"}], "tools": []},
    EMBEDDINGS: {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
    TOKENIZE: {"prompt": "x", "add_special_tokens": False},
    DETOKENIZE: {"tokens": [1, 2, 3]},
    RERANK: {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    SCORE: {"text_1": "a", "text_2": ["b", "c"]},
}
SALTED = {CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, RERANK, SCORE}
ALIASED = [{"name": "tiny", "aliases": ["alias-x"]}]
OTHER = {"authorization": f"Bearer {OTHER_KEY}"}


async def served(street: Street, *steps: Step, **sections: Any) -> tuple[Engine, House]:
    engine = await street.engine()
    if steps:
        engine.always(*steps)
    return engine, await street.house(engine, **sections)


async def ask(house: House, path: str, **fields: Any) -> httpx.Response:
    return await house.client.post(path, json={"model": "tiny"} | BODIES[path] | fields)


@pytest.mark.parametrize("model", ["tiny", "alias-x"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_is_forwarded_with_its_salt_and_nothing_else(street: Street, path: str, model: str) -> None:
    engine, house = await served(street, models=ALIASED)
    fields = {"zz_new": {"b": 1, "a": None}, "priority": 1}
    assert (await ask(house, path, model=model, **fields)).status_code == 200
    (call,) = engine.asked
    assert (call.method, call.target) == ("POST", path)
    sent = call.json()
    salt = sent.pop("cache_salt", None)
    assert (salt is not None and len(salt) == 64) == (path in SALTED)
    assert sent == {"model": "tiny"} | BODIES[path] | fields


@pytest.mark.parametrize("path", sorted(SALTED))
async def test_tenants_have_salts_of_their_own_everywhere(street: Street, path: str) -> None:
    engine, house = await served(street)
    for headers in ({}, OTHER):
        await house.client.post(path, json={"model": "tiny"} | BODIES[path], headers=headers)
    await ask(house, path, cache_salt="mine")
    salts = [call.json()["cache_salt"] for call in engine.asked]
    assert len(set(salts)) == 3
    assert "mine" not in salts


@pytest.mark.parametrize("path", BODIES)
async def test_a_salt_of_the_clients_never_passes(street: Street, path: str) -> None:
    engine, house = await served(street)
    assert (await ask(house, path, cache_salt="canary", kv_transfer_params={"host": "canary"})).status_code == 200
    assert b"canary" not in engine.asked[0].body


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "cache_aware", "disaggregated"])
@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_works_under_every_policy(
    street: Street, tokenizer_folder: Path, path: str, policy: str
) -> None:
    prefill, decode = await street.engines(2)
    roles = ("prefill", "decode") if policy == "disaggregated" else ("both", "both")
    static = [
        {"url": engine.url, "model": "tiny", "role": role}
        for engine, role in zip((prefill, decode), roles, strict=True)
    ]
    house = await street.house(
        *static, policy={"use": policy}, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}]
    )
    for _ in range(3):
        assert (await ask(house, path)).status_code == 200
    await house.idle()


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_passes_to_the_byte_and_is_counted(street: Street, path: str) -> None:
    said = b'{"object": "x", "data": [1.0, 1e2], "model":"tiny", "usage": {"prompt_tokens": 29, "total_tokens": 29}}'
    _, house = await served(street, *whole(200, said))
    answer = await ask(house, path)
    assert (answer.status_code, answer.content) == (200, said)
    assert await house.metric("requests_total", status="200", model="tiny", tenant="team-a") == 1
    await house.idle()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_a_refusal_passes_in_the_engines_words(street: Street, path: str, status: int) -> None:
    body = b'{"anything" : ["canary", 1.0]}'
    engine, house = await served(street, *whole(status, body))
    answer = await ask(house, path)
    assert (answer.status_code, answer.content) == (status, body)
    assert len(engine.asked) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_spare_takes_what_one_engine_could_not(street: Street, path: str) -> None:
    first, second = await street.engines(2)
    first.script = lambda _: [End.RST]
    house = await street.house(first, second)
    assert {(await ask(house, path)).status_code for _ in range(2)} == {200}
    assert first.asked[0].body == second.asked[0].body


@pytest.mark.parametrize("path", [path for path in HOT if path not in (MESSAGES, COUNT_TOKENS)])
async def test_errors_have_openais_form(street: Street, path: str) -> None:
    _, house = await served(street)
    refusal(await house.client.post(path, content=b"{", headers={"authorization": "Bearer x"}), 401)
    refusal(await house.client.get(path), 405)
    if path != TRANSCRIPTIONS:
        refusal(await ask(house, path, model="nobody"), 404)
        refusal(await house.client.post(path, content=b"{"), 400)


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_is_noticed_everywhere(street: Street, path: str) -> None:
    engine, house = await served(street, End.SILENCE)
    client = await street.raw(house)
    client.ask(orjson.dumps({"model": "tiny"} | BODIES[path]), path=path)
    call = await engine.arrival(path)
    client.leave()
    await asyncio.wait_for(call.closed.wait(), 5)
    await house.idle()
    await house.until("requests_total", 1, status="client_left")


# Anthropic's form


def anthropic(answer: httpx.Response, status: int, *kinds: str) -> None:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] in kinds
    assert body["error"]["message"]


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
async def test_errors_on_messages_have_anthropics_form(street: Street, path: str) -> None:
    engine = await street.engine()
    tenant = {"name": "team-a", "keys": [{"sha256": digest(KEY)}], "requests_per_minute": 4}
    house = await street.house(engine, listen={"port": 0, "max_body_bytes": 1_000}, tenants=[tenant])
    anthropic(await house.client.get(path), 405, "invalid_request_error", "not_found_error")
    anthropic(
        await house.client.post(path, json={}, headers={"authorization": "Bearer x"}), 401, "authentication_error"
    )
    anthropic(await house.client.post(path, content=b"{"), 400, "invalid_request_error")
    anthropic(await ask(house, path, model="nobody"), 404, "not_found_error")
    anthropic(await ask(house, path, user="x" * 2_000), 413, "request_too_large", "invalid_request_error")
    await engine.stop()
    anthropic(await ask(house, path), 502, "api_error")
    anthropic(await ask(house, path), 429, "rate_limit_error")


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_anthropics_clients_send_their_key_in_a_header_of_its_own(street: Street, header: str) -> None:
    engine, house = await served(street)
    async with httpx.AsyncClient(base_url=house.url, trust_env=False) as client:
        key = KEY if header == "x-api-key" else f"Bearer {KEY}"
        answer = await client.post(MESSAGES, json={"model": "tiny"} | BODIES[MESSAGES], headers={header: key})
    assert answer.status_code == 200
    assert KEY.encode() not in engine.asked[0].head


def named(kind: str, **data: Any) -> bytes:
    """An event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind} | data))


SPOKEN = [
    named("message_start", message={"id": "m", "model": "tiny", "usage": {"input_tokens": 29, "output_tokens": 0}}),
    named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    named("content_block_delta", index=0, delta={"type": "text_delta", "text": "你好"}),
    named("ping"),
    named("content_block_stop", index=0),
    named("message_delta", delta={"stop_reason": "end_turn"}, usage={"input_tokens": 29, "output_tokens": 6}),
]
STOP = named("message_stop")
USED = {"input_tokens": 29, "output_tokens": 6, "total_tokens": 35}
CREATED = [
    named("response.created", response={"id": "resp_1", "status": "in_progress", "model": "tiny"}),
    named("response.output_text.delta", delta="LY", item_id="i"),
]
ENDS = [named(f"response.{end}", response={"id": "resp_1", "usage": USED}) for end in ("completed", "incomplete")]
FAILED = named("response.failed", response={"id": "resp_1", "status": "failed", "error": {"message": "no"}})


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(
    ("path", "said"),
    [(MESSAGES, [*SPOKEN, STOP]), *((RESPONSES, [*CREATED, end]) for end in ENDS)],
    ids=["messages", "completed", "incomplete"],
)
async def test_a_stream_with_an_end_of_its_own_needs_no_done(
    street: Street, path: str, said: list[bytes], cut: bool
) -> None:
    data = b"".join(said)
    engine, house = await served(street, *stream(*(bytewise(data) if cut else said)))
    answer = await ask(house, path, stream=True)
    assert (answer.status_code, answer.content) == (200, data)
    assert "stream_options" not in engine.asked[0].json()
    assert await house.metric("engine_failures_total") == 0
    assert await house.metric("requests_total", status="200") == 1
    assert await house.metric("completion_tokens_total") == 6
    assert await house.metric("prompt_tokens_total") == 29


async def test_a_response_that_failed_is_told_by_its_last_event(street: Street) -> None:
    data = b"".join([*CREATED, FAILED])
    _, house = await served(street, *stream(data))
    answer = await ask(house, RESPONSES, stream=True)
    assert (answer.status_code, answer.content) == (200, data)


@pytest.mark.parametrize("ending", [[], [End.RST], [End.FIN], [b"event: cont"], [End.SILENCE]])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_stream_without_its_end_has_broken_off(street: Street, path: str, ending: list[Step]) -> None:
    said = SPOKEN[:3] if path == MESSAGES else CREATED
    gate = asyncio.Event()
    _, house = await served(street, *stream(*said, gate, *ending), timeouts={"head": 5, "idle": 0.3})
    client = await street.raw(house)
    client.ask(orjson.dumps({"model": "tiny", "stream": True} | BODIES[path]), path=path)
    await client.until(said[-1])
    gate.set()
    rest = await client.until(b"\r\n" + LAST_CHUNK)
    (line,) = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
    told = orjson.loads(line.removeprefix(b"data: "))
    assert b"[DONE]" not in rest
    if path == MESSAGES:
        assert b"event: error\n" in rest
        assert (told["type"], sorted(told["error"])) == ("error", ["message", "type"])
    else:
        assert told["type"] in ("error", "response.failed")
    assert await house.metric("engine_failures_total") == 1
    await house.idle()


async def test_chat_and_completions_still_need_their_done(street: Street) -> None:
    _, house = await served(street, *stream(*SPOKEN, STOP))
    for path in (CHAT, COMPLETIONS):
        assert (await ask(house, path, stream=True)).content.endswith(DONE)
    assert await house.metric("engine_failures_total", cause="no_done") == 2


async def test_usage_in_anthropics_words_is_counted(street: Street) -> None:
    said = {"type": "message", "usage": {"input_tokens": 29, "output_tokens": 6, "cache_read_input_tokens": 0}}
    _, house = await served(street, *whole(200, said))
    assert (await ask(house, MESSAGES)).json() == said
    assert await house.metric("prompt_tokens_total") == 29
    assert await house.metric("completion_tokens_total") == 6


# Responses that are kept


def keeping(engine: Engine, name: str) -> None:
    """The engine makes responses of that name and knows no others."""

    def say(call: Call) -> Script:
        if call.path == RESPONSES:
            before = call.json().get("previous_response_id")
            if before not in (None, name):
                return refused(404, "no such response")
            return whole(200, {"id": name, "object": "response", "usage": usage(), "engine": name})
        if call.path.split("/")[3] != name:
            return refused(404, "no such response")
        return whole(200, {"id": name, "engine": name, "method": call.method, "target": call.target})

    engine.script = say


async def kept(street: Street) -> tuple[list[Engine], House]:
    engines = await street.engines(3)
    for number, engine in enumerate(engines):
        keeping(engine, f"resp_{number}")
    return engines, await street.house(*engines)


async def test_a_response_is_found_where_it_was_made(street: Street) -> None:
    _, house = await kept(street)
    made = [(await ask(house, RESPONSES)).json()["id"] for _ in range(6)]
    assert set(made) == {"resp_0", "resp_1", "resp_2"}
    for name in made:
        answer = await house.client.get(f"{RESPONSES}/{name}")
        assert (answer.status_code, answer.json()["engine"], answer.json()["method"]) == (200, name, "GET")
        answer = await house.client.post(f"{RESPONSES}/{name}/cancel")
        assert (answer.status_code, answer.json()["engine"]) == (200, name)
        assert answer.json()["target"] == f"{RESPONSES}/{name}/cancel"
    await house.idle()


async def test_a_streamed_response_is_found_too(street: Street) -> None:
    engine, house = await served(street, *stream(*CREATED, ENDS[0]))
    assert (await ask(house, RESPONSES, stream=True)).status_code == 200
    engine.always(*whole(200, {"id": "resp_1"}))
    assert (await house.client.get(f"{RESPONSES}/resp_1")).json() == {"id": "resp_1"}


async def test_a_streamed_response_is_found_before_its_end_and_when_the_client_has_left(street: Street) -> None:
    engine, house = await served(street, *stream(*CREATED, End.SILENCE))
    client = await street.raw(house)
    client.ask(orjson.dumps({"model": "tiny", "stream": True} | BODIES[RESPONSES]), path=RESPONSES)
    await client.until(CREATED[-1])
    engine.always(*whole(200, {"id": "resp_1"}))
    assert (await house.client.post(f"{RESPONSES}/resp_1/cancel")).status_code == 200
    client.leave()
    await house.idle()
    assert (await house.client.get(f"{RESPONSES}/resp_1")).json() == {"id": "resp_1"}


async def test_a_conversation_goes_on_where_its_last_response_is(street: Street) -> None:
    _, house = await kept(street)
    name = (await ask(house, RESPONSES)).json()["id"]
    for _ in range(4):
        answer = await ask(house, RESPONSES, previous_response_id=name)
        assert (answer.status_code, answer.json()["engine"]) == (200, name)


@pytest.mark.parametrize("name", ["resp_9", "resp_0", "a b", "resp_0%2fcancel", "x" * 3_000])
async def test_a_response_of_nobodys_is_404_and_asks_no_engine(street: Street, name: str) -> None:
    engines, house = await kept(street)
    before = sum(len(engine.calls) for engine in engines)
    for method, path in (("GET", f"{RESPONSES}/{name}"), ("POST", f"{RESPONSES}/{name}/cancel")):
        assert (await house.client.request(method, path)).status_code in (404, 405)
    assert sum(len(engine.calls) for engine in engines) == before


async def test_a_response_belongs_to_its_tenant(street: Street) -> None:
    engines, house = await kept(street)
    name = (await ask(house, RESPONSES)).json()["id"]
    asked = sum(len(engine.asked) for engine in engines)
    for method, path in (("GET", f"{RESPONSES}/{name}"), ("POST", f"{RESPONSES}/{name}/cancel")):
        refusal(await house.client.request(method, path, headers=OTHER), 404)
        refusal(await house.client.request(method, path, headers={"authorization": "Bearer x"}), 401)
    body = {"model": "tiny", "previous_response_id": name} | BODIES[RESPONSES]
    assert (await house.client.post(RESPONSES, json=body, headers=OTHER)).status_code in (400, 404)
    assert sum(len(engine.asked) for engine in engines) == asked


# Audio


def form(*parts: tuple[str, bytes], boundary: str = "b0undary") -> bytes:
    written = [
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary.encode(), name.encode(), value)
        for name, value in parts
    ]
    return b"".join(written) + b"--%b--\r\n" % boundary.encode()


SOUND = (
    'name="file"; filename="a.wav"\r\nContent-Type: audio/wav',
    b"RIFF" + bytes(range(256)) * 40 + b"\r\n--b0und\r\n",
)
MODEL = ('name="model"', b"tiny")
FORMS: dict[str, tuple[str, bytes]] = {
    "file first": ("multipart/form-data; boundary=b0undary", form(SOUND, MODEL)),
    "file last": ("multipart/form-data; boundary=b0undary", form(MODEL, ('name="language"', b"en"), SOUND)),
    "quoted": ('multipart/form-data; boundary="a b:c"', form(SOUND, MODEL, boundary="a b:c")),
    "capitals": ("Multipart/Form-Data; charset=utf-8; Boundary=b0undary", form(SOUND, MODEL)),
    "unquoted name": ("multipart/form-data; boundary=b0undary", form(SOUND, ("name=model", b"tiny"))),
    "more fields": (
        "multipart/form-data; boundary=b0undary",
        form(SOUND, MODEL, ('name="timestamp_granularities[]"', b"word"), ('name="zz"', "é\r\n".encode())),
    ),
    "something behind": ("multipart/form-data; boundary=b0undary", form(SOUND, MODEL) + b"epilogue"),
}


@pytest.mark.parametrize("kind", FORMS)
async def test_a_recording_passes_byte_for_byte(street: Street, kind: str) -> None:
    engine, house = await served(street, *whole(200, {"text": "hello"}))
    content_type, body = FORMS[kind]
    answer = await house.client.post(TRANSCRIPTIONS, content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()) == (200, {"text": "hello"})
    (call,) = engine.asked
    assert call.body == body
    assert call.headers("content-type") == [content_type]
    assert await house.metric("requests_total", model="tiny", status="200") == 1


async def test_httpx_sends_a_form_that_passes(street: Street) -> None:
    engine, house = await served(street, *whole(200, b"hello", content_type="text/plain; charset=utf-8"))
    sound = {"file": ("a.wav", b"RIFF" * 100_000, "audio/wav")}
    answer = await house.client.post(TRANSCRIPTIONS, data={"model": "tiny", "response_format": "text"}, files=sound)
    assert (answer.status_code, answer.text) == (200, "hello")
    assert b"RIFF" * 100_000 in engine.asked[0].body


async def test_a_transcription_may_be_streamed(street: Street) -> None:
    said = [b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}\n\n', DONE]
    _, house = await served(street, *stream(*said))
    content_type, body = FORMS["file first"]
    answer = await house.client.post(TRANSCRIPTIONS, content=body, headers={"content-type": content_type})
    assert answer.content == b"".join(said)


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("multipart/form-data; boundary=b0undary", form(SOUND), 400),
        ("multipart/form-data; boundary=b0undary", form(SOUND, ('name="model"', b"")), 400),
        ("multipart/form-data; boundary=b0undary", form(SOUND, ('name="model"', b"nobody")), 404),
        ("multipart/form-data; boundary=b0undary", form(SOUND, ('name="model"', b"\xff")), 404),
        ("multipart/form-data; boundary=other", form(SOUND, MODEL), 400),
        ("multipart/form-data; boundary=b0undary", form(SOUND, MODEL)[:-30], 400),
        ("multipart/form-data; boundary=b0undary", b"", 400),
        ("multipart/form-data; boundary=", form(SOUND, MODEL), 400),
        ("multipart/form-data", form(SOUND, MODEL), 400),
        ("application/json", b'{"model": "tiny"}', 400),
        ("multipart/form-data; boundary=b0undary", form(SOUND, MODEL, ('name="x"', b"y" * 200_000)), 413),
    ],
)
async def test_a_recording_that_is_none_is_refused(street: Street, content_type: str, body: bytes, status: int) -> None:
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 100_000})
    answer = await house.client.post(TRANSCRIPTIONS, content=body, headers={"content-type": content_type})
    refusal(answer, {400, 404, 415} if status != 413 else 413)
    assert not engine.asked
    await serves_on(house)


async def test_a_tenant_hears_only_its_models(street: Street) -> None:
    engine = await street.engine()
    tenant = {"name": "team-a", "keys": [{"sha256": digest(KEY)}], "models": ["other"]}
    house = await street.house(engine, models=[{"name": "tiny"}, {"name": "other"}], tenants=[tenant])
    content_type, body = FORMS["file first"]
    answer = await house.client.post(TRANSCRIPTIONS, content=body, headers={"content-type": content_type})
    refusal(answer, 404)
    for path in BODIES:
        assert (await ask(house, path)).status_code == 404
    assert not engine.asked
