"""Objects in a real pool, by Mooncake's client in a process of its own, which adds one segment to the pool.

    with Objects(master.rpc, folder) as objects:
        objects.put(keys)
        assert objects.exist(keys) == len(keys)

Lines go in and come out; the client hangs and crashes where it likes without harm to the tests.
"""

import ctypes
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.real.stack import LIBRARIES, MASTER, inherited

SEGMENT = 16 * 1024 * 1024
BUFFER = 16 * 1024 * 1024
PATIENCE = 30.0
"""Seconds for an answer of the client."""


def missing() -> str | None:
    """Why there is no pool here, in one sentence."""
    if not MASTER.exists():
        return f"{MASTER.name} is not installed beside {sys.executable}."
    for library in LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"the shared library {library} is missing."
    return None


class Objects:
    def __init__(self, rpc: str, folder: Path | None = None, tenant: str = "default") -> None:
        """With a `folder`, objects are put on disk, too, a file each, within a second or so."""
        offload = {
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
        }
        quiet = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, rpc, str(folder or ""), tenant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited(), **quiet, **(offload if folder else {})},
        )
        assert self._answer() == 0, "the master does not take this client"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def put(self, keys: Sequence[str], size: int = 64) -> None:
        """Again while the store is full of what may not be evicted yet."""
        end = time.monotonic() + PATIENCE
        while self._ask("put", list(keys), size):
            assert time.monotonic() < end, "the pool takes no more"
            time.sleep(0.05)

    def exist(self, keys: Sequence[str]) -> int:
        """How many of `keys` there are, as an engine asks for them: their leases are renewed."""
        return int(self._ask("exist", list(keys), 0))

    def remove(self, keys: Sequence[str]) -> None:
        self._ask("remove", list(keys), 0)

    def kill(self) -> None:
        """SIGKILL: the master hears nothing of it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, *question: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        end, line = time.monotonic() + PATIENCE, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                assert selector.select(end - time.monotonic()), "the client does not answer"
                piece = os.read(self._process.stdout.fileno(), 65536)
                assert piece, "the client is gone"
                line += piece
        return json.loads(line)


def serve(rpc: str, folder: str, tenant: str) -> None:
    # The wheel has no types, and is loaded in this process only.
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-untyped]  # noqa: PLC0415

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where the client writes, too

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    client = MooncakeDistributedStore()
    place = ("127.0.0.1", "P2PHANDSHAKE", SEGMENT, BUFFER, "tcp", "", rpc)
    answer(client.setup(*place, None, bool(folder), folder, tenant))
    for line in sys.stdin:
        verb, keys, size = json.loads(line)
        if verb == "put":
            parts = [keys[start : start + 500] for start in range(0, len(keys), 500)]
            answer(sum(client.put_batch(part, [bytes(size)] * len(part)) for part in parts))
        elif verb == "exist":
            answer(sum(code == 1 for code in client.batch_is_exist(keys)))
        else:
            for key in keys:
                client.remove(key, True)
            answer(0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
