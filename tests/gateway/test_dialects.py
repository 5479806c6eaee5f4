"""How each protocol tells an error, counts tokens, and ends."""

from typing import Any

import anthropic
import openai
import orjson
import pytest
from openai.types.responses import ResponseErrorEvent

from gateway.dialects import Dialect, Usage, gave_up, usage
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    Broken,
    EngineFailed,
    EngineTimedOut,
    GatewayError,
    NotStored,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)

ERROR = EngineFailed("The engine broke off.")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("m"), "invalid_request_error"),
        (Unauthorized("m"), "authentication_error"),
        (NotStored(), "not_found_error"),
        (BodyTooSlow("m"), "invalid_request_error"),
        (UnsupportedMedia("m"), "invalid_request_error"),
        (Broken(), "api_error"),
        (BodyTooLarge(1), "request_too_large"),
        (RateLimited("m"), "rate_limit_error"),
        (EngineFailed("m"), "api_error"),
        (Unavailable("m"), "overloaded_error"),
        (EngineTimedOut("m"), "timeout_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anthropics_clients_are_told_in_their_own_words(error: GatewayError, kind: str) -> None:
    told = orjson.loads(Dialect.MESSAGES.refusal(error))
    assert told == {"type": "error", "error": {"type": kind, "message": error.message}}


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.RESPONSES])
def test_openais_clients_are_told_openais_object(dialect: Dialect) -> None:
    assert dialect.refusal(ERROR) == ERROR.body()


def test_a_chat_that_broke_off_ends_with_an_error_and_done() -> None:
    assert Dialect.CHAT.last_words(ERROR) == b"data: " + ERROR.body() + b"\n\ndata: [DONE]\n\n"


def test_a_response_that_broke_off_ends_with_an_error_event() -> None:
    name, data = Dialect.RESPONSES.last_words(BadRequest("m", param="p", code="c")).removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: error"
    told = ResponseErrorEvent.model_validate_json(data.removeprefix(b"data: "))
    assert (told.message, told.param, told.code, told.type) == ("m", "p", "c", "error")


def test_a_message_that_broke_off_ends_with_an_error_event() -> None:
    name, data = Dialect.MESSAGES.last_words(ERROR).removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: error"
    assert data == b"data: " + Dialect.MESSAGES.refusal(ERROR)


@pytest.mark.parametrize(("dialect", "words"), [(Dialect.CHAT, b"data: [DONE]\n\n"), (Dialect.RESPONSES, b""),
                                                (Dialect.MESSAGES, b"")])  # fmt: skip
def test_an_error_of_the_engines_own_is_not_told_again(dialect: Dialect, words: bytes) -> None:
    assert dialect.last_words(None) == words


@pytest.mark.parametrize("dialect", Dialect)
def test_each_sdk_can_read_what_ends_its_stream(dialect: Dialect) -> None:
    """Their own decoders, on the bytes that are sent."""
    sdk = anthropic if dialect is Dialect.MESSAGES else openai
    first = next(iter(sdk._streaming.SSEDecoder().iter_bytes(iter([dialect.last_words(ERROR)]))))
    assert orjson.loads(first.data)["error"]["message"] == ERROR.message


@pytest.mark.parametrize(
    ("dialect", "data", "ends"),
    [
        (Dialect.RESPONSES, {"type": "response.completed"}, True),
        (Dialect.RESPONSES, {"type": "response.incomplete"}, True),
        (Dialect.RESPONSES, {"type": "response.failed"}, True),
        (Dialect.RESPONSES, {"type": "response.created"}, False),
        (Dialect.RESPONSES, {"type": "response.output_text.done"}, False),
        (Dialect.MESSAGES, {"type": "message_stop"}, True),
        (Dialect.MESSAGES, {"type": "message_delta"}, False),
        (Dialect.MESSAGES, {}, False),
        (Dialect.CHAT, {"type": "message_stop"}, False),
    ],
)
def test_which_event_is_the_last(dialect: Dialect, data: dict[str, Any], ends: bool) -> None:
    assert dialect.ends(data) is ends
    assert not ends or any(word in orjson.dumps(data) for word in dialect.words), "it must be read to be seen"


@pytest.mark.parametrize(
    ("data", "counted"),
    [
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}, Usage(7, 2, None)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}}, Usage(7, None, 3)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": None}}, Usage(7, None, None)),
        ({"usage": {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 0}}}, Usage(7, None, 0)),
        ({"response": {"usage": {"input_tokens": 7, "output_tokens": 2}}}, Usage(7, 2, None)),
        ({"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 0}}}, Usage(7, 0, None)),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}}, Usage(7, 2, 4)),
        ({"usage": {"cache_read_input_tokens": 4, "cache_creation_input_tokens": 5}}, Usage(9, None, 4)),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": None, "output_tokens": 2}}, Usage(3, 2, None)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": True}}, Usage(None, None, None)),
        ({"usage": {"prompt_tokens": 2**40, "completion_tokens": "9"}}, Usage(None, None, None)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": [1]}}, Usage(7, None, None)),
        ({"usage": None}, None),
        ({"usage": 7, "response": 7, "message": []}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_tokens_are_counted_in_each_protocols_words(data: dict[str, Any], counted: Usage | None) -> None:
    assert usage(data) == counted


@pytest.mark.parametrize(
    ("data", "so"),
    [
        ({"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}, True),
        ({"choices": [{"finish_reason": "stop"}, 7, None]}, False),
        ({"choices": []}, False),
        ({"choices": "abort"}, False),
        ({"type": "message_delta", "delta": {"stop_reason": None}}, True),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, False),
        ({"type": "message", "stop_reason": None}, True),
        ({"type": "message", "stop_reason": "end_turn"}, False),
        ({"type": "message_start", "message": {"stop_reason": None}}, False),
        ({}, False),
    ],
)
def test_an_answer_that_the_engine_gave_up(data: dict[str, Any], so: bool) -> None:
    assert gave_up(data) is so
