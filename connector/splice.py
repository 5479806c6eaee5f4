"""Members of a JSON object taken out and put in, every other byte left as it stands. Pure.

What a serialiser writes is not what it read: 1e2 becomes 100.0, long integers lose digits, escapes
change. In a tool's schema that changes the prompt, and with it every block hash. So bodies are never
written anew: the spans of the top-level members are found, and the rest is copied.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MARK = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[-+.\w]++")
_OPEN = re.compile(rb"[ \t\n\r]*+\{")
_SPACE = re.compile(rb"[ \t\n\r]*+")
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")


MOST_MEMBERS = 10_000
"""Top-level members that are passed over, some 20 ms."""
MOST_MARKS = 1_000_000
"""Brackets and strings in one value that are passed over, some 0.4 s."""


class NotAnObject(ValueError):
    """The bytes are no JSON object, or one with more in it than anybody means."""


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
    at = _skip(_SPACE, raw, _skip(_OPEN, raw, 0))
    count = 0
    while raw[at : at + 1] != b"}":
        count += 1
        if count > MOST_MEMBERS:
            raise NotAnObject
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


def spliced(raw: bytes, changes: Mapping[str, bytes | None], added: Mapping[str, bytes]) -> list[bytes]:
    """The object with the members that `changes` names replaced where they first stand, or gone (None), and with
    `added` in front; in parts. Values are JSON. What `added` names must not stand there, or be gone. Raises
    `NotAnObject`.
    """
    brace = _skip(_OPEN, raw, 0)
    front = b",".join(b"%b:%b" % (orjson.dumps(name), value) for name, value in added.items())
    first = _skip(_SPACE, raw, brace)
    if front and raw[first : first + 1] != b"}":
        front += b","
    if not changes:
        return [raw[:brace], front, raw[brace:]] if front else [raw]
    kept = [raw[:brace], front]
    start, gone = brace, False
    left = dict(changes)
    for member in members(raw):
        value = left.get(member.name, b"")
        if value:
            left[member.name] = None  # a second member of the name would win
        gone = value is None
        if value is None:
            kept.append(raw[start : member.start])
            start = _skip(_SPACE, raw, member.end)
            if raw[start : start + 1] == b",":
                start += 1
        elif value:
            kept += (raw[start : member.value], value)
            start = member.end
    if gone:  # the comma before the last member separates nothing any more
        before = b"".join(kept).rstrip(b" \t\n\r")
        kept = [before[:-1] if before.endswith(b",") else before]
    return [*kept, raw[start:]]


def _value_end(raw: bytes, at: int) -> int:
    first = raw[at : at + 1]
    if first == b'"':
        return _skip(_STRING, raw, at)
    if first not in (b"{", b"["):
        return _skip(_SCALAR, raw, at)
    depth = marks = 0
    while mark := _MARK.search(raw, at):
        at = mark.end()
        marks += 1
        if marks > MOST_MARKS:
            raise NotAnObject
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
