"""/v1/responses: OpenAI's stateful API, with the store that one engine keeps for itself.

As vLLM 0.32 with VLLM_ENABLE_RESPONSES_API_STORE=1 (vllm/entrypoints/openai/responses, its simple
context, with a tool parser). A stream ends with `response.completed`, also where the answer was cut
short and its status is `incomplete`; there is no [DONE]. An answer that goes on from a stored one
gets that one's messages without its instructions, and of its output the texts only: vLLM leaves its
tool calls away.

What differs: the store forgets the oldest beyond `KEPT`; a stream that follows an answer ends when
the answer is cancelled, where vLLM's goes on waiting; tools other than functions are never called.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from connector.simulated.answers import Chosen, call_id, called
from connector.simulated.ask import ANY_OBJECT, Ask, Refusal, formed, sampled, tool_due
from connector.simulated.engine import Generation, Output, Prompt
from connector.simulated.scale_out import generate_body
from connector.simulated.script import Call, Wanted
from connector.simulated.serving import Desk, Streamed, as_json, json_body
from connector.simulated.turns import (
    Messages,
    ResponsesBody,
    TextConfig,
    chat_of,
    messages_of,
    name,
    opening,
    response_body,
)

KEPT = 1024
"""Answers that an engine remembers."""
_FUNCTION = (
    "name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description",
    "output_schema",
)  # fmt: skip
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")


@dataclass(eq=False, slots=True)
class Kept:
    """One answer in the store; `response` is replaced as it goes on."""

    response: dict[str, Any]
    messages: Messages
    events: list[bytes] = field(default_factory=list)
    ended: bool = True
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, *events: bytes, ended: bool = False) -> None:
        """More has happened; whoever follows is woken."""
        self.events += events
        self.ended = ended
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The events behind that number, until the last one."""
        place = after + 1
        while place < len(self.events) or not self.ended:
            if place >= len(self.events):
                await self.changed.wait()
                continue
            yield self.events[place]
            place += 1


class Responses:
    """The endpoints and their store."""

    def __init__(self, desk: Desk, *, parses_tools: bool) -> None:
        self._desk = desk
        self._parses_tools = parses_tools
        self._store: OrderedDict[str, Kept] = OrderedDict()

    async def create(self, request: Request) -> Response:
        body = response_body(await json_body(request))
        ask, messages, prompt = self._asked(body)
        made = Made(body, ask.model or self._desk.model.names[0], prompt.max_tokens, int(time.time()))
        if body.background:
            return self._in_background(made, messages, prompt)
        form = ResponsesForm(made, lambda response: self._keep(body, response, messages))
        return await self._desk.answer(request, [prompt], form, stream=ask.stream)

    async def render(self, request: Request) -> Response:
        raw = await json_body(request)
        body = response_body(raw)
        self._desk.adapter(body.model)
        if body.previous_response_id is not None:
            message = "previous_response_id is not supported by the stateless render endpoint."
            raise Refusal(message, "previous_response_id", kind="invalid_request_error")
        ask, _, prompt = self._asked(body)
        return as_json(generate_body(body.request_id, raw, ask, prompt, response=True))

    async def retrieve(self, request: Request) -> Response:
        name = request.path_params["name"]
        kept = self._kept(name)
        if request.query_params.get("stream", "").lower() not in ("true", "1"):
            return as_json(kept.response)
        if not kept.events and kept.ended:
            raise Refusal.of("response_id", f"Unknown response_id: {name}", name)
        after = request.query_params.get("starting_after", "")
        return Streamed(lambda: kept.follow(int(after) if after.isdigit() else -1))

    async def cancel(self, request: Request) -> Response:
        kept = self._kept(request.path_params["name"])
        if kept.response["status"] not in ("queued", "in_progress"):
            raise Refusal("Cannot cancel a synchronous response.", "response_id", kind="invalid_request_error")
        kept.response = {**kept.response, "status": "cancelled"}
        if kept.task is not None:
            kept.task.cancel()
        return as_json(kept.response)

    def _asked(self, body: ResponsesBody) -> tuple[Ask, Messages, Prompt]:
        """What is asked for, all messages, and the prompt. Raises `Refusal`."""
        adapter = self._desk.adapter(body.model)
        said, output = [], []
        if body.previous_response_id is not None:
            before = self._kept(body.previous_response_id)
            said, output = before.messages, before.response["output"]
        messages = [*opening(body.instructions, said, output), *messages_of(body.input)]
        ask = _ask(body, messages, parses_tools=self._parses_tools)
        tokens, exact = self._desk.chat_tokens(chat_of(body, messages))
        self._check_room(len(tokens))
        return ask, messages, self._desk.prompts([tokens], ask, adapter, exact=exact)[0]

    def _check_room(self, prompt: int) -> None:
        limit = self._desk.model.max_model_len
        if prompt == limit:
            message = f"The engine prompt length {prompt} exceeds the max_model_len {limit}. Please reduce prompt."
            raise Refusal(message, "input", kind="invalid_request_error")

    def _kept(self, name: str) -> Kept:
        kept = self._store.get(name)
        if kept is None:
            message = f"Response with id '{name}' not found."
            raise Refusal(message, "response_id", status=404, kind="invalid_request_error")
        return kept

    def _keep(self, body: ResponsesBody, response: dict[str, Any], messages: Messages) -> None:
        if body.store:
            self._remember(Kept(response, messages))

    def _remember(self, kept: Kept) -> None:
        self._store[kept.response["id"]] = kept
        while len(self._store) > KEPT:
            self._store.popitem(last=False)

    def _in_background(self, made: "Made", messages: Messages, prompt: Prompt) -> Response:
        kept = Kept(made.response("queued"), messages, ended=False)
        self._remember(kept)
        kept.task = asyncio.create_task(self._run(kept, made, prompt))
        kept.task.add_done_callback(lambda _: kept.tell(ended=True))
        if made.body.stream:
            return Streamed(lambda: kept.follow(-1))
        return as_json(kept.response)

    async def _run(self, kept: Kept, made: "Made", prompt: Prompt) -> None:
        """Answer into the store."""

        def keep(response: dict[str, Any]) -> None:
            kept.response = response

        async for event in self._desk.events([prompt], ResponsesForm(made, keep)):
            kept.tell(event)


@dataclass(frozen=True, slots=True)
class Made:
    """What an answer bears that is known before it begins."""

    body: ResponsesBody
    model: str
    max_tokens: int
    created: int

    def response(
        self, status: str, output: Sequence[dict[str, Any]] = (), usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The object in its state so far."""
        body = self.body
        logprobs = body.top_logprobs if "message.output_text.logprobs" in (body.include or ()) else None
        return {
            "id": body.request_id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self.model,
            "object": "response",
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": _echoed_choice(body),
            "tools": [_echoed_tool(tool) for tool in body.tools],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": body.background,
            "max_output_tokens": self.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "reasoning": _filled(body.reasoning, _REASONING),
            "service_tier": body.service_tier,
            "status": status,
            "text": _echoed_text(body.text),
            "top_logprobs": logprobs,
            "truncation": body.truncation,
            "usage": usage,
            "user": body.user,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


@dataclass(frozen=True, slots=True)
class ResponsesForm:
    """/v1/responses; `keep` is given the answer when it is whole."""

    made: Made
    keep: Callable[[dict[str, Any]], None]

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        choice = choices[0]
        call = called(choice)
        output = [_called_item(call, name("fc"), call_id(), "completed")] if call is not None else []
        if call is None and choice.text:
            output = [_message(name("msg"), choice.text)]
        return self.finished(choice.generation, output, len(choice.token_ids))

    def stream(self, generations: Sequence[Generation]) -> "ResponseEvents":
        return ResponseEvents(self, generations[0])

    def finished(self, generation: Generation, output: Sequence[dict[str, Any]], generated: int) -> dict[str, Any]:
        status = "incomplete" if generation.finish == "length" else "completed"
        response = self.made.response(status, output, _usage(generation, generated))
        self.keep(response)
        return response


class ResponseEvents:
    """One answer in events: a message, or a function's call."""

    def __init__(self, form: ResponsesForm, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._call = generation.prompt.call
        self._numbered = self._generated = 0
        self._text = ""
        self._item: str | None = None
        self._call_id = call_id()

    def begin(self) -> list[bytes]:
        response = self._form.made.response("in_progress")
        return [self._event(f"response.{state}", {"response": response}) for state in ("created", "in_progress")]

    def events(self, output: Output) -> list[bytes]:
        self._generated += output.token is not None
        before = len(self._text)
        self._text += output.text
        if self._call is not None:
            return self._calling(self._call, before)
        if not output.text:
            return []
        opened = self._open("msg", _message) if self._item is None else []
        return [*opened, self._part_event("response.output_text.delta", delta=output.text, logprobs=[])]

    def end(self) -> list[bytes]:
        output, done = self._closed()
        response = self._form.finished(self._generation, output, self._generated)
        return [*done, self._event("response.completed", {"response": response})]

    def _calling(self, call: Call, before: int) -> list[bytes]:
        events: list[bytes] = []
        if before < call.named <= len(self._text):
            self._item = name("fc")
            item = _called_item(replace(call, arguments=""), self._item, self._call_id, "in_progress")
            events.append(self._event("response.output_item.added", {"item": item, "output_index": 0}))
        if piece := call.piece(before, len(self._text)):
            about = {"delta": piece, "item_id": self._item, "output_index": 0}
            events.append(self._event("response.function_call_arguments.delta", about))
        return events

    def _open(self, prefix: str, item: Callable[[str, str], dict[str, Any]]) -> list[bytes]:
        self._item = name(prefix)
        begun = {**item(self._item, ""), "status": "in_progress"}
        added = self._event("response.output_item.added", {"item": begun, "output_index": 0})
        part = {**_output_text(""), "logprobs": []}
        return [added, self._part_event("response.content_part.added", part=part)]

    def _closed(self) -> tuple[list[dict[str, Any]], list[bytes]]:
        """The items of the answer, and the events that end them."""
        if self._item is None:
            return [], []
        if self._call is not None:
            return self._closed_call(self._call, self._item)
        item = _message(self._item, self._text)
        done = [
            self._part_event("response.output_text.done", logprobs=[], text=self._text),
            self._part_event("response.content_part.done", part=_output_text(self._text)),
        ]
        return [item], [*done, self._event("response.output_item.done", {"item": item, "output_index": 0})]

    def _closed_call(self, call: Call, name: str) -> tuple[list[dict[str, Any]], list[bytes]]:
        arguments = call.piece(0, len(self._text))
        item = _called_item(replace(call, arguments=arguments), name, self._call_id, "completed")
        about = {"arguments": arguments, "item_id": name, "output_index": 0}
        done = self._event("response.function_call_arguments.done", about, name=call.name)
        return [item], [done, self._event("response.output_item.done", {"item": item, "output_index": 0})]

    def _part_event(self, kind: str, **data: object) -> bytes:
        """About the only part of the message."""
        return self._event(kind, {**data, "content_index": 0, "item_id": self._item, "output_index": 0})

    def _event(self, kind: str, data: Mapping[str, object], **more: object) -> bytes:
        """The fields are in the alphabet's order but for the type, as in OpenAI's own models."""
        number, self._numbered = self._numbered, self._numbered + 1
        told = {**dict(sorted({**data, "sequence_number": number}.items())), "type": kind, **more}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(told))


def _ask(body: ResponsesBody, messages: Messages, *, parses_tools: bool) -> Ask:
    ask = sampled(body, chat=True, max_tokens=body.max_output_tokens, echo=False)
    tool = tool_due(chat_of(body, messages)) if parses_tools else None
    return replace(ask, wanted=tool or _form(body), limit_field="max_output_tokens")


def _form(body: ResponsesBody) -> Wanted | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return formed(None, body.structured_outputs)
    if body.structured_outputs is not None:
        raise Refusal.of("structured_outputs", "Cannot specify both structured_outputs and text.format")
    if form.get("type") == "json_schema":
        return Wanted(schema=form.get("schema") or ANY_OBJECT)
    return Wanted(schema=ANY_OBJECT) if form.get("type") == "json_object" else None


def _echoed_choice(body: ResponsesBody) -> object:
    choice = body.tool_choice
    if not body.tools and choice == "auto":
        return "none"
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"name": choice.get("name"), "type": "function"}
    return choice


def _echoed_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    return _filled(tool, _FUNCTION) if tool.get("type") == "function" else tool


def _echoed_text(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None:
        return None
    form = text.format
    if form is not None and form.get("type") == "json_schema":
        form = _filled(form, ("name", "schema", "type", "description", "strict"))
    return {"format": form, "verbosity": text.verbosity}


def _filled(given: dict[str, Any] | None, names: Sequence[str]) -> dict[str, Any] | None:
    """With every field, in this order, those that were not given null."""
    return None if given is None else {**{name: given.get(name) for name in names}, **given}


def _output_text(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _message(name: str, text: str) -> dict[str, Any]:
    return {
        "id": name,
        "content": [_output_text(text)] if text else [],
        "role": "assistant",
        "status": "completed",
        "type": "message",
        "phase": None,
    }


def _called_item(call: Call, name: str, identity: str, status: str) -> dict[str, Any]:
    return {
        "arguments": call.arguments,
        "call_id": identity,
        "name": call.name,
        "type": "function_call",
        "id": name,
        "async": None,
        "caller": None,
        "namespace": None,
        "status": status,
    }


def _usage(generation: Generation, generated: int) -> dict[str, Any]:
    prompt = len(generation.prompt.tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": generation.cached,
            "cache_write_tokens": generation.created,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": generated,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + generated,
    }
