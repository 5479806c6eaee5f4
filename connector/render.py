"""A chat request to the prompt text that vLLM would build from it.

transformers renders the template; what stands here is what vLLM does to the request before that
(vllm/renderers/hf.py and vllm/entrypoints/openai/chat_completion/ of 0.32.0):

- of a message only role, content, name, tool calls and reasoning survive; absent content becomes ""
- tool call arguments, JSON text in the request, become an object; anything else becomes {}
- `tool_calls: []` is dropped; reasoning is known under two names
- tools are written out anew: type, name, description, parameters, strict if set; null where absent
- `reasoning_effort` is passed on, and sets `enable_thinking` unless the request does

What cannot be known to be equal is refused with `Inexact`, never guessed: content in parts, the
developer role, a template that comes with the request, documents.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson
from transformers import PreTrainedTokenizerBase

from connector.errors import Inexact

_TRANSFORMERS_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
_INEXACT_FIELDS = ("chat_template", "documents", "mm_processor_kwargs", "truncate_prompt_tokens", "media_io_kwargs")


class Template(Protocol):
    """What transformers' tokenizers offer."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **template_kwargs: Any,
    ) -> Any: ...


def chat_text(body: Mapping[str, Any], template: Template) -> str:
    """The text of a /v1/chat/completions body. Raises `Inexact` where it cannot be known."""
    for field in _INEXACT_FIELDS:
        if body.get(field) is not None:
            raise Inexact(field)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Inexact("messages")
    conversation = [_message(message) for message in messages]
    generate = body.get("add_generation_prompt", True)
    go_on = body.get("continue_final_message", False)
    if not isinstance(generate, bool) or not isinstance(go_on, bool) or (generate and go_on):
        raise Inexact("generation_prompt")
    try:
        text = template.apply_chat_template(
            conversation,
            _tools(body.get("tools")),
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=go_on,
            **_variables(body),
        )
    except Exception as error:  # a template is a program of the model's: it may raise anything
        raise Inexact("template") from error
    if not isinstance(text, str):
        raise Inexact("template")
    return text


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Inexact("messages")
    role = message["role"]
    if role == "developer":
        raise Inexact("developer_role")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise Inexact("content_parts")
    if content is not None and content.startswith("x-anthropic-billing-header"):
        raise Inexact("billing_header")
    rendered: dict[str, Any] = {"role": role, "content": content or ""}
    if isinstance(message.get("name"), str):
        rendered["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            rendered["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:
            rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _tool_call(call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise Inexact("tool_calls")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Inexact("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise Inexact("tools")
    function = tool["function"]
    rendered = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        rendered["strict"] = function["strict"]
    return {"type": tool.get("type", "function"), "function": rendered}


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """The template's own variables that the request sets."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise Inexact("chat_template_kwargs")
    if not _TRANSFORMERS_OWN.isdisjoint(given):
        raise Inexact("chat_template_kwargs")
    variables = dict(given)
    effort = body.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        variables.setdefault("enable_thinking", effort != "none")
    return variables
