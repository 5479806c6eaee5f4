"""The HTTP surface. Hot routes are raw ASGI and go straight to serve; the rest is FastAPI.

Every path that is not listed here is refused, never proxied. Errors are OpenAI's error object.
"""

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from connector.vllm import Card
from gateway.errors import Broken, Forbidden, GatewayError, UnknownModel, error_body
from gateway.exchange import Exchange, request_id
from gateway.fleet import Fleet
from gateway.serve import CHAT, COMPLETIONS, Serve
from gateway.tenants import Tenants, bearer_key
from gateway.trace import CONTENT_TYPE, Telemetry

HOT = frozenset({CHAT, COMPLETIONS})


class Surface(FastAPI):
    """The gateway's ASGI application."""

    def __init__(self, serve: Serve, **settings: Any) -> None:
        super().__init__(
            title="Moongate", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, **settings
        )
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in HOT and scope["method"] == "POST":
            await self._serve(Exchange(scope, receive, send))
        else:
            await super().__call__(scope, receive, _with_request_id(scope, send))


def surface(
    serve: Serve,
    *,
    tenants: Tenants,
    fleet: Fleet,
    models: Sequence[str],
    telemetry: Telemetry,
    admin_key: str | None,
    **settings: Any,
) -> Surface:
    """The application with all its routes."""
    app = Surface(serve, **settings)

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
        tenants.identify(request.scope["headers"])
        return _json({"object": "list", "data": [card.raw for card in _cards(fleet).values()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        """One of them."""
        tenants.identify(request.scope["headers"])
        card = _cards(fleet).get(name)
        if card is None:
            raise UnknownModel
        return _json(card.raw)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus metrics, for the operator."""
        _check_operator(request, admin_key)
        return Response(telemetry.render(), media_type=CONTENT_TYPE)

    _errors(app)
    telemetry.gauges(lambda: _engine_gauges(fleet), "engine")
    return app


def _errors(app: FastAPI) -> None:
    """FastAPI's errors, in OpenAI's form."""

    @app.exception_handler(GatewayError)
    async def refused(_: Request, error: GatewayError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.body(), error.status, headers, "application/json")

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        error = Broken("The gateway failed on this request; the operator's log says why.")
        return Response(error.body(), error.status, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if request.scope["path"] in HOT:
            error, headers = HTTPException(405), {"allow": "POST"}
        message = {
            404: "There is no such endpoint here; see the README for those that there are.",
            405: f"This endpoint does not take {request.method}.",
        }.get(error.status_code, error.detail)
        return Response(error_body(message, "invalid_request_error"), error.status_code, headers, "application/json")


def _cards(fleet: Fleet) -> dict[str, Card]:
    """The models and adapters that living engines serve, each once."""
    cards: dict[str, Card] = {}
    for engine in fleet.engines:
        if engine.alive:
            for card in engine.cards:
                if card.id == engine.spec.model or card.parent is not None:
                    cards.setdefault(card.id, card)
    return cards


def _alive(fleet: Fleet, model: str) -> int:
    """How many engines can answer for a model now. Which, and why not the others, is the log's to tell."""
    return sum(e.alive and e.spec.model == model and e.spec.role != "prefill" for e in fleet.engines)


def _engine_gauges(fleet: Fleet) -> Mapping[str, tuple[str, list[tuple[str, float]]]]:
    return {
        "engine_up": ("1 where the engine is given work.", [(e.id, float(e.alive)) for e in fleet.engines]),
        "engine_requests": ("Requests of this gateway under way.", [(e.id, e.requests) for e in fleet.engines]),
        "engine_backlog_tokens": ("Prompt tokens not yet computed.", [(e.id, e.backlog) for e in fleet.engines]),
        "engine_held_blocks": ("Blocks the engine is thought to hold.", [(e.id, len(e.held)) for e in fleet.engines]),
        "engine_connections": ("Connections with an exchange under way.", [(e.id, e.wire.busy) for e in fleet.engines]),
    }


def _check_operator(request: Request, admin_key: str | None) -> None:
    if admin_key is not None:
        given = bearer_key(request.scope["headers"]) or b""
        if not hmac.compare_digest(given, admin_key.encode()):
            raise Forbidden("This endpoint needs the admin key, as 'Authorization: Bearer KEY'.")
    elif request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
        raise Forbidden("Without admin.key in the configuration this endpoint answers loopback only.")


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Every answer carries x-request-id, those of FastAPI too."""

    async def tagged(message: Any) -> None:
        if message["type"] == "http.response.start":
            name = request_id(scope["headers"]).encode("ascii")
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
        await send(message)

    return tagged
