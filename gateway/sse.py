"""A stream of server-sent events on its way through. Bytes stay bytes.

Events are separated on LF, CR and CRLF only (WHATWG HTML, 9.2.6), whatever chunks they came in, and
go on in whole events. An event is parsed only where it must be: when a word in it says that it may
carry the usage, an error, an abort, an end, or something that is private between engines. One that is the
last one's equal in all but its text is not even looked through: to find no word in 200 bytes costs as much
as all else that is done here to an event.

What vLLM writes into a stream depends on whether its usage was asked for: `system_fingerprint` then
stands in the usage event instead of the last event of each choice. Where the usage is the gateway's own,
its event is hidden and the fingerprint goes where it would have been (vllm/entrypoints/openai/
chat_completion/serving.py). It is the same for every answer of an engine, so only the first stream is
held up for it, from its first finish_reason to its usage event.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from connector.splice import NotAnObject, members, spliced
from gateway.dialects import DONE, Dialect, Usage, gave_up, usage

MAX_EVENT = 1024 * 1024
"""Bytes of an unfinished event that are held; a longer one goes through in pieces, unread."""
MOST_AROUND = 4096
"""Bytes of an event of which what stands around its text is remembered: a token's has a few hundred."""

PRIVATE = ("kv_transfer_params", "ec_transfer_params")
"""Fields of an engine's answer that are between engines: a client never gets them."""

_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE = re.compile(rb"\r\n|\n|\r")
_LAST_END = (b"\n\n", b"\n\r\n", b"\r\r")
_FINISHED = b'"finish_reason":"'
_TEXTS = (b'"content":"', b'"text":"')
"""Before the text in an event of chat, of completions and of messages. Nothing is learned from what it says."""
_QUOTE, _LF, _CR = b'"\n\r'


class Fingerprint:
    """An engine's system_fingerprint, once a stream has told it. It is the engine's for as long as it runs."""

    __slots__ = ("known", "value")

    def __init__(self) -> None:
        self.known = False
        self.value: str | None = None

    def learn(self, value: object) -> None:
        self.known = True
        self.value = value if isinstance(value, str) else None

    def forget(self) -> None:
        self.known = False
        self.value = None


class EventStream:
    """Reads what the gateway needs to know from a stream, and hides what is not the client's."""

    def __init__(self, dialect: Dialect, *, hide_usage: bool = False, fingerprint: Fingerprint | None = None) -> None:
        """`hide_usage`: the usage event was asked for by the gateway, not by the client."""
        self._hide_usage = hide_usage
        self._fingerprint = fingerprint or Fingerprint()
        self.dialect = dialect
        self._words = (*dialect.words, _FINISHED) if hide_usage else dialect.words
        self._rest: list[bytes] = []
        self._size = 0
        self._tail = b""
        self._held: list[tuple[bytes, bool]] = []
        """What waits for the fingerprint, and whether it is to carry it."""
        self._around: tuple[bytes, bytes] | None = None
        """What stood before and behind the text of an event of which nothing had to be read."""
        self.events = 0
        """Pieces of text that have gone by, about one for each token."""
        self.usage: Usage | None = None
        self.error: Mapping[str, Any] | None = None
        """The engine's error object, if it sent one."""
        self.made: str | None = None
        """The id of the response that a stream of /v1/responses makes."""
        self.done = False
        """The event that ends a stream came by."""
        self.aborted = False
        """The engine gave the request up."""
        self.torn = False
        """What went on last is a part of an event."""

    def feed(self, piece: bytes) -> bytes:
        """Take a piece, return what may go on."""
        if self.aborted:
            return b""
        if self._around is not None and not self._rest and self._differs_in_text(piece, *self._around):
            self.events += 1
            return piece
        if not self._rest and piece.endswith(b"\n\n"):
            data = piece
        else:
            data = self._whole(piece)
            if not data:
                return b""
        events = data.count(b"\ndata:") + data.startswith(b"data:")
        self.events += events
        for word in self._words:
            if data.find(word) >= 0:  # `in` takes half as long again: it looks for a number first
                self._around = None
                return self._read(data)
        if self._held:
            self._held.append((data, False))
            return b""
        self._around = _around_text(data) if events == 1 and len(data) <= MOST_AROUND else None
        return data

    def rest(self) -> bytes:
        """What is left when the engine has ended: what was held, and an event without its blank line if it is the last.

        A part of any other event is of no use to anybody.
        """
        data = b"".join(self._rest)
        self._rest, self._size, self._tail = [], 0, b""
        held, self._held = self._held, []
        last = self._read(data) if data else b""
        self._held = held
        return self._let_go() + (last if self.done else b"")

    @staticmethod
    def _differs_in_text(event: bytes, before: bytes, after: bytes) -> bool:
        """Whether an event is made of these two and, between them, a text that ends neither its string nor its line."""
        if not event.startswith(before) or not event.endswith(after):
            return False
        text = event[len(before) : -len(after)]
        return _QUOTE not in text and _LF not in text and _CR not in text

    def _whole(self, piece: bytes) -> bytes:
        """The events that are whole with this piece; what is behind them is kept."""
        window = self._tail + piece
        end = max(window.rfind(mark) + len(mark) if mark in window else 0 for mark in _LAST_END)
        if end:
            self.torn = False
            cut = end - len(self._tail)
        elif self._size + len(piece) > MAX_EVENT:
            self.torn = True
            cut = len(piece)
        else:
            cut = 0
        data = b"".join((*self._rest, piece[:cut])) if cut else b""
        if cut:
            self._rest, self._size = [], 0
        if after := piece[cut:]:
            self._rest.append(after)
            self._size += len(after)
        self._tail = (after if cut else window)[-3:]
        return data

    def _read(self, data: bytes) -> bytes:
        start = 0
        out: list[bytes] = []
        for mark in _END.finditer(data):
            self._event(data[start : mark.end()], out)
            start = mark.end()
        if start < len(data):
            self._event(data[start:], out)
        if self._held:
            self._held += ((event, False) for event in out)
            return b""
        return b"".join(out)

    def _event(self, event: bytes, out: list[bytes]) -> None:
        if self.aborted:
            return  # whatever follows would make it look like an end
        payload = b"\n".join(line[5:].removeprefix(b" ") for line in _LINE.split(event) if line.startswith(b"data:"))
        if payload == DONE and self.dialect is Dialect.CHAT:
            self.done = True
            out.insert(0, self._let_go())
            out.append(event)
            return
        data = parsed(payload)
        if isinstance(data, dict):
            event = self._data(event, payload, data, out)
        if event:
            out.append(event)

    def _data(self, event: bytes, payload: bytes, data: dict[str, Any], out: list[bytes]) -> bytes:
        """Learn from an event; what goes on of it."""
        if data.get("error"):
            error = data["error"]
            self.error = error if isinstance(error, dict) else {"message": str(error)}
        self.aborted = self.aborted or gave_up(data)
        self.done = self.done or self.dialect.ends(data)
        self.usage = _fuller(self.usage, usage(data))
        response = data.get("response")
        if self.dialect is Dialect.RESPONSES and isinstance(response, dict) and isinstance(response.get("id"), str):
            self.made = response["id"]
        if self.aborted:
            return b""
        if self._hide_usage and data.get("choices") == [] and isinstance(data.get("usage"), dict):
            self._fingerprint.learn(data.get("system_fingerprint"))
            out.insert(0, self._let_go())
            return b""
        if holds_private(data):
            event = _rewritten(event, without_private(payload))
        if self._hide_usage and _FINISHED in payload:
            if not self._fingerprint.known:
                self._held += ((before, False) for before in out)
                self._held.append((event, True))
                out.clear()
                return b""
            return self._stamped(event)
        return event

    def _let_go(self) -> bytes:
        """The events that were held, with the fingerprint where it belongs."""
        held, self._held = self._held, []
        return b"".join(self._stamped(event) if ends else event for event, ends in held)

    def _stamped(self, event: bytes) -> bytes:
        """The last event of a choice as it would be had the usage not been asked for."""
        brace = event.rfind(b"}")
        if self._fingerprint.value is None or brace < 0 or b'"system_fingerprint"' in event:
            return event
        stamp = b',"system_fingerprint":' + orjson.dumps(self._fingerprint.value)
        return event[:brace] + stamp + event[brace:]


def _around_text(event: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and behind the text of an event, if it has one."""
    for mark in _TEXTS:
        at = event.find(mark)
        if at >= 0:
            start = at + len(mark)
            end = event.find(b'"', start)
            return (event[:start], event[end:]) if end >= 0 else None
    return None


def parsed(text: bytes) -> Any:
    """JSON as engines write it, bare NaN and Infinity among it; None where it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def holds_private(data: Mapping[str, Any]) -> bool:
    """Whether an answer, or the response that an event tells of, says what is private between engines."""
    response = data.get("response")
    if isinstance(response, dict) and holds_private(response):
        return True
    return data.get(PRIVATE[0]) is not None or data.get(PRIVATE[1]) is not None


def without_private(body: bytes) -> bytes:
    """The JSON object without what is private between engines."""
    gone: dict[str, bytes | None] = dict.fromkeys(PRIVATE)
    try:
        inner = [body[m.value : m.end] for m in members(body) if m.name == "response"]
        changes = dict(gone)
        for value in inner:
            if value.startswith(b"{"):
                changes["response"] = b"".join(spliced(value, gone, {}))
        return b"".join(spliced(body, changes, {}))
    except NotAnObject:
        return b"{}"


def _rewritten(event: bytes, payload: bytes) -> bytes:
    """The event with other data."""
    names = [line for line in _LINE.split(event) if line and not line.startswith(b"data:")]
    return b"\n".join([*names, *(b"data: " + line for line in payload.split(b"\n")), b"", b""])


def _fuller(before: Usage | None, now: Usage | None) -> Usage | None:
    """The later usage, where it says something; Anthropic's streams tell theirs in two parts."""
    if before is None or now is None:
        return now or before
    return Usage(
        prompt=now.prompt or before.prompt,
        completion=now.completion if now.completion is not None else before.completion,
        cached=now.cached if now.cached is not None else before.cached,
    )
