"""The three protocols that clients speak here: how each tells an error, and how its streams end.

chat        OpenAI's chat, completions and what has no streams of its own: `data: [DONE]` ends a stream
responses   OpenAI's responses: response.completed, .incomplete or .failed ends a stream
messages    Anthropic's messages: message_stop ends a stream
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import orjson
from msgspec import Struct

from gateway.errors import GatewayError

DONE = b"[DONE]"

_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
_ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
                    503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


class Usage(Struct, frozen=True):
    """Tokens of one request, as its engine counted; None where it does not say."""

    prompt: int | None
    completion: int | None
    cached: int | None
    """Of the prompt, what was not computed; needs the engine's --enable-prompt-tokens-details."""


class Dialect(Enum):
    """A protocol."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"

    @property
    def words(self) -> tuple[bytes, ...]:
        """What stands in each event that has to be read, one of them in each."""
        return _WORDS[self]

    def refusal(self, error: GatewayError) -> bytes:
        """The body of an answer that is an error."""
        return _anthropic(error) if self is Dialect.MESSAGES else error.body()

    def last_words(self, error: GatewayError | None) -> bytes:
        """What ends a stream that broke off: the error, unless the engine has told its own."""
        if self is Dialect.CHAT:
            told = b"data: " + error.body() + b"\n\n" if error is not None else b""
            return told + b"data: [DONE]\n\n"
        if error is None:
            return b""
        body = _anthropic(error) if self is Dialect.MESSAGES else _response_error(error)
        return b"event: error\ndata: " + body + b"\n\n"

    def ends(self, data: Mapping[str, Any]) -> bool:
        """Whether an event is the last one."""
        return self is not Dialect.CHAT and data.get("type") in _ENDS


_COMMON = (b'"error"', b"_transfer_params", b'"usage"')
_WORDS = {
    Dialect.CHAT: (DONE, b'"abort"', *_COMMON),
    Dialect.RESPONSES: (b'"response.c', b'"response.incomplete"', b'"response.failed"', *_COMMON),
    Dialect.MESSAGES: (b'"message_stop"', b'"message_delta"', *_COMMON),
}


def usage(data: Mapping[str, Any]) -> Usage | None:
    """The usage in a whole answer or in an event, whichever protocol's."""
    inner = data.get("usage")
    for holder in ("response", "message"):
        if not isinstance(inner, dict) and isinstance(data.get(holder), dict):
            inner = data[holder].get("usage")
    if not isinstance(inner, dict):
        return None
    details = inner.get("prompt_tokens_details") or inner.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    prompt = _count(inner.get("prompt_tokens", inner.get("input_tokens")))
    if "cache_read_input_tokens" in inner:  # Anthropic's input_tokens are those beyond the cached
        cached = _count(inner["cache_read_input_tokens"])
        prompt = (prompt or 0) + (cached or 0) + (_count(inner.get("cache_creation_input_tokens")) or 0)
    return Usage(prompt, _count(inner.get("completion_tokens", inner.get("output_tokens"))), cached)


def gave_up(data: Mapping[str, Any]) -> bool:
    """Whether an answer or an event tells that the engine gave the request up, which looks like an end.

    vLLM says finish_reason `abort`; its conversion to Anthropic's messages makes stop_reason null of it.
    """
    choices = data.get("choices")
    if isinstance(choices, list):
        return any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices)
    match data:
        case {"type": "message_delta", "delta": {"stop_reason": None}} | {"type": "message", "stop_reason": None}:
            return True
    return False


def _count(value: object) -> int | None:
    """A number of tokens, if it can be one."""
    return value if type(value) is int and 0 <= value < 2**31 else None


def _anthropic(error: GatewayError) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def _response_error(error: GatewayError) -> bytes:
    told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"type": "error", "code": error.code, "message": error.message, "param": error.param,
                         "sequence_number": 0, "error": told})  # fmt: skip
