"""What the gateway must know of a multipart/form-data body, which itself passes byte for byte."""

from collections.abc import Mapping
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest

MOST_PARTS = 1000
"""Parts of a form; a transcription has some twenty fields."""
MAX_FIELD = 1024
"""Bytes of a field's value that are looked at: names and flags are shorter, files are not read."""
_WANTED = frozenset({b"model", b"stream"})


def fields(body: bytes, content_type: bytes) -> Mapping[str, object]:
    """The fields `model` and `stream` of a form. Raises `BadRequest` where it is none.

    Of two with one name the last counts, as it does for engines.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest("The body must be multipart/form-data, with a boundary.")
    form = _Form()
    callbacks: Any = {name: getattr(form, name) for name in vars(_Form) if name.startswith("on_")}
    parser = MultipartParser(boundary, callbacks)
    try:
        parser.write(body[max(0, body.find(b"--" + boundary)) :])  # what stands before it is nobody's
        parser.finalize()
    except MultipartParseError:
        raise BadRequest("The body is no multipart/form-data with the boundary that its header names.") from None
    text = {key.decode(): data.decode("utf-8", "replace") for key, data in form.found.items()}
    return {**text, "stream": text.get("stream", "").lower() in ("true", "1")}


class _Form:
    """What the parser tells."""

    def __init__(self) -> None:
        self.found: dict[bytes, bytes] = {}
        self._name = b""
        self._header = b""
        self._value = b""
        self._parts = 0

    def on_part_begin(self) -> None:
        self._name = b""
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise BadRequest(f"The form has more than {MOST_PARTS} parts.")

    def on_header_begin(self) -> None:
        self._header = self._value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._name = parse_options_header(self._value)[1].get(b"name", b"")

    def on_headers_finished(self) -> None:
        self.found.pop(self._name, None)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        before = self.found.get(self._name, b"")
        if self._name in _WANTED and len(before) <= MAX_FIELD:
            self.found[self._name] = before + data[start : min(end, start + MAX_FIELD)]
