"""A relay of the gateway's own bricks that does nothing else: the floor that the gateway is measured against.

python -m tests.benchmarks.bare PORT UPSTREAM
"""

import sys
from typing import Any

import uvicorn

from connector.wire import Wire


class Bare:
    """Passes each request to one origin, and the answer's bytes back."""

    def __init__(self, upstream: str) -> None:
        self._wire = Wire(upstream)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer = await self._wire.send("POST", scope["path"], [(b"content-type", b"application/json")], body)
        kind = answer.header(b"content-type") or b"application/json"
        await send({"type": "http.response.start", "status": answer.status, "headers": [(b"content-type", kind)]})
        while piece := await answer.read():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        Bare(sys.argv[2]), port=int(sys.argv[1]), loop="uvloop", http="httptools", ws="none", access_log=False,
        log_level="error", lifespan="off",
    )  # fmt: skip
