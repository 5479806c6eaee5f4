"""The engine's HTTP side: vLLM's routes as far as a gateway can tell."""

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connector.simulated import scale_out
from connector.simulated.answers import ChatForm, CompletionForm
from connector.simulated.ask import (
    Ask,
    DetokenizeBody,
    Refusal,
    TokenizeChat,
    TokenizePrompt,
    chat_ask,
    checked,
    completion_ask,
    malformed,
)
from connector.simulated.audio import Transcriptions
from connector.simulated.dev import Dev
from connector.simulated.engine import Engine, Prompt
from connector.simulated.messages import Messages
from connector.simulated.pooling import Vectors
from connector.simulated.responses import Responses
from connector.simulated.serving import Desk, Flags, Model, as_json, check_rank, json_body, new_id, request_id

SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")


class Api:
    """The routes over one engine."""

    def __init__(
        self,
        model: Model,
        engine: Engine,
        event_sources: Mapping[str, object] | None = None,
        flags: Flags = Flags(),  # noqa: B008 -- frozen
    ) -> None:
        self._model = model
        self._engine = engine
        self._desk = Desk(model, engine, flags.version)
        self._sources = {"0": event_sources} if event_sources else {}
        self._flags = flags

    def app(self) -> Starlette:
        messages = Messages(self._desk, self._flags.parses_tools)
        responses = Responses(self._desk, parses_tools=self._flags.parses_tools)
        vectors = Vectors(self._desk)
        audio = Transcriptions(self._desk)
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._refusing(self.chat), methods=["POST"]),
                Route("/v1/completions", self._refusing(self.completion), methods=["POST"]),
                Route("/v1/responses", self._refusing(responses.create), methods=["POST"]),
                Route("/v1/responses/{name}", self._refusing(responses.retrieve)),
                Route("/v1/responses/{name}/cancel", self._refusing(responses.cancel), methods=["POST"]),
                Route("/v1/messages", self._refusing(messages.create), methods=["POST"]),
                Route("/v1/messages/count_tokens", self._refusing(messages.count), methods=["POST"]),
                Route("/v1/embeddings", self._refusing(vectors.embed), methods=["POST"]),
                *(Route(path, self._refusing(vectors.score), methods=["POST"]) for path in SCORE),
                *(Route(path, self._refusing(vectors.rerank), methods=["POST"]) for path in RERANK),
                Route("/v1/audio/transcriptions", self._refusing(audio.create), methods=["POST"]),
                Route("/tokenize", self._refusing(self.tokenize), methods=["POST"]),
                Route("/detokenize", self._refusing(self.detokenize), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.well),
                Route("/ping", self.well, methods=["GET", "POST"]),
                Route("/version", self.version),
                Route("/load", self.load),
                Route("/metrics", self.metrics),
                Route("/kv_event_sources", self.event_sources),
                *self._scaled_out(messages, responses),
                *self._developing(),
            ],
            exception_handlers={HTTPException: _detail},
        )

    def _scaled_out(self, messages: Messages, responses: Responses) -> list[Route]:
        if not self._flags.scale_out:
            return [Route(path, self._refusing(scale_out.closed), methods=["POST"]) for path in scale_out.ROUTES]
        renders = (self.render_chat, self.render_completion, messages.render, responses.render)
        return [
            Route(path, self._refusing(render), methods=["POST"])
            for path, render in zip(scale_out.ROUTES, renders, strict=False)
        ]

    def _developing(self) -> list[Route]:
        if not self._flags.dev_mode:
            return []
        dev = Dev(self._model, self._engine, self._sources.get("0"), self._flags)
        return [
            Route("/reset_prefix_cache", self._refusing(dev.reset_prefix_cache), methods=["POST"]),
            Route("/is_sleeping", dev.is_sleeping),
            Route("/server_info", self._refusing(dev.server_info)),
        ]

    async def chat(self, request: Request) -> Response:
        ask, prompts = self._chat(await json_body(request))
        check_rank(request)
        form = ChatForm(self._desk.heading(request, ask.model), ask)
        return await self._desk.answer(request, prompts, form, stream=ask.stream)

    async def render_chat(self, request: Request) -> Response:
        body = await json_body(request)
        ask, prompts = self._chat(body)
        return as_json(scale_out.generate_body(f"chatcmpl-{new_id(request)}", body, ask, prompts[0]))

    def _chat(self, body: dict[str, Any]) -> tuple[Ask, list[Prompt]]:
        ask = chat_ask(body, parses_tools=self._flags.parses_tools)
        adapter = self._desk.adapter(ask.model)
        tokens, exact = self._desk.chat_tokens(body)
        return ask, self._desk.prompts([tokens], ask, adapter, exact=exact)

    async def completion(self, request: Request) -> Response:
        ask, several, prompts = self._completion(await json_body(request))
        check_rank(request)
        texts = [one if isinstance(one, str) else self._model.backend.decode(list(one)) for one in several]
        form = CompletionForm(self._desk.heading(request, ask.model), ask, texts)
        return await self._desk.answer(request, prompts, form, stream=ask.stream)

    async def render_completion(self, request: Request) -> Response:
        body = await json_body(request)
        ask, several, prompts = self._completion(body)
        name = f"cmpl-{new_id(request)}"
        names = [name] if len(several) == 1 else [f"{name}-{number}" for number in range(len(several))]
        pairs = zip(names, prompts[:: ask.n], strict=True)
        return as_json([scale_out.generate_body(name, body, ask, prompt) for name, prompt in pairs])

    def _completion(self, body: dict[str, Any]) -> tuple[Ask, Sequence[str | list[int]], list[Prompt]]:
        completion, ask = completion_ask(body)
        adapter = self._desk.adapter(ask.model)
        assert completion.prompt is not None
        several, exact = _several(completion.prompt)
        tokens = [self._desk.completion_tokens({**body, "prompt": one}) for one in several]
        return ask, several, self._desk.prompts(tokens, ask, adapter, exact=exact)

    async def tokenize(self, request: Request) -> Response:
        body = await json_body(request)
        if "messages" in body:
            checked(TokenizeChat, body)
            self._desk.adapter(body.get("model"))
            tokens = self._desk.chat_tokens(body)[0]
        else:
            if "prompt" not in body:
                missing = {"type": "missing", "msg": "Field required", "input": body}
                raise malformed([{**missing, "loc": (field,)} for field in ("prompt", "messages")])
            checked(TokenizePrompt, body)
            self._desk.adapter(body.get("model"))
            tokens = self._desk.completion_tokens(body)
        strings = [self._model.backend.id_to_token(token) for token in tokens]
        return as_json(
            {
                "count": len(tokens),
                "max_model_len": self._model.max_model_len,
                "tokens": list(tokens),
                "token_strs": strings if body.get("return_token_strs") else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await json_body(request)
        tokens = checked(DetokenizeBody, body).tokens
        self._desk.adapter(body.get("model"))
        known = [token for token in tokens if token < self._model.vocabulary]
        return as_json({"prompt": self._model.backend.decode(known, skip_special_tokens=False)})

    async def models(self, _: Request) -> Response:
        root, parent = str(self._model.folder), self._model.names[0]
        cards = [_card(name, root, None, self._model.max_model_len) for name in self._model.names]
        cards += [_card(adapter.name, adapter.path, parent, None) for adapter in self._model.adapters]
        return as_json({"object": "list", "data": cards})

    async def well(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return as_json({"version": self._flags.version})

    async def load(self, _: Request) -> Response:
        return as_json({"server_load": self._desk.open})

    async def metrics(self, _: Request) -> Response:
        return Response(self._engine.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")

    async def event_sources(self, _: Request) -> Response:
        return as_json(self._sources)

    def _refusing(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint whose refusals are answers, and that echoes the request's id."""

        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except Refusal as refusal:
                response = JSONResponse(refusal.body, refusal.status)
            response.headers["x-request-id"] = request_id(request) or uuid.uuid4().hex
            return response

        return answer


def _several(prompt: str | Sequence[int | str | list[int]]) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts of a completion, and whether they are ids."""
    if isinstance(prompt, str):
        return [prompt], False
    ids = [one for one in prompt if type(one) is int]
    if ids:
        return [ids], True
    several = [one for one in prompt if isinstance(one, str | list)]
    return several, isinstance(several[0], list)


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, object]:
    created = int(time.time())
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


async def _detail(_: Request, error: Exception) -> Response:
    """An unknown route or method, as FastAPI tells it."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
