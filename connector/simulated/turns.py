"""What /v1/responses is asked: its body, and the chat's body that is rendered for it. Pure.

As vLLM 0.32 has it (vllm/entrypoints/openai/responses/protocol.py and utils.py). Unlike a chat's, this
text is encoded with the special tokens that the tokenizer adds: where the template writes one too, the
prompt begins with two.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from connector.simulated.ask import Refusal, Sampling, Structured, check_salt, checked

Messages = list[dict[str, Any]]


def _named_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "function" and not isinstance(tool.get("name"), str):
        raise ValueError("a function has a name")
    return tool


class TextConfig(BaseModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(Sampling):
    input: str | list[dict[str, Any]]
    background: bool | None = False
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[Annotated[dict[str, Any], AfterValidator(_named_tool)]] = Field(default_factory=list)
    top_logprobs: int | None = 0
    truncation: Literal["auto", "disabled"] | None = "disabled"
    request_id: str = Field(default_factory=lambda: name("resp"))
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    structured_outputs: Structured | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def response_body(body: dict[str, Any]) -> ResponsesBody:
    """Raises `Refusal`."""
    check_salt(body.get("cache_salt"))
    if body.get("background") and not body.get("store", True):
        raise Refusal.of("background", "background can only be used when `store` is true")
    if body.get("prompt") is not None:
        raise Refusal.of("prompt", "prompt template is not supported")
    _check_choice(body)
    return checked(ResponsesBody, body)


def _check_choice(body: Mapping[str, Any]) -> None:
    tools, choice = body.get("tools") or [], body.get("tool_choice", "auto")
    if choice == "required" and not tools:
        raise Refusal.of("tool_choice", "Tool choice 'required' must be specified with 'tools' parameter.")
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return
    if choice.get("name") not in [tool.get("name") for tool in tools if isinstance(tool, dict)]:
        raise Refusal.of("tool_choice", "Tool choice 'function' not found in 'tools' parameter.")


def chat_of(body: ResponsesBody, messages: Messages) -> dict[str, Any]:
    """The chat's body whose template is rendered."""
    chat: dict[str, Any] = {"messages": messages, "add_special_tokens": True}
    if tools := [_chat_tool(tool) for tool in body.tools if tool.get("type") == "function"]:
        choice = body.tool_choice
        named = isinstance(choice, dict) and choice.get("type") == "function"
        chat |= {"tools": tools, "tool_choice": _named(choice) if named else choice}
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if body.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    if body.kv_transfer_params is not None:
        chat["kv_transfer_params"] = body.kv_transfer_params
    return chat


def _named(choice: str | dict[str, Any]) -> dict[str, Any]:
    assert isinstance(choice, dict)
    return {"type": "function", "function": {"name": choice.get("name")}}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def opening(instructions: str | None, said: Messages, output: Sequence[dict[str, Any]]) -> Messages:
    """The instructions, and what an earlier response was asked and put out."""
    turns: Messages = [{"role": "system", "content": instructions}] if instructions else []
    turns += [message for message in said if message.get("role") != "system"]
    for item in output:
        if item["type"] == "message":
            turns += [{"role": "assistant", "content": part["text"]} for part in item["content"]]
    return turns


def messages_of(given: str | Sequence[dict[str, Any]]) -> Messages:
    """The messages of an input. What an assistant says, calls and thinks in a row is one message. Raises `Refusal`."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: Messages = []
    for item in given:
        message = _message_of(item)
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and _joined(last, message):
            continue
        messages.append(message)
    return messages


def _joined(last: dict[str, Any], more: dict[str, Any]) -> bool:
    """Whether a part of an assistant's message had a place in the one before."""
    if "tool_calls" in more:
        last["tool_calls"] = [*last.get("tool_calls", ()), *more["tool_calls"]]
        return True
    part = next((name for name in ("reasoning", "content") if name in more), None)
    if part is None or last.get(part) is not None:
        return False
    last[part] = more[part]
    return True


def _message_of(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or [{"text": ""}]
        return {"role": "assistant", "reasoning": parts[0].get("text", "")}
    if "role" not in item:
        raise Refusal.of("input", f"Unsupported input item type: {kind}")
    content = item.get("content")
    if item["role"] == "assistant" and isinstance(content, list) and content:
        content = content[0].get("text")
    return {"role": item["role"], "content": content}


def name(prefix: str) -> str:
    """A new name for a part of a response."""
    return f"{prefix}_{uuid.uuid4().hex[:16]}"
