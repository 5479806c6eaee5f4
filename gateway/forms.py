"""What the gateway must know of a multipart/form-data body, which itself passes byte for byte."""

from collections.abc import Mapping

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest

MAX_FIELD = 1024
"""Bytes of a field's value that are looked at: names and flags are shorter, files are not read."""
_WANTED = frozenset({b"model", b"stream"})


def fields(body: bytes, content_type: bytes) -> Mapping[str, object]:
    """The fields `model` and `stream` of a form. Raises `BadRequest` where it is none."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest("The body must be multipart/form-data, with a boundary.")
    found: dict[bytes, bytes] = {}
    header, value, name = bytearray(), bytearray(), b""

    def on_header_begin() -> None:
        header.clear()
        value.clear()

    def on_header_field(data: bytes, start: int, end: int) -> None:
        header.extend(data[start:end])

    def on_header_value(data: bytes, start: int, end: int) -> None:
        value.extend(data[start:end])

    def on_header_end() -> None:
        nonlocal name
        if bytes(header).lower() == b"content-disposition":
            name = parse_options_header(bytes(value))[1].get(b"name", b"")

    def on_part_data(data: bytes, start: int, end: int) -> None:
        if name in _WANTED and len(found.get(name, b"")) <= MAX_FIELD:
            found[name] = found.get(name, b"") + data[start : min(end, start + MAX_FIELD)]

    parser = MultipartParser(
        boundary,
        {
            "on_header_begin": on_header_begin,
            "on_header_field": on_header_field,
            "on_header_value": on_header_value,
            "on_header_end": on_header_end,
            "on_part_data": on_part_data,
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except MultipartParseError:
        raise BadRequest("The body is no multipart/form-data with the boundary that its header names.") from None
    text = {key.decode(): data.decode("utf-8", "replace") for key, data in found.items()}
    return {**text, "stream": text.get("stream", "").lower() in ("true", "1")}
