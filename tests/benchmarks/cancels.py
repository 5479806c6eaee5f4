"""Thousands of requests of which half are cancelled at random moments: does anything stay behind?

Clients leave before the head, in the middle of a stream, while a whole answer is computed, while they
upload, about the end, and with a second request behind the first, by FIN and by RST. Afterwards nothing
may be counted as under way, the tenant must have its full concurrency again, and the engine must have seen
every client leave within a second. The exit status is 1 where one of this is not so.
"""

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import uvloop

from tests.benchmarks.stage import KEY, TENANT, say, stage, table
from tests.double import CHAT, DONE, LAST_CHUNK, Call, Engine, Master, Step, chunk, completed, delta, head, whole

NOTICE = 1.0
"""Seconds within which a cancel must have reached the engine, and all counts must be zero again."""
GAUGES = ("engine_requests", "engine_connections", "engine_backlog_tokens")
LEAVING = ("before the head", "mid-stream", "whole answer", "upload", "about the end", "with another behind")
SHOWN = 20
"""Faults that are told of one by one."""
_LONG = 30.0
_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Fate:
    """What becomes of one request, drawn from its number."""

    leaves: str | None
    """When its client leaves, one of LEAVING; None where it stays."""
    streamed: bool
    thinks: float
    """Seconds before the engine's head."""
    events: int
    moment: float
    """Seconds after which its client leaves."""
    reset: bool
    """It leaves by RST."""
    share: float
    """How much of its body it sends."""


def fate(seed: int, number: int) -> Fate:
    chance = random.Random(f"{seed} {number}")
    leaves = chance.choice(LEAVING) if number % 2 else None
    return Fate(
        leaves=leaves,
        streamed=leaves == "mid-stream" or (leaves != "whole answer" and chance.random() < 0.6),
        thinks=_LONG
        if leaves in {"before the head", "whole answer", "with another behind"}
        else chance.uniform(0, 0.03),
        events=1000 if leaves == "mid-stream" else chance.randrange(10),
        moment=0.15 * chance.random() ** 3,  # often while the gateway has not begun or connects
        reset=chance.random() < 0.5,
        share=chance.random() if leaves == "upload" else 1.0,
    )


@dataclass
class Storm:
    """Sends the requests and plays the engine, both by the fates that a seed gives."""

    port: int
    key: str
    engine: Engine
    seed: int = 0
    told: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _left: dict[int, float] = field(default_factory=dict)
    _ended: dict[int, float] = field(default_factory=dict)
    _held: asyncio.Event = field(default_factory=asyncio.Event)

    async def rage(self, requests: int, concurrency: int) -> None:
        """Send all requests."""
        self.engine.script = self._script
        numbers = iter(range(requests))

        async def work() -> None:
            for number in numbers:
                await self._ask(number)
                if number and number % 1000 == 0:
                    say(f"{number} of {requests} requests sent")

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def calm(self) -> dict[str, float]:
        """What is counted as under way once a second has passed since the last cancel, and the slowest cancel."""
        await asyncio.sleep(NOTICE)
        seen = {int(call.json()["user"]) for call in self.engine.asked}
        slowest = 0.0
        staying: Counter[str] = Counter()
        for number, left in self._left.items():
            if number not in seen:
                self.told["never reached the engine"] += 1
            elif number not in self._ended:
                staying[fate(self.seed, number).leaves or ""] += 1
            else:
                slowest = max(slowest, self._ended[number] - left)
        self.faults += [f"still at the engine: {count} that left {leaves}" for leaves, count in staying.items()]
        if slowest > NOTICE:
            self.faults.append(f"a cancel reached the engine after {slowest:.2f} s")
        async with httpx.AsyncClient(trust_env=False) as client:
            lines = (await client.get(f"http://127.0.0.1:{self.port}/metrics")).text.splitlines()
        found = {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"moongate_{name}{{"))
            for name in GAUGES
        }
        self.faults += [f"moongate_{name} is {value:g}" for name, value in found.items() if value]
        return {"slowest_cancel_seconds": slowest, **found}

    async def refill(self, concurrent: int) -> None:
        """See that the tenant can have so many requests under way, and not one more."""
        before = len(self.engine.asked)
        self.engine.script = lambda _: (self._held, *whole(200, completed()))
        waiting = [asyncio.create_task(self._status()) for _ in range(concurrent)]
        try:
            async with asyncio.timeout(10):
                await self.engine.arrival(CHAT, before + concurrent)
            if (surplus := await self._status()) != 429:
                self.faults.append(f"a request beyond the tenant's concurrency got {surplus}")
        except TimeoutError:
            self.faults.append("the tenant's requests did not all reach the engine")
        self._held.set()
        if others := set(await asyncio.gather(*waiting)) - {200}:
            self.faults.append(f"the tenant did not have its full concurrency: {others}")

    def _script(self, call: Call) -> Iterator[Step]:
        number = int(call.json()["user"])
        what = fate(self.seed, number)
        clock = asyncio.get_running_loop().time
        try:
            yield _after(what.thinks)
            if not what.streamed:
                yield from whole(200, completed())
                return
            yield head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")])
            for _ in range(what.events):
                yield chunk(delta("word "))
                yield _after(0.01)
            yield chunk(DONE) + LAST_CHUNK
        finally:  # also where the peer has left: nobody holds the rest of the script then
            self._ended[number] = clock()

    async def _ask(self, number: int) -> None:
        what = fate(self.seed, number)
        request = self._request(number, stream=what.streamed, filler="x" * (200_000 if what.leaves == "upload" else 20))
        if what.leaves == "with another behind":
            request = request.replace(b"connection: close\r\n", b"") * 2
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request[: int(len(request) * what.share)])
        try:
            if what.leaves is None:
                await self._read(number, reader)
            else:
                self.told[what.leaves] += 1
                await asyncio.sleep(what.moment)
                self._left[number] = asyncio.get_running_loop().time()
        finally:
            if what.reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            writer.transport.abort()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        try:
            async with asyncio.timeout(20):
                answer = await reader.read()
        except (TimeoutError, OSError) as error:
            self.faults.append(f"request {number} was not answered: {error!r}")
            return
        if answer.startswith(b"HTTP/1.1 200") and (b"[DONE]" in answer or b"LYRA" in answer):
            self.told["answered"] += 1
        else:
            self.faults.append(f"request {number} was answered with {answer[:300]!r}")

    async def _status(self) -> int:
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            answer = await client.post(
                f"http://127.0.0.1:{self.port}{CHAT}",
                content=_body(-1),
                headers={"authorization": f"Bearer {self.key}"},
            )
            return answer.status_code

    def _request(self, number: int, **fields: object) -> bytes:
        body = _body(number, **fields)
        lines = (f"POST {CHAT} HTTP/1.1", "host: gateway", f"authorization: Bearer {self.key}", "connection: close")
        return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


def _body(number: int, **fields: object) -> bytes:
    messages = [{"role": "user", "content": "the engine loads a block of the prefix " * 20}]
    return orjson.dumps({"model": "tiny", "messages": messages, "user": str(number), **fields})


def _after(seconds: float) -> asyncio.Event:
    """A gate that opens by itself."""
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, gate.set)
    return gate


async def measure(requests: int, concurrency: int, seed: int) -> dict[str, Any]:
    limit = concurrency * 2
    with stage() as on:
        async with Engine() as engine, Master() as master:
            sections = {
                "pools": {"main": {"admin": [master.url], "deadline_ms": 200}},
                "tenants": [{**TENANT, "concurrent": limit}],
            }
            gateway = await asyncio.to_thread(lambda: on.gateway("gateway", engine.url, on.model, **sections))
            storm = Storm(gateway.port, KEY, engine, seed)
            await storm.rage(requests, concurrency)
            found = await storm.calm()
            await storm.refill(limit)
    return {"requests": requests, **storm.told, **found, "faults": storm.faults}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.cancels",
        description=__doc__,
        epilog="example: python -m tests.benchmarks.cancels --requests 500 --seed 7",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=5000, help="requests, half of them cancelled; default 5000")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once; default 64")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn follows from it; default 0")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = uvloop.run(measure(options.requests, options.concurrency, options.seed))
    if options.json:
        json.dump(found, sys.stdout, indent=2)
    else:
        rows = [[name, f"{value:g}"] for name, value in found.items() if name != "faults"]
        print(table(["", ""], rows))
    for fault in found["faults"][:SHOWN]:
        say(fault)
    if len(found["faults"]) > SHOWN:
        say(f"and {len(found['faults']) - SHOWN} more")
    return bool(found["faults"])


if __name__ == "__main__":
    sys.exit(main())
