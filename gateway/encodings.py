"""Content codings (RFC 9110, 8.4.1): what clients send compressed, and what engines answer compressed.

Clients do: Codex sends zstd whatever the server says. Engines are asked for `identity` and seldom do.
"""

import zlib
from collections.abc import Callable, Sequence

import brotli
import zstandard

from gateway.errors import BadRequest, BodyTooLarge, UnsupportedMedia

CODINGS = ("gzip", "deflate", "br", "zstd")
MOST_LAYERS = 3
"""Codings that may lie upon each other."""
_STEP = 64 * 1024
_MEMBERS = 1024
"""Members or frames that a body may be made of: each costs the same, however little is in it."""
_SLICE = 256
"""Bytes of zstd that are inflated at once: a block of 128 KiB takes 4 bytes at least, so 8 MiB come out at most."""
_WINDOW = 128 * 1024 * 1024


_FAULTS = (zlib.error, brotli.error, zstandard.ZstdError, EOFError)


class Undecodable(Exception):
    """A body is not what its Content-Encoding says."""


def codings(header: bytes) -> list[str]:
    """The codings that Content-Encoding lists, the outermost last; `identity` says nothing."""
    names = [name.strip().lower() for name in header.decode("latin-1").split(",")]
    return [name.removeprefix("x-") for name in names if name and name != "identity"]


def decoded(body: bytes, header: bytes, limit: int) -> bytes:
    """A request's body in the clear. Raises `UnsupportedMedia`, `BadRequest` or `BodyTooLarge`.

    Never holds more than `limit` bytes of what comes out, however small what went in.
    """
    names = codings(header)
    if len(names) > MOST_LAYERS or any(name not in CODINGS for name in names):
        raise UnsupportedMedia(
            f"Content-Encoding may be {', '.join(CODINGS)}; send the body in one of them, or plain.",
            accept=", ".join(CODINGS).encode(),
        )
    try:
        return unpacked(body, names, limit)
    except Undecodable:
        raise BadRequest("The body is not what its Content-Encoding says.") from None


def unpacked(body: bytes, names: Sequence[str], limit: int) -> bytes:
    """A whole body without these codings. Raises `Undecodable` or `BodyTooLarge`."""
    for name in reversed(names):
        try:
            body = _inflated(name, body, limit)
        except _FAULTS:
            raise Undecodable from None
    return body


def decoder(names: Sequence[str]) -> Callable[[bytes], bytes]:
    """What turns the pieces of an engine's stream into the clear. It raises `Undecodable` where it cannot."""
    steps = [_pieces(name) for name in reversed(names)]

    def feed(piece: bytes) -> bytes:
        try:
            for step in steps:
                piece = step(piece)
        except _FAULTS:
            raise Undecodable from None
        return piece

    return feed


def _pieces(name: str) -> Callable[[bytes], bytes]:
    match name:
        case "br":
            return brotli.Decompressor().process  # type: ignore[no-any-return]
        case "zstd":
            return zstandard.ZstdDecompressor().decompressobj().decompress
        case "gzip":
            return zlib.decompressobj(31).decompress
        case _:
            return zlib.decompressobj().decompress


def _inflated(name: str, body: bytes, limit: int) -> bytes:
    match name:
        case "br":
            return _brotli(body, limit)
        case "zstd":
            return _zstd(body, limit)
        case "gzip":
            return _zlib(body, limit, 31)
    try:
        return _zlib(body, limit, 15)
    except zlib.error:  # some send deflate without the zlib frame that RFC 9110, 8.4.1.2 demands
        return _zlib(body, limit, -15)


def _zlib(body: bytes, limit: int, bits: int) -> bytes:
    pieces: list[bytes] = []
    size = at = members = 0
    view = memoryview(body)
    while at < len(body):  # gzip may have several members
        inflater = zlib.decompressobj(bits)
        members = _few(members + 1)
        while not inflater.eof:
            if at >= len(body):
                raise EOFError
            pieces.append(inflater.decompress(view[at : at + _STEP], limit - size + 1))
            size = _within(size + len(pieces[-1]), limit)
            at = min(at + _STEP, len(body)) - len(inflater.unconsumed_tail)
        at -= len(inflater.unused_data)
        if bits != 31:
            break
    return b"".join(pieces)


def _zstd(body: bytes, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = at = frames = 0
    while at < len(body):  # there may be several frames
        frames = _few(frames + 1)
        inflater = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
        while not inflater.eof:
            if at >= len(body):
                raise EOFError
            pieces.append(inflater.decompress(body[at : at + _SLICE]))
            size = _within(size + len(pieces[-1]), limit)
            at = min(at + _SLICE, len(body))
        at -= len(inflater.unused_data)
    return b"".join(pieces)


def _brotli(body: bytes, limit: int) -> bytes:
    inflater = brotli.Decompressor()
    pieces = [inflater.process(body, output_buffer_limit=_STEP)]
    size = _within(len(pieces[0]), limit)
    while not inflater.is_finished():
        pieces.append(inflater.process(b"", output_buffer_limit=_STEP))
        size = _within(size + len(pieces[-1]), limit)
        if not pieces[-1] and inflater.can_accept_more_data():
            raise EOFError
    return b"".join(pieces)


def _few(members: int) -> int:
    if members > _MEMBERS:
        raise EOFError
    return members


def _within(size: int, limit: int) -> int:
    if size > limit:
        raise BodyTooLarge(limit)
    return size
