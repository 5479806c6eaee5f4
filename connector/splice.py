"""Members of a JSON object taken out and put in, every other byte left as it stands. Pure.

What a serialiser writes is not what it read: 1e2 becomes 100.0, long integers lose digits, escapes
change. In a tool's schema that changes the prompt, and with it every block hash. So bodies are never
written anew: the spans of the top-level members are found, and the rest is copied.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import orjson

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MARK = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^,}\]\s]++")
_SPACE = re.compile(rb"[ \t\n\r]*+")
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")


class NotAnObject(ValueError):
    """The bytes are no JSON object."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: its name, and where it stands in the bytes."""

    name: str
    start: int
    value: int
    end: int


def members(raw: bytes) -> Iterator[Member]:
    """The top-level members of a JSON object, in their order. Raises `NotAnObject` where it is none.

    Values are passed over by their brackets and quotes, not checked.
    """
    at = _skip(_SPACE, raw, 0)
    if raw[at : at + 1] != b"{":
        raise NotAnObject
    at = _skip(_SPACE, raw, at + 1)
    while raw[at : at + 1] != b"}":
        start = at
        at = _skip(_STRING, raw, at)
        try:
            name = orjson.loads(raw[start:at])
        except orjson.JSONDecodeError:
            raise NotAnObject from None
        value = _skip(_COLON, raw, at)
        end = _value_end(raw, value)
        yield Member(name, start, value, end)
        at = _skip(_SPACE, raw, end)
        if raw[at : at + 1] == b",":
            at = _skip(_SPACE, raw, at + 1)
        elif raw[at : at + 1] != b"}":
            raise NotAnObject


def spliced(raw: bytes, drop: Collection[str], put: Mapping[str, bytes]) -> list[bytes]:
    """The object without the members named in `drop`, and with those of `put` (JSON values) in front; in parts.

    Nothing but `drop` is looked for: a name of `put` that may stand there already must be dropped too.
    """
    added = b"".join(b"%b:%b," % (orjson.dumps(name), value) for name, value in put.items())
    brace = raw.index(b"{") + 1
    if not drop:
        return [raw[:brace], added, raw[brace:]] if added else [raw]
    kept: list[bytes] = []
    start, last = brace, None
    for member in members(raw):
        last = member
        if member.name in drop:
            kept.append(raw[start : member.start])
            start = _skip(_SPACE, raw, member.end)
            if raw[start : start + 1] == b",":
                start += 1
    rest = raw[start:]
    if last is not None and last.name in drop:  # the comma before it separates nothing any more
        return [raw[:brace], _bare_end(added + b"".join(kept)), rest]
    return [raw[:brace], added, *kept, rest]


def _bare_end(text: bytes) -> bytes:
    stripped = text.rstrip(b" \t\n\r")
    return stripped.removesuffix(b",")


def _value_end(raw: bytes, at: int) -> int:
    first = raw[at : at + 1]
    if first == b'"':
        return _skip(_STRING, raw, at)
    if first not in (b"{", b"["):
        return _skip(_SCALAR, raw, at)
    depth = 0
    while mark := _MARK.search(raw, at):
        at = mark.end()
        if mark[0] == b'"':
            at = _skip(_STRING, raw, at - 1)
        elif mark[0] in (b"{", b"["):
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return at
    raise NotAnObject


def _skip(what: re.Pattern[bytes], raw: bytes, at: int) -> int:
    found = what.match(raw, at)
    if found is None:
        raise NotAnObject
    return found.end()
