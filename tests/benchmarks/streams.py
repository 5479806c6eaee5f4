"""Many slow streams at once through one gateway process: is one broken or delayed, and does memory stay?

Two identical rounds of streams. The upstream stamps each event with the moment at which it sends it, the
client compares the moment at which it arrives, and nothing is subtracted. Jitter is by how much the time
between two events of a stream differs from that between their stamps. The exit status is 1 where a stream
broke, an event came more than a second late, or the gateway is more than 5 % larger after the second round
than after the first.

With --large, the second round has a prompt of so many bytes each second beside it, never the same text twice,
and jitter of 50 ms or more at p99 is a fault. Memory may then grow by what the gateway remembers of prompts.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import orjson
import uvloop

from tests.benchmarks.stage import KEY, LAST, Relay, say, stage, table
from tests.benchmarks.upstream import stamps

LATE = 1.0
"""Seconds that an event may take at most."""
GROWTH = 1.05
"""How much larger the second round may leave the gateway than the first."""
JITTER = 0.05
"""Seconds of jitter at p99 beside large prompts, at most."""
PATIENCE = 30.0
"""Seconds beyond its own after which a round is broken off."""


def request(text: str, *, stream: bool) -> bytes:
    """A chat of one message, as it is sent."""
    messages = [{"role": "user", "content": text}]
    body = orjson.dumps({"model": "tiny", "messages": messages, **({"stream": True} if stream else {})})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_REQUEST = request("Count.", stream=True)
_WORDS = ("engine", "loads", "a", "block", "of", "its", "prefix", "from", "the", "pool", "and", "decodes", "what")


class Stream(asyncio.Protocol):
    """One stream as it arrives."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._bytes = bytearray()
        self._arrivals: list[tuple[int, float]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(_REQUEST)

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        self._arrivals.append((len(self._bytes), time.monotonic()))
        if self._bytes.endswith(LAST):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def delays(self) -> list[float]:
        """Seconds that each event took, from its stamp to the arrival of its last byte."""
        arrivals = iter(self._arrivals)
        size, moment = 0, 0.0
        found = []
        for end, sent in stamps(self._bytes):
            while size < end:
                size, moment = next(arrivals)
            found.append(moment - sent)
        return found

    def jitters(self) -> list[float]:
        """Seconds by which the time between each two events has changed on the way."""
        return [abs(after - before) for before, after in pairwise(self.delays())]

    def whole(self, events: int) -> bool:
        """All events and the end came, and no error among them."""
        fine = self._bytes.startswith(b"HTTP/1.1 200") and self._bytes.endswith(LAST)
        return fine and self._bytes.count(b"data: [DONE]") == 1 and len(stamps(self._bytes)) == events


@dataclass(frozen=True, slots=True)
class Load:
    """What a round consists of."""

    streams: int
    events: int
    """Of each stream."""
    rate: float
    """Events a second."""
    large: int = 0
    """Bytes of a prompt that is sent each second beside the streams; 0: none is."""

    @property
    def seconds(self) -> float:
        return self.events / self.rate


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a round."""

    streams: list[Stream]
    large: list[float]
    """Seconds that each large prompt's answer took; infinity where it was none."""


def large_prompts(load: Load) -> list[bytes]:
    """One for each second, made beforehand. They part with their first word."""
    chance = random.Random(load.large)
    made = []
    for number in range(int(load.seconds) if load.large else 0):
        words = " ".join(chance.choices(_WORDS, k=load.large // 5))
        made.append(request(f"{number} {words}"[: load.large].ljust(load.large, "."), stream=False))
    return made


async def ask(port: int, sent: bytes) -> float:
    """Seconds until the answer to one request is there; infinity where it is not 200."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    status = await reader.readline()
    took = time.monotonic() - began
    writer.close()
    return took if status.startswith(b"HTTP/1.1 200") else float("inf")


async def play(port: int, load: Load) -> Played:
    """Open all streams at once and wait until they have ended."""
    connect, prompts = asyncio.get_running_loop().create_connection, large_prompts(load)
    played = [Stream() for _ in range(load.streams)]
    for stream in played:
        await connect(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    asked = []
    try:
        async with asyncio.timeout(load.seconds + PATIENCE):
            for prompt in prompts:
                asked.append(asyncio.create_task(ask(port, prompt)))
                await asyncio.sleep(1.0)
            await asyncio.gather(*(stream.ended.wait() for stream in played), *asked)
    except TimeoutError:
        say(f"{sum(not stream.ended.is_set() for stream in played)} streams had not ended in time")
    done = [one.result() if one.done() and not one.cancelled() else float("inf") for one in asked]
    return Played(played, done)


def at(share: int, figures: list[float]) -> float:
    """The figure below which so many of a hundred are; infinity where there is none."""
    return sorted(figures)[len(figures) * share // 100] if figures else float("inf")


def measure(name: str, gateway: Relay, load: Load) -> dict[str, Any]:
    """One round: what broke, how late and how uneven events were, and how large the gateway is behind it."""
    beside = f" beside prompts of {load.large} bytes" if load.large else ""
    say(f"{name}: {load.streams} streams for {load.seconds:.0f} s{beside}")
    played = uvloop.run(play(gateway.port, load))
    delays = [delay for stream in played.streams for delay in stream.delays()]
    jitters = [jitter for stream in played.streams for jitter in stream.jitters()]
    return {
        "round": name,
        "streams": load.streams,
        "broken": sum(not stream.whole(load.events) for stream in played.streams),
        "events": len(delays),
        **{f"p{share}": at(share, delays) for share in (50, 99)},
        "max": max(delays, default=float("inf")),
        "jitter_p99": at(99, jitters),
        "jitter_max": max(jitters, default=float("inf")),
        "large": len(played.large),
        "large_failed": sum(took == float("inf") for took in played.large),
        "large_p50": at(50, played.large),
        "rss": gateway.rss(),
    }


def faults(rounds: list[dict[str, Any]]) -> list[str]:
    """Which bounds are broken."""
    found = [f"{each['round']}: {each['broken']} streams broke" for each in rounds if each["broken"]]
    found += [f"{each['round']}: an event took {each['max']:.2f} s" for each in rounds if each["max"] > LATE]
    first, second = (each["rss"] for each in rounds)
    if rounds[1]["large"]:
        if rounds[1]["large_failed"]:
            found.append(f"{rounds[1]['large_failed']} large prompts were not answered")
        if rounds[1]["jitter_p99"] >= JITTER:
            found.append(f"jitter beside large prompts was {rounds[1]['jitter_p99'] * 1000:.0f} ms at p99")
    elif second > first * GROWTH:
        found.append(f"the gateway grew from {first:.1f} to {second:.1f} MB in the second round")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.streams",
        description=__doc__,
        epilog="examples:\n"
        "  python -m tests.benchmarks.streams --streams 200 --seconds 10\n"
        "  python -m tests.benchmarks.streams --streams 50 --seconds 20 --rate 20 --large 1000000",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=1000, help="streams at once; default 1000")
    parser.add_argument("--seconds", type=int, default=60, help="how long each stream is; default 60")
    parser.add_argument("--rate", type=float, default=1.0, help="events of each stream a second; default 1")
    parser.add_argument(
        "--large", type=int, default=0, metavar="BYTES", help="a prompt of so many each second; default none"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.streams < 1 or options.seconds < 1 or options.rate * options.seconds < 2 or options.large < 0:
        parser.error("there must be a stream, a second and two events, and no prompt is less than nothing")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(options.streams, int(options.seconds * options.rate), options.rate)
    with stage() as on:
        gateway = on.gateway("gateway", on.upstream(load.events, 1 / load.rate), on.model)
        before = gateway.rss()
        rounds = [
            measure("round 1", gateway, load),
            measure("round 2", gateway, replace(load, large=options.large)),
        ]
    broken = faults(rounds)
    if options.json:
        json.dump({"rss_before": before, "rounds": rounds, "faults": broken}, sys.stdout, indent=2)
    else:
        times = ("p50", "p99", "max", "jitter_p99", "jitter_max", "large_p50")
        rows = [["before", *[""] * 10, f"{before:.1f}"]]
        for each in rounds:
            counts = [str(each[name]) for name in ("round", "streams", "broken", "events")]
            spans = ["" if name == "large_p50" and not each["large"] else f"{each[name] * 1000:.1f}" for name in times]
            rows.append([*counts, *spans, str(each["large"]), f"{each['rss']:.1f}"])
        heads = ("p50 ms", "p99 ms", "max ms", "jitter p99 ms", "jitter max ms", "large p50 ms", "large", "RSS MB")
        print(table(["", "streams", "broken", "events", *heads], rows))
    for fault in broken:
        say(fault)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
