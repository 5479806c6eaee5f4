"""One client body to the bodies that engines get. Pure.

The client's bytes go on as they are; what the gateway adds is spliced in behind the opening brace.
Only where a field of the client's must go or change is the body written anew. What belongs to the
gateway and never passes: cache_salt (the tenant's goes in its place), and kv_transfer_params and
ec_transfer_params, which can kill an engine or make it wait for ever; also where they hide in vllm_xargs.

A prefill leg asks for one token that nobody reads: what shapes the answer (limits, stops, logprobs,
grammars) is left out, what shapes the prompt (messages, tools, template settings) stays.
"""

from collections.abc import Mapping
from typing import Any

import orjson

OWNED = ("cache_salt", "kv_transfer_params", "ec_transfer_params")
"""Fields that a client cannot set."""

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


def engine_body(raw: bytes, body: Mapping[str, Any], salt: str | None) -> bytes:
    """The body for the engine that answers the client.

    `raw` is what the client sent and `body` its parse, an object. A streamed answer is asked to
    end with its usage, for the gateway's own account; `wants_usage` says whether the client did.
    """
    ask_usage = body.get("stream") is True and not wants_usage(body)
    owned = _hidden(body) or any(field in body for field in OWNED)
    if owned or (ask_usage and "stream_options" in body) or not body:
        changed = _without_owned(body)
        if ask_usage:
            changed["stream_options"] = {**_options(body), "include_usage": True}
        if salt is not None:
            changed["cache_salt"] = salt
        return orjson.dumps(changed)
    added = b""
    if salt is not None:
        added += b'"cache_salt":%b,' % orjson.dumps(salt)
    if ask_usage:
        added += b'"stream_options":{"include_usage":true},'
    if not added:
        return raw
    brace = raw.index(b"{") + 1
    return b"".join((raw[:brace], added, raw[brace:]))


def prefill_body(body: Mapping[str, Any], salt: str | None) -> bytes:
    """The body for a prefill leg: the same prompt, one token, no stream, whatever ends early left out.

    `ignore_eos` makes sure that the token is not an end, since a prefill that stops is no prefill.
    """
    changed = {name: value for name, value in _without_owned(body).items() if name not in _ANSWER_ONLY}
    changed |= {"max_tokens": 1, "n": 1, "stream": False, "ignore_eos": True}
    if salt is not None:
        changed["cache_salt"] = salt
    return orjson.dumps(changed)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client asked for the usage of its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The stream's options without those that say nothing unless usage is included."""
    options = body.get("stream_options")
    given = options if isinstance(options, dict) else {}
    return {name: value for name, value in given.items() if name != "continuous_usage_stats"}


def _hidden(body: Mapping[str, Any]) -> bool:
    arguments = body.get("vllm_xargs")
    return isinstance(arguments, dict) and any(field in arguments for field in OWNED)


def _without_owned(body: Mapping[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in body.items() if name not in OWNED}
    if _hidden(body):
        changed["vllm_xargs"] = {name: value for name, value in body["vllm_xargs"].items() if name not in OWNED}
    return changed
