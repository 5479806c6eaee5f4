"""/v1/embeddings, /score and /rerank: prompts to vectors, and how near they are to one another.

As vLLM 0.32 answers for an embedding model (vllm/entrypoints/pooling, scores as its bi-encoder makes
them: the cosine of two vectors). A real engine serves these with a model of its own kind, and not
beside chats; this one serves all from one process, so that a gateway can be tried.

A prompt goes through the engine as any other, cached and timed; the one token that it brings is told
to nobody, though it is counted. Its vector is the sum of one fixed direction for each of its tokens,
so texts that share words are near. `dimensions` cuts it short; of the encodings there are float and
base64, of the number types float32.
"""

import base64
import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from connector.simulated.answers import Chosen, Heading
from connector.simulated.ask import Message, Refusal, Token, check_room, check_salt, checked, malformed
from connector.simulated.engine import Prompt
from connector.simulated.script import Script
from connector.simulated.serving import Desk, json_body
from connector.simulated.text import Word

DIMENSIONS = 256
"""Numbers in a vector."""
_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))

Vector = Sequence[float]
ScoreInput = str | dict[str, Any]


class Pooling(BaseModel):
    """What these requests share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    cache_salt: str | None = None


class EmbeddingBody(Pooling):
    input: list[Token] | list[list[Token]] | str | list[str] | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    dimensions: int | None = None


class ScoreBody(Pooling):
    first: ScoreInput | list[ScoreInput]
    second: ScoreInput | list[ScoreInput]


class RerankBody(Pooling):
    query: ScoreInput
    documents: ScoreInput | list[ScoreInput]
    top_n: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The endpoints."""

    desk: Desk

    async def embed(self, request: Request) -> Response:
        raw = await json_body(request)
        check_salt(raw.get("cache_salt"))
        if "input" not in raw and "messages" not in raw:
            missing = {"type": "missing", "msg": "Field required", "input": raw}
            raise malformed([{**missing, "loc": (name,)} for name in ("input", "messages")])
        body = checked(EmbeddingBody, raw)
        if body.dimensions is not None and not 0 < body.dimensions <= DIMENSIONS:
            raise Refusal(f"Model {self._name!r} only supports dimensions up to {DIMENSIONS}, got {body.dimensions}.")
        prompts = self._prompts(body, self._tokens(body, raw))
        form = EmbeddingForm(self.desk.heading(request, self._name), body.encoding_format, body.dimensions)
        return await self.desk.answer_whole(request, prompts, form.whole)

    async def score(self, request: Request) -> Response:
        raw = await json_body(request)
        check_salt(raw.get("cache_salt"))
        body = checked(ScoreBody, _paired(raw))
        first, second = _texts(body.first), _texts(body.second)
        _check_lengths(len(first), len(second))
        form = ScoreForm(self.desk.heading(request, self._name), len(first))
        return await self.desk.answer_whole(request, self._prompts(body, self._encoded([*first, *second])), form.whole)

    async def rerank(self, request: Request) -> Response:
        raw = await json_body(request)
        check_salt(raw.get("cache_salt"))
        body = checked(RerankBody, raw)
        query, documents = _texts(body.query), _texts(body.documents)
        _check_lengths(1, len(documents))
        form = RerankForm(self.desk.heading(request, self._name), documents, body.top_n or len(documents))
        prompts = self._prompts(body, self._encoded([*query, *documents]))
        return await self.desk.answer_whole(request, prompts, form.whole)

    @property
    def _name(self) -> str:
        return self.desk.model.names[0]

    def _tokens(self, body: EmbeddingBody, raw: Mapping[str, Any]) -> list[Sequence[int]]:
        if body.messages is not None:
            return [self.desk.chat_tokens({"add_generation_prompt": False, **raw})[0]]
        given = body.input or []
        several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else [*given]
        if not several:
            raise Refusal("You must pass at least one prompt")
        special = body.add_special_tokens
        return [self.desk.completion_tokens({"prompt": one, "add_special_tokens": special}) for one in several]

    def _encoded(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self.desk.completion_tokens({"prompt": text}) for text in texts]

    def _prompts(self, body: Pooling, several: Sequence[Sequence[int]]) -> list[Prompt]:
        model = self.desk.model
        try:
            adapter = self.desk.adapter(body.model)
        except Refusal as refusal:
            message = f"The model `{body.model}` does not exist."
            raise Refusal(message, status=refusal.status, kind=refusal.kind) from refusal
        for tokens in several:
            check_room(len(tokens), exact=True, max_model_len=model.max_model_len)
        silence = Script((Word(model.eos, ""),))
        number, named = adapter or (None, None)
        return [
            Prompt(tokens, silence, max_tokens=1, salt=body.cache_salt, adapter=named, lora_id=number)
            for tokens in several
        ]


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    heading: Heading
    encoding: Literal["float", "base64"]
    dimensions: int | None

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        vectors = [embedded(choice.generation.prompt.tokens, self.dimensions) for choice in choices]
        return {
            "id": f"embd-{self.heading.request_id}",
            "object": "list",
            "created": self.heading.created,
            "model": self.heading.model,
            "data": [
                {"index": index, "object": "embedding", "embedding": self._told(vector)}
                for index, vector in enumerate(vectors)
            ],
            "usage": _usage(choices),
        }

    def _told(self, vector: "array[float]") -> list[float] | str:
        return list(vector) if self.encoding == "float" else base64.b64encode(vector.tobytes()).decode()


@dataclass(frozen=True, slots=True)
class ScoreForm:
    heading: Heading
    queries: int

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        return {
            "id": f"score-{self.heading.request_id}",
            "object": "list",
            "created": self.heading.created,
            "model": self.heading.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(_scores(choices, self.queries))
            ],
            "usage": _usage(choices),
        }


@dataclass(frozen=True, slots=True)
class RerankForm:
    heading: Heading
    documents: Sequence[str]
    best: int
    """How many are told."""

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        ranked = sorted(enumerate(_scores(choices, 1)), key=lambda one: one[1], reverse=True)
        usage = _usage(choices)
        return {
            "id": f"score-{self.heading.request_id}",
            "model": self.heading.model,
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
            "results": [
                {
                    "index": index,
                    "document": {"text": self.documents[index], "multi_modal": None},
                    "relevance_score": score,
                }
                for index, score in ranked[: self.best]
            ],
        }


def embedded(tokens: Sequence[int], dimensions: int | None = None) -> "array[float]":
    """A prompt's vector, of length 1."""
    size = dimensions or DIMENSIONS
    total = [0.0] * size
    for token, count in Counter(tokens).items():
        for place, part in enumerate(_direction(token)[:size]):
            total[place] += count * part
    length = math.hypot(*total) or 1.0
    return array("f", (part / length for part in total))


def cosine(one: Vector, other: Vector) -> float:
    """Of vectors of length 1."""
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=16_384)
def _direction(token: int) -> Vector:
    drawn = hashlib.shake_128(token.to_bytes(8, "big")).digest(DIMENSIONS)
    return tuple(byte - 127.5 for byte in drawn)


def _scores(choices: Sequence[Chosen], queries: int) -> list[float]:
    vectors = [embedded(choice.generation.prompt.tokens) for choice in choices]
    documents = vectors[queries:]
    asked = vectors[:queries] if queries > 1 else vectors[:1] * len(documents)
    return [cosine(query, document) for query, document in zip(asked, documents, strict=True)]


def _usage(choices: Sequence[Chosen]) -> dict[str, Any]:
    tokens = sum(len(choice.generation.prompt.tokens) for choice in choices)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _paired(raw: dict[str, Any]) -> dict[str, Any]:
    """The two sides of a score, whatever they are called. Raises `Refusal`."""
    for first, second in _PAIRS:
        if first in raw and second in raw:
            return {**raw, "first": raw[first], "second": raw[second]}
    missing = {"type": "missing", "msg": "Field required", "input": raw}
    raise malformed([{**missing, "loc": (name,)} for pair in _PAIRS for name in pair if name not in raw])


def _texts(given: ScoreInput | Sequence[ScoreInput]) -> list[str]:
    several = [given] if isinstance(given, str | dict) else given
    texts = [one for one in several if isinstance(one, str)]
    if len(texts) < len(several):
        raise Refusal("MultiModalParam is not supported for this model")
    return texts


def _check_lengths(first: int, second: int) -> None:
    if first > 1 and first != second:
        raise Refusal("Input lengths must be either 1:1, 1:N or N:N")
    if first == 0:
        raise Refusal("At least one text element must be given")
    if second == 0:
        raise Refusal("At least one text_pair element must be given")
