"""The engine's HTTP side: vLLM's routes as far as a gateway can tell."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer as Backend

from connector.blocks import Adapter
from connector.errors import Inexact
from connector.simulated.answers import Chosen, Heading, Stream, whole_chat, whole_completion
from connector.simulated.ask import (
    Ask,
    DetokenizeBody,
    Refusal,
    TokenizeChat,
    TokenizePrompt,
    chat_ask,
    check_limits,
    checked,
    completion_ask,
    flattened,
    malformed,
)
from connector.simulated.engine import Answering, Engine, Prompt
from connector.simulated.text import Voice
from connector.tokens import Tokenizer

VERSION = "0.32.0"
MAX_ID = 128


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine serves, under which names, and its words."""

    folder: Path
    names: tuple[str, ...]
    max_model_len: int
    tokenizer: Tokenizer
    backend: Backend
    voice: Voice
    eos: int
    vocabulary: int
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        names: Sequence[str] = (),
        max_model_len: int | None = None,
        adapters: Sequence[Adapter] = (),
        seed: int = 0,
    ) -> "Model":
        """From a folder with tokenizer.json and config.json. Raises `NoTokenizer` or `NoWords`."""
        tokenizer = Tokenizer(folder)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        config = _config(folder)
        eos = config.get("eos_token_id")
        return cls(
            folder=folder,
            names=tuple(names) or (str(folder),),
            max_model_len=max_model_len or int(config.get("max_position_embeddings", 8192)),
            tokenizer=tokenizer,
            backend=backend,
            voice=Voice(backend, seed),
            eos=int(eos[0] if isinstance(eos, list) else eos or 0),
            vocabulary=max(int(config.get("vocab_size", 0)), backend.get_vocab_size()),
            adapters=tuple(adapters),
        )


class Api:
    """The routes over one engine."""

    def __init__(self, model: Model, engine: Engine, event_sources: Mapping[str, object] | None = None) -> None:
        self._model = model
        self._engine = engine
        self._sources = {"0": event_sources} if event_sources else {}
        self._fingerprint = f"vllm-{VERSION}-{uuid.uuid5(uuid.NAMESPACE_URL, str(model.folder)).hex[:8]}"
        self._open = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._refusing(self.chat), methods=["POST"]),
                Route("/v1/completions", self._refusing(self.completion), methods=["POST"]),
                Route("/tokenize", self._refusing(self.tokenize), methods=["POST"]),
                Route("/detokenize", self._refusing(self.detokenize), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.well),
                Route("/ping", self.well, methods=["GET", "POST"]),
                Route("/version", self.version),
                Route("/load", self.load),
                Route("/metrics", self.metrics),
                Route("/kv_event_sources", self.event_sources),
            ],
            exception_handlers={HTTPException: _detail},
        )

    async def chat(self, request: Request) -> Response:
        body = await _body(request)
        ask = chat_ask(body)
        adapter = self._adapter(ask.model)
        tokens, exact = self._chat_tokens(body)
        _check_rank(request)
        prompts = self._prompts([tokens], ask, adapter, exact=exact)
        return await self._answer(request, ask, prompts, [""])

    async def completion(self, request: Request) -> Response:
        body = await _body(request)
        completion, ask = completion_ask(body)
        adapter = self._adapter(ask.model)
        assert completion.prompt is not None
        several, exact = _several(completion.prompt)
        tokens = [self._completion_tokens({**body, "prompt": one}) for one in several]
        _check_rank(request)
        prompts = self._prompts(tokens, ask, adapter, exact=exact)
        texts = [one if isinstance(one, str) else self._model.backend.decode(list(one)) for one in several]
        return await self._answer(request, ask, prompts, texts)

    async def tokenize(self, request: Request) -> Response:
        body = await _body(request)
        if "messages" in body:
            checked(TokenizeChat, body)
            self._adapter(body.get("model"))
            tokens = self._chat_tokens(body)[0]
        else:
            if "prompt" not in body:
                missing = {"type": "missing", "msg": "Field required", "input": body}
                raise malformed([{**missing, "loc": (field,)} for field in ("prompt", "messages")])
            checked(TokenizePrompt, body)
            self._adapter(body.get("model"))
            tokens = self._completion_tokens(body)
        strings = [self._model.backend.id_to_token(token) for token in tokens]
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._model.max_model_len,
                "tokens": list(tokens),
                "token_strs": strings if body.get("return_token_strs") else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await _body(request)
        tokens = checked(DetokenizeBody, body).tokens
        self._adapter(body.get("model"))
        known = [token for token in tokens if token < self._model.vocabulary]
        return _json({"prompt": self._model.backend.decode(known, skip_special_tokens=False)})

    async def models(self, _: Request) -> Response:
        root, parent = str(self._model.folder), self._model.names[0]
        cards = [_card(name, root, None, self._model.max_model_len) for name in self._model.names]
        cards += [_card(adapter.name, adapter.path, parent, None) for adapter in self._model.adapters]
        return _json({"object": "list", "data": cards})

    async def well(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return _json({"version": VERSION})

    async def load(self, _: Request) -> Response:
        return _json({"server_load": self._open})

    async def metrics(self, _: Request) -> Response:
        return Response(self._engine.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")

    async def event_sources(self, _: Request) -> Response:
        return _json(self._sources)

    def _refusing(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint whose refusals are answers, and that echoes the request's id."""

        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except Refusal as refusal:
                response = JSONResponse(refusal.body, refusal.status)
            response.headers["x-request-id"] = _request_id(request) or uuid.uuid4().hex
            return response

        return answer

    def _adapter(self, name: object) -> tuple[int, Adapter] | None:
        """The adapter of that name, with vLLM's number for it; None for the model itself."""
        if name is None or name in self._model.names:
            return None
        for number, adapter in enumerate(self._model.adapters, 1):
            if adapter.name == name:
                return number, adapter
        valid = ", ".join((*self._model.names, *(adapter.name for adapter in self._model.adapters)))
        message = f"The model `{name}` does not exist. Valid aliases: {valid}."
        raise Refusal(message, "model", status=404, kind="NotFoundError")

    def _chat_tokens(self, body: dict[str, Any]) -> tuple[Sequence[int], bool]:
        """A chat's ids, and whether the client gave them."""
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is not None:
            field = "kv_transfer_params.prompt_token_ids"
            if not isinstance(given, list) or not given or not all(type(one) is int and one >= 0 for one in given):
                message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
                raise Refusal.of(field, message)
            if max(given) >= self._model.vocabulary:
                raise Refusal.of(field, f"Token id {max(given)} is out of vocabulary")
            return given, True
        try:
            return self._model.tokenizer.chat(flattened(body, self._model.names[0])), False
        except Inexact as error:
            raise Refusal(str(error.__cause__ or error)) from error

    def _completion_tokens(self, body: dict[str, Any]) -> Sequence[int]:
        try:
            tokens = self._model.tokenizer.completion(body)
        except Inexact as error:
            raise Refusal(str(error)) from error
        if tokens and max(tokens) >= self._model.vocabulary:
            raise Refusal(f"Token id {max(tokens)} is out of vocabulary")
        return tokens

    def _prompts(
        self, several: Sequence[Sequence[int]], ask: Ask, adapter: tuple[int, Adapter] | None, *, exact: bool
    ) -> list[Prompt]:
        """Every choice of every prompt."""
        prompts = []
        for tokens in several:
            limit = check_limits(ask, len(tokens), exact, self._model.max_model_len)
            one = Prompt(
                tokens=tokens,
                answer=self._model.voice.answer(tokens),
                max_tokens=limit,
                min_tokens=ask.min_tokens,
                ignore_eos=ask.ignore_eos,
                stop=ask.stop,
                stop_token_ids=ask.stop_token_ids,
                keep_stop=ask.keep_stop,
                salt=ask.salt,
                adapter=adapter[1] if adapter else None,
                lora_id=adapter[0] if adapter else None,
            )
            prompts.append(one)
            prompts += [replace(one, answer=self._model.voice.answer(tokens, choice)) for choice in range(1, ask.n)]
        return prompts

    async def _answer(self, request: Request, ask: Ask, prompts: Sequence[Prompt], texts: Sequence[str]) -> Response:
        heading = Heading(
            request_id=_request_id(request) or uuid.uuid4().hex[:16],
            created=int(time.time()),
            model=ask.model or self._model.names[0],
            fingerprint=self._fingerprint,
        )
        if ask.stream:
            return Streamed(self, heading, ask, prompts, texts)
        whole = asyncio.create_task(self._whole(heading, ask, prompts, texts))
        if await _before_leaving(request.receive, whole):
            return _json(whole.result())
        return Response(status_code=499)

    async def _whole(
        self, heading: Heading, ask: Ask, prompts: Sequence[Prompt], texts: Sequence[str]
    ) -> dict[str, Any]:
        async with self.answering(prompts) as answering:
            said = ["" for _ in prompts]
            ids: list[list[int]] = [[] for _ in prompts]
            async for output in answering.outputs():
                said[output.choice] += output.text
                ids[output.choice] += [] if output.token is None else [output.token]
            choices = [Chosen(*one) for one in zip(answering.generations, said, ids, strict=True)]
        if ask.chat:
            return whole_chat(heading, ask, choices)
        return whole_completion(heading, ask, choices, texts)

    @asynccontextmanager
    async def answering(self, prompts: Sequence[Prompt]) -> AsyncIterator[Answering]:
        """As the engine's, and counted in /load."""
        self._open += 1
        try:
            async with self._engine.answering(prompts) as answering:
                yield answering
        finally:
            self._open -= 1


class Streamed(Response):
    """An answer in events. The client's leaving ends it at once."""

    media_type = "text/event-stream"

    def __init__(self, api: Api, heading: Heading, ask: Ask, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._api = api
        self._heading = heading
        self._ask = ask
        self._prompts = prompts
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if await _before_leaving(receive, asyncio.create_task(self._copy(send))):
            await send({"type": "http.response.body", "body": b""})

    async def _copy(self, send: Send) -> None:
        async with self._api.answering(self._prompts) as answering:
            stream = Stream(self._heading, self._ask, answering.generations, self._texts)
            async for output in answering.outputs():
                for event in stream.events(output):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            for event in stream.end():
                await send({"type": "http.response.body", "body": event, "more_body": True})


async def _before_leaving(receive: Receive, work: asyncio.Task[Any]) -> bool:
    """Let a task end, unless the client leaves first: then it is cancelled. Whether it ended."""
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return True
        return False
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.wait({work, leaving})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises `Refusal`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refusal(message, kind="Bad Request")
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else None
    except json.JSONDecodeError as error:
        told = {"type": "json_invalid", "loc": (error.pos,), "msg": "JSON decode error", "input": {}}
        raise malformed([{**told, "ctx": {"error": error.msg}}]) from error
    if body is None:
        raise malformed([{"type": "missing", "loc": (), "msg": "Field required", "input": None}])
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise malformed([{"type": "model_attributes_type", "loc": (), "msg": message, "input": body}])
    return body


def _several(prompt: str | Sequence[int | str | list[int]]) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts of a completion, and whether they are ids."""
    if isinstance(prompt, str):
        return [prompt], False
    ids = [one for one in prompt if type(one) is int]
    if ids:
        return [ids], True
    several = [one for one in prompt if isinstance(one, str | list)]
    return several, isinstance(several[0], list)


def _check_rank(request: Request) -> None:
    rank = request.headers.get("x-data-parallel-rank", "")
    if rank.isdigit() and int(rank) > 0:
        raise Refusal(f"data_parallel_rank {rank} is out of range [0, 1).")


def _request_id(request: Request) -> str | None:
    return request.headers.get("x-request-id", "")[:MAX_ID] or None


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


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


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config


async def _detail(_: Request, error: Exception) -> Response:
    """An unknown route or method, as FastAPI tells it."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
