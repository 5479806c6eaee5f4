"""Requests that vLLM 0.32 refuses, with what it answers, and requests that it answers, in all shapes.

The same lists are put to the simulated engine alone and to a real one beside it. Both serve the
model `tiny` with 8192 tokens of context.
"""

from dataclasses import dataclass
from typing import Any

import orjson

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
SCALE_OUT = (
    *(f"{path}/render" for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES)),
    *(f"{path}/derender" for path in (CHAT, COMPLETIONS)),
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
)
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "what is a block?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ANY = "any"
"""Where the param is a name of vLLM's own classes."""


@dataclass(frozen=True)
class Refused:
    name: str
    path: str
    body: Any
    status: int = 400
    kind: str = "BadRequestError"
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = tuple(JSON.items())

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)


def chat(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 4} | fields


def completion(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "what is a block?", "temperature": 0, "max_tokens": 4} | fields


def message(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 4} | fields


def response(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "input": "what is a block?", "max_output_tokens": 4} | fields


def _typed(name: str, param: str, **fields: object) -> Refused:
    return Refused(name, CHAT, chat(**fields), kind="Bad Request", param=param)


REFUSED = [
    Refused("prompt too long, ids", COMPLETIONS, completion(prompt=[10] * 9000), param="input_tokens"),
    Refused("prompt too long, chat", CHAT, chat(messages=[{"role": "user", "content": "x y z q " * 5000}]),
            param="input_tokens"),
    Refused("prompt fills the context", COMPLETIONS, completion(prompt=[10] * 8192), param="max_tokens"),
    Refused("max_tokens beyond the context", CHAT, chat(max_tokens=100_000), param="max_tokens"),
    Refused("max_tokens 0", CHAT, chat(max_tokens=0), param="max_tokens"),
    Refused("max_tokens negative", COMPLETIONS, completion(max_tokens=-1), param="max_tokens"),
    Refused("unknown model, chat", CHAT, chat(model="nope"), 404, "NotFoundError", "model"),
    Refused("unknown model, completion", COMPLETIONS, completion(model="nope"), 404, "NotFoundError", "model"),
    Refused("unknown model, tokenize", "/tokenize", {"model": "nope", "prompt": "x"}, 404, "NotFoundError", "model"),
    Refused("temperature negative", CHAT, chat(temperature=-1), param="temperature"),
    Refused("temperature too high", CHAT, chat(temperature=3), param="temperature"),
    Refused("top_p 0", CHAT, chat(top_p=0), param="top_p"),
    Refused("top_k", CHAT, chat(top_k=-2)),
    Refused("min_p", CHAT, chat(min_p=2)),
    Refused("presence_penalty", CHAT, chat(presence_penalty=3)),
    Refused("repetition_penalty", CHAT, chat(repetition_penalty=0)),
    Refused("n 0", CHAT, chat(n=0)),
    Refused("n 2, greedy", CHAT, chat(n=2)),
    Refused("min_tokens above max_tokens", CHAT, chat(min_tokens=10)),
    Refused("no message", CHAT, chat(messages=[])),
    Refused("messages missing", CHAT, {"model": "tiny"}, kind="Bad Request", param="body.messages"),
    Refused("role missing", CHAT, chat(messages=[{"content": "x"}]), kind="Bad Request", param=ANY),
    Refused("tool_choice without tools", CHAT, chat(tool_choice="required"), param="tool_choice"),
    Refused("tools without a parser", CHAT, chat(tools=[TOOL])),
    Refused("tools empty", CHAT, chat(tools=[]), param="tools"),
    Refused("tool_choice unknown", CHAT, chat(tools=[TOOL], tool_choice="foo"), param="tool_choice"),
    Refused("tool_choice of another tool", CHAT,
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), param="tool_choice"),
    Refused("stream_options without stream", CHAT, chat(stream_options={"include_usage": True}),
            param="stream_options"),
    Refused("response_format without its schema", CHAT, chat(response_format={"type": "json_schema"}),
            param="response_format"),
    Refused("top_logprobs without logprobs", CHAT, chat(top_logprobs=1), param="top_logprobs"),
    Refused("too many logprobs", COMPLETIONS, completion(logprobs=99), param="logprobs"),
    Refused("token out of vocabulary", COMPLETIONS, completion(prompt=[5000])),
    Refused("token negative", COMPLETIONS, completion(prompt=[-1]), kind="Bad Request", param="body.prompt.0"),
    Refused("prompt empty", COMPLETIONS, completion(prompt=""), param="prompt"),
    Refused("prompt missing", COMPLETIONS, {"model": "tiny"}, param="prompt"),
    Refused("prompts none", COMPLETIONS, completion(prompt=[])),
    Refused("prompts mixed", COMPLETIONS, completion(prompt=["a", [1]]), kind="Bad Request", param="body.prompt.0"),
    Refused("salt empty", CHAT, chat(cache_salt=""), param="cache_salt"),
    Refused("salt too long", CHAT, chat(cache_salt="x" * 129), param="cache_salt"),
    Refused("salt a number", CHAT, chat(cache_salt=5), param="cache_salt"),
    *(Refused(f"salt with {char!r}", COMPLETIONS, completion(cache_salt=f"a{char}b"), param="cache_salt")
      for char in "@/\\\x00"),
    Refused("image", CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])),
    Refused("both kinds of going on", CHAT, chat(add_generation_prompt=True, continue_final_message=True)),
    Refused("template of its own", CHAT, chat(chat_template="x")),
    Refused("ids of its own, unknown", CHAT, chat(kv_transfer_params={"prompt_token_ids": [99_999]}),
            param="kv_transfer_params.prompt_token_ids"),
    Refused("ids of its own, no list", CHAT, chat(kv_transfer_params={"prompt_token_ids": "x"}),
            param="kv_transfer_params.prompt_token_ids"),
    Refused("rank out of range", CHAT, chat(), headers=(*JSON.items(), ("x-data-parallel-rank", "7"))),
    _typed("max_tokens a word", "body.max_tokens", max_tokens="many"),
    _typed("max_tokens a fraction", "body.max_tokens", max_tokens=1.5),
    _typed("temperature a word", "body.temperature", temperature="hot"),
    _typed("stream a word", "body.stream", stream="maybe"),
    _typed("stop a number", "body.stop", stop=5),
    _typed("messages a word", "body.messages", messages="x"),
    _typed("tool without function", "body.tools.0.function", tools=[{"type": "function"}]),
    _typed("kv_transfer_params a word", "body.kv_transfer_params", kv_transfer_params="x"),
    Refused("bad JSON", CHAT, b"{bad", kind="Bad Request", param="body.1"),
    Refused("no body", CHAT, b"", kind="Bad Request", param="body"),
    Refused("null", CHAT, b"null", kind="Bad Request", param="body"),
    Refused("a list", CHAT, [1], kind="Bad Request", param="body"),
    Refused("wrong content type", CHAT, chat(), kind="Bad Request", headers=(("content-type", "text/plain"),)),
    Refused("no content type", CHAT, chat(), kind="Bad Request", headers=()),
    Refused("ids of its own, no list, responses", RESPONSES,
            response(kv_transfer_params={"prompt_token_ids": []}), param="kv_transfer_params.prompt_token_ids"),
    Refused("ids of its own, unknown, responses", RESPONSES,
            response(kv_transfer_params={"prompt_token_ids": [99_999]}), param="kv_transfer_params.prompt_token_ids"),
    *(Refused(f"closed, {path}", path, {}, 403, "PermissionDeniedError") for path in SCALE_OUT),
    Refused("tokenize nothing", "/tokenize", {"model": "tiny"}, kind="Bad Request", param="body.prompt"),
    Refused("detokenize nothing", "/detokenize", {"model": "tiny"}, kind="Bad Request", param="body.tokens"),
]  # fmt: skip

USAGE = {"include_usage": True}
ANSWERED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", CHAT, chat()),
    ("chat, model omitted", CHAT, {"messages": USER, "max_tokens": 2}),
    ("chat, two choices", CHAT, chat(n=2, temperature=1)),
    ("chat, ids", CHAT, chat(return_token_ids=True)),
    ("chat, ids of its own", CHAT, chat(kv_transfer_params={"prompt_token_ids": [10, 11]}, return_token_ids=True)),
    ("chat, max_completion_tokens", CHAT, chat(max_completion_tokens=2)),
    ("chat, tools unused", CHAT, chat(tools=[TOOL], tool_choice="none")),
    ("chat, unknown field", CHAT, chat(foo=1)),
    ("chat, unknown role", CHAT, chat(messages=[{"role": "alien", "content": "x"}])),
    ("chat, no content", CHAT, chat(messages=[{"role": "user"}])),
    ("chat, parts", CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}])),
    ("chat, unknown transfer", CHAT, chat(kv_transfer_params={"x": 1})),
    ("chat, number as text", CHAT, chat(max_tokens="3")),
    ("completion", COMPLETIONS, completion()),
    ("completion, echo", COMPLETIONS, completion(echo=True)),
    ("completion, echo alone", COMPLETIONS, completion(echo=True, max_tokens=0)),
    ("completion, ids", COMPLETIONS, completion(prompt=[10, 11, 12], return_token_ids=True)),
    ("completion, several, two choices", COMPLETIONS, completion(prompt=["one", "two"], n=2, temperature=1)),
    ("completion, several ids", COMPLETIONS, completion(prompt=[[10, 11], [12]], return_token_ids=True)),
    ("completion, near the limit", COMPLETIONS, completion(prompt=[10] * 8190)),
    ("completion, salted", COMPLETIONS, completion(cache_salt="ok")),
    ("messages", MESSAGES, message()),
    ("messages, system", MESSAGES, message(system="be short")),
    ("messages, ids of its own", MESSAGES, message(kv_transfer_params={"prompt_token_ids": [10, 11]})),
    ("responses", RESPONSES, response()),
    ("responses, instructions", RESPONSES, response(instructions="be short")),
    ("responses, ids of its own", RESPONSES, response(kv_transfer_params={"prompt_token_ids": [10, 11]})),
    ("tokenize", "/tokenize", {"model": "tiny", "prompt": "a block"}),
    ("tokenize, strings", "/tokenize", {"prompt": "a block", "return_token_strs": True}),
    ("tokenize, chat", "/tokenize", {"model": "tiny", "messages": USER}),
    ("detokenize", "/detokenize", {"model": "tiny", "tokens": [10, 11, 300]}),
]
STREAMED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", CHAT, chat()),
    ("chat, usage", CHAT, chat(stream_options=USAGE)),
    ("chat, usage all along", CHAT, chat(stream_options={**USAGE, "continuous_usage_stats": True})),
    ("chat, two choices", CHAT, chat(n=2, temperature=1)),
    ("chat, ids", CHAT, chat(return_token_ids=True)),
    ("completion", COMPLETIONS, completion()),
    ("completion, usage", COMPLETIONS, completion(stream_options=USAGE)),
    ("completion, usage all along", COMPLETIONS, completion(stream_options={**USAGE, "continuous_usage_stats": True})),
    ("completion, echo", COMPLETIONS, completion(echo=True)),
    ("completion, ids", COMPLETIONS, completion(return_token_ids=True)),
    ("completion, several", COMPLETIONS, completion(prompt=["one", "two"], max_tokens=1, stream_options=USAGE)),
]


def prompt_tokens(usage: dict[str, Any]) -> int:
    """The prompt's tokens as any of the dialects counts them."""
    names = ("prompt_tokens", "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name, 0) for name in names)


def shape(value: Any) -> Any:
    """The names in a JSON value, in order, and what is null: all but the values themselves."""
    if isinstance(value, dict):
        return tuple((name, shape(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return ("list", *dict.fromkeys(shape(inner) for inner in value))
    return type(value).__name__


def stream_shape(content: bytes) -> list[Any]:
    """The shapes of a stream's events, each told once, in the order in which they first come."""
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line]
    return list(dict.fromkeys("[DONE]" if line == b"[DONE]" else shape(orjson.loads(line)) for line in lines))
