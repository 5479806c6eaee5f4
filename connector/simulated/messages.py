"""/v1/messages and /v1/messages/count_tokens: Anthropic's API over the chat's. Pure but for the routes.

As vLLM 0.32 does it (vllm/entrypoints/anthropic): a body becomes a chat's body, and what the chat
would say is told in Anthropic's words. A stream ends with message_delta, which bears the whole usage,
and message_stop; there is no [DONE]. Errors about fields' types come in OpenAI's form, all others in
Anthropic's.

What differs: inline system messages stay where they are, also where the model's template wants them
first; tool_addition and tool_removal blocks are refused; nothing is thought.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from connector.simulated.answers import Chosen, Heading, call_id, called
from connector.simulated.ask import Ask, Refusal, chat_ask, checked
from connector.simulated.engine import Generation, Output, Prompt
from connector.simulated.scale_out import generate_body
from connector.simulated.serving import Desk, as_json, check_rank, json_body, new_id

_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BlockType = Literal[
    "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"
]  # fmt: skip


class Block(BaseModel):
    type: _BlockType
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None


class Turn(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class OutputFormat(BaseModel):
    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(BaseModel):
    model: Annotated[str, Field(min_length=1)]
    messages: list[Turn]
    system: str | list[Block] | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(gt=0)]
    metadata: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """The two endpoints."""

    desk: Desk
    parses_tools: bool

    async def create(self, request: Request) -> Response:
        body = checked(MessagesBody, await json_body(request))
        return await _anthropically(lambda: self._create(request, body))

    async def render(self, request: Request) -> Response:
        """Refusals come in OpenAI's form here."""
        chat = as_chat(checked(MessagesBody, await json_body(request)))
        ask, prompt = self._asked(chat)
        return as_json(generate_body(f"chatcmpl-{new_id(request)}", chat, ask, prompt))

    async def count(self, request: Request) -> Response:
        body = checked(CountBody, await json_body(request))
        return await _anthropically(lambda: self._count(body))

    async def _create(self, request: Request, body: MessagesBody) -> Response:
        ask, prompt = self._asked(as_chat(body))
        check_rank(request)
        form = MessagesForm(self.desk.heading(request, ask.model), ask)
        return await self.desk.answer(request, [prompt], form, stream=ask.stream)

    def _asked(self, chat: dict[str, Any]) -> tuple[Ask, Prompt]:
        ask = chat_ask(chat, parses_tools=self.parses_tools)
        adapter = self.desk.adapter(ask.model)
        tokens, exact = self.desk.chat_tokens(chat)
        return ask, self.desk.prompts([tokens], ask, adapter, exact=exact)[0]

    async def _count(self, body: CountBody) -> Response:
        self.desk.adapter(body.model)
        tokens, _ = self.desk.chat_tokens(as_chat(body))
        return as_json(
            {"input_tokens": len(tokens), "context_management": {"original_input_tokens": len(tokens)}},
        )


async def _anthropically(endpoint: Callable[[], Awaitable[Response]]) -> Response:
    try:
        return await endpoint()
    except Refusal as refusal:
        error = {"type": refusal.kind, "message": refusal.message}
        return JSONResponse({"type": "error", "error": error}, refusal.status)


def as_chat(body: CountBody) -> dict[str, Any]:
    """The chat's body that asks for the same."""
    system = [] if body.system is None else _system(body.system)
    messages = [*system, *(message for turn in body.messages for message in _messages(turn))]
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools is not None:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
    if body.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    chat.update(_configured(body))
    return {**chat, **_sampling(body)} if isinstance(body, MessagesBody) else chat


def _configured(body: CountBody) -> dict[str, Any]:
    config: dict[str, Any] = {}
    output = body.output_config
    if output is not None and output.format is not None and output.format.schema_:
        schema = {"name": "json_schema", "schema": output.format.schema_}
        config["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output is not None and output.effort is not None:
        config["reasoning_effort"] = output.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        config["reasoning_effort"] = "none"
    return config


def _sampling(body: MessagesBody) -> dict[str, Any]:
    fields = {
        "max_tokens": body.max_tokens,
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "cache_salt": body.cache_salt,
        "kv_transfer_params": body.kv_transfer_params,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if body.stream:
        given |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return given


def _system(content: str | list[Block]) -> list[dict[str, Any]]:
    """Text in one piece. What Claude Code sends for its bill is left out: it would spoil every prefix."""
    texts = [content] if isinstance(content, str) else [block.text or "" for block in content if block.type == "text"]
    if not isinstance(content, str):
        texts = [text for text in texts if not text.startswith(_BILLING)]
    text = "".join(texts)
    return [{"role": "system", "content": text}] if text else []


def _messages(turn: Turn) -> Iterator[dict[str, Any]]:
    if turn.role == "system":
        if not (isinstance(turn.content, str) and turn.content.startswith(_BILLING)):
            yield from _system(turn.content)
        return
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    if turn.role == "user":
        yield from (_result(block) for block in turn.content if block.type == "tool_result")
    message = _blocks(turn.role, turn.content)
    if turn.role == "assistant" or "content" in message:
        yield message


def _blocks(role: str, blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role}
    parts = [part for block in blocks for part in _part(role, block)]
    if thoughts := [block.thinking for block in blocks if block.type == "thinking" and block.thinking is not None]:
        message["reasoning"] = "".join(thoughts)
    if calls := [_call(block) for block in blocks if block.type == "tool_use"]:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return message


def _part(role: str, block: Block) -> list[dict[str, Any]]:
    if block.type == "text" and block.text:
        return [{"type": "text", "text": block.text}]
    if block.type == "image":
        return [{"type": "image_url"}]
    if block.type == "tool_result" and role == "assistant":
        return [{"type": "text", "text": f"Tool result: {block.content or ''}"}]
    return []


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
    return {"id": block.id or call_id(), "type": "function", "function": function}


def _result(block: Block) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {**tool.input_schema, "type": tool.input_schema.get("type", "object")},
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


@dataclass(frozen=True, slots=True)
class MessagesForm:
    """/v1/messages."""

    heading: Heading
    ask: Ask

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        choice = choices[0]
        reason, sequence = stopped(choice.generation, called=called(choice) is not None)
        message = {
            "id": f"chatcmpl-{self.heading.request_id}",
            "type": "message",
            "role": "assistant",
            "content": [_said(choice)],
            "model": self.heading.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": used(choice.generation, len(choice.token_ids)),
        }
        return {name: value for name, value in message.items() if value is not None}

    def stream(self, generations: Sequence[Generation]) -> "MessageEvents":
        return MessageEvents(self.heading, generations[0])


def _said(choice: Chosen) -> dict[str, Any]:
    call = called(choice)
    if call is None:
        return {"type": "text", "text": choice.text}
    return {"type": "tool_use", "id": call_id(), "name": call.name, "input": json.loads(call.arguments)}


def stopped(generation: Generation, *, called: bool) -> tuple[str | None, str | None]:
    """Anthropic's reason to stop, and the sequence that did it."""
    if generation.finish == "length":
        return "max_tokens", None
    if generation.finish != "stop":
        return None, None
    if called:
        return "tool_use", None
    if isinstance(generation.stop_reason, str):
        return "stop_sequence", generation.stop_reason
    return "end_turn", None


def used(generation: Generation, generated: int) -> dict[str, int]:
    """Anthropic counts three kinds of prompt tokens, which exclude one another."""
    fresh = len(generation.prompt.tokens) - generation.cached - generation.created
    return {
        "input_tokens": max(0, fresh),
        "output_tokens": generated,
        "cache_creation_input_tokens": generation.created,
        "cache_read_input_tokens": generation.cached,
    }


class MessageEvents:
    """One message in events: a block of text, or a tool's use."""

    def __init__(self, heading: Heading, generation: Generation) -> None:
        self._heading = heading
        self._generation = generation
        self._generated = self._said = 0
        self._started = False
        self._block: str | None = None

    def begin(self) -> list[bytes]:
        return []

    def events(self, output: Output) -> list[bytes]:
        begin = [] if self._started else [self._start()]
        self._started = True
        self._generated += output.token is not None
        before = self._said
        self._said += len(output.text)
        call = self._generation.prompt.call
        if call is None:
            return [*begin, *self._text(output.text)]
        if before < call.named <= self._said:
            begin += self._open({"type": "tool_use", "id": call_id(), "name": call.name, "input": {}})
        if piece := call.piece(before, self._said):
            begin.append(self._delta({"type": "input_json_delta", "partial_json": piece}))
        return begin

    def end(self) -> list[bytes]:
        call = self._generation.prompt.call
        over = call is not None and self._said >= call.begins + len(call.arguments)
        reason, sequence = stopped(self._generation, called=over)
        last = {
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": used(self._generation, self._generated),
        }
        closed = [] if self._block is None else [_event("content_block_stop", {"index": 0})]
        return [*closed, _event("message_delta", last), _event("message_stop", {})]

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": f"chatcmpl-{self._heading.request_id}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._heading.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._generation.prompt.tokens), "output_tokens": 0},
        }
        return _event("message_start", {"message": message})

    def _text(self, text: str) -> list[bytes]:
        if not text:
            return []
        begin = self._open({"type": "text", "text": ""}) if self._block is None else []
        return [*begin, self._delta({"type": "text_delta", "text": text})]

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        self._block = block["type"]
        return [_event("content_block_start", {"content_block": block, "index": 0})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"delta": delta, "index": 0})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))
