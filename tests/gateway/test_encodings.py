"""Compressed bodies: what clients send, bounded; what engines answer, piece by piece."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gateway.encodings import CODINGS, codings, decoded, decoder
from gateway.errors import BadRequest, BodyTooLarge, UnsupportedMedia


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def unsized_zstd(data: bytes) -> bytes:
    """A frame that does not tell its size, as streaming clients write it."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
OTHERS: list[tuple[str, Callable[[bytes], bytes]]] = [("deflate", raw_deflate), ("zstd", unsized_zstd)]
WAYS = [*PACK.items(), *OTHERS]
LIMIT = 1_000_000

bodies = st.binary(max_size=2000) | st.builds(
    lambda byte, n: byte * n, st.binary(min_size=1, max_size=3), st.integers(0, 50_000)
)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (b"", []), (b"identity", []), (b"gzip", ["gzip"]), (b"GZip", ["gzip"]), (b"x-gzip", ["gzip"]),
        (b" gzip ,\tbr", ["gzip", "br"]), (b"identity, zstd", ["zstd"]), (b",,", []), (b"\xff", ["ÿ"]),
    ],
)  # fmt: skip
def test_what_a_header_lists(header: bytes, names: list[str]) -> None:
    assert codings(header) == names


@pytest.mark.parametrize(("name", "pack"), WAYS, ids=lambda value: getattr(value, "__name__", value))
@given(body=bodies)
def test_a_body_comes_out_as_it_went_in(name: str, pack: Callable[[bytes], bytes], body: bytes) -> None:
    assert decoded(pack(body), name.encode(), LIMIT) == body


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_several_members_are_one_body(name: str) -> None:
    assert decoded(PACK[name](b"one ") + PACK[name](b"") + PACK[name](b"two"), name.encode(), 7) == b"one two"


def test_layers_come_off_from_the_outermost() -> None:
    body = PACK["zstd"](PACK["br"](PACK["gzip"](b"body")))
    assert decoded(body, b"gzip, br, zstd", LIMIT) == b"body"


@pytest.mark.parametrize("header", [b"identity", b"", b"identity, identity"])
def test_a_plain_body_is_itself(header: bytes) -> None:
    assert decoded(b"body", header, 4) == b"body"


@pytest.mark.parametrize("header", [b"compress", b"lzma", b"gzip, x", b"*", b"gzip;q=1", b"gzip,gzip,gzip,gzip"])
def test_a_coding_that_is_not_known_is_told_with_those_that_are(header: bytes) -> None:
    with pytest.raises(UnsupportedMedia) as caught:
        decoded(b"", header, LIMIT)
    assert caught.value.headers == [(b"accept-encoding", ", ".join(CODINGS).encode())]


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b[:3], lambda b: b"{" + b, lambda b: b"plain text"])
def test_a_body_that_is_cut_short_or_no_such_coding(name: str, spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BadRequest, match=name):
        decoded(spoil(PACK[name](b"some body of a request" * 10)), name.encode(), LIMIT)


@pytest.mark.parametrize("name", CODINGS)
@given(body=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(name: str, body: bytes) -> None:
    with suppress(BadRequest, BodyTooLarge):
        decoded(body, name.encode(), 1000)


@pytest.mark.parametrize(("name", "pack"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_the_limit_is_of_what_comes_out(name: str, pack: Callable[[bytes], bytes]) -> None:
    body = bytes(range(256)) * 1000
    assert decoded(pack(body), name.encode(), len(body)) == body
    with pytest.raises(BodyTooLarge):
        decoded(pack(body), name.encode(), len(body) - 1)


@pytest.mark.parametrize(("name", "pack"), WAYS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("layers", [1, 2])
def test_a_bomb_is_found_out_before_it_is_large(name: str, pack: Callable[[bytes], bytes], layers: int) -> None:
    bomb = b"\0" * 50_000_000
    for _ in range(layers):
        bomb = pack(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decoded(bomb, ",".join([name] * layers).encode(), LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 32 * LIMIT
    finally:
        tracemalloc.stop()


# What engines answer


@pytest.mark.parametrize("header", [b"", b"identity", b"unknown", b"gzip, unknown"])
def test_an_answer_in_no_known_coding_passes_as_it_is(header: bytes) -> None:
    assert decoder(header) is None


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_decoded_as_it_comes(name: str, size: int) -> None:
    body = bytes(range(256)) * 20
    packed = PACK[name](body)
    feed = decoder(name.encode())
    assert feed is not None
    assert b"".join(feed(packed[at : at + size]) for at in range(0, len(packed), size)) == body


def test_an_answer_in_two_codings() -> None:
    feed = decoder(b"gzip, br")
    assert feed is not None
    assert feed(PACK["br"](PACK["gzip"](b"body"))) == b"body"
