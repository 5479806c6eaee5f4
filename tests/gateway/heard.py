"""What a client hears on a bare socket: answers taken off it byte by byte, and how it ends."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from tests.double import values
from tests.gateway.house import House, Raw

PATIENCE = 8.0
"""Seconds to wait for what must come at once: this machine pauses at times."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer, its body without the framing."""

    status: int
    head: bytes
    body: bytes

    def headers(self, name: str) -> list[str]:
        return values(self.head, name)

    def header(self, name: str) -> str | None:
        return next(iter(self.headers(name)), None)

    def json(self) -> Any:
        return orjson.loads(self.body)


async def hear(client: Raw, *, bodiless: bool = False) -> Heard:
    """The next answer. `bodiless`: it answers a HEAD request, so that no body follows."""
    async with asyncio.timeout(PATIENCE):
        head = await client.reader.readuntil(b"\r\n\r\n")
        heard = Heard(int(head.split(b" ", 2)[1]), head, b"")
        if bodiless or heard.status < 200 or heard.status in (204, 304):
            return heard
        return Heard(heard.status, head, await _body(client, heard))


async def _body(client: Raw, heard: Heard) -> bytes:
    if heard.header("transfer-encoding") is None:
        length = heard.header("content-length")
        return await (client.reader.read() if length is None else client.reader.readexactly(int(length)))
    assert heard.headers("transfer-encoding") == ["chunked"]
    assert not heard.headers("content-length")
    body = b""
    while size := int((await client.reader.readline()).strip(), 16):
        body += await client.reader.readexactly(size)
        assert await client.reader.readexactly(2) == b"\r\n"
    assert await client.reader.readline() == b"\r\n", "trailers came"
    return body


async def last_words(client: Raw) -> bytes:
    """Everything until the gateway closes, which it must."""
    said = b""
    async with asyncio.timeout(PATIENCE):
        try:
            while piece := await client.reader.read(65536):
                said += piece
        except ConnectionError:
            pass
    return said


async def refused(client: Raw, status: int | set[int] = 400) -> Heard:
    """The only answer on a connection that the gateway closes behind it: an error."""
    heard = await hear(client)
    refusal(heard, status)
    assert await last_words(client) == b""
    return heard


def refusal(answer: Heard | httpx.Response, status: int | set[int], kind: str | None = None) -> Any:
    """The error object of an answer that is the gateway's own error."""
    code, body = _parts(answer)
    assert code in (status if isinstance(status, set) else {status}), body
    headers = answer.headers if isinstance(answer, httpx.Response) else _names(answer)
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    error = orjson.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert kind is None or error["type"] == kind
    return error


def _parts(answer: Heard | httpx.Response) -> tuple[int, bytes]:
    return (answer.status, answer.body) if isinstance(answer, Heard) else (answer.status_code, answer.content)


def _names(heard: Heard) -> httpx.Headers:
    lines = heard.head.decode("latin-1").split("\r\n")[1:-2]
    return httpx.Headers([(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)])


async def serves_on(house: House) -> None:
    """The gateway answers somebody else, and nothing is left under way."""
    assert (await house.client.get("/health")).status_code == 200
    await house.idle()
