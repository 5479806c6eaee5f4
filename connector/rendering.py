"""Chat templates in a process of their own, as Jinja holds Python's lock while it renders.

The process starts when it is first wanted and takes a second or two, in which others render as they
can. It gets bodies as they came and parses them itself. It ends with this one, and when it takes too
long; then the request that it was busy with is `Inexact`, and the next one starts another.

    python -m connector.rendering FD       what it runs: FD is its end of a pair of sockets

It holds no vocabulary, so that it takes some 70 MB, of which transformers is most.
"""

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import orjson

from connector.errors import Inexact
from connector.tokens import Text

SECONDS = 10.0
"""How long one rendering may take."""
STARTING = 60.0
"""How long a start may take, and how soon after one another may be tried."""
_LENGTH = struct.Struct(">Q")

Render = Callable[[Mapping[str, Any]], Text]


class Rendering:
    """One process that renders what it is given, one body after the other."""

    def __init__(self, render: Render, *, seconds: float = SECONDS) -> None:
        """`render` can be pickled."""
        self._render = render
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, "rendering")
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._started = -STARTING
        self._closed = False
        self.ready = False
        """Whether the process runs. Where it does not, `start` it and render elsewhere until it does."""

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """See to it that the process is ready soon."""
        if not self.ready and not self._closed and time.monotonic() - self._started >= STARTING:
            self._started = time.monotonic()
            self._thread.submit(self._start)

    async def text(self, raw: bytes) -> Text:
        """The text of a body. Raises `Inexact`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, raw)

    def close(self) -> None:
        """End the process; nothing is rendered any more."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._child = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "connector.rendering", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback could show a prompt
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._socket = ours
        ours.settimeout(STARTING)
        with suppress(OSError, EOFError):
            _send(ours, pickle.dumps((self._render, self._seconds)))
            _receive(ours)
            ours.settimeout(self._seconds + 1)
            self.ready = not self._closed
        if not self.ready:
            self._end()

    def _ask(self, raw: bytes) -> Text:
        if self._socket is None or not self.ready:
            raise Inexact("renderer_died")
        try:
            _send(self._socket, raw)
            answer = _receive(self._socket)
        except (OSError, EOFError) as error:
            self._end()
            self._started = -STARTING  # it had been running: start another at once
            raise Inexact("renderer_died") from error
        kind, data = answer[:1], answer[1:]
        if kind == _REFUSED:
            raise Inexact(data.decode())
        return Text(data, special=kind == _SPECIAL)

    def _end(self) -> None:
        self.ready = False
        child, self._child = self._child, None
        ours, self._socket = self._socket, None
        if child is not None:
            child.kill()
            child.wait()
        if ours is not None:
            ours.close()


_REFUSED, _PLAIN, _SPECIAL = b"!", b" ", b"+"
"""How an answer begins: with a reason, or a text that gets special tokens or not."""


def _send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(_LENGTH.pack(len(data)))
    peer.sendall(data)


def _receive(peer: socket.socket) -> bytes:
    """Raises `EOFError` where the peer is gone."""
    [length] = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    return bytes(_exactly(peer, length))


def _exactly(peer: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


def _rendered(render: Render, raw: bytes) -> bytes:
    try:
        text = render(orjson.loads(raw))
    except Inexact as error:
        return _REFUSED + error.reason.encode()
    return (_SPECIAL if text.special else _PLAIN) + text.data


def main() -> None:
    """Render until the peer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent says when it is over
    with socket.socket(fileno=int(sys.argv[1])) as peer, suppress(EOFError, OSError):
        render, seconds = pickle.loads(_receive(peer))  # noqa: S301 - from the process that started this one
        _send(peer, b"")
        while True:
            raw = _receive(peer)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends the process
            answer = _rendered(render, raw)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(peer, answer)


if __name__ == "__main__":
    main()
