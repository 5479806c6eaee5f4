"""The hot endpoints: what is sent to engines. A path that is not here, nor in api, is refused, never proxied."""

import re
from dataclasses import dataclass
from typing import Literal

from connector.handoff import OWNED
from gateway.dialects import Dialect

PromptKind = Literal["chat", "completion", "responses", "messages"]
"""The first two are rendered and tokenised here; all of them by a render endpoint, where one is configured."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of vLLM's, and what the gateway must know of it."""

    path: str
    dialect: Dialect = Dialect.CHAT
    prompt: PromptKind | None = None
    """How its prompt is made into tokens; None: it is placed by load."""
    salted: bool = True
    """vLLM's request has cache_salt (vllm/entrypoints/*/protocol.py)."""
    asks_usage: bool = False
    """A stream tells its usage where stream_options ask for it."""
    form: bool = False
    """The body is multipart/form-data, and passes byte for byte."""
    makes: bool = False
    """Its answers are kept by the engine that made them, and asked for by their id."""
    owned: frozenset[str] = OWNED
    """Fields that a client cannot set."""


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", prompt="chat", asks_usage=True),
        Endpoint("/v1/completions", prompt="completion", asks_usage=True),
        # vLLM keeps a response under the request_id of its body: a client could take another's place with one
        Endpoint("/v1/responses", Dialect.RESPONSES, prompt="responses", makes=True, owned=OWNED | {"request_id"}),
        Endpoint("/v1/messages", Dialect.MESSAGES, prompt="messages"),
        Endpoint("/v1/messages/count_tokens", Dialect.MESSAGES, salted=False),
        Endpoint("/v1/embeddings"),
        Endpoint("/v1/rerank"),
        Endpoint("/v1/score"),
        Endpoint("/tokenize", salted=False),
        Endpoint("/detokenize", salted=False),
        Endpoint("/v1/audio/transcriptions", salted=False, form=True),
    )
}

STORED = re.compile(r"/v1/responses/([A-Za-z0-9._-]{1,128})(/cancel)?")
"""A response that an engine keeps: GET it, or POST to its /cancel."""
