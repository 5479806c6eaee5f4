"""Where a request's body ends: one answer, or none. What two parsers could read in two ways is refused.

RFC 9112, 3.2 (Host), 3.3 (target), 6.1 to 6.3 (length): a request that a server in front of this one, or an
engine behind it, would cut elsewhere carries a second request that nobody checked.
"""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from gateway.errors import BadRequest

NAMES = frozenset({b"host", b"content-length", b"transfer-encoding"})
"""The header fields that frame a request."""

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]*)?")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_NO_HOST = "The request must have one Host header, with a host in it."
_NO_LENGTH = "The request's length is ambiguous: send Content-Length, or Transfer-Encoding: chunked."


def declared_length(version: str, target: bytes, fields: Sequence[tuple[bytes, bytes]]) -> int | None:
    """The length of the body; None where it comes in chunks. Raises `BadRequest`.

    `fields` are those of `NAMES`, in lower case, each as often as it came.
    """
    found = dict(fields)
    if len(found) < len(fields):
        raise BadRequest(_NO_HOST if [name for name, _ in fields].count(b"host") > 1 else _NO_LENGTH)
    if version not in ("1.1", "1.0"):
        raise BadRequest("Send the request in HTTP/1.1.")
    _check_host(version, target, found.get(b"host"))
    length, coding = found.get(b"content-length"), found.get(b"transfer-encoding")
    if coding is not None:
        if length is not None or version == "1.0" or coding.strip().lower() != b"chunked":
            raise BadRequest(_NO_LENGTH)
        return None
    if length is None:
        return 0
    if not _DIGITS.fullmatch(length):
        raise BadRequest("Content-Length must be one number.")
    return int(length)


def _check_host(version: str, target: bytes, host: bytes | None) -> None:
    if (host is None and version == "1.1") or (host is not None and not _HOST.fullmatch(host)):
        raise BadRequest(_NO_HOST)
    if not target.startswith(b"/") and b"://" in target and urlsplit(target).netloc != host:
        raise BadRequest("The request's target names another host than its Host header.")
