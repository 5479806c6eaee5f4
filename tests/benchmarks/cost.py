"""What a request and an event cost the gateway in CPU time, beside vllm-router and a relay that does nothing else.

Each figure is user and system time of the relaying process (/proc), divided by what it relayed: rates on
a shared machine do not travel, ratios within one run do. Every relay gets every load in each run, in an
order that rotates; the first run warms up and does not count. The figures are medians, and so are the
ratios, each of which is taken within one run and against vllm-router's policy of the same name.

vllm-router is installed from PyPI into .venv-router beside the project.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import orjson
import uvloop

from gateway.processes import free_port
from tests.benchmarks import router
from tests.benchmarks.stage import KEY, Relay, Stage, say, stage, table
from tests.benchmarks.upstream import stamped

EVENTS = 200
PAUSE = 0.005
NUMBER = "00000000"
"""Stands in a body where each request has a number of its own, so that no two prompts are the same."""
SENTENCE = "the engine loads a block of the prefix "
LAST = b"\r\n0\r\n\r\n"
"""The end of an answer in chunks, with the line before it: a head may end with 0 as well."""
POLICIES = ("round_robin", "cache_aware")
COLUMNS = ("bare relay", *(f"{name} {policy}" for policy in POLICIES for name in ("vllm-router", "Moongate")))


@dataclass(frozen=True)
class Load:
    """What is sent, over how many connections, and how many units each request brings."""

    name: str
    body: Mapping[str, object]
    connections: int = 32
    units: int = 1
    stretch: int = 1
    """How many times as long as others it is sent, so that what /proc counts in hundredths is enough."""


def chat(*texts: str, **more: object) -> Mapping[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"model": "tiny", "messages": messages, "max_tokens": 16, **more}


def tool(number: int) -> Mapping[str, object]:
    properties = {f"field_{at}": {"type": "string", "description": SENTENCE} for at in range(25)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


LOADS = (
    Load("small request", chat(f"{NUMBER} What is a block?")),
    Load("1,100-token prompt, always the same", chat(SENTENCE * 160)),
    Load("1,100-token prompt, always another", chat(NUMBER + SENTENCE * 160)),
    Load("400 kB in one message", chat(NUMBER + SENTENCE * 10_250), connections=8),
    Load(
        "400 kB in 201 messages and 40 tools, the last message new",
        chat(*[SENTENCE * 38] * 200, NUMBER, tools=[tool(number) for number in range(40)]),
        connections=8,
    ),
    Load("SSE event", chat(f"{NUMBER} What is a block?", stream=True), units=EVENTS, stretch=2),
)


class Client(asyncio.Protocol):
    """One kept connection that asks again as soon as it is answered, until the time is up."""

    def __init__(self, load: Load, until: float, numbers: "count[int]") -> None:
        body = orjson.dumps(load.body)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n"
            f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._before, _, self._after = (head.encode() + body).partition(NUMBER.encode())
        self._numbered = bool(self._after)
        self._least = EVENTS * len(stamped()) if "stream" in load.body else 1
        self._until = until
        self._numbers = numbers
        self._head = self._tail = b""
        self._size = 0
        self._length: int | None = None
        """Bytes of the answer, its head too; 0 where it is chunked."""
        self.answered = 0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._size += len(data)
        self._tail = data[-len(LAST) :] if len(data) >= len(LAST) else (self._tail + data)[-len(LAST) :]
        if self._length is None:
            self._head += data
            head, mark, _ = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(head)
                return
            declared = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            self._length = len(head) + 4 + int(declared) if declared else 0
        if self._size == self._length or (self._length == 0 and self._tail == LAST):
            self.answered += 1
            if self._size < self._least:
                self._fail(data)
            elif time.monotonic() < self._until:
                self._ask()
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(self.answered)

    def _ask(self) -> None:
        self._head = self._tail = b""
        self._size = 0
        self._length = None
        if self._numbered:
            number = b"%08d" % next(self._numbers)
            self._transport.write(b"".join((self._before, number, self._after)))
        else:
            self._transport.write(self._before)

    def _fail(self, said: bytes) -> None:
        self.ended.set_exception(RuntimeError(f"an answer was not as it should be: {said[-500:]!r}"))
        self._transport.abort()


async def send(port: int, load: Load, seconds: float, numbers: "count[int]") -> int:
    """Send a load for so many seconds; how many requests were answered."""
    until = time.monotonic() + seconds
    connect = asyncio.get_running_loop().create_connection
    ends = []
    for _ in range(load.connections):
        _, client = await connect(lambda: Client(load, until, numbers), "127.0.0.1", port)
        ends.append(client.ended)
    return sum(await asyncio.gather(*ends))


def measure(relay: Relay, load: Load, seconds: float, numbers: "count[int]") -> float:
    """CPU microseconds of the relay for each unit of a load."""
    before = relay.cpu()
    answered = uvloop.run(send(relay.port, load, seconds * load.stretch, numbers))
    return (relay.cpu() - before) * 1e6 / (answered * load.units)


def relays(on: Stage) -> dict[str, Relay]:
    """Every relay that is compared, by its column."""
    upstream = on.upstream(EVENTS, PAUSE)
    found = {"bare relay": on.module("bare", "/health", "tests.benchmarks.bare", str(free_port()), upstream)}
    for policy in POLICIES:
        port = free_port()
        command = router.command(upstream, policy, port, free_port())
        found[f"vllm-router {policy}"] = on.start(f"router-{policy}", port, "/health", command)
        model = on.model if policy == "cache_aware" else None
        found[f"Moongate {policy}"] = on.gateway(f"gateway-{policy}", upstream, model, policy={"use": policy})
    return {column: found[column] for column in COLUMNS}


def compare(loads: list[Load], runs: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """The figures of each load and column, run by run."""
    figures: dict[str, dict[str, list[float]]] = {load.name: {name: [] for name in COLUMNS} for load in loads}
    numbers = count()
    with stage() as on:
        found = relays(on)
        for run in range(runs + 1):
            for load in loads:
                for at in range(len(COLUMNS)):
                    name = COLUMNS[(at + run) % len(COLUMNS)]
                    figure = measure(found[name], load, seconds if run else seconds / 3, numbers)
                    if run:  # the first warms up
                        figures[load.name][name].append(figure)
            say(f"run {run} of {runs} done" if run else "warmed up")
    return figures


def summary(row: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians of a load's figures, and of the ratios within each run."""
    ratios = {
        policy: statistics.median(
            ours / theirs for ours, theirs in zip(row[f"Moongate {policy}"], row[f"vllm-router {policy}"], strict=True)
        )
        for policy in POLICIES
    }
    return {
        "microseconds": {name: statistics.median(runs) for name, runs in row.items()},
        "ratio": ratios,
        "runs": row,
    }


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.cost",
        description=__doc__,
        epilog="example: python -m tests.benchmarks.cost --runs 3 --only small --only SSE",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5, help="paired runs, of which the median counts; default 5")
    parser.add_argument("--seconds", type=float, default=2, help="of each load on each relay; default 2")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only loads whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print JSON: medians, ratios, and every run")
    options = parser.parse_args()
    loads = [load for load in LOADS if not options.only or any(text in load.name for text in options.only)]
    if not loads or options.runs < 1 or options.seconds <= 0:
        parser.error(f"nothing to measure; the loads are: {', '.join(load.name for load in LOADS)}")
    found = {load: summary(row) for load, row in compare(loads, options.runs, options.seconds).items()}
    if options.json:
        json.dump(found, sys.stdout, indent=2)
        return
    rows = []
    for load, row in found.items():
        cells = [figure(row["microseconds"]["bare relay"])]
        for policy in POLICIES:
            cells += [figure(row["microseconds"][f"{name} {policy}"]) for name in ("vllm-router", "Moongate")]
            cells.append(f"{row['ratio'][policy]:.2f}x")
        rows.append([load, *cells])
    head = ["bare relay", *(f"{name} {policy}" for policy in POLICIES for name in ("vllm-router", "Moongate", "ratio"))]
    print(table(["CPU µs per", *head], rows))


if __name__ == "__main__":
    main()
