"""What can go wrong outside, as a tree. Foreign errors are translated into these at the border.

ConnectorError
|-- WireError           an HTTP exchange with an engine or a master failed
|   |-- Unreachable     no connection: refused, unroutable, unknown name, TLS refused
|   |-- Disconnected    the connection ended before the answer did
|   |-- Exhausted       this process has no file descriptor left; nothing is said of the peer
|   |-- TimedOut        a wait ran into its limit; `phase` says which
|   `-- BadAnswer       the peer does not speak HTTP/1.1, or not what was asked for
`-- Inexact             this prompt's token ids or hashes cannot be known exactly here
"""

from typing import Literal

Phase = Literal["connect", "head", "idle", "reader", "total"]


class ConnectorError(Exception):
    """Anything that went wrong outside the process."""


class WireError(ConnectorError):
    """An HTTP exchange failed. `origin` is the peer's `host:port`."""

    def __init__(self, origin: str, detail: str) -> None:
        super().__init__(f"{origin}: {detail}")
        self.origin = origin
        self.detail = detail


class Unreachable(WireError):
    """No connection could be made: nothing was sent."""


class Disconnected(WireError):
    """The connection ended before the answer did."""


class Exhausted(WireError):
    """No file descriptor is left in this process for a connection."""


class TimedOut(WireError):
    """A wait ran into its limit."""

    def __init__(self, origin: str, phase: Phase, limit: float) -> None:
        super().__init__(origin, f"{phase} timeout after {limit:g} s")
        self.phase = phase
        self.limit = limit


class BadAnswer(WireError):
    """The peer's bytes are not the HTTP answer that was asked for."""


class Inexact(ConnectorError):
    """The prompt's ids or hashes cannot be known exactly; `reason` is one of a small, fixed set.

    The request goes on without a prefix: it is placed by load, and nothing is predicted for it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
