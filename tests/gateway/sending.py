"""What tests do over and over: set up a gateway, ask it on a bare socket, wait for the engine to notice."""

import asyncio
from typing import Any

import orjson

from tests.double import CHAT, Call, Engine, Step
from tests.gateway.house import KEY, House, Raw, Street, chat

STREAMED = orjson.dumps(chat(stream=True))


async def saying(street: Street, *steps: Step, **sections: Any) -> tuple[Engine, House]:
    """A gateway before an engine that always says this."""
    engine = await street.engine()
    engine.always(*steps)
    return engine, await street.house(engine, **sections)


async def asking(street: Street, house: House, *headers: str, streamed: bool = True) -> Raw:
    client = await street.raw(house)
    client.ask(STREAMED if streamed else orjson.dumps(chat()), *headers)
    return client


async def noticed(*calls: Call) -> None:
    """The engine has seen its client leave."""
    async with asyncio.timeout(5):
        for call in calls:
            await call.closed.wait()


def declaring(length: int) -> bytes:
    """A head that promises a body."""
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-length: {length}\r\n\r\n".encode()
    )
