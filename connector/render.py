"""A chat request to the prompt text that vLLM would build from it.

transformers renders the template; what stands here is what vLLM does to the request before that
(vllm/renderers/hf.py and vllm/entrypoints/openai/chat_completion/ of 0.32.0):

- of a message only role, content, name, tool calls and reasoning survive
- a template that loops over a message's content gets it in parts (vLLM's format "openai"), any other
  gets text, parts joined by a line break (its format "string"); absent content is no part, or ""
- a tool's content is always text
- tool call arguments, JSON text in the request, become an object; anything else becomes {}
- `tool_calls: []` is dropped; reasoning is known under two names
- tools are written out anew: type, name, description, parameters, strict if set; null where absent
- `reasoning_effort` goes before the one in chat_template_kwargs, and sets `enable_thinking` unless
  they do

What cannot be known to be equal is refused with `Inexact`, never guessed: parts that are no text, the
developer role, a template that comes with the request or whose format is unclear, documents, tools
that are loaded later.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.ext import loopcontrols
from transformers import PreTrainedTokenizerBase

from connector.errors import Inexact

_TRANSFORMERS_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
_INEXACT_FIELDS = ("chat_template", "documents", "mm_processor_kwargs", "truncate_prompt_tokens", "media_io_kwargs")


ContentFormat = Literal["string", "openai"]


class Template(Protocol):
    """What transformers' tokenizers offer."""

    def get_chat_template(
        self, chat_template: None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str: ...

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
    generate = body.get("add_generation_prompt", True)
    go_on = body.get("continue_final_message", False)
    if not isinstance(generate, bool) or not isinstance(go_on, bool) or (generate and go_on):
        raise Inexact("generation_prompt")
    tools = _tools(body.get("tools"))
    variables = _variables(body)
    try:
        wanted = content_format(template.get_chat_template(tools=tools))
    except ValueError as error:  # the model has no template
        raise Inexact("template") from error
    if wanted is None:
        raise Inexact("content_format")
    conversation = [_message(message, wanted) for message in messages]
    try:
        text = template.apply_chat_template(
            conversation,
            tools,
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=go_on,
            **variables,
        )
    except Exception as error:  # a template is a program of the model's: it may raise anything
        raise Inexact("template") from error
    if not isinstance(text, str):
        raise Inexact("template")
    return text


def _message(message: object, wanted: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Inexact("messages")
    role = message["role"]
    if role == "developer":
        raise Inexact("developer_role")
    texts = _texts(message.get("content"))
    if any("x-anthropic-billing-header" in text for text in texts):
        raise Inexact("billing_header")
    rendered: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if wanted == "openai" and role != "tool":
        rendered["content"] = [{"type": "text", "text": text} for text in texts]
    if isinstance(message.get("name"), str):
        rendered["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        rendered |= _turn(message)
    return rendered


def _texts(content: object) -> list[str]:
    """The texts that a message's content consists of."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Inexact("content_parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Inexact("content_parts")
        texts.append(part["text"])
    return texts


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """What only an assistant's message has."""
    rendered: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Inexact("tool_calls")
        rendered["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _tool_call(call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise Inexact("tool_calls")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)  # as vLLM does: orjson knows neither NaN nor 2**64
        except json.JSONDecodeError:
            arguments = {}
        except (ValueError, RecursionError) as error:  # an integer of more than 4300 digits is one
            raise Inexact("tool_calls") from error
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
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise Inexact("tools")
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
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    return variables


@lru_cache(maxsize=64)
def content_format(template: str) -> ContentFormat | None:
    """How a template wants content: in parts if it loops over it, else as text. None: it is not clear.

    vLLM looks for loops over the content of a loop variable over `messages`, through assignments,
    filters, slices and macros. Here the plain cases are decided; a loop over anything else that might
    be content (a name, a macro's parameter) is left undecided.
    """
    try:
        tree = jinja2.Environment(extensions=[_Generation, loopcontrols], autoescape=True).parse(template)
    except jinja2.TemplateError:
        return None
    messages = {_name(loop.target) for loop in tree.find_all(nodes.For) if _name(_bare(loop.iter)).endswith("messages")}
    macros = list(tree.find_all(nodes.Macro))
    in_macros = {id(loop) for macro in macros for loop in macro.find_all(nodes.For)}
    parameters = {argument.name for macro in macros for argument in macro.args}
    aliases = {_name(a.target) for a in tree.find_all(nodes.Assign) if _keys(a.node) & {"content"}}
    unclear = False
    for loop in tree.find_all(nodes.For):
        over = _bare(loop.iter)
        name = _name(over)
        if _key(over) == "content" and isinstance(over, nodes.Getattr | nodes.Getitem) and _name(over.node) in messages:
            return "openai"
        if name == "content" and id(loop) not in in_macros:
            return "openai"
        unclear |= _key(over) == "content" or name == "content" or name in parameters or name in aliases
    return None if unclear else "string"


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which transformers knows and whose body is all that matters here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bare(node: nodes.Node) -> nodes.Node:
    """An expression without its filters, tests and slices."""
    inner: nodes.Node | None = None
    if isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        inner = node.node
    return node if inner is None else _bare(inner)


def _name(node: nodes.Node) -> str:
    """The name of a plain variable, else nothing."""
    return node.name if isinstance(node, nodes.Name) else ""


def _key(node: nodes.Node) -> object:
    """What is taken of something: `a` of `x.a` and of `x["a"]`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None


def _keys(expression: nodes.Node) -> set[object]:
    """Everything that is taken of anything in an expression."""
    return {_key(node) for node in (expression, *expression.find_all((nodes.Getattr, nodes.Getitem)))}
