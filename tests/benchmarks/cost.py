"""What a request and an event cost the gateway in CPU time, beside a relay that does nothing else.

    python -m tests.benchmarks.cost            some two minutes; --json for machines

The figure is user and system time of the relaying process (/proc), divided by what it relayed: rates on
a shared machine do not travel, ratios within one run do. Median of paired runs.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from connector.simulated.model import make
from gateway.processes import Child, free_port

KEY = "key-of-the-benchmark"
CONNECTIONS = 32
TICKS = os.sysconf("SC_CLK_TCK")
SMALL = {"model": "tiny", "messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 16}
TURN = {"model": "tiny", "messages": [{"role": "user", "content": "the engine loads a block of the prefix " * 160}]}


@dataclass(frozen=True)
class Load:
    """What is sent: a body, how often, and how many units each brings."""

    name: str
    body: Mapping[str, object]
    requests: int
    units: int = 1


EVENTS = 200
LOADS = (
    Load("small request", SMALL, 6000),
    Load("1,100-token prompt", TURN, 2000),
    Load("SSE event", {**SMALL, "stream": True}, 160, EVENTS),
)


def config(upstream: str, port: int, model: Path | None, policy: str) -> Mapping[str, object]:
    return {
        "listen": {"port": port},
        "secret": "a secret",
        "pools": {"main": {"admin": [upstream], "deadline_ms": 200}},
        "models": [{"name": "tiny", "pool": "main", "tokenizer": str(model) if model else None}],
        "engines": {"static": [{"url": upstream, "model": "tiny"}]},
        "policy": {"use": policy},
        "tenants": [{"name": "t", "keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}],
    }


@contextmanager
def relays(folder: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Every relay that is compared, by name: its port and its pid."""
    model = make(folder / "moongate-sim")
    upstream = free_port()
    url = f"http://127.0.0.1:{upstream}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with ExitStack() as stop:

        def start(name: str, *command: str | Path) -> Child:
            return stop.enter_context(Child(name, [sys.executable, "-m", *command], folder, environment))

        behind = start("upstream", "tests.benchmarks.upstream", str(upstream), str(EVENTS), "0.01")
        behind.wait_for(f"{url}/health", 20)
        found = {}
        port = free_port()
        bare = start("bare", "tests.benchmarks.bare", str(port), url)
        bare.wait_for(f"http://127.0.0.1:{port}/health", 20)
        found["bare relay"] = (port, bare.process.pid)
        kinds: tuple[tuple[str, str, Path | None], ...] = (
            ("round_robin, no tokenizer", "round_robin", None),
            ("cache_aware, all steps", "cache_aware", model),
        )
        for name, policy, tokenizer in kinds:
            port = free_port()
            path = folder / f"{policy}.yaml"
            path.write_text(json.dumps(config(url, port, tokenizer, policy)))
            gateway = start(policy, "gateway", "serve", "--config", path)
            gateway.wait_for(f"http://127.0.0.1:{port}/ready", 60)
            found[name] = (port, gateway.process.pid)
        yield found


def cpu(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def send(port: int, load: Load) -> None:
    """Send a load over kept connections, each asking again as soon as it is answered."""
    body = orjson.dumps(load.body)
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    left = iter(range(load.requests))

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            if b"chunked" in head:
                await reader.readuntil(b"0\r\n\r\n")
            else:
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))


def measure(port: int, pid: int, load: Load) -> float:
    """CPU microseconds of the relay for each unit of a load."""
    before = cpu(pid)
    asyncio.run(send(port, load))
    return (cpu(pid) - before) * 1e6 / (load.requests * load.units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="paired runs, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, relays(Path(folder)) as found:
        figures: dict[str, dict[str, list[float]]] = {load.name: {name: [] for name in found} for load in LOADS}
        for run in range(options.runs + 1):
            for load in LOADS:
                for name, (port, pid) in found.items():
                    figure = measure(port, pid, load)
                    if run:  # the first warms up
                        figures[load.name][name].append(figure)
            print(f"run {run} of {options.runs} done", file=sys.stderr)
    medians = {load: {name: statistics.median(runs) for name, runs in row.items()} for load, row in figures.items()}
    if options.json:
        print(json.dumps(medians, indent=2))
        return
    names = list(next(iter(medians.values())))
    print("| CPU µs per | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for unit, row in medians.items():
        cells = (f"{row[name]:.0f} ({row[name] / row[names[0]]:.2f}x)" for name in names)
        print(f"| {unit} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
