"""A stream of server-sent events on its way through. Bytes stay bytes.

Events are separated on LF, CR and CRLF only (WHATWG HTML, 9.2.6), whatever chunks they came in, and
go on in whole events. An event is parsed only where it must be: when a word in it says that it
carries the usage, an error, an abort, or something that is private between engines.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

MAX_EVENT = 1024 * 1024
"""Bytes of an unfinished event that are held; a longer one goes through in pieces, unread."""

PRIVATE = ("kv_transfer_params", "ec_transfer_params")
"""Fields of an engine's answer that are between engines: a client never gets them."""

_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_NOTEWORTHY = re.compile(
    rb'\[DONE\]|"usage":\s*\{|"error":|"finish_reason":\s*"abort"|"(?:kv|ec)_transfer_params":\s*[^\sn]'
)


class EventStream:
    """Reads what the gateway needs to know from a stream, and hides what is not the client's."""

    def __init__(self, *, hide_usage: bool) -> None:
        """`hide_usage`: the usage event was asked for by the gateway, not by the client."""
        self._hide_usage = hide_usage
        self._rest = b""
        self.usage: Mapping[str, Any] | None = None
        self.error: Mapping[str, Any] | None = None
        """The engine's error object, if it sent one."""
        self.done = False
        """`data: [DONE]` came by."""
        self.aborted = False
        """The engine gave the request up: finish_reason abort."""
        self.torn = False
        """What went on last is a part of an event."""

    def feed(self, piece: bytes) -> bytes:
        """Take a piece, return what may go on."""
        data = self._rest + piece if self._rest else piece
        end = _last_end(data)
        if end == 0:
            if len(data) > MAX_EVENT:
                self._rest = b""
                self.torn = True
                return data
            self._rest = data
            return b""
        self.torn = False
        if end == len(data):
            self._rest = b""
        else:
            self._rest = data[end:]
            data = data[:end]
        if _NOTEWORTHY.search(data) is None:
            return data
        return self._read(data)

    def rest(self) -> bytes:
        """What is left when the engine has ended: an event without its blank line."""
        data, self._rest = self._rest, b""
        return self._read(data) if data else b""

    def _read(self, data: bytes) -> bytes:
        kept: list[bytes] = []
        start = 0
        for mark in _END.finditer(data):
            kept.append(self._event(data[start : mark.end()]))
            start = mark.end()
        if start < len(data):
            kept.append(self._event(data[start:]))
        return b"".join(kept)

    def _event(self, event: bytes) -> bytes:
        """The event as it goes on: unchanged, without what is private, or not at all."""
        if self.aborted:
            return b""
        if _NOTEWORTHY.search(event) is None:
            return event
        lines = re.split(rb"\r\n|\n|\r", event)
        payload = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if payload == b"[DONE]":
            self.done = True
            return event
        data = parsed(payload)
        return self._data(event, data) if isinstance(data, dict) else event

    def _data(self, event: bytes, data: dict[str, Any]) -> bytes:
        if isinstance(data.get("error"), dict):
            self.error = data["error"]
        choices = data.get("choices")
        if isinstance(choices, list):
            reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
            self.aborted = "abort" in reasons
        usage = data.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        if self.aborted or (self._hide_usage and isinstance(usage, dict) and choices == []):
            return b""
        if any(data.get(field) is not None for field in PRIVATE):
            return b"data: " + written({name: value for name, value in data.items() if name not in PRIVATE}) + b"\n\n"
        return event


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


def written(data: object) -> bytes:
    """The JSON of something that was `parsed`."""
    return json.dumps(data, separators=(",", ":")).encode()


def _last_end(data: bytes) -> int:
    """Where the last whole event ends; 0 if there is none."""
    end = 0
    for mark in (b"\n\n", b"\n\r\n", b"\r\r"):
        at = data.rfind(mark)
        if at >= 0:
            end = max(end, at + len(mark))
    return end
