"""One client body to the bodies that engines get: what is added, what never passes, what stays."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.handoff import OWNED, engine_body, prefill_body, wants_usage

SALT = 'tenant\'s "salt" \\ \u00fc'

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
)
stream_options = (
    scalars
    | st.lists(scalars, max_size=2)
    | st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans() | st.none(), "continuous_usage_stats": st.booleans()}
    )
)
xargs = scalars | st.dictionaries(st.sampled_from([*OWNED, "a", "b"]), values, max_size=4)
plain = st.dictionaries(st.sampled_from(["model", "messages", "prompt", "n", "seed", "x y"]), values, max_size=4)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m"),
        "messages": values,
        "stream": st.booleans() | st.none(),
        "stream_options": stream_options,
        "vllm_xargs": xargs,
        "cache_salt": values,
        "kv_transfer_params": values,
        "max_tokens": st.integers(0, 9),
    },
)
salts = st.none() | st.just(SALT)


def written(body: dict[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(body, indent=indent, ensure_ascii=indent is None).encode()


def sent_to(raw: bytes, salt: str | None, *, ask_usage: bool = True, model: str | None = None) -> bytes:
    return b"".join(engine_body(raw, orjson.loads(raw), salt=salt, ask_usage=ask_usage, model=model))


def prefill_of(raw: bytes, salt: str | None, model: str | None = None) -> bytes:
    return b"".join(prefill_body(raw, orjson.loads(raw), salt, model))


def parsed(data: bytes) -> dict[str, Any]:
    """The parse, which must not have two values for one name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), f"a name twice: {names}"
        return dict(pairs)

    result = json.loads(data, object_pairs_hook=unique)
    assert isinstance(result, dict)
    return result


def without_owned(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in OWNED}
    if isinstance(kept.get("vllm_xargs"), dict):
        kept["vllm_xargs"] = {name: value for name, value in kept["vllm_xargs"].items() if name not in OWNED}
    return kept


# the engine that answers


@given(bodies, salts, st.sampled_from([None, 1]))
def test_the_parse_differs_in_what_is_the_gateways_alone(
    body: dict[str, Any], salt: str | None, indent: int | None
) -> None:
    raw = written(body, indent)

    sent = parsed(sent_to(raw, salt))

    expected = without_owned(body)
    if salt is not None:
        expected["cache_salt"] = salt
    if body.get("stream") is True:
        options = body.get("stream_options")
        given = options if isinstance(options, dict) else {}
        if given.get("include_usage") is not True and given.get("continuous_usage_stats"):  # it said nothing before
            given = {name: value for name, value in given.items() if name != "continuous_usage_stats"}
        expected["stream_options"] = given | {"include_usage": True}
    assert sent == expected


@given(plain.filter(bool), salts, st.sampled_from([None, 1]), st.sampled_from([b"", b" ", b"\n\t \r"]))
def test_the_clients_bytes_stay_where_nothing_has_to_go(
    body: dict[str, Any], salt: str | None, indent: int | None, space: bytes
) -> None:
    raw = space + written(body, indent) + space

    sent = sent_to(raw, salt)

    assert sent.startswith(space + b"{")
    assert sent.endswith(raw[raw.index(b"{") + 1 :]), "spliced in behind the brace, and nothing else"
    assert salt is not None or sent == raw


def test_a_stream_is_spliced_as_well() -> None:
    raw = b'{ "stream" :true, "x":1e2}'

    assert sent_to(raw, None) == b'{"stream_options":{"include_usage":true}, "stream" :true, "x":1e2}'
    assert sent_to(raw, "s").endswith(b' "stream" :true, "x":1e2}')


@given(bodies)
def test_a_salt_is_exactly_the_tenants(body: dict[str, Any]) -> None:
    raw = written(body)

    for sent in (sent_to(raw, SALT), prefill_of(raw, SALT)):
        assert parsed(sent)["cache_salt"] == SALT
    for sent in (sent_to(raw, None), prefill_of(raw, None)):
        assert "cache_salt" not in parsed(sent)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","cache_salt":"mine"}',
        b'{"cache_salt":"mine","model":"m","cache_salt":"again"}',
        rb'{"model":"m","cache\u005fsalt":"mine"}',
        rb'{"model":"m","\u0063ache_salt":"mine","cache_salt":"again"}',
        b'{"model":"m","cache_salt":null}',
        b'{"model":"m","cache_salt":""}',
        b'{"model":"m","cache_salt":5}',
        b'{"model":"m","cache_salt":{"cache_salt":"mine"}}',
        b'{"model":"m","kv_transfer_params":{"do_remote_prefill":true}}',
        b'{"kv_transfer_params":null,"model":"m","kv_transfer_params":{"do_remote_prefill":true}}',
        rb'{"model":"m","kv_transfer\u005fparams":{"do_remote_prefill":true}}',
        b'{"model":"m","kv_transfer_params":null}',
        b'{"model":"m","kv_transfer_params":{}}',
        b'{"model":"m","kv_transfer_params":[]}',
        b'{"model":"m","kv_transfer_params":7}',
        b'{"model":"m","vllm_xargs":{"kv_transfer_params":{"do_remote_prefill":true}}}',
        rb'{"model":"m","vllm\u005fxargs":{"kv\u005ftransfer_params":1,"cache_salt":"mine"}}',
        b'{"model":"m","vllm_xargs":{},"vllm_xargs":{"cache_salt":"mine"}}',
        b' \n{"model":"m","cache_salt":"mine"}\n',
    ],
    ids=bytes.decode,
)
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_what_is_the_gateways_never_passes(raw: bytes, salt: str | None) -> None:
    for sent in (sent_to(raw, salt), prefill_of(raw, salt)):
        assert b"mine" not in sent
        assert b"again" not in sent
        assert b"kv_transfer" not in sent
        assert b"do_remote" not in sent
        got = parsed(sent)
        assert got.get("cache_salt") == salt
        assert got["model"] == "m"
        assert "cache_salt" not in (got.get("vllm_xargs") or {})


def test_other_arguments_of_the_clients_stay() -> None:
    body = {"model": "m", "vllm_xargs": {"kv_transfer_params": 1, "mine": [1, 2]}}

    assert parsed(sent_to(written(body), None)) == {"model": "m", "vllm_xargs": {"mine": [1, 2]}}
    assert parsed(prefill_of(written(body), None))["vllm_xargs"] == {"mine": [1, 2]}


def test_names_that_only_look_like_the_gateways_stay() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "cache_salt kv_transfer_params", "cache_salt": "a word"}],
        "metadata": {"cache_salt": "a word", "kv_transfer_params": "too"},
        "Cache_Salt": "another",
    }

    assert parsed(sent_to(written(body), None)) == body


@pytest.mark.parametrize("body", [{}, {"cache_salt": "mine"}])
@pytest.mark.parametrize("raw", [b"{}", b" { } "])
def test_an_empty_object_stays_json(raw: bytes, body: dict[str, Any]) -> None:
    assert parsed(sent_to(raw, SALT)) == {"cache_salt": SALT}
    assert parsed(sent_to(raw, None)) == {}


ABSENT = object()


@pytest.mark.parametrize(
    ("options", "sent", "wanted"),
    [
        (ABSENT, {"include_usage": True}, False),
        (None, {"include_usage": True}, False),
        ({}, {"include_usage": True}, False),
        ({"include_usage": False}, {"include_usage": True}, False),
        ({"include_usage": None}, {"include_usage": True}, False),
        ({"include_usage": 1}, {"include_usage": True}, False),
        ({"include_usage": True}, {"include_usage": True}, True),
        ({"continuous_usage_stats": True}, {"include_usage": True}, False),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            {"include_usage": True, "continuous_usage_stats": True},
            True,
        ),
        ("yes", {"include_usage": True}, False),
        (True, {"include_usage": True}, False),
        ([], {"include_usage": True}, False),
        (7, {"include_usage": True}, False),
    ],
)
def test_a_stream_ends_with_its_usage(options: object, sent: object, *, wanted: bool) -> None:
    body = {"model": "m", "stream": True} | ({} if options is ABSENT else {"stream_options": options})
    raw = written(body)

    assert parsed(sent_to(raw, None))["stream_options"] == sent
    assert wants_usage(body) is wanted
    assert not wanted or sent_to(raw, None) == raw


@pytest.mark.parametrize("stream", [ABSENT, None, False])
@pytest.mark.parametrize("options", [ABSENT, None, {}, {"include_usage": False}, {"include_usage": True}, "x"])
def test_what_is_no_stream_is_left_alone(stream: object, options: object) -> None:
    """An engine refuses stream_options without a stream, and that is the client's to hear."""
    given_fields = {"stream": stream, "stream_options": options}
    body = {"model": "m"} | {name: value for name, value in given_fields.items() if value is not ABSENT}
    raw = written(body)

    assert sent_to(raw, None) == raw


# the prefill leg

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}}
PREFILL = {"max_tokens": 1, "n": 1, "stream": False, "ignore_eos": True}

D01: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # what the row is called, what the client sends beside its prompt, what of it the prefill gets
    ("min_tokens", {"min_tokens": 100}, {}),
    ("min and max tokens", {"min_tokens": 100, "max_tokens": 200}, {}),
    ("max_completion_tokens", {"max_completion_tokens": 500}, {}),
    ("both max fields", {"max_completion_tokens": 500, "max_tokens": 400}, {}),
    ("neither max field", {}, {}),
    ("max_tokens null", {"max_tokens": None}, {}),
    ("stream_options", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {}),
    ("n", {"n": 2}, {}),
    ("logprobs", {"logprobs": True, "top_logprobs": 5}, {}),
    ("logprobs of some tokens", {"logprobs": True, "logprob_token_ids": [1, 2]}, {}),
    ("logprobs of completions", {"logprobs": 3}, {}),
    ("prompt_logprobs", {"prompt_logprobs": 1}, {}),
    ("echo", {"echo": True}, {}),
    ("best_of", {"best_of": 2}, {}),
    ("use_beam_search", {"use_beam_search": True}, {}),
    ("ignore_eos", {"ignore_eos": False}, {}),
    ("stop", {"stop": ["x"]}, {}),
    ("stop_token_ids", {"stop_token_ids": [2]}, {}),
    ("response_format", SCHEMA, {}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}, {}),
    ("guided", {"guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "g"}, {}),
    ("return_token_ids", {"return_token_ids": True}, {}),
    ("tool_choice", TOOLS, TOOLS),
    ("template settings", {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
     {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}),
    ("special tokens", {"add_special_tokens": False}, {"add_special_tokens": False}),
    ("priority", {"priority": 3}, {"priority": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "kept"), [row[1:] for row in D01], ids=[row[0] for row in D01])
@pytest.mark.parametrize("stream", [ABSENT, False, True])
@pytest.mark.parametrize("prompt", [CHAT, TEXT], ids=["chat", "completions"])
def test_a_prefill_computes_the_prompt_and_one_token(
    prompt: dict[str, Any], stream: object, sent: dict[str, Any], kept: dict[str, Any]
) -> None:
    body = prompt | sent | ({} if stream is ABSENT else {"stream": stream})

    leg = parsed(prefill_of(written(body), "tenant"))

    assert leg == prompt | kept | PREFILL | {"cache_salt": "tenant"}


@pytest.mark.parametrize(("sent", "kept"), [row[1:] for row in D01], ids=[row[0] for row in D01])
def test_the_decode_gets_the_clients_own_limits(sent: dict[str, Any], kept: dict[str, Any]) -> None:
    body = CHAT | sent
    leg = parsed(sent_to(written(body), None))

    assert leg == body
    assert ("max_tokens" in leg) == ("max_tokens" in sent), "absent stays absent"


def test_a_prefill_is_one_token_where_only_a_part_of_the_body_was_read() -> None:
    raw = b'{"model":"m","prompt":"hi","max_tokens":9,"n":2,"stop":"x","stream":true}'
    leg = parsed(b"".join(prefill_body(raw, {"model": "m"}, None)))

    assert leg == TEXT | PREFILL


@pytest.mark.parametrize("raw", [b'{"model":"alias","a":1}', rb'{"\u006dodel":"alias","a":1,"model":"x"}'])
def test_an_engine_is_asked_for_its_own_name_of_a_model(raw: bytes) -> None:
    assert parsed(sent_to(raw, None, model="tiny")) == {"model": "tiny", "a": 1}
    assert parsed(prefill_of(raw, None, "tiny")) == {"model": "tiny", "a": 1} | PREFILL


@pytest.mark.parametrize("options", [ABSENT, {}, {"include_usage": True}, "x"])
def test_an_endpoint_that_has_no_stream_options_gets_none(options: object) -> None:
    body = {"model": "m", "stream": True} | ({} if options is ABSENT else {"stream_options": options})

    assert sent_to(written(body), None, ask_usage=False) == written(body)


def test_a_long_body_stays_a_part_of_its_own() -> None:
    raw = b'{"model":"m","x":"' + b"y" * 100_000 + b'"}'
    parts = engine_body(raw, {"model": "m"}, salt=SALT, ask_usage=True)

    assert b"".join(parts[:2]).endswith(b",")
    assert parts[-1] == raw[1:]
    assert engine_body(raw, {"model": "m"}, salt=None, ask_usage=True)[0] is raw


@given(bodies)
def test_a_prefill_passes_vllms_own_checks(body: dict[str, Any]) -> None:
    """The cross-field rules that cost others a 400 (case D01)."""
    leg = parsed(prefill_of(written(body), None))

    assert leg.get("min_tokens", 0) <= leg["max_tokens"] == 1
    assert "max_completion_tokens" not in leg
    assert "stream_options" not in leg
    assert leg["stream"] is False
    assert leg.get("messages") == body.get("messages")
