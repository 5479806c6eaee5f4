import orjson
import pytest

from gateway import errors
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    Broken,
    EngineFailed,
    EngineTimedOut,
    Forbidden,
    GatewayError,
    NotStored,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnknownPath,
    UnsupportedMedia,
    WrongMethod,
    error_body,
)

TREE: list[tuple[GatewayError, int, str]] = [
    (BadRequest("m"), 400, "invalid_request_error"),
    (Unauthorized("m"), 401, "authentication_error"),
    (Forbidden("m"), 403, "permission_error"),
    (UnknownPath(), 404, "invalid_request_error"),
    (WrongMethod("POST"), 405, "invalid_request_error"),
    (UnknownModel(), 404, "invalid_request_error"),
    (NotStored(), 404, "invalid_request_error"),
    (BodyTooSlow("m"), 408, "invalid_request_error"),
    (BodyTooLarge(10), 413, "invalid_request_error"),
    (UnsupportedMedia("m"), 415, "invalid_request_error"),
    (RateLimited("m"), 429, "rate_limit_error"),
    (Broken(), 500, "server_error"),
    (EngineFailed("m"), 502, "server_error"),
    (Unavailable("m"), 503, "server_error"),
    (EngineTimedOut("m"), 504, "timeout"),
]


def _public(kind: type[GatewayError]) -> set[type[GatewayError]]:
    own = set() if kind.__name__.startswith("_") else {kind}
    return own.union(*(_public(sub) for sub in kind.__subclasses__()))


@pytest.mark.parametrize(("error", "status", "kind"), TREE, ids=lambda v: type(v).__name__)
def test_each_error_is_openais_object(error: GatewayError, status: int, kind: str) -> None:
    assert error.status == status
    told = orjson.loads(error.body())
    assert told.keys() == {"error"}
    assert told["error"].keys() == {"message", "type", "param", "code"}
    assert told["error"]["type"] == kind
    assert told["error"]["message"] == error.message


def test_the_whole_tree_is_tested_and_drawn() -> None:
    assert _public(GatewayError) - {GatewayError} == {type(error) for error, _, _ in TREE}
    for error, status, kind in TREE:
        assert errors.__doc__ is not None
        line = next(line for line in errors.__doc__.splitlines() if f"- {type(error).__name__} " in line)
        assert f"{status} {kind}" in line


def test_param_and_code_are_told() -> None:
    told = orjson.loads(BadRequest("m", param="p", code="c").body())["error"]
    assert (told["param"], told["code"]) == ("p", "c")


def test_unknown_model_says_which_parameter() -> None:
    told = orjson.loads(UnknownModel().body())["error"]
    assert (told["param"], told["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("param", [None, "previous_response_id"])
def test_not_stored_says_which_parameter_named_the_response(param: str | None) -> None:
    told = orjson.loads(NotStored(param=param).body())["error"]
    assert (told["param"], told["code"]) == (param, "response_not_found")


def test_unsupported_media_names_the_codings_that_would_do() -> None:
    assert UnsupportedMedia("m", accept=b"gzip, br").headers == [(b"accept-encoding", b"gzip, br")]
    assert UnsupportedMedia("m").headers == []


def test_unauthorized_names_its_scheme() -> None:
    assert Unauthorized("m").headers == [(b"www-authenticate", b"Bearer")]


@pytest.mark.parametrize("kind", [RateLimited, Unavailable])
@pytest.mark.parametrize(("wait", "told"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (59.5, b"60")])
def test_retry_after_is_whole_seconds_never_too_early(
    kind: type[RateLimited | Unavailable], wait: float, told: bytes
) -> None:
    assert kind("m", retry_after=wait).headers == [(b"retry-after", told)]


def test_error_body_survives_any_text() -> None:
    text = 'quote " newline \n line separator \u2028 crab 🦀'
    assert orjson.loads(error_body(text, "t"))["error"]["message"] == text
