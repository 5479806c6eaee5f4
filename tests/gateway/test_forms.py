"""What is read of a form, which itself passes byte for byte."""

from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.forms import MAX_FIELD, fields

TYPE = b"multipart/form-data; boundary=b"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


@given(st.binary(max_size=300), st.sampled_from(["true", "false", "1", "0", "True", ""]))
def test_a_form_as_clients_write_it(audio: bytes, stream: str) -> None:
    request = httpx.Request(
        "POST", "http://x", data={"model": "whisper", "stream": stream, "language": "de"}, files={"file": ("a", audio)}
    )
    found = fields(request.read(), request.headers["content-type"].encode())
    assert found == {"model": "whisper", "stream": stream.lower() in ("true", "1")}


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([], {"stream": False}),
        ([part("model", b"m")], {"model": "m", "stream": False}),
        ([part("model", b"")], {"stream": False}),
        ([part("model", "é🦀".encode())], {"model": "é🦀", "stream": False}),
        ([part("model", b"\xff")], {"model": "\ufffd", "stream": False}),
        ([part("file", b'--b-\r\nname="model"\r\n', '; filename="model"'), part("model", b"m")],
         {"model": "m", "stream": False}),
        ([part("Model", b"x"), part("models", b"y")], {"stream": False}),
        ([b"--b\r\ncontent-disposition: form-data; name=model\r\ncontent-type: text/plain\r\n\r\nm\r\n"],
         {"model": "m", "stream": False}),
        ([b"--b\r\ncontent-type: text/plain\r\n\r\nm\r\n"], {"stream": False}),
    ],
)  # fmt: skip
def test_what_is_found(parts: list[bytes], found: dict[str, object]) -> None:
    assert fields(form(*parts), TYPE) == found


def test_the_last_of_two_counts_as_it_does_for_engines() -> None:
    """Or a tenant could ask for a model that it may not have, by writing its name in two parts."""
    assert fields(form(part("model", b"team-"), part("stream", b"1"), part("model", b"lora")), TYPE)["model"] == "lora"


def test_a_part_without_a_name_does_not_carry_the_last_ones_on() -> None:
    assert fields(form(part("model", b"m"), b"--b\r\nx: y\r\n\r\nmore\r\n"), TYPE)["model"] == "m"


def test_a_long_field_is_not_read_to_its_end() -> None:
    model = fields(form(part("model", b"m" * 10_000_000)), TYPE)["model"]
    assert isinstance(model, str)
    assert len(model) <= 2 * MAX_FIELD


@pytest.mark.parametrize(
    "kind",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/mixed; boundary=b",
    ],
)
def test_a_body_that_is_no_form(kind: bytes) -> None:
    with pytest.raises(BadRequest, match="must be multipart/form-data"):
        fields(form(part("model", b"m")), kind)


@pytest.mark.parametrize("body", [b"{}", b"--c\r\n\r\n--c--", form(part("model", b"m")).replace(b"--b", b"--c")])
def test_a_body_that_is_not_what_its_header_says(body: bytes) -> None:
    with pytest.raises(BadRequest, match="boundary that its header names"):
        fields(body, TYPE)


@given(
    st.lists(st.sampled_from([b"--b", b"--", b"\r\n", b":", b"name", b'"', b"model", b"=", b";", b"x", b"\0", b"\xff"]))
)
def test_no_bytes_raise_anything_else(pieces: list[bytes]) -> None:
    with suppress(BadRequest):
        fields(b"".join(pieces), TYPE)
