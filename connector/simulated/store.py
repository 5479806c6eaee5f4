"""The real Mooncake pool, by its native client, for a simulated engine.

Every call runs in a few threads of its own and has a deadline: the client waits for seconds for a
master that is gone, and for half a minute for one that hangs, and takes the whole process along in
`setup`. So the master's port is knocked at first; and while calls hang, no more are made, and
everything is a miss. What is stored under a key is a few bytes: the keys are real, the blocks are not.

Why `get` before a block counts as loaded: a pool that has lost a segment still says for seconds that
its objects exist. Real engines fail to load them and compute (kv_load_failure_policy recompute).
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from connector.errors import ConnectorError
from connector.keys import KeyScheme

SEGMENT = 64 * 1024 * 1024
BUFFER = 16 * 1024 * 1024
"""Bytes that this process adds to the pool, and that its transfers go through."""
VALUE = b"a block of a simulated engine"
DEADLINE = 0.5
"""Seconds for one call; what comes later is a miss."""
KNOCK = 0.3
THREADS = 4

Answer = TypeVar("Answer")


class NoPool(ConnectorError):
    """The master is not there, or does not take this client."""


class Store:
    """One engine's client. A context: its segment is part of the pool while it is open."""

    def __init__(self, master: str, scheme: KeyScheme, deadline: float = DEADLINE, patience: float = 10.0) -> None:
        """`master` is its RPC side, `host:port`; `patience` in seconds is for it to come up at first."""
        self._master = master
        self._scheme = scheme
        self._deadline = deadline
        self._patience = patience
        self._threads = ThreadPoolExecutor(THREADS, "mooncake")
        self._late: set[asyncio.Future[Any]] = set()
        """Calls that are over their deadline and have not come back."""
        self._client: Any = None

    async def __aenter__(self) -> Self:
        """Raises `NoPool`."""
        await self._knock()
        self._client = await asyncio.get_running_loop().run_in_executor(self._threads, self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Unmount the segment, unless there is no master to tell: `close` would hang, and the process with it.

        It takes 0.7 to 1.8 s, in which the interpreter stands still.
        """
        if await self._listening():
            await self._run(self._client.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks can be loaded. 0 where the pool does not answer in time."""
        if not hashes:
            return 0
        keys = [self._scheme.keys(block) for block in hashes]
        width = len(keys[0])
        there = await self._exist([key for block in keys for key in block])
        run = _leading([code == 1 for code in there or ()]) // width
        if not run:
            return 0
        values = await self._get([key for block in keys[:run] for key in block])
        return _leading([value == VALUE for value in values]) // width

    async def put(self, hashes: Sequence[bytes]) -> list[int]:
        """Put the blocks that are not there; answers which ones, by their place. Empty where nothing came through."""
        keys = [self._scheme.keys(block) for block in hashes]
        all_keys = [key for block in keys for key in block]
        there = await self._exist(all_keys)
        if there is None:
            return []
        exists = {key for key, code in zip(all_keys, there, strict=True) if code == 1}
        missing = [place for place, block in enumerate(keys) if not exists.issuperset(block)]
        new = [key for place in missing for key in keys[place] if key not in exists]
        if not new:
            return []
        code = await self._call(lambda: self._client.put_batch(new, [VALUE] * len(new)), -1)
        return missing if code == 0 else []

    async def clear(self) -> bool:
        """Remove every object of the pool, whoever put it there."""
        removed = await self._call(lambda: self._client.remove_all(True), -1)
        return removed >= 0

    async def _exist(self, keys: list[str]) -> list[int] | None:
        answer: list[int] | None = await self._call(lambda: self._client.batch_is_exist(keys), None)
        return answer

    async def _get(self, keys: list[str]) -> list[bytes]:
        nothing: list[bytes] = []
        return await self._call(lambda: self._client.get_batch(keys), nothing)

    async def _knock(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                while not await self._listening():  # noqa: ASYNC110 -- nobody tells when it comes up
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise NoPool(f"no Mooncake master listens at {self._master}") from error

    async def _listening(self) -> bool:
        host, _, port = self._master.rpartition(":")
        try:
            async with asyncio.timeout(KNOCK):
                _, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def _open(self) -> Any:
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", "1000")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        # The variables must be set before; the wheel has no types.
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-untyped]  # noqa: PLC0415

        client = MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, BUFFER, "tcp", "", self._master)
        if code:
            raise NoPool(f"the Mooncake master at {self._master} does not take this client: {code}")
        return client

    async def _call(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Run in a thread, within the deadline. While one is late, no other is made."""
        if self._late:
            return otherwise
        future = asyncio.ensure_future(self._run(call))
        done, _ = await asyncio.wait({future}, timeout=self._deadline)
        if done:
            return future.result()
        self._late.add(future)
        future.add_done_callback(self._late.discard)
        return otherwise

    async def _run(self, call: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _leading(good: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return good.index(False) if False in good else len(good)
