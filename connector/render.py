"""A chat request to the prompt text that vLLM would build from it.

connector/templates.py renders the template; what stands here is what vLLM does to the request before that
(vllm/renderers/ and vllm/entrypoints/openai/chat_completion/protocol.py of 0.32.0):

- of a message only role, content, tool calls, reasoning, tool call id, name and task survive, in this order
- a template that loops over a message's content gets it in parts (vLLM's format "openai"), any other
  gets text, parts that are not empty joined by a line break (its format "string"); absent content is
  no part, or ""; refusals, thoughts and the Responses API's texts are texts
- a tool's content is always text, unless it refers to tools and the template takes parts
- a system message's first line is dropped if it starts with `x-anthropic-billing-header`
- if any message is a developer's and the template does not name that role, developers' messages
  become system messages, and these are merged at the front
- tool call arguments, JSON text in the request, become an object; anything else becomes {}; a call's
  members are put in the order of OpenAI's types
- `tool_calls: []` is dropped; reasoning is known under two names
- tools are written out anew: type, name, description, parameters, strict and defer_loading if set;
  null where absent
- `reasoning_effort` and `documents` go before those in chat_template_kwargs, the effort sets
  `enable_thinking` unless they do; null and "auto" in them are as good as absent; tools in them go
  before the request's; the engine's own defaults stand under all; what the template does not read is left out

What cannot be known to be equal is refused with `Inexact`, never guessed: media, a template that comes
with a request to engines that refuse it, tools in a developer's message, integers beyond 64 bits (they
do not survive this gateway's reading of JSON), models whose prompts vLLM builds in Python. Some of what
vLLM refuses is rendered here all the same: then there is no prompt to differ from. A template that asks
for the time gets this machine's.
"""

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from connector.errors import Inexact
from connector.templates import ContentFormat, chat_template


@dataclass(frozen=True, slots=True)
class Rules:
    """What engines are told of chats by their flags, beside the model's folder."""

    template: str | None = None
    """--chat-template: the text of the template that is used instead of the model's, or its name there."""
    content_format: Literal["auto"] | ContentFormat = "auto"
    """--chat-template-content-format."""
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """--default-chat-template-kwargs."""
    trust_request_template: bool = False
    """--trust-request-chat-template."""
    exclude_tools_when_none: bool = False
    """--exclude-tools-when-tool-choice-none."""


NO_FLAGS = Rules()
"""What engines are told that are started with none of these."""


class Template(Protocol):
    """What transformers' tokenizers offer."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str: ...


def chat_text(body: Mapping[str, Any], template: Template, rules: Rules = NO_FLAGS) -> str:
    """The text of a /v1/chat/completions body. Raises `Inexact` where it cannot be known."""
    for name in _INEXACT_FIELDS:
        if body.get(name) not in (None, {}):
            raise Inexact(name)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Inexact("messages")
    own = _own_template(body, rules)
    variables = _variables(body, rules)
    try:
        return _rendered(messages, own, variables, template, rules)
    except Inexact:
        raise
    except Exception as error:  # a template is a program of the model's: it may raise anything
        raise Inexact("template") from error


def _rendered(
    messages: Sequence[object], own: str | None, variables: dict[str, Any], template: Template, rules: Rules
) -> str:
    named = variables.pop("chat_template", None)
    go_on = variables.pop("continue_final_message")
    chosen = chat_template(template.get_chat_template(own, tools=variables["tools"]))
    used = chosen
    if own is None and named is not None:  # vLLM chooses the form before it looks at this one
        used = chat_template(template.get_chat_template(named, tools=variables["tools"]))
    form = chosen.content if rules.content_format == "auto" else rules.content_format
    conversation = [_message(message, form) for message in messages]
    if any(message["role"] == "developer" for message in conversation):
        conversation = _developers(conversation, known=used.knows_developers)
    read = {name: value for name, value in variables.items() if name in used.variables or name in _ALWAYS}
    text = used.text(conversation, {**template.special_tokens_map, **read}, go_on=go_on)
    if _beyond_64_bits([conversation, read]):
        raise Inexact("number")
    return text


# what the template is given besides the messages

_ALWAYS = ("tools", "documents", "add_generation_prompt")
_SWALLOWED = frozenset({
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "tokenize", "return_assistant_tokens_mask",
})  # fmt: skip
"""Variables that are transformers' own parameters and change nothing of the text: templates never see them."""
_UNPASSABLE = frozenset({"self", "conversation", "conversations", "messages", "model_config", "tokenizer"})
"""Names under which vLLM and transformers pass other things: it refuses most requests that give them."""
_INEXACT_FIELDS = ("mm_processor_kwargs", "truncate_prompt_tokens", "media_io_kwargs")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _own_template(body: Mapping[str, Any], rules: Rules) -> str | None:
    """The template that the request or the engine's flag gives; an empty one is none."""
    given = body.get("chat_template")
    if given is not None and (not rules.trust_request_template or not isinstance(given, str)):
        raise Inexact("chat_template")
    return given or rules.template


def _variables(body: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """All variables that the engine's flags and the request set, `tools` and `chat_template` among them."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or not _UNPASSABLE.isdisjoint(given):
        raise Inexact("chat_template_kwargs")
    if given.get("tokenize") or given.get("return_assistant_tokens_mask"):
        raise Inexact("chat_template_kwargs")
    if given.get("chat_template") is not None and not rules.trust_request_template:
        raise Inexact("chat_template")
    generate = body.get("add_generation_prompt", True)
    go_on = body.get("continue_final_message", False)
    if not isinstance(generate, bool) or not isinstance(go_on, bool) or (generate and go_on):
        raise Inexact("generation_prompt")
    asked = {**given, "add_generation_prompt": generate, "continue_final_message": go_on}
    if (documents := body.get("documents")) is not None:
        asked["documents"] = _documents(documents)
    if (effort := body.get("reasoning_effort")) is not None:
        if effort not in _EFFORTS:
            raise Inexact("reasoning_effort")
        asked["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            asked["enable_thinking"] = effort != "none"
    variables = {"tools": None, "documents": None, **rules.kwargs}
    tools = _tools(body.get("tools"))
    if tools is not None and not (rules.exclude_tools_when_none and body.get("tool_choice") == "none"):
        variables["tools"] = tools
    variables |= {name: value for name, value in asked.items() if value is not None and value != "auto"}
    _dicts(variables["tools"], "tools")
    _dicts(variables["documents"], "documents")
    return {name: value for name, value in variables.items() if name not in _SWALLOWED}


def _dicts(value: object, reason: str) -> None:
    """Tools and documents must be objects in a list, wherever they come from, or transformers refuses them."""
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise Inexact(reason)


def _documents(documents: object) -> list[dict[str, str]]:
    if not isinstance(documents, list):
        raise Inexact("documents")
    for document in documents:
        if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
            raise Inexact("documents")
    return documents


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None or tools == []:  # vLLM refuses the latter
        return None
    if not isinstance(tools, list):
        raise Inexact("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise Inexact("tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise Inexact("tools")
    rendered = {name: function.get(name) for name in ("name", "description", "parameters")}
    flags = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading")}
    later = tool.get("defer_loading")
    if flags["defer_loading"] is None:
        flags["defer_loading"] = later
    if not all(flag is None or isinstance(flag, bool) for flag in (later, *flags.values())):
        raise Inexact("tools")
    rendered |= {name: flag for name, flag in flags.items() if flag is not None}
    whole = {"type": "function", "function": rendered}
    return whole if later is None else {**whole, "defer_loading": later}


def _beyond_64_bits(value: object) -> bool:
    """Whether a number stands somewhere in a value that was perhaps an integer before orjson read it."""
    if isinstance(value, float):
        return 2.0**63 <= abs(value) < math.inf
    if isinstance(value, dict):
        return any(map(_beyond_64_bits, value.values()))
    return isinstance(value, list) and any(map(_beyond_64_bits, value))


# messages


def _message(message: object, form: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Inexact("messages")
    role = message["role"]
    parts = _parts(message.get("content"), system=role == "system")
    rendered: dict[str, Any] = {"role": role, "content": _content(parts, form, tool=role == "tool")}
    if role == "assistant":
        rendered |= _turn(message)
    if role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            rendered[name] = message[name]
    if role == "developer":
        rendered["tools"] = message.get("tools")
    return rendered


_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Kinds of parts that are text, and where it stands in them."""
_MEDIA = frozenset({
    "input_image", "image_url", "image_embeds", "image_pil", "audio_embeds", "audio_url", "input_audio",
    "video_embeds", "video_url", "prompt_embeds",
})  # fmt: skip
_OF_SOME_PART = frozenset(
    {"type", "name", "text", "refusal", "thinking", "closed", "uuid", "data", "file", "prompt_cache_breakpoint"}
) | (_MEDIA - {"input_image", "prompt_embeds"})
"""What parts have of their own; anything else goes with a text to a template that takes parts."""


def _parts(content: object, *, system: bool) -> list[dict[str, Any]]:
    """A message's content in the parts that a template gets: texts, and references to tools."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise Inexact("content_parts")
    sent = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [part for one in sent if (part := _part(_unbilled(one) if system else one)) is not None]


_BILLING = "x-anthropic-billing-header"


def _unbilled(part: object) -> object:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str) and text.startswith(_BILLING):
            return {**part, "text": text.partition("\n")[2] or None}
    return part


def _part(part: Any) -> dict[str, Any] | None:
    """None: a text that is not there, which vLLM passes over."""
    kind = _kind(part)
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")}
    text = part.get(_TEXTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise Inexact("content_parts")
    rendered = {"type": "text", "text": text}
    return rendered if len(part) == 2 else rendered | _rest(part, _OF_SOME_PART)


def _kind(part: object) -> str:
    """The kind of a part of text; media and what vLLM refuses are refused."""
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str | None):
        raise Inexact("content_parts")
    if kind in _MEDIA or not _MEDIA.isdisjoint(part):
        raise Inexact("media")
    if (kind not in _TEXTS and kind != "tool_reference") or part.get("uuid") is not None:
        raise Inexact("content_parts")
    return kind


def _content(parts: list[dict[str, Any]], form: ContentFormat, *, tool: bool) -> str | list[dict[str, Any]]:
    if form == "openai":
        if tool and all(part["type"] == "text" for part in parts):
            return "\n".join(part["text"] for part in parts)
        return parts
    texts = (part["text"] if part["type"] == "text" else part["name"] for part in parts)
    try:
        return "\n".join(text for text in texts if text)
    except TypeError as error:  # a tool is referred to by something else than its name
        raise Inexact("content_parts") from error


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """What only an assistant's message has."""
    rendered: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise Inexact("tool_calls")
        if calls:
            rendered["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _tool_call(call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type") != "function" or "id" not in call:
        raise Inexact("tool_calls")
    function = call.get("function")
    if not isinstance(function, dict) or "name" not in function or not isinstance(function.get("arguments"), str):
        raise Inexact("tool_calls")
    try:
        arguments = json.loads(function["arguments"])  # as vLLM does: orjson knows neither NaN nor 2**64
    except json.JSONDecodeError:
        arguments = {}
    except (ValueError, RecursionError) as error:  # an integer of more than 4300 digits is one
        raise Inexact("tool_calls") from error
    if not isinstance(arguments, dict):
        arguments = {}
    named = {"arguments": arguments, "name": function["name"]}
    ordered = {"id": call["id"], "function": named | _rest(function, named), "type": "function"}
    return ordered | _rest(call, ordered)


def _rest(members: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name not in known}


def _developers(conversation: list[dict[str, Any]], *, known: bool) -> list[dict[str, Any]]:
    """A conversation with developers' messages, for a template that knows them or one that does not."""
    if known:
        if any(message.get("tools") is not None for message in conversation):
            raise Inexact("developer_tools")
        return conversation
    system: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for message in conversation:
        if message["role"] == "developer":
            system.append({name: value for name, value in message.items() if name != "tools"} | {"role": "system"})
        else:
            (system if message["role"] == "system" else others).append(message)
    if len(system) == 1 and conversation[0]["role"] in ("system", "developer"):
        return system + others
    texts = map(_text, system)
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


# models that have no template, or not only one

_PYTHON_TYPES = {
    "gpt_oss": "Harmony",
    "deepseek_v32": "DeepSeek V3.2",
    "deepseek_v4": "DeepSeek V4",
    "deepseek_v41": "DeepSeek V4.1",
    "kimi_k3": "Kimi K3",
    "kimi_audio": "Kimi Audio",
    "inkling_model": "Inkling",
    "inkling_mm_model": "Inkling",
}
_PYTHON_ARCHITECTURES = {
    "GptOssForCausalLM": "Harmony",
    "DeepseekV32ForCausalLM": "DeepSeek V3.2",
    "DeepseekV4ForCausalLM": "DeepSeek V4",
    "DeepseekV4ForConditionalGeneration": "DeepSeek V4",
    "DeepseekV41ForCausalLM": "DeepSeek V4.1",
    "KimiK3ForConditionalGeneration": "Kimi K3",
    "MoonshotKimiaForCausalLM": "Kimi Audio",
    "InklingForCausalLM": "Inkling",
    "InklingForConditionalGeneration": "Inkling",
}


def renderer_of_its_own(folder: Path) -> str | None:
    """Why a model's chats cannot be rendered here, in a few words; None if they can.

    vLLM builds the prompts of some models in Python (vllm/config/model.py, vllm/tokenizers/registry.py and
    vllm/renderers/registry.py of 0.32.0): by their type or architecture in config.json; Mistral's by
    their tokenizer files; Cohere's if an engine is told so, which the folder does not say. And the
    processor of a multimodal model may bring a template that is not the tokenizer's.
    """
    config = _json(folder / "config.json")
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    for name in names:
        if name in _PYTHON_ARCHITECTURES:
            return f"vLLM renders {_PYTHON_ARCHITECTURES[name]} in Python"
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _PYTHON_TYPES:
        return f"vLLM renders {_PYTHON_TYPES[kind]} in Python"
    if str(kind).startswith("cohere") or any(name.startswith("Cohere") for name in names):
        return "vLLM may render Cohere in Python (--tokenizer-mode cohere)"
    weights = {path.name for path in folder.glob("*.safetensors")}
    mistral = (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*"))
    if mistral and (not weights or any(name.startswith("consolidated") for name in weights)):
        return "vLLM renders with Mistral's own tokenizer"
    legacy = _json(folder / "chat_template.json").get("chat_template")
    if legacy is not None and legacy != _tokenizers_template(folder):
        return "the processor's template is not the tokenizer's"
    return None


def _tokenizers_template(folder: Path) -> object:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        return _json(folder / "tokenizer_config.json").get("chat_template")


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
