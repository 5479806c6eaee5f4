"""The whole gateway, served by a real uvicorn in the test's own loop, against doubles."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import uvicorn

from gateway.app import build
from gateway.config import Config
from tests.double import CHAT, Collector, Engine, Master

KEY = "sk-team-a"
OTHER_KEY = "sk-team-b"
SECRET = "the gateway's own secret"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def settings(*engines: Engine | dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A configuration for these engines; sections replace or add to it."""
    tree: dict[str, Any] = {
        "listen": {"port": 0},
        "secret": SECRET,
        "models": [{"name": "tiny"}],
        "engines": {
            "static": [e if isinstance(e, dict) else {"url": e.url, "model": "tiny"} for e in engines],
            "poll_seconds": 60,
        },
        "policy": {"use": "round_robin"},
        "self_check": {"audit_every": 0, "calibrate": False},
        "tenants": [
            {"name": "team-a", "keys": [{"sha256": digest(KEY)}]},
            {"name": "team-b", "keys": [{"sha256": digest(OTHER_KEY)}]},
        ],
    }
    return tree | sections


@dataclass
class House:
    """A gateway that runs."""

    url: str
    client: httpx.AsyncClient
    port: int
    tasks: set[asyncio.Task[None]]
    """Which the server would wait for, and then cancel, if it were stopped."""

    async def chat(self, text: str = "Tell me of the pool.", **fields: Any) -> httpx.Response:
        return await self.client.post(CHAT, json=chat(text, **fields))

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 where there is none."""
        total = 0.0
        for line in (await self.metrics()).splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match is None or match[1] != f"moongate_{name}":
                continue
            has = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if labels.items() <= has.items():
                total += float(match[3])
        return total

    async def idle(self) -> None:
        """Wait until nothing is under way. Fails after a second."""

        async def nothing() -> bool:
            return not (await self.metric("engine_requests") or await self.metric("engine_connections"))

        await eventually(nothing)
        assert await self.metric("engine_backlog_tokens") == 0

    async def until(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has a value. Fails after a second."""

        async def there() -> bool:
            return await self.metric(name, **labels) == value

        await eventually(there)


async def eventually(check: Callable[[], bool | Awaitable[bool]], seconds: float = 10) -> None:
    """Wait until something is so. Fails where it does not become so in time."""
    async with asyncio.timeout(seconds):
        while True:
            so = check()
            if so if isinstance(so, bool) else await so:
                return
            await asyncio.sleep(0.005)


def chat(text: str = "Tell me of the pool.", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def serving(tree: dict[str, Any]) -> AsyncIterator[House]:
    """Run a gateway with this configuration."""
    house = build(Config(**tree))
    config = uvicorn.Config(
        house.surface,
        port=0,
        http=house.front,
        ws="none",
        lifespan="on",
        timeout_keep_alive=1,  # has no effect: the front looks after idle connections itself
        access_log=False,
        log_config=None,
        server_header=False,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": f"Bearer {KEY}"}
    try:
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=10, trust_env=False, verify=False
        ) as client:
            yield House(url, client, port, server.server_state.tasks)
    finally:
        for accepting in server.servers:
            accepting.close()
        for connection in tuple(server.server_state.connections):
            connection.shutdown()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
        await server.lifespan.shutdown()
        await asyncio.sleep(0)


@dataclass
class Street:
    """Builds doubles and gateways, and takes all of them down."""

    _stack: AsyncExitStack = field(repr=False)

    async def engine(self, model: str = "tiny") -> Engine:
        return await self._stack.enter_async_context(Engine(model))

    async def engines(self, count: int) -> list[Engine]:
        return [await self.engine() for _ in range(count)]

    async def master(self) -> Master:
        return await self._stack.enter_async_context(Master())

    async def collector(self) -> Collector:
        return await self._stack.enter_async_context(Collector())

    async def house(self, *engines: Engine | dict[str, Any], **sections: Any) -> House:
        return await self._stack.enter_async_context(serving(settings(*engines, **sections)))

    async def raw(self, house: House) -> "Raw":
        """A connection of one's own to a gateway."""
        client = Raw(*await asyncio.open_connection("127.0.0.1", house.port))
        self._stack.callback(client.leave)
        return client


@dataclass
class Raw:
    """A client on a bare socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, body: bytes, *headers: str, path: str = CHAT, method: str = "POST") -> None:
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: gateway",
            f"authorization: Bearer {KEY}",
            f"content-length: {len(body)}",
            *headers,
            "",
            "",
        ]
        self.send("\r\n".join(lines).encode("latin-1") + body)

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`."""
        async with asyncio.timeout(5):
            return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Everything until the gateway closes."""
        async with asyncio.timeout(5):
            return await self.reader.read()

    def leave(self) -> None:
        self.writer.transport.abort()


def events(body: bytes) -> list[Any]:
    """The events of a stream of `data:` lines; [DONE] as the text."""
    found = []
    for block in body.split(b"\n\n"):
        if block:
            assert block.startswith(b"data: "), block
            payload = block.removeprefix(b"data: ")
            found.append("[DONE]" if payload == b"[DONE]" else orjson.loads(payload))
    return found
