"""A chat template: what its source tells, and the text that it makes of messages.

What is read from the source, once, are the rules of vLLM 0.32.0 (vllm/renderers/hf.py): they decide in what
form a template gets its messages and which variables reach it. They are of syntax alone, and followed
to the letter: a template that hides a loop from them gets text in vLLM too.

Rendering is what transformers 5.16 to 5.19 do (utils/chat_template_utils.py), between which vLLM 0.32.0 chooses.

Why not by transformers: from 5.20 on it gives templates other messages (members that are null are gone,
reasoning has a third name), so that which one is installed here would decide whether a prompt is
the engine's. And it copies whole conversations: 201 messages with 40 tools took 2.3 ms instead of 1.4.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

ContentFormat = Literal["string", "openai"]

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""What stands at the end of a turn that goes on while it is rendered; the text ends there."""


class NotContinuable(Exception):
    """The last message cannot go on: it has no text, or the template does not write it as it is."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template that is ready to be rendered, and what vLLM must know of it before."""

    source: str
    program: jinja2.Template
    content: ContentFormat
    """openai: it loops over a message's content, which it then gets in parts. string: it gets text."""
    variables: frozenset[str]
    """What it reads and does not set: other variables never reach it."""
    knows_developers: bool
    """It names the role `developer`; else developers' messages become system messages."""

    def text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, go_on: bool = False) -> str:
        """The prompt. With `go_on` it ends with the last message's text, whatever the template puts after it.

        Raises `NotContinuable`, or anything at all, for a template is a program.
        """
        if not go_on:
            return self.program.render(**variables, messages=messages)
        before, final = self._to_go_on(messages)
        text = self.program.render(**variables, messages=before)
        end = text.rfind(_MARK.strip())
        if end < 0 or final.strip() not in text:
            raise NotContinuable
        kept = text[:end]
        return kept if text[end:].startswith(_MARK) else kept.rstrip()

    def _to_go_on(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
        """The messages with a mark after the last one's text, and that text."""
        content = messages[-1].get("content")
        if "content" not in self.source:
            raise NotContinuable
        if isinstance(content, str):
            return [*messages[:-1], {**messages[-1], "content": content + _MARK}], content
        parts = list(content or ())
        for index in reversed(range(len(parts))):
            if "text" in parts[index]:
                text: str = parts[index]["text"]
                parts[index] = {**parts[index], "text": text + _MARK}
                return [*messages[:-1], {**messages[-1], "content": parts}], text
        raise NotContinuable


@lru_cache(maxsize=64)
def chat_template(source: str) -> ChatTemplate:
    """Raises jinja2's `TemplateError` if that is no template."""
    language = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    tree = language.parse(source)
    variables = frozenset(jinja2.meta.find_undeclared_variables(tree))  # vLLM counts the two names below as well
    language.filters["tojson"] = _json
    language.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}  # noqa: DTZ005
    return ChatTemplate(
        source=source,
        program=language.from_string(source),
        content=_content(tree),
        variables=variables,
        knows_developers='"developer"' in source or "'developer'" in source,
    )


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, and cannot do all this."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which transformers adds to the language; its body is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("show"), [], [], body).set_lineno(line)

    def show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Unpacks(Exception):
    """A loop or an assignment that matters binds something other than one plain name."""


def _content(tree: nodes.Template) -> ContentFormat:
    try:
        return "openai" if _loops_over_content(tree) else "string"
    except _Unpacks:  # vLLM stops looking there, and takes its default
        return "string"


def _loops_over_content(tree: nodes.Template) -> bool:
    messages = _messages(tree)
    each = [_bound(loop.target) for loop in tree.find_all(nodes.For) if any(_is(loop.iter, name) for name in messages)]
    in_macros: dict[int, set[str]] = {}  # each loop in a macro, and the macro's parameters that are given content
    for macro in tree.find_all(nodes.Macro):
        given = set(_given_content(tree, macro, each))
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = given or in_macros.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        over_content = any(_is(loop.iter, message, "content") for message in each)
        if over_content or name in in_macros.get(id(loop), {"content"}):
            _bound(loop.target)
            return True
    return False


def _messages(tree: nodes.Template) -> list[str]:
    """Every name under which the messages go: `messages`, and what it or a part of it is assigned to."""
    names = ["messages"]
    for name in names:
        for assignment in tree.find_all(nodes.Assign):
            if _is(assignment.node, name) and (alias := _bound(assignment.target)) not in names:
                names.append(alias)
    return names


def _given_content(tree: nodes.Template, macro: nodes.Macro, each: list[str]) -> Iterator[str]:
    """The parameters of a macro that are somewhere given a message's content."""
    parameters = [parameter.name for parameter in macro.args]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = list(zip(parameters, call.args, strict=False))
            given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in parameters]
            for parameter, value in given:
                if any(_is(value, message, "content") for message in each):
                    yield parameter


def _is(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether an expression is that variable, or `key` of it, under whatever filters, tests and slices."""
    if isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        return node.node is not None and _is(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is_name(node.node, name)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _is_name(node.node, name)
    return False


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _bound(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unpacks
    return target.name
