"""What a client's body goes through: decoded, read once, and given on with every byte that is not the gateway's."""

import asyncio
import gzip
import hashlib
import re
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import brotli
import httpx
import orjson
import pytest
import zstandard

from tests.double import CHAT, COMPLETIONS, EMBEDDINGS, Call, End, Engine, Script, chunk, completed, whole
from tests.gateway.heard import hear, last_words, refusal, serves_on
from tests.gateway.house import House, Raw, Street, chat, eventually
from tests.gateway.memory import peak

pytestmark = pytest.mark.usefixtures("calm")

KB, MB = 1_000, 1_000_000
SALT = re.compile(rb'"cache_salt": ?"[0-9a-f]{64}"')
TEXT = b'"messages": [{"role": "user", "content": "x"}]'
ALIASED = [{"name": "tiny", "aliases": ["alias-x", "org/alias:y"]}]


def joined(*members: bytes) -> bytes:
    return b"{" + b", ".join(members) + b"}"


async def served(street: Street, **sections: Any) -> tuple[Engine, House]:
    engine = await street.engine()
    return engine, await street.house(engine, **sections)


async def post(house: House, body: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await house.client.post(path, content=body, headers=named)


def stands_in(call: Call, members: Sequence[bytes]) -> None:
    """All members stand in the engine's body as the client wrote them, in their order, and one salt is added."""
    at = 0
    for member in members:
        at = call.body.find(member, at)
        assert at >= 0, f"{member!r} is not in {call.body!r}"
        at += len(member)
    assert len(SALT.findall(call.body)) == 1
    call.json()


# Malformed

DEEP = 200_000
MALFORMED = {
    "empty": b"",
    "null": b"null",
    "true": b"true",
    "a number": b"12",
    "a list": b"[]",
    "a list with an object": b'[{"model":"tiny"}]',
    "a text": b'"canary"',
    "an empty object": b"{}",
    "no model": joined(TEXT),
    "model null": joined(b'"model": null', TEXT),
    "model empty": joined(b'"model": ""', TEXT),
    "model a number": joined(b'"model": 1', TEXT),
    "model a list": joined(b'"model": ["tiny"]', TEXT),
    "cut short": b'{"model":"tiny"',
    "cut in a text": b'{"model":"tiny", "canary',
    "something behind": b'{"model":"tiny"} canary',
    "another object behind": b'{"model":"tiny"}{"model":"tiny"}',
    "a comma too many": b'{"model":"tiny",}',
    "single quotes": b"{'model':'tiny'}",
    "a bare word": b'{"model":tiny}',
    "NaN": b'{"model":"tiny","temperature":NaN}',
    "Infinity": b'{"model":"tiny","temperature":-Infinity}',
    "a leading zero": b'{"model":"tiny","seed":01}',
    "a control character": b'{"model":"tiny","user":"a\x00b"}',
    "a line break in a text": b'{"model":"tiny","user":"a\nb"}',
    "a bad escape": b'{"model":"tiny","user":"\\x41"}',
    "byte ff": b"\xff",
    "byte ff in a text": b'{"model":"tiny","user":"\xff"}',
    "half a character": b'{"model":"tiny","user":"\xe4\xbd"}',
    "an encoded surrogate": b'{"model":"tiny","user":"\xed\xa0\x80"}',
    "an overlong character": b'{"model":"tiny","user":"\xc0\xaf"}',
    "latin-1": '{"model":"tiny","user":"é"}'.encode("latin-1"),
    "utf-16": '{"model":"tiny"}'.encode("utf-16"),
    "utf-32": '{"model":"tiny"}'.encode("utf-32"),
    "2,000 lists": b"[" * 2_000 + b"]" * 2_000,
    "200,000 lists": b"[" * DEEP + b"]" * DEEP,
    "200,000 lists in a field": joined(b'"model": "tiny"', b'"tools": ' + b"[" * DEEP + b"]" * DEEP),
    "200,000 objects in a field": joined(b'"model": "tiny"', b'"tools": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "200,000 lists that never end": b'{"model": "tiny", "tools": ' + b"[" * DEEP,
    "zstd without the header": zstandard.compress(joined(b'"model": "tiny"')),
    "gzip without the header": gzip.compress(joined(b'"model": "tiny"')),
    "a megabyte of spaces": b" " * MB,
    "a form": b"model=tiny&prompt=canary",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("kind", MALFORMED)
async def test_a_body_that_is_no_request_is_refused_and_not_logged(
    street: Street, caplog: pytest.LogCaptureFixture, kind: str, path: str
) -> None:
    engine, house = await served(street)
    refusal(await post(house, MALFORMED[kind], path), 400, "invalid_request_error")
    assert not engine.asked
    assert "canary" not in "".join(r.getMessage() for r in caplog.records if r.name.startswith(("moongate", "uvicorn")))
    await serves_on(house)


@pytest.mark.parametrize(
    "member",
    [
        b'"tools": [{"type": "function", "function": {"name": "f", "parameters": '
        + b'{"a":' * 1_000
        + b"1"
        + b"}" * 1_000
        + b"}}]",
        b'"seed": ' + b"9" * 5_000,
        b'"seed": -' + b"9" * 5_000,
    ],
    ids=["1,000 objects deep", "5,000 digits", "-5,000 digits"],
)
async def test_what_no_engine_could_read_is_refused(street: Street, member: bytes) -> None:
    engine, house = await served(street)
    refusal(await post(house, joined(b'"model": "tiny"', TEXT, member)), 400, "invalid_request_error")
    assert not engine.asked
    await serves_on(house)


# Bytes stay bytes

FIDELITY = [
    b'"zz_new": {"z": 1.0, "a": 1e2, "m": 1E+2, "b": -0.0, "c": -0}',
    b'"seed": 12345678901234567890',
    b'"big": [123456789012345678901234567890, 0.1000000000000000055, 5e-324, 1.7976931348623157e308]',
    b'"tools": [{"type":"function","function":{"parameters":{"zeta":1,"alpha":{"y":1.0,"x":[ ]},"beta" : { }}}}]',
    b'"user": "\\u00e9\\u2028\\/\\ud83e\\udd80 \xf0\x9f\xa6\x80 \xe2\x80\xa8 \x7f \\n"',
    b'"stop":\t["\\u0000", ""]',
    b'"logit_bias": {"50256": -100, "1": 0.5}',
    b'"response_format": {"type": "json_schema", "json_schema": {"b": 1, "a": 2, "b": 3}}',
    b'"metadata": {"model": "alias-x", "cache_salt_": "a", "stream_options": {"include_usage": 1e0}}',
    b'"a\\"b": "\\\\\\"model\\": \\"tiny\\"}"',
    b'"": {"": []}',
]


@pytest.mark.parametrize("model", ["tiny", "alias-x"])
@pytest.mark.parametrize("streamed", [b"true", b"false", b"null"])
@pytest.mark.parametrize("position", [0, 5, 99])
async def test_every_member_reaches_the_engine_as_it_was_written(
    street: Street, model: str, streamed: bytes, position: int
) -> None:
    engine, house = await served(street, models=ALIASED)
    members = [*FIDELITY, TEXT, b'"stream" : ' + streamed]
    for_model = members.copy()
    for_model.insert(position, b'"model": "%b"' % model.encode())
    assert (await post(house, joined(*for_model))).status_code == 200
    (call,) = engine.asked
    stands_in(call, members)
    assert call.json()["model"] == "tiny"
    assert call.header("content-length") == str(len(call.body))


@pytest.mark.parametrize("space", [b"", b" ", b"\n", b"\r\n\t "])
async def test_space_between_members_is_the_clients(street: Street, space: bytes) -> None:
    engine, house = await served(street, models=ALIASED)
    parts = [b"{", b'"model"', b":", b'"alias-x"', b",", b'"max_tokens"', b":", b"1", b",", TEXT, b"}"]
    assert (await post(house, space + space.join(parts) + space)).status_code == 200
    (call,) = engine.asked
    tail = space.join([b",", b'"max_tokens"', b":", b"1", b",", TEXT, b"}"]) + space
    assert tail in call.body
    assert call.json().keys() == {"model", "max_tokens", "messages", "cache_salt"}


FIELDS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False, "thinking": None},
    "structured_outputs": {"json": {"type": "object", "properties": {"z": {}, "a": {}}}},
    "guided_json": {"type": "string"},
    "guided_regex": "[a-z]+\\d",
    "top_k": 5,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "stop_token_ids": [1, 2],
    "priority": -3,
    "mm_processor_kwargs": {"num_crops": 4},
    "documents": [{"title": "a", "text": "b"}],
    "logit_bias": {"50256": -100},
    "max_completion_tokens": 5,
    "parallel_tool_calls": False,
    "service_tier": "flex",
    "reasoning_effort": "low",
    "include_reasoning": True,
    "request_id": "mine",
    "zz_new": {"a": [1, {"b": None}]},
    "stream_options_": {"x": 1},
    "Model": "other",
}


@pytest.mark.parametrize("model", ["tiny", "alias-x"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_only_documented_fields_differ_at_the_engine(street: Street, model: str, streamed: bool) -> None:
    engine, house = await served(street, models=ALIASED)
    body = chat(stream=streamed, **FIELDS) | {"model": model}
    assert (await house.client.post(CHAT, json=body)).status_code == 200
    sent = engine.asked[0].json()
    ours = {"cache_salt", "stream_options"} if streamed else {"cache_salt"}
    assert sent.keys() - body.keys() == ours
    assert {name: sent[name] for name in body} == body | {"model": "tiny"}


@pytest.mark.parametrize("name", FIELDS)
async def test_a_field_that_nobody_knows_is_the_engines_to_judge(street: Street, name: str) -> None:
    engine, house = await served(street)
    member = orjson.dumps({name: FIELDS[name]})[1:-1]
    assert (await post(house, joined(b'"model": "tiny"', TEXT, member))).status_code == 200
    stands_in(engine.asked[0], [b'"model": "tiny"', TEXT, member])


CONTENTS: dict[str, dict[str, Any]] = {
    "a text": {"content": "x"},
    "null": {"content": None},
    "none": {},
    "empty": {"content": ""},
    "no parts": {"content": []},
    "text parts": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    "an image": {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
    "an unknown part": {"content": [{"type": "hologram", "hologram": {"z": 1, "a": 2}}]},
    "a refusal": {"content": None, "refusal": "no", "name": "n"},
}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"z":1, "a": "\\u00e9"}'}}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function", "oracle"])
@pytest.mark.parametrize("content", CONTENTS)
async def test_messages_and_tools_are_not_touched(
    street: Street, tokenizer_folder: Path, content: str, role: str
) -> None:
    """Whether the gateway can read them for itself or not."""
    engine, house = await served(street, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    message = {"role": role, **CONTENTS[content]}
    message |= {"tool_calls": CALLS} if role == "assistant" else {"tool_call_id": "c"} if role == "tool" else {}
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    members = [
        b'"messages": ' + orjson.dumps([{"role": "user", "content": "x"}, message]),
        b'"tools": ' + orjson.dumps(tools),
        b'"tool_choice": "auto"',
    ]
    assert (await post(house, joined(b'"model": "tiny"', *members))).status_code == 200
    stands_in(engine.asked[0], members)


NULLABLE = ["stream", "logprobs", "max_tokens", "tools", "stop", "stream_options", "seed", "user", "n", "cache_salt_"]


@pytest.mark.parametrize("name", [*NULLABLE, "all"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_is_the_same_as_nothing(street: Street, path: str, name: str) -> None:
    engine, house = await served(street)
    members = [b'"%b": null' % one.encode() for one in (NULLABLE if name == "all" else [name])]
    answer = await post(house, joined(b'"model": "tiny"', b'"prompt": "x"', TEXT, *members), path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    stands_in(engine.asked[0], members)


@pytest.mark.parametrize("member", [b'"min_tokens": 0', b'"temperature": 0', b'"top_k": -1', b'"stop": []', b'"n": 0'])
async def test_zero_is_not_nothing(street: Street, member: bytes) -> None:
    engine, house = await served(street)
    assert (await post(house, joined(b'"model": "tiny"', TEXT, member))).status_code == 200
    stands_in(engine.asked[0], [member])


@pytest.mark.parametrize("streamed", [True, False, None])
@pytest.mark.parametrize(
    "options",
    [
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": False},
        {"include_usage": None, "zz": 1},
        {},
        None,
    ],
)
async def test_stream_options_keep_what_the_client_said_beside_the_usage(
    street: Street, options: dict[str, Any] | None, streamed: bool | None
) -> None:
    engine, house = await served(street)
    assert (await house.chat(stream=streamed, stream_options=options)).status_code == 200
    sent = engine.asked[0].json()["stream_options"]
    if not streamed:
        assert sent == options
    else:
        assert sent == (options or {}) | {"include_usage": True}


# Fields that stand twice


@pytest.mark.parametrize(
    "members",
    [
        [b'"model": "alias-x"', b'"model": "tiny"'],
        [b'"model": "tiny"', b'"model": "alias-x"'],
        [b'"model": "nobody"', b'"model": "alias-x"'],
        [b'"mo\\u0064el": "nobody"', b'"model": "alias-x"'],
        [b'"model": "alias-x"', b'"mo\\u0064el": "tiny"'],
        [b'"model": "alias-x"', b'"mod\\u0065l": "nobody"'],
        [b'"model": "alias-x"', b'"stream": true', b'"stream": false'],
        [b'"model": "alias-x"', b'"stream": true', b'"stream_options": {}', b'"stream_options": null'],
    ],
)
async def test_gateway_and_engine_never_read_two_things_in_one_body(street: Street, members: list[bytes]) -> None:
    """A field that stands twice is refused, or means to both what stands last."""
    engine, house = await served(street, models=ALIASED)
    answer = await post(house, joined(*members, TEXT))
    if answer.status_code == 200:
        sent = engine.asked[0].json()
        assert sent["model"] == "tiny"
        assert bool(sent.get("stream")) == answer.headers["content-type"].startswith("text/event-stream")
        assert engine.asked[0].body.count(b'"cache_salt"') == 1
    else:
        refusal(answer, {400, 404})
        assert not engine.asked


# Aliases


@pytest.mark.parametrize("name", ["alias-x", "org/alias:y", "tiny"])
@pytest.mark.parametrize("written", ["plain", "escaped"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
async def test_an_alias_is_the_engines_real_name(street: Street, name: str, written: str, path: str) -> None:
    engine, house = await served(street, models=ALIASED)
    text = name if written == "plain" else "".join(f"\\u{ord(letter):04x}" for letter in name)
    others = [b'"prompt": "of alias-x and tiny"', b'"input": "alias-x"', TEXT, b'"user": "alias-x"']
    members = [*others[:2], b'"model":  "%b"' % text.encode(), *others[2:]]
    assert (await post(house, joined(*members), path)).status_code == 200
    (call,) = engine.asked
    assert call.json()["model"] == "tiny"
    stands_in(call, others)


@pytest.mark.parametrize("name", ["alias-X", "alias", "alias-x ", "ALIAS-X", "org/alias", "alias-x/", "\x00alias-x"])
async def test_what_only_looks_like_an_alias_is_unknown(street: Street, name: str) -> None:
    engine, house = await served(street, models=ALIASED)
    answer = await house.client.post(CHAT, json=chat() | {"model": name})
    assert refusal(answer, 404)["code"] == "model_not_found"
    assert not engine.asked


@pytest.mark.parametrize("name", ["alias-x", "tiny"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_the_answer_to_an_alias_passes_unchanged(street: Street, name: str, streamed: bool) -> None:
    _, house = await served(street, models=ALIASED)
    said = []
    for model in ("tiny", name):
        answer = await house.client.post(CHAT, json=chat("tiny or alias-x", stream=streamed) | {"model": model})
        said.append(answer.content)
    assert said[0] == said[1]
    assert b'"model":"tiny"' in said[1]


async def test_an_alias_belongs_to_its_model(street: Street) -> None:
    first, second = await street.engine("tiny"), await street.engine("other")
    static = [{"url": first.url, "model": "tiny"}, {"url": second.url, "model": "other"}]
    models = [{"name": "tiny", "aliases": ["a"]}, {"name": "other", "aliases": ["b"]}]
    house = await street.house(*static, models=models)
    for model in ("a", "b", "tiny", "other", "b"):
        assert (await house.client.post(CHAT, json=chat() | {"model": model})).status_code == 200
    assert [call.json()["model"] for call in first.asked] == ["tiny"] * 2
    assert [call.json()["model"] for call in second.asked] == ["other"] * 3
    assert await house.metric("requests_total", model="other") == 3


# Content types

ACCEPTED = [
    None,
    "application/json",
    "application/json; charset=utf-8",
    "application/json;charset=UTF-8",
    'application/json; charset="utf-8"',
    "application/json; odata=verbose; charset=utf-8",
    "application/vnd.api+json",
    "text/plain",
    "text/plain; charset=utf-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "nonsense",
]
OTHER_CHARSETS = ["utf-16", "UTF-16LE", "utf-32", "iso-8859-1", "latin1", '"utf-16"', "utf-7", "shift_jis", "x"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("content_type", ACCEPTED)
async def test_json_is_json_whatever_it_is_called(street: Street, content_type: str | None, path: str) -> None:
    engine, house = await served(street)
    client: Raw = await street.raw(house)
    body = joined(b'"model": "tiny"', b'"prompt": "x"', b'"input": "x"', TEXT)
    client.ask(body, *([f"content-type: {content_type}"] if content_type is not None else []), path=path)
    assert (await hear(client)).status == 200
    assert engine.asked[0].headers("content-type") == ["application/json"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("charset", OTHER_CHARSETS)
async def test_another_charset_is_refused(street: Street, charset: str, path: str) -> None:
    engine, house = await served(street)
    body = orjson.dumps(chat()).decode().encode("utf-16" if "16" in charset else "utf-8")
    answer = await post(house, body, path, content_type=f"application/json; charset={charset}")
    refusal(answer, 415, "invalid_request_error")
    assert not engine.asked


# Prompts in all their forms

PROMPTS: dict[str, list[Any]] = {
    COMPLETIONS: ["x", ["a", "b"], [1, 2, 3], [[1, 2], [3]], [], "", [""], [[]]],
    EMBEDDINGS: ["x", ["a", "b"], [1, 2, 3], [[1, 2], [3]], [], [{"type": "text", "text": "x"}]],
}
FORMS = [(path, prompt) for path, prompts in PROMPTS.items() for prompt in prompts]


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
@pytest.mark.parametrize(("path", "prompt"), FORMS)
async def test_every_form_of_a_prompt_is_routed_and_forwarded(
    street: Street, tokenizer_folder: Path, path: str, prompt: Any, policy: str
) -> None:
    model = {"name": "tiny", "tokenizer": str(tokenizer_folder)}
    engine, house = await served(street, models=[model], policy={"use": policy})
    name = b'"prompt": ' if path == COMPLETIONS else b'"input": '
    members = [b'"model": "tiny"', name + orjson.dumps(prompt)]
    assert (await post(house, joined(*members), path)).status_code == 200
    stands_in(engine.asked[0], members)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "cache_aware"])
@pytest.mark.parametrize("batched", [True, False])
async def test_token_lists_spread_over_the_engines(
    street: Street, tokenizer_folder: Path, policy: str, batched: bool
) -> None:
    engines = await street.engines(2)
    model = {"name": "tiny", "tokenizer": str(tokenizer_folder)}
    house = await street.house(*engines, models=[model], policy={"use": policy})
    for number in range(100):
        ids = [number, *range(40)]
        await post(house, orjson.dumps({"model": "tiny", "prompt": [ids] if batched else ids}), COMPLETIONS)
    assert min(len(engine.asked) for engine in engines) >= 20


# Compressed bodies


def zstd_without_size(data: bytes) -> bytes:
    made = zstandard.ZstdCompressor().compressobj()
    return bytes(made.compress(data) + made.flush())


def brotlied(data: bytes) -> bytes:
    return bytes(brotli.compress(data, quality=5))


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotlied,
    "zstd": zstandard.compress,
}
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    **PACK,
    "GZip": gzip.compress,
    "identity": bytes,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "gzip,zstd": lambda data: zstandard.compress(gzip.compress(data)),
    "br , deflate": lambda data: zlib.compress(brotlied(data)),
    "identity, gzip": gzip.compress,
}
LONG = orjson.dumps(chat("你好🦀 " * 20_000))


@pytest.mark.parametrize("body", [orjson.dumps(chat()), LONG, b" " + orjson.dumps(chat(stream=True))])
@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_body_reaches_the_engine_plain(street: Street, coding: str, body: bytes) -> None:
    engine, house = await served(street)
    plain = await post(house, body)
    answer = await post(house, CODINGS[coding](body), content_encoding=coding)
    assert answer.status_code == plain.status_code == 200
    first, second = engine.asked
    assert second.body == first.body
    assert not second.headers("content-encoding")
    assert second.headers("content-length") == [str(len(second.body))]


async def test_codings_may_stand_on_several_lines(street: Street) -> None:
    engine, house = await served(street)
    client = await street.raw(house)
    body = orjson.dumps(chat())
    client.ask(brotlied(gzip.compress(body)), "content-encoding: gzip", "content-encoding: br")
    assert (await hear(client)).status == 200
    assert engine.asked[0].json()["messages"] == chat()["messages"]


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress(LONG[:999]) + gzip.compress(LONG[999:])),
        ("zstd", zstandard.compress(LONG[:999]) + zstandard.compress(LONG[999:])),
        ("zstd", zstd_without_size(LONG)),
        ("zstd", zstandard.ZstdCompressor(level=19, write_checksum=True).compress(LONG)),
        ("gzip", gzip.compress(LONG, compresslevel=0)),
    ],
    ids=["members", "frames", "no size", "checksum", "stored"],
)
async def test_every_form_of_a_coding_is_read(street: Street, coding: str, packed: bytes) -> None:
    engine, house = await served(street)
    assert (await post(house, packed, content_encoding=coding)).status_code == 200
    assert engine.asked[0].json()["messages"] == orjson.loads(LONG)["messages"]


@pytest.mark.parametrize("coding", PACK)
async def test_a_compressed_body_may_come_in_chunks_of_a_byte(street: Street, coding: str) -> None:
    engine, house = await served(street)
    client = await street.raw(house)
    packed = PACK[coding](orjson.dumps(chat()))
    pieces = b"".join(chunk(packed[at : at + 1]) for at in range(len(packed))) + b"0\r\n\r\n"
    lines = [f"POST {CHAT} HTTP/1.1", "host: gateway", f"authorization: {house.client.headers['authorization']}"]
    lines += ["transfer-encoding: chunked", f"content-encoding: {coding}", "", ""]
    client.send("\r\n".join(lines).encode() + pieces)
    assert (await hear(client)).status == 200
    assert engine.asked[0].json()["messages"] == chat()["messages"]


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda packed: packed[: len(packed) // 2],
    "without its last byte": lambda packed: packed[:-1],
    "empty": lambda _: b"",
    "plain": lambda _: orjson.dumps(chat()),
    "noise": lambda _: bytes(range(255, 0, -1)) * 4,
    "head only": lambda packed: packed[:4],
    "spoiled": lambda packed: packed[:20] + bytes(20) + packed[40:],
}


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_compressed_body_that_is_spoiled_is_refused(street: Street, coding: str, spoiled: str) -> None:
    engine, house = await served(street)
    packed = SPOILED[spoiled](PACK[coding](orjson.dumps(chat(user=hashlib.sha512(b"").hexdigest()))))
    refusal(await post(house, packed, content_encoding=coding), 400, "invalid_request_error")
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize("coding", ["foo", "gzip, foo", "foo, gzip", "compress", "aes128gcm", "gzip;q=1", "g zip"])
async def test_an_unknown_coding_is_415_and_told_which_are_known(street: Street, coding: str) -> None:
    engine, house = await served(street)
    answer = await post(house, gzip.compress(orjson.dumps(chat())), content_encoding=coding)
    refusal(answer, 415, "invalid_request_error")
    known = {name.strip() for name in answer.headers["accept-encoding"].split(",")}
    assert known >= set(PACK)
    assert not engine.asked


@pytest.mark.parametrize("count", [100, 2_000])
async def test_codings_upon_codings_are_refused(street: Street, count: int) -> None:
    engine, house = await served(street)
    answer = await post(house, gzip.compress(b"{}"), content_encoding=",".join(["gzip"] * count))
    refusal(answer, {400, 413, 415})
    assert not engine.asked


def gzip_of_zeros(size: int, wbits: int = 31) -> bytes:
    made = zlib.compressobj(9, wbits=wbits)
    return b"".join([*(made.compress(bytes(MB)) for _ in range(size // MB)), made.flush()])


def zstd_window(exponent: int) -> bytes:
    """A frame that wants a window of 2 ** exponent bytes for one block of JSON."""
    body = joined(b'"model": "tiny"', TEXT)
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(exponent - 10) << 3]) + (len(body) << 3 | 1).to_bytes(3, "little") + body


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gzip": ("gzip", lambda: gzip_of_zeros(300 * MB)),
    "gzip of gzip": ("gzip, gzip", lambda: gzip.compress(gzip_of_zeros(300 * MB))),
    "deflate": ("deflate", lambda: gzip_of_zeros(300 * MB, 15)),
    "brotli": ("br", lambda: bytes(brotli.compress(bytes(100 * MB), quality=2))),
    "zstd": ("zstd", lambda: zstandard.compress(bytes(300 * MB))),
    "zstd without its size": ("zstd", lambda: zstd_without_size(bytes(300 * MB))),
    "zstd of zstd": ("zstd, zstd", lambda: zstandard.compress(zstandard.compress(bytes(300 * MB)))),
    "spaces": ("gzip", lambda: gzip.compress(b" " * 5 * MB)),
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_bomb_is_refused_without_room_for_it(street: Street, bomb: str) -> None:
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 2 * MB})
    coding, make = BOMBS[bomb]
    packed = await asyncio.to_thread(make)
    with peak() as memory:
        refusal(await post(house, packed, content_encoding=coding), 413, "invalid_request_error")
    assert memory.grown < 40 * MB
    assert not engine.asked
    await serves_on(house)


@pytest.mark.parametrize("exponent", [17, 23, 27, 30, 41])
async def test_a_window_of_gigabytes_is_not_made(street: Street, exponent: int) -> None:
    _, house = await served(street, listen={"port": 0, "max_body_bytes": 2 * MB})
    with peak() as memory:
        answer = await post(house, zstd_window(exponent), content_encoding="zstd")
    assert answer.status_code in ({200} if exponent == 17 else {200, 400, 413})
    assert memory.grown < 40 * MB
    await serves_on(house)


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("surplus", [0, 1])
async def test_the_limit_holds_for_the_plain_body(street: Street, coding: str, surplus: int) -> None:
    body = orjson.dumps(chat())
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 5 * KB})
    plain = body + b" " * (5 * KB - len(body) + surplus)
    answer = await post(house, PACK[coding](plain), content_encoding=coding)
    assert answer.status_code == (413 if surplus else 200)
    assert len(engine.asked) == 1 - surplus


# Large bodies


def imaged(size: int) -> bytes:
    """A vision request of exactly that many bytes."""
    head = b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "'
    tail = b'"}}]}]}'
    return head + b"QUJD" * ((size - len(head) - len(tail)) // 4) + b"=" * ((size - len(head) - len(tail)) % 4) + tail


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 100 * KB):
        yield body[at : at + 100 * KB]


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


SIZES = [100 * KB, 2 * MB, 9 * MB, 28 * MB]


@pytest.mark.parametrize("size", [*SIZES, pytest.param(99 * MB, marks=pytest.mark.long)])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_large_body_reaches_the_engine_byte_for_byte(street: Street, size: int, chunked: bool) -> None:
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 100 * MB, "max_held_bytes": 400 * MB})
    body = imaged(size)

    answer = await house.client.post(CHAT, content=pieces(body) if chunked else body, timeout=60)
    assert answer.status_code == 200
    (call,) = engine.asked
    before, after = SALT.split(call.body)
    without = (before + after.lstrip(b", "), before.rstrip(b", ") + after)
    assert digest(body) in {digest(one) for one in without}, "only the salt and a comma were added"


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_above_the_limit_is_413_and_counted(street: Street, chunked: bool) -> None:
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 3 * MB})

    body = b" " * 4 * MB
    answer = await house.client.post(CHAT, content=pieces(body) if chunked else body)
    refusal(answer, 413, "invalid_request_error")
    assert not engine.asked
    assert await house.metric("requests_total", status="413", tenant="team-a") == 1
    await serves_on(house)


@pytest.mark.parametrize("length", [3 * MB + 1, 101 * MB, 10**12])
async def test_a_declared_length_is_refused_before_any_of_it_comes(street: Street, length: int) -> None:
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 3 * MB})
    client = await street.raw(house)
    lines = [f"POST {CHAT} HTTP/1.1", "host: gateway", f"authorization: {house.client.headers['authorization']}"]
    client.send("\r\n".join([*lines, f"content-length: {length}", "", ""]).encode())
    refusal(await hear(client), 413)
    assert await last_words(client) == b""
    assert not engine.asked


# The memory of all bodies together


class Uploads:
    """Clients that declare a body, send a part of it and keep the rest back."""

    def __init__(self, street: Street, house: House, size: int) -> None:
        self._street = street
        self._house = house
        self._body = imaged(size)
        self.clients: list[Raw] = []

    async def begin(self, *, chunked: bool = False) -> Raw:
        client = await self._street.raw(self._house)
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(self._body)}"
        key = self._house.client.headers["authorization"]
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: {key}\r\n{framing}\r\n\r\n".encode())
        first = self._body[:-1]
        client.send(chunk(first) if chunked else first)
        self.clients.append(client)
        return client

    def end(self, client: Raw, *, chunked: bool = False) -> None:
        last = self._body[-1:]
        client.send(chunk(last) + b"0\r\n\r\n" if chunked else last)


@pytest.mark.parametrize("chunked", [True, False])
async def test_more_bodies_than_there_is_room_for_are_told_to_come_back(street: Street, chunked: bool) -> None:
    listen = {"port": 0, "max_body_bytes": 2 * MB, "max_held_bytes": 3 * MB + 500 * KB}
    engine, house = await served(street, listen=listen)
    uploads = Uploads(street, house, MB)
    admitted = [await uploads.begin(chunked=chunked) for _ in range(3)]
    await asyncio.sleep(0.3)  # what was sent is there by now
    heard = await hear(await uploads.begin(chunked=chunked))
    refusal(heard, 503)
    assert int(heard.header("retry-after") or 0) >= 1
    for client in admitted:
        uploads.end(client, chunked=chunked)
    assert [(await hear(client)).status for client in admitted] == [200, 200, 200]
    client = await uploads.begin(chunked=chunked)
    uploads.end(client, chunked=chunked)
    assert (await hear(client)).status == 200, "there is room again"
    assert len(engine.asked) == 4


@pytest.mark.parametrize("ending", ["leaves", "is refused", "is answered"])
async def test_room_comes_back_however_a_request_ends(street: Street, ending: str) -> None:
    listen = {"port": 0, "max_body_bytes": 2 * MB, "max_held_bytes": 2 * MB + 500 * KB}
    _, house = await served(street, listen=listen)
    for _ in range(5):
        uploads = Uploads(street, house, MB)
        for client in [await uploads.begin() for _ in range(2)]:
            if ending == "leaves":
                client.leave()
            else:
                client.send(b"}" if ending == "is answered" else b"x")
                assert (await hear(client)).status == (200 if ending == "is answered" else 400)
        await serves_on(house)

    async def fits() -> bool:
        return (await post(house, imaged(MB))).status_code == 200

    await eventually(fits)


async def test_room_is_held_until_the_engine_has_answered(street: Street) -> None:
    """A body may have to be sent again, so it is kept while the engine thinks."""
    gate = asyncio.Event()
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 2 * MB, "max_held_bytes": 2 * MB})
    engine.always(gate, *whole(200, completed()))
    first = asyncio.create_task(post(house, imaged(MB + 500 * KB)))
    await engine.arrival(CHAT)
    refusal(await post(house, imaged(MB)), 503)
    assert (await house.client.get("/health")).status_code == 200
    gate.set()
    assert (await first).status_code == 200
    assert (await post(house, imaged(MB))).status_code == 200


@pytest.mark.parametrize("coding", PACK)
async def test_a_compressed_body_takes_the_room_of_the_plain_one(street: Street, coding: str) -> None:
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": 2 * MB, "max_held_bytes": 2 * MB})
    engine.always(End.SILENCE)
    plain = imaged(MB + 500 * KB)
    first = asyncio.create_task(post(house, PACK[coding](plain), content_encoding=coding))
    await engine.arrival(CHAT)
    refusal(await post(house, PACK[coding](plain), content_encoding=coding), 503)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await house.idle()


def forgetful(call: Call) -> Script:
    """What an engine says that keeps no bodies."""
    call.body = b""
    return whole(200, completed())


async def test_many_uploads_at_once_take_no_more_memory_than_was_admitted(street: Street) -> None:
    """Of twenty bodies of 5 MB, three fit; each of those stands once more at the engine, in this process too."""
    size, room = 5 * MB, 16 * MB
    engine, house = await served(street, listen={"port": 0, "max_body_bytes": size, "max_held_bytes": room})
    engine.script = forgetful
    body, length = imaged(size), {"content-length": str(size)}
    with peak() as memory:
        answers = await asyncio.gather(
            *(house.client.post(CHAT, content=pieces(body), headers=length) for _ in range(20))
        )
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429, 503}
    assert statuses.count(200) >= 1
    assert all(answer.headers.get("retry-after") for answer in answers if answer.status_code != 200)
    assert memory.grown < 2.5 * room + 2 * room
    await serves_on(house)
