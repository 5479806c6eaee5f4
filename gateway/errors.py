"""What a client can be told, as a tree. Each knows its HTTP status and OpenAI's error object.

GatewayError
|-- BadRequest        400 invalid_request_error
|-- Unauthorized      401 authentication_error, with WWW-Authenticate
|-- Forbidden         403 permission_error
|-- UnknownModel      404 invalid_request_error, param model, code model_not_found
|-- NotStored         404 invalid_request_error
|-- BodyTooSlow       408 invalid_request_error
|-- BodyTooLarge      413 invalid_request_error
|-- UnsupportedMedia  415 invalid_request_error
|-- RateLimited       429 rate_limit_error, with Retry-After
|-- Broken            500 server_error: a defect of the gateway's own
|-- EngineFailed      502 server_error
|-- Unavailable       503 server_error, with Retry-After
`-- EngineTimedOut    504 timeout
"""

import math
from typing import ClassVar

import orjson


class GatewayError(Exception):
    """An answer that is an error. The message tells the reader what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return []

    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        return error_body(self.message, self.type, self.param, self.code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(GatewayError):
    status = 401
    type = "authentication_error"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"www-authenticate", b"Bearer")]


class Forbidden(GatewayError):
    status = 403
    type = "permission_error"


class UnknownModel(GatewayError):
    status = 404
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "This model is not served here; GET /v1/models lists those that are.",
            param="model",
            code="model_not_found",
        )


class NotStored(GatewayError):
    status = 404
    type = "invalid_request_error"

    def __init__(self, *, param: str | None = None) -> None:
        super().__init__(
            "No engine is known here to keep this response for you; send the whole conversation instead.",
            param=param,
            code="response_not_found",
        )


class BodyTooSlow(GatewayError):
    status = 408
    type = "invalid_request_error"


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes; send a shorter prompt.")


class UnsupportedMedia(GatewayError):
    status = 415
    type = "invalid_request_error"

    def __init__(self, message: str, *, accept: bytes | None = None) -> None:
        """`accept` are the content codings that would do."""
        super().__init__(message)
        self._accept = accept

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"accept-encoding", self._accept)] if self._accept is not None else []


class _ComeBack(GatewayError):
    """An error that passes by itself; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = max(1, math.ceil(retry_after))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"retry-after", b"%d" % self.retry_after)]


class RateLimited(_ComeBack):
    status = 429
    type = "rate_limit_error"


class Unavailable(_ComeBack):
    status = 503


class Broken(GatewayError):
    status = 500

    def __init__(self) -> None:
        super().__init__("The gateway failed on this request; the operator's log says why.")


class EngineFailed(GatewayError):
    status = 502


class EngineTimedOut(GatewayError):
    status = 504
    type = "timeout"
