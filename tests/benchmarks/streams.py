"""Many slow streams at once through one gateway process: is one broken or delayed, and does memory stay?

Two identical rounds of streams with an event a second. The upstream stamps each event with the moment at
which it sends it, the client compares the moment at which it arrives, and nothing is subtracted. The exit
status is 1 where a stream broke, an event came more than a second late, or the gateway is more than 5 %
larger after the second round than after the first.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any, cast

import orjson
import uvloop

from tests.benchmarks.stage import KEY, LAST, Relay, say, stage, table
from tests.benchmarks.upstream import stamps

LATE = 1.0
"""Seconds that an event may take at most."""
GROWTH = 1.05
"""How much larger the second round may leave the gateway than the first."""
PATIENCE = 30.0
"""Seconds beyond its own after which a round is broken off."""

_BODY = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Count."}], "stream": True})
_REQUEST = (
    f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
    f"content-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n"
).encode() + _BODY


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

    def whole(self, events: int) -> bool:
        """All events and the end came, and no error among them."""
        fine = self._bytes.startswith(b"HTTP/1.1 200") and self._bytes.endswith(LAST)
        return fine and self._bytes.count(b"data: [DONE]") == 1 and len(stamps(self._bytes)) == events


async def play(port: int, streams: int, seconds: int) -> list[Stream]:
    """Open all streams at once and wait until they have ended."""
    connect = asyncio.get_running_loop().create_connection
    played = [Stream() for _ in range(streams)]
    for stream in played:
        await connect(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    try:
        async with asyncio.timeout(seconds + PATIENCE):
            await asyncio.gather(*(stream.ended.wait() for stream in played))
    except TimeoutError:
        say(f"{sum(not stream.ended.is_set() for stream in played)} streams had not ended in time")
    return played


def measure(name: str, gateway: Relay, streams: int, seconds: int) -> dict[str, Any]:
    """One round: what broke, how late events were, and how large the gateway is behind it."""
    say(f"{name}: {streams} streams for {seconds} s")
    played = uvloop.run(play(gateway.port, streams, seconds))
    delays = sorted(delay for stream in played for delay in stream.delays()) or [float("inf")]
    return {
        "round": name,
        "streams": streams,
        "broken": sum(not stream.whole(seconds) for stream in played),
        "events": len(delays),
        **{f"p{share}": delays[len(delays) * share // 100] for share in (50, 99)},
        "max": delays[-1],
        "rss": gateway.rss(),
    }


def faults(rounds: list[dict[str, Any]]) -> list[str]:
    """Which bounds are broken."""
    found = [f"{each['round']}: {each['broken']} streams broke" for each in rounds if each["broken"]]
    found += [f"{each['round']}: an event took {each['max']:.2f} s" for each in rounds if each["max"] > LATE]
    first, second = (each["rss"] for each in rounds)
    if second > first * GROWTH:
        found.append(f"the gateway grew from {first:.1f} to {second:.1f} MB in the second round")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.streams",
        description=__doc__,
        epilog="example: python -m tests.benchmarks.streams --streams 200 --seconds 10",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=1000, help="streams at once; default 1000")
    parser.add_argument("--seconds", type=int, default=60, help="events of each stream, one a second; default 60")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.streams < 1 or options.seconds < 1:
        parser.error("there must be a stream and a second")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with stage() as on:
        gateway = on.gateway("gateway", on.upstream(options.seconds, 1.0), on.model)
        before = gateway.rss()
        rounds = [measure(name, gateway, options.streams, options.seconds) for name in ("round 1", "round 2")]
    broken = faults(rounds)
    if options.json:
        json.dump({"rss_before": before, "rounds": rounds, "faults": broken}, sys.stdout, indent=2)
    else:
        rows = [["before", *[""] * 6, f"{before:.1f}"]]
        for each in rounds:
            times = [f"{each[name] * 1000:.1f}" for name in ("p50", "p99", "max")]
            rows.append(
                [*(str(each[name]) for name in ("round", "streams", "broken", "events")), *times, f"{each['rss']:.1f}"]
            )
        print(table(["", "streams", "broken", "events", "p50 ms", "p99 ms", "max ms", "RSS MB"], rows))
    for fault in broken:
        say(fault)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
