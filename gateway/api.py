"""The routes that are not hot, by FastAPI; the hot ones (endpoints) go from front straight to serve.

Every path that is listed in neither is refused, never proxied. Errors are OpenAI's error object.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from connector.vllm import Card
from gateway.agreement import Agreement
from gateway.bodies import EXACT_BYTES
from gateway.cors import Cors
from gateway.dialects import Dialect
from gateway.endpoints import ENDPOINTS, STORED
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    Broken,
    Forbidden,
    GatewayError,
    UnknownModel,
    UnknownPath,
    WrongMethod,
)
from gateway.exchange import request_id
from gateway.explain import Explain
from gateway.fleet import Fleet
from gateway.gauges import engine_gauges, model_gauges, pool_gauges
from gateway.models import Model
from gateway.tenants import Tenant, Tenants, bearer_key
from gateway.trace import CONTENT_TYPE, Telemetry

MAX_QUESTION = EXACT_BYTES + 64 * 1024
"""Bytes of a question to /admin/explain: of a larger request nothing is known but the engines' load."""


class Surface(FastAPI):
    """The gateway's ASGI application."""

    def __init__(self, cors: Cors, **settings: Any) -> None:
        super().__init__(
            title="Moongate", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, **settings
        )
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        fields = dict(scope["headers"])
        name = request_id(fields)
        more = [(b"x-request-id", name), *self._cors.headers(fields.get(b"origin"))]
        if scope["path"] in ENDPOINTS and ENDPOINTS[scope["path"]].dialect is Dialect.MESSAGES:
            more.append((b"request-id", name))

        async def tagged(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        allowed = self._cors.preflight(fields) if scope["method"] == "OPTIONS" else []
        if allowed:
            await tagged({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
        else:
            await super().__call__(scope, receive, tagged)


def surface(
    *,
    cors: Cors,
    tenants: Tenants,
    fleet: Fleet,
    models: Mapping[str, Model],
    agreements: Mapping[str, Agreement],
    telemetry: Telemetry,
    explain: Explain,
    admin_key: str | None,
    body_bytes: int,
    body_seconds: float,
    **settings: Any,
) -> Surface:
    """The application with all its routes. A body may have so many bytes, and take so many seconds to come."""
    app = Surface(cors, **settings)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Every model has an engine that can answer."""
        alive = {model: _alive(fleet, model) for model in models}
        ready = all(alive.values())
        return _json({"ready": ready, "engines": alive}, 200 if ready else 503)

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """What the living engines serve, each model once, with every field that vLLM gives."""
        tenant = tenants.identify(dict(request.scope["headers"]))
        return _json({"object": "list", "data": [card.raw for card in _cards(fleet, tenant).values()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        """One of them."""
        card = _cards(fleet, tenants.identify(dict(request.scope["headers"]))).get(name)
        if card is None:
            raise UnknownModel
        return _json(card.raw)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus metrics, for the operator."""
        _check_operator(request, admin_key)
        return Response(telemetry.render(), media_type=CONTENT_TYPE)

    @app.post("/admin/explain")
    async def explained(request: Request) -> Response:
        """Where a request would go, and why, for the operator. It is sent to no engine."""
        _check_operator(request, admin_key)
        explanation = await explain(await _body(request, min(body_bytes, MAX_QUESTION), body_seconds))
        return Response(msgspec.json.encode(explanation), media_type="application/json")

    _errors(app)
    telemetry.gauges(lambda: engine_gauges(fleet), "engine")
    telemetry.gauges(lambda: model_gauges(models, agreements), "model")
    telemetry.gauges(lambda: pool_gauges(models), "pool")
    return app


def _errors(app: FastAPI) -> None:
    """FastAPI's errors, in OpenAI's form."""

    @app.exception_handler(GatewayError)
    async def refused(_: Request, error: GatewayError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.body(), error.status, headers, "application/json")

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        error = Broken()
        return Response(error.body(), error.status, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        path, method = request.scope["path"], request.scope["method"]
        endpoint, stored = ENDPOINTS.get(path), STORED.fullmatch(path)
        if endpoint is not None or stored is not None:
            allow = "GET" if stored is not None and not stored[2] else "POST"
        else:
            allow = "" if error.status_code == 404 else (error.headers or {}).get("Allow", "GET")
        told: GatewayError = WrongMethod(allow) if allow and method != allow else UnknownPath()
        dialect = endpoint.dialect if endpoint is not None else Dialect.CHAT
        headers = {name.decode(): value.decode() for name, value in told.headers}
        return Response(dialect.refusal(told), told.status, headers, "application/json")


def _cards(fleet: Fleet, tenant: Tenant) -> dict[str, Card]:
    """The models and adapters that living engines serve and this tenant may ask for, each once."""
    cards: dict[str, Card] = {}
    for engine in fleet.engines:
        if engine.alive and (tenant.models is None or engine.spec.model in tenant.models):
            for card in engine.cards:
                if card.id == engine.spec.model or card.parent is not None:
                    cards.setdefault(card.id, card)
    return cards


def _alive(fleet: Fleet, model: str) -> int:
    """How many engines can answer for a model now. Which, and why not the others, is the log's to tell."""
    return sum(e.alive and e.spec.model == model and e.spec.role != "prefill" for e in fleet.engines)


def _check_operator(request: Request, admin_key: str | None) -> None:
    if admin_key is not None:
        given = bearer_key(dict(request.scope["headers"])) or b""
        if not hmac.compare_digest(given, admin_key.encode()):
            raise Forbidden("This endpoint needs the admin key, as 'Authorization: Bearer KEY'.")
    elif request.client is None or not ipaddress.ip_address(request.client.host).is_loopback or not _here(request):
        raise Forbidden("Without admin.key in the configuration this endpoint answers loopback only.")


def _here(request: Request) -> bool:
    """Whether the host is named by its address, or as localhost: a web page's name may be made to lead here."""
    name = request.url.hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name) is not None
    except ValueError:
        return False


async def _body(request: Request, limit: int, seconds: float) -> bytes:
    """Raises `BodyTooLarge`, `BodyTooSlow`, or `BadRequest` where the client left."""
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise BodyTooLarge(limit)
                pieces.append(piece)
    except TimeoutError:
        raise BodyTooSlow(f"The request body did not arrive within {seconds:g} s; send it again.") from None
    except ClientDisconnect:
        raise BadRequest("The client left before its body was there.") from None
    return b"".join(pieces)


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
