"""One client body to the bodies that engines get. Pure.

The client's bytes go on as they are: what the gateway adds is put behind the opening brace, and what must
go is cut out (connector.splice). What belongs to the gateway and never passes: cache_salt (the tenant's
goes in its place), and kv_transfer_params and ec_transfer_params, which can kill an engine or make it wait
for ever; also where they hide in vllm_xargs.

Where the ids of the prompt are known to be the engine's, they can go in the prompt's place: as
kv_transfer_params.prompt_token_ids, which makes chat skip its template and its tokenizer
(vllm/entrypoints/openai/chat_completion/serving.py), or as the `prompt` of a completion.

A prefill leg asks for one token that nobody reads: what shapes the answer (limits, stops, logprobs,
grammars) is left out, what shapes the prompt (messages, tools, template settings) stays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from connector.splice import spliced

OWNED = frozenset({"cache_salt", "kv_transfer_params", "ec_transfer_params"})
"""Fields that a client cannot set."""
_HIDDEN = OWNED | {"kv_cache_report_mode"}
"""And in vllm_xargs: the last makes an engine tell of blocks as stored that it had, which are then counted twice."""

_ANSWER_ONLY = frozenset(
    {
        "stream_options",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "echo",
        "best_of",
        "use_beam_search",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "return_token_ids",
    }
)

_PREFILL = {"max_tokens": b"1", "n": b"1", "stream": b"false", "ignore_eos": b"true"}


def engine_body(
    raw: bytes,
    body: Mapping[str, Any],
    *,
    salt: str | None,
    ask_usage: bool,
    model: str | None = None,
    owned: frozenset[str] = OWNED,
    ids: Sequence[int] | None = None,
) -> list[bytes]:
    """The body for the engine that answers the client, in parts.

    `raw` is what the client sent and `body` its parse, an object. `ask_usage` makes a streamed answer end with
    its usage, for the gateway's own account; `model` goes in place of the client's name for it; `owned` are the
    fields that a client cannot set on this endpoint; `ids` go in the prompt's place.
    """
    changes: dict[str, bytes | None] = {} if owned.isdisjoint(body) else dict.fromkeys(owned.intersection(body))
    added: dict[str, bytes] = {}
    if salt is not None:
        if changes:
            changes.pop("cache_salt", None)
        _set(body, changes, added, "cache_salt", orjson.dumps(salt))
    if model is not None:
        changes["model"] = orjson.dumps(model)
    if ask_usage and body.get("stream") is True and not wants_usage(body):
        asked = orjson.dumps({**_options(body), "include_usage": True})
        _set(body, changes, added, "stream_options", asked)
    if "vllm_xargs" in body:
        _unhide(body, changes)
    if ids is not None:
        _send(body, changes, added, ids)
    return spliced(raw, changes, added)


def prefill_body(
    raw: bytes,
    body: Mapping[str, Any],
    salt: str | None,
    model: str | None = None,
    ids: Sequence[int] | None = None,
) -> list[bytes]:
    """The body for a prefill leg: the same prompt, one token, no stream, whatever ends early left out.

    `ignore_eos` makes sure that the token is not an end, since a prefill that stops is no prefill. `body` may be
    a part of the whole: what it does not tell of goes as well.
    """
    changes: dict[str, bytes | None] = dict.fromkeys((*_ANSWER_ONLY, *OWNED, *_PREFILL))
    added: dict[str, bytes] = {}
    for name, value in _PREFILL.items():
        _set(body, changes, added, name, value)
    if salt is not None:
        changes.pop("cache_salt", None)
        _set(body, changes, added, "cache_salt", orjson.dumps(salt))
    if model is not None:
        changes["model"] = orjson.dumps(model)
    _unhide(body, changes)
    if ids is not None:
        _send(body, changes, added, ids)
    return spliced(raw, changes, added)


def ids_body(model: str, ids: Sequence[int], salt: str | None) -> bytes:
    """The body of a completion that computes a prompt given by its ids, and nothing else."""
    asked: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": 1, "ignore_eos": True}
    return orjson.dumps(asked if salt is None else {**asked, "cache_salt": salt})


def audit_body(raw: bytes, body: Mapping[str, Any], salt: str | None, model: str | None = None) -> list[bytes]:
    """The body that makes an engine tell the ids of a prompt: a prefill leg's, and `return_token_ids`."""
    parts = prefill_body(raw, body, salt, model)
    parts[0] = b'{"return_token_ids":true,' + parts[0][1:]
    return parts


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client asked for the usage of its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The stream's options without those that say nothing unless usage is included."""
    options = body.get("stream_options")
    given = options if isinstance(options, dict) else {}
    return {name: value for name, value in given.items() if name != "continuous_usage_stats" or not value}


def _set(
    body: Mapping[str, Any], changes: dict[str, bytes | None], added: dict[str, bytes], name: str, value: bytes
) -> None:
    if name in body:
        changes[name] = value
    else:
        added[name] = value


def _send(
    body: Mapping[str, Any], changes: dict[str, bytes | None], added: dict[str, bytes], ids: Sequence[int]
) -> None:
    """Put ids in the prompt's place."""
    if "prompt" in body:
        changes["prompt"] = orjson.dumps(ids)
    else:
        changes.pop("kv_transfer_params", None)
        _set(body, changes, added, "kv_transfer_params", orjson.dumps({"prompt_token_ids": ids}))


def _unhide(body: Mapping[str, Any], changes: dict[str, bytes | None]) -> None:
    """Take what a client cannot set out of vllm_xargs as well."""
    arguments = body.get("vllm_xargs")
    if isinstance(arguments, dict) and not _HIDDEN.isdisjoint(arguments):
        kept = {name: value for name, value in arguments.items() if name not in _HIDDEN}
        changes["vllm_xargs"] = orjson.dumps(kept)
