"""Cross-origin requests: which web pages may read answers (WHATWG Fetch, 3.2)."""

from collections.abc import Sequence


class Cors:
    """The origins that are allowed, each as a browser sends it; `*` is every one, none of them is nobody."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self.origins = frozenset(origin.encode() for origin in origins)

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """What an answer carries for a request from this origin; errors carry it too."""
        if origin is None or not self.origins.intersection({origin, b"*"}):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        ]

    def preflight(self, fields: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What the 204 to an OPTIONS request carries beside `headers`; nothing where it is no preflight of theirs."""
        allowed = self.headers(fields.get(b"origin"))
        if not allowed or b"access-control-request-method" not in fields:
            return []
        wanted = fields.get(b"access-control-request-headers", b"authorization, content-type")
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"86400"),
        ]
