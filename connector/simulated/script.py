"""What an engine says where the form of its answer is set: a tool's call, or JSON of a schema. Pure.

A real engine has its tokens masked by a grammar; here the text is made up first and then said token
by token. A call is written between `<tool_call>` and `</tool_call>`, as vLLM's hermes parser reads
it, and as the template of a made model writes it in the next turn: what was said stays cached.

Of JSON schema this much is heeded: type, properties, required, items, minItems, enum, const, $ref
into the schema itself, allOf, anyOf and oneOf (the first that is not null), default bounds of numbers
and lengths, and the usual formats. Patterns, regular expressions and grammars are not.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from connector.simulated.text import Saying, Word

DEEP = 6
"""Levels after which what may be left out is left out, so that a schema may mention itself."""
BOTTOM = 40
"""Levels after which even what is required is null: no finite value would do."""
MANY = 10_000
"""Values in an answer, and characters in a string, however many are asked for."""
_OPEN, _NAMED, _CLOSE = '\n<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"
_FORMATS = {
    "date-time": "2026-01-02T03:04:05Z",
    "date": "2026-01-02",
    "time": "03:04:05Z",
    "duration": "P1D",
    "email": "one@example.com",
    "uuid": "00000000-0000-4000-8000-000000000001",
    "uri": "https://example.com/",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The form that an answer must have: this text; or JSON of this schema, as a call where a tool is named."""

    schema: Schema | None = None
    tool: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's call, and where in the answer's text it stands."""

    name: str
    arguments: str
    named: int
    """Characters after which the name is known."""
    begins: int
    """Characters before the arguments."""
    ends: int
    """Characters of it all."""

    def piece(self, before: int, after: int) -> str:
        """What of the arguments stands between two places of the text."""
        return self.arguments[max(0, before - self.begins) : max(0, after - self.begins)]


@dataclass(frozen=True, slots=True)
class Script:
    """An answer that was written beforehand. Behind its end nothing is said."""

    words: tuple[Word, ...]
    call: Call | None = None

    @property
    def length(self) -> int:
        return len(self.words)

    def word(self, position: int) -> Word:
        return self.words[position] if position < len(self.words) else Word(self.words[-1].token, "")


class BadSchema(Exception):
    """What is no schema."""


def script(wanted: Wanted, tokenizer: Tokenizer, saying: Saying) -> Script:
    """The answer of that form; its strings are of the words that would have been said. Raises `BadSchema`."""
    if wanted.text is not None:
        return Script(spelled(tokenizer, wanted.text))
    try:
        value = Example(wanted.schema or {}, _words(saying)).value()
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # anything may stand in it
        raise BadSchema(f"{type(error).__name__}: {error}") from error
    written = json.dumps(value, ensure_ascii=False)
    if wanted.tool is None:
        return Script(spelled(tokenizer, written))
    named = _OPEN + json.dumps(wanted.tool, ensure_ascii=False)
    text = named + _NAMED + written + _CLOSE
    call = Call(wanted.tool, written, len(named), len(named + _NAMED), len(text))
    return Script(spelled(tokenizer, text), call)


def spelled(tokenizer: Tokenizer, text: str) -> tuple[Word, ...]:
    """A text as the tokens that it encodes to, each with the characters that end with it."""
    encoded = tokenizer.encode(text or " ", add_special_tokens=False)
    words: list[Word] = []
    told = 0
    for place, (token, (_, end)) in enumerate(zip(encoded.ids, encoded.offsets, strict=True), 1):
        upto = len(text) if place == len(encoded.ids) else max(told, end)
        words.append(Word(token, text[told:upto]))
        told = upto
    return tuple(words)


class Example:
    """A value that a schema describes: what is required, and no more."""

    def __init__(self, schema: Schema, words: Iterator[str]) -> None:
        self._root = schema
        self._words = words
        self._left = MANY

    def value(self) -> Any:
        """At the top nothing else than an object is expected where no type is told."""
        return self._of(self._root or {"type": "object"}, 0)

    def _of(self, schema: object, level: int) -> Any:
        self._left -= 1
        if level > BOTTOM or self._left < 0:
            return None
        known = self._merged(schema, frozenset())
        if "const" in known:
            return known["const"]
        if known.get("enum"):
            return known["enum"][0]
        options = known.get("anyOf") or known.get("oneOf")
        if options:
            return self._of(_chosen(options, level), level + 1)
        return self._typed(_kind(known, level), known, level)

    def _typed(self, kind: str, schema: Schema, level: int) -> Any:
        if kind == "object":
            properties = schema.get("properties") or {}
            return {name: self._of(properties.get(name, {}), level + 1) for name in schema.get("required") or ()}
        if kind == "array":
            return self._array(schema, level)
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        if kind in ("boolean", "null"):
            return True if kind == "boolean" else None
        return self._string(schema)

    def _array(self, schema: Schema, level: int) -> list[Any]:
        if schema.get("prefixItems"):
            return [self._of(item, level + 1) for item in schema["prefixItems"]]
        least = int(schema.get("minItems", 0))
        count = least if level > DEEP or schema.get("maxItems") == 0 else max(1, least)
        return [self._of(schema.get("items", {}), level + 1) for _ in range(min(count, max(0, self._left)))]

    def _string(self, schema: Schema) -> str:
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        text = next(self._words)
        while len(text) < min(MANY, int(schema.get("minLength", 0))):
            text += " " + next(self._words)
        return text[: int(schema.get("maxLength", len(text)))]

    def _merged(self, schema: object, passed: frozenset[str]) -> Schema:
        """A schema with what it refers to and all that must hold at once; each reference counts once."""
        if not isinstance(schema, Mapping):
            return {}
        parts: list[object] = list(schema.get("allOf") or ())
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in passed:
            parts.append(self._referred(reference))
            passed |= {reference}
        merged: dict[str, Any] = {}
        for part in parts:
            _add(merged, self._merged(part, passed))
        _add(merged, {name: value for name, value in schema.items() if name not in ("allOf", "$ref")})
        return merged

    def _referred(self, reference: str) -> object:
        found: object = self._root
        for step in reference.removeprefix("#").split("/"):
            if step and isinstance(found, Mapping):
                found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _add(merged: dict[str, Any], more: Schema) -> None:
    properties = {**merged.get("properties", {}), **more.get("properties", {})}
    required = [*dict.fromkeys([*merged.get("required", ()), *more.get("required", ())])]
    merged.update(more)
    if properties:
        merged["properties"] = properties
    if required:
        merged["required"] = required


def _chosen(options: Sequence[object], level: int) -> object:
    nulls = [option for option in options if isinstance(option, Mapping) and option.get("type") == "null"]
    if nulls and (level > DEEP or len(nulls) == len(options)):
        return nulls[0]
    return next(option for option in options if option not in nulls)


def _kind(schema: Schema, level: int) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        nullable = "null" in kind
        kind = "null" if nullable and level > DEEP else next((one for one in kind if one != "null"), "null")
    if isinstance(kind, str):
        return kind
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "string"


def _number(schema: Schema, *, whole: bool) -> float:
    step = schema.get("multipleOf") or 1
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf) + step)
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf) - step)
    value = min(max(1, low), high)
    value = math.ceil(value / step) * step if "multipleOf" in schema else value
    return math.ceil(value) if whole else float(value)


def _words(saying: Saying) -> Iterator[str]:
    position = 0
    while True:
        yield saying.word(position).text.strip()
        position += 1
