"""A client's body: read once to a call, and made into what engines get.

What the gateway does not need itself is the engine's to judge.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from msgspec import Struct

from connector.blocks import Adapter
from connector.handoff import engine_body, prefill_body
from connector.splice import NotAnObject, members
from gateway.endpoints import Endpoint
from gateway.errors import BadRequest
from gateway.models import Model
from gateway.tenants import Tenant

INLINE_BYTES = 16 * 1024
"""Bodies above this many bytes are searched in a thread, so that others go on."""

EXACT_BYTES = 8 * 1024 * 1024
"""Bodies above this many bytes are placed by load: no context is so long, and tokens take a hundredfold of memory."""

SHALLOW = 250
"""Brackets in a body up to which it cannot be nested too deeply."""
COUNTED = 4096
"""Bytes of a body up to which counting its brackets costs less than writing it once (10 us for 400 kB)."""

GLANCED = frozenset(
    {"model", "stream", "stream_options", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
     "previous_response_id", "request_id"}
)  # fmt: skip
"""What is read of a body above EXACT_BYTES: parsing all of it would hold everybody up."""

_TOO_MUCH = "The body has more members or brackets than any request needs."


class Call(Struct, frozen=True):
    """A parsed request."""

    tenant: Tenant
    endpoint: Endpoint
    target: str
    """Path and query."""
    model: Model
    adapter: Adapter | None
    salt: str | None
    raw: bytes
    body: Mapping[str, Any]
    rename: str | None = None
    """The engines' name of the model, where the client used an alias."""
    content_type: bytes | None = None
    """Of a body that is no JSON."""
    session: str | None = None
    """The session that the client names, as a key of the tenant's own."""


async def read_object(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; of a very large one only what the gateway needs itself. Raises `BadRequest`."""
    if len(raw) > EXACT_BYTES:
        return await asyncio.to_thread(_glance, raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: line {error.lineno}, column {error.colno}.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    if len(raw) > COUNTED or raw.count(b"[") + raw.count(b"{") >= SHALLOW:
        _check_depth(body)
    return body


async def to_answer(call: Call, ids: Sequence[int] | None = None) -> Sequence[bytes]:
    """The body for the engine that answers; `ids` go in the prompt's place. Raises `BadRequest`."""
    looks = (
        ids is not None
        or call.rename is not None
        or not call.endpoint.owned.isdisjoint(call.body)
        or "stream_options" in call.body
        or "vllm_xargs" in call.body
    )
    return await _made(_answering, call, ids, looks=looks)


async def to_prefill(call: Call, ids: Sequence[int] | None = None) -> Sequence[bytes]:
    """The body for a prefill leg. Raises `BadRequest`."""
    return await _made(_prefilling, call, ids, looks=True)


async def _made(
    make: Callable[[Call, Sequence[int] | None], Sequence[bytes]],
    call: Call,
    ids: Sequence[int] | None,
    *,
    looks: bool,
) -> Sequence[bytes]:
    """A body for an engine. Where members must be looked for in a large one, that takes long: in a thread."""
    try:
        if looks and len(call.raw) > INLINE_BYTES:
            return await asyncio.to_thread(make, call, ids)
        return make(call, ids)
    except NotAnObject:
        raise BadRequest(_TOO_MUCH) from None


def _answering(call: Call, ids: Sequence[int] | None) -> Sequence[bytes]:
    endpoint = call.endpoint
    if endpoint.form:
        return (call.raw,)
    return engine_body(
        call.raw,
        call.body,
        salt=call.salt,
        ask_usage=endpoint.asks_usage,
        model=call.rename,
        owned=endpoint.owned,
        ids=ids,
    )


def _prefilling(call: Call, ids: Sequence[int] | None) -> Sequence[bytes]:
    return prefill_body(call.raw, call.body, call.salt, call.rename, ids)


def _check_depth(body: Mapping[str, Any]) -> None:
    """Refuse what is nested more deeply than engines read: orjson reads 1,024 levels and writes 254."""
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise BadRequest(f"The body is nested too deeply; {SHALLOW} levels are certain to pass.") from None


def _glance(raw: bytes) -> Mapping[str, Any]:
    try:
        return {m.name: orjson.loads(raw[m.value : m.end]) for m in members(raw) if m.name in GLANCED}
    except (NotAnObject, orjson.JSONDecodeError):
        raise BadRequest("The body must be a JSON object.") from None
