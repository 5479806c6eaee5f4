"""What every endpoint needs: the model's names and ids, prompts for the engine, answers in one piece or in events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer as Backend

from connector.blocks import Adapter
from connector.errors import Inexact
from connector.render import Rules
from connector.simulated.answers import Chosen, Form, Heading
from connector.simulated.ask import Ask, Refusal, check_limits, flattened, malformed
from connector.simulated.engine import Answering, Engine, Prompt
from connector.simulated.script import BadSchema, script
from connector.simulated.text import Voice
from connector.tokens import Tokenizer

VERSION = "0.32.0"
MAX_ID = 128


@dataclass(frozen=True, slots=True)
class Flags:
    """How an engine was started, as far as its routes tell it."""

    version: str = VERSION
    """The version of vLLM that it says it is."""
    parses_tools: bool = True
    """vLLM's --enable-auto-tool-choice and --tool-call-parser."""
    scale_out: bool = False
    """--enable-scale-out."""
    dev_mode: bool = False
    """VLLM_SERVER_DEV_MODE=1."""


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
        template: str | None = None,
    ) -> "Model":
        """From a folder with tokenizer.json and config.json; `template` is another chat template than the folder's.

        Raises `NoTokenizer` or `NoWords`.
        """
        tokenizer = Tokenizer(folder, Rules(template=template))
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


class Desk:
    """Where requests become prompts, and what the engine says becomes answers."""

    def __init__(self, model: Model, engine: Engine, version: str = VERSION) -> None:
        self.model = model
        self.engine = engine
        self.open = 0
        """Answers that are being given."""
        self._fingerprint = f"vllm-{version}-{uuid.uuid5(uuid.NAMESPACE_URL, str(model.folder)).hex[:8]}"

    def heading(self, request: Request, model: str | None) -> Heading:
        return Heading(
            request_id=new_id(request),
            created=int(time.time()),
            model=model or self.model.names[0],
            fingerprint=self._fingerprint,
        )

    def adapter(self, name: object) -> tuple[int, Adapter] | None:
        """The adapter of that name, with vLLM's number for it; None for the model itself."""
        if name is None or name in self.model.names:
            return None
        for number, adapter in enumerate(self.model.adapters, 1):
            if adapter.name == name:
                return number, adapter
        valid = ", ".join((*self.model.names, *(adapter.name for adapter in self.model.adapters)))
        message = f"The model `{name}` does not exist. Valid aliases: {valid}."
        raise Refusal(message, "model", status=404, kind="NotFoundError")

    def chat_tokens(self, body: dict[str, Any]) -> tuple[Sequence[int], bool]:
        """A chat's ids, and whether the client gave them."""
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is not None:
            field = "kv_transfer_params.prompt_token_ids"
            if not isinstance(given, list) or not given or not all(type(one) is int and one >= 0 for one in given):
                message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
                raise Refusal.of(field, message)
            if max(given) >= self.model.vocabulary:
                raise Refusal.of(field, f"Token id {max(given)} is out of vocabulary")
            return given, True
        try:
            return self.model.tokenizer.chat(flattened(body, self.model.names[0])), False
        except Inexact as error:
            raise Refusal(str(error.__cause__ or error)) from error

    def completion_tokens(self, body: dict[str, Any]) -> Sequence[int]:
        try:
            tokens = self.model.tokenizer.completion(body)
        except Inexact as error:
            raise Refusal(str(error)) from error
        if tokens and max(tokens) >= self.model.vocabulary:
            raise Refusal(f"Token id {max(tokens)} is out of vocabulary")
        return tokens

    def prompts(
        self, several: Sequence[Sequence[int]], ask: Ask, adapter: tuple[int, Adapter] | None, *, exact: bool = False
    ) -> list[Prompt]:
        """Every choice of every prompt. `exact` where the client sent ids. Raises `Refusal`."""
        model_len = self.model.max_model_len
        limits = [check_limits(ask, len(tokens), exact, model_len) for tokens in several]
        return [
            self._prompt(tokens, choice, limit, ask, adapter)
            for tokens, limit in zip(several, limits, strict=True)
            for choice in range(ask.n)
        ]

    def _prompt(
        self, tokens: Sequence[int], choice: int, limit: int, ask: Ask, adapter: tuple[int, Adapter] | None
    ) -> Prompt:
        """One choice, with what will be said. Raises `Refusal`."""
        words = self.model.voice.answer(tokens, choice)
        try:
            written = None if ask.wanted is None else script(ask.wanted, self.model.backend, words)
        except BadSchema as error:
            raise Refusal(f"Invalid JSON schema: {error}") from error
        return Prompt(
            tokens=tokens,
            answer=written or words,
            max_tokens=limit,
            min_tokens=ask.min_tokens,
            ignore_eos=ask.ignore_eos,
            stop=ask.stop,
            stop_token_ids=ask.stop_token_ids,
            keep_stop=ask.keep_stop,
            salt=ask.salt,
            adapter=adapter[1] if adapter else None,
            lora_id=adapter[0] if adapter else None,
            call=written.call if written else None,
        )

    async def answer(self, request: Request, prompts: Sequence[Prompt], form: Form, *, stream: bool) -> Response:
        """Answer as the form has it. Who leaves before the end frees the places at once."""
        if stream:
            return Streamed(lambda: self.events(prompts, form))
        return await self.answer_whole(request, prompts, form.whole)

    async def answer_whole(
        self, request: Request, prompts: Sequence[Prompt], told: Callable[[Sequence[Chosen]], dict[str, Any]]
    ) -> Response:
        """Answer in one piece."""
        whole = asyncio.create_task(self._whole(prompts, told))
        if await before_leaving(request.receive, whole):
            return as_json(whole.result())
        return Response(status_code=499)

    async def _whole(
        self, prompts: Sequence[Prompt], told: Callable[[Sequence[Chosen]], dict[str, Any]]
    ) -> dict[str, Any]:
        async with self.answering(prompts) as answering:
            return told(await chosen(answering))

    async def events(self, prompts: Sequence[Prompt], form: Form) -> AsyncGenerator[bytes]:
        async with self.answering(prompts) as answering:
            stream = form.stream(answering.generations)
            for event in stream.begin():
                yield event
            async for output in answering.outputs():
                for event in stream.events(output):
                    yield event
            for event in stream.end():
                yield event

    @asynccontextmanager
    async def answering(self, prompts: Sequence[Prompt]) -> AsyncIterator[Answering]:
        """As the engine's, and counted in /load."""
        self.open += 1
        try:
            async with self.engine.answering(prompts) as answering:
                yield answering
        finally:
            self.open -= 1


async def chosen(answering: Answering) -> list[Chosen]:
    """All choices, when they have ended."""
    said = ["" for _ in answering.generations]
    ids: list[list[int]] = [[] for _ in said]
    async for output in answering.outputs():
        said[output.choice] += output.text
        ids[output.choice] += [] if output.token is None else [output.token]
    return [Chosen(*one) for one in zip(answering.generations, said, ids, strict=True)]


class Streamed(Response):
    """An answer in events. The client's leaving ends it at once."""

    media_type = "text/event-stream"

    def __init__(self, events: Callable[[], AsyncGenerator[bytes]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if await before_leaving(receive, asyncio.create_task(self._copy(send))):
            await send({"type": "http.response.body", "body": b""})

    async def _copy(self, send: Send) -> None:
        async with aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})


async def before_leaving(receive: Receive, work: asyncio.Task[Any]) -> bool:
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


async def json_body(request: Request) -> dict[str, Any]:
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


def check_rank(request: Request) -> None:
    """An engine alone has one rank only. Raises `Refusal`."""
    rank = request.headers.get("x-data-parallel-rank", "")
    if rank.isdigit() and int(rank) > 0:
        raise Refusal(f"data_parallel_rank {rank} is out of range [0, 1).")


def request_id(request: Request) -> str | None:
    return request.headers.get("x-request-id", "")[:MAX_ID] or None


def new_id(request: Request) -> str:
    """What an answer is called by: the client's name for its request, or one that is made up."""
    return request_id(request) or uuid.uuid4().hex[:16]


def as_json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config
