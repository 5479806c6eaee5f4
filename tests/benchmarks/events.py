"""KV events at 50,000 a second from eight engines: are they taken in whole, and what do requests pay?

Pairs of phases, without events and with them, while one client asks again and again. Each publisher stores
chains of blocks and removes the oldest, as an engine does whose cache is full. In the end every engine must be
thought to hold just what its publisher holds, or the gateway must say that it missed something. The exit status
is 1 where something was lost unnoticed, or where requests took more than twice as long at p99 with events.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections import deque
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from typing import Any

import httpx
import msgspec
import zmq

from gateway.processes import free_port
from tests.benchmarks.stage import KEY, Relay, say, stage, table

SLOWER = 2.0
"""How many times longer requests may take at p99."""
BLOCK = 16
HELD = 8000
"""Blocks that an engine has."""
CHAIN = 64
"""Blocks of a prompt."""


class Publisher:
    """One engine's events, made beforehand where they cost much: half of them store, half remove."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, number: int, batch: int) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._batch = batch
        self._number = number
        self._made = 0
        self._sent = 0
        self._held: deque[int] = deque()
        self._token_ids = list(range(BLOCK))

    @property
    def held(self) -> int:
        return len(self._held)

    def send(self) -> int:
        """Send a message; how many events are in it."""
        events: list[dict[str, Any]] = []
        while len(events) < self._batch:
            block = (self._number << 48 | self._made) * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [block],
                    "parent_block_hash": self._held[-1] if self._made % CHAIN else None,
                    "token_ids": self._token_ids,
                    "block_size": BLOCK,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
            self._made += 1
            self._held.append(block)
            if len(self._held) > HELD:
                gone = self._held.popleft()
                events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0})
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._socket.send_multipart((b"", self._sent.to_bytes(8, "big"), payload))
        self._sent += 1
        return len(events)


def publish(ports: list[int], first: int, rate: float, batch: int, go: Event, end: Event, said: Any) -> None:
    """Several publishers in one process, together at `rate` events a second while `go` is set."""
    with zmq.Context() as context:
        publishers = [Publisher(context, port, first + number, batch) for number, port in enumerate(ports)]
        time.sleep(1)  # for the gateway to connect
        sent, spent, turn = 0, 0.0, 0
        while not end.is_set():
            if not go.wait(0.05):
                continue
            started = time.monotonic()
            due = (spent + 0.005) * rate
            while sent < due:
                sent += publishers[turn % len(publishers)].send()
                turn += 1
            time.sleep(max(0.0, 0.005 - (time.monotonic() - started)))
            spent += time.monotonic() - started
        said.put((sent, spent, [publisher.held for publisher in publishers]))
        time.sleep(3)  # for what is under way


def ask(gateway: Relay, seconds: float) -> list[float]:
    """Requests one after another; how long each took, ascending."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "How long does this take? " * 40}]}
    took = []
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}", headers=headers, trust_env=False) as client:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.perf_counter()
            client.post("/v1/chat/completions", json=body).raise_for_status()
            took.append(time.perf_counter() - started)
            time.sleep(0.002)
    return sorted(took)


def metrics(gateway: Relay) -> dict[str, float]:
    """The gateway's samples, summed over engines."""
    totals: dict[str, float] = {}
    for line in httpx.get(f"http://127.0.0.1:{gateway.port}/metrics", trust_env=False).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rpartition(" ")[::2]
            name = name.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def measure(options: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    ports = [free_port() for _ in range(options.publishers)]
    with stage() as on, ExitStack() as stop:
        upstreams = [on.upstream(1, 0.0) for _ in ports]
        gateway = on.gateway(
            "gateway",
            upstreams[0],
            on.model,
            engines={
                "static": [
                    {"url": url, "model": "tiny", "kv_events": {"connect": f"tcp://127.0.0.1:{port}"}}
                    for url, port in zip(upstreams, ports, strict=True)
                ]
            },
        )
        go, end, said = spawn.Event(), spawn.Event(), spawn.Queue()
        rate = options.rate / options.processes
        shares = [ports[number :: options.processes] for number in range(options.processes)]
        workers = [
            spawn.Process(target=publish, args=(share, number * 1000, rate, options.batch, go, end, said))
            for number, share in enumerate(shares)
        ]
        for worker in workers:
            worker.start()
            stop.callback(worker.kill)
        time.sleep(3)
        pairs, cpu, busy = [], 0.0, 0.0
        for number in range(options.pairs):
            say(f"pair {number + 1} of {options.pairs}")
            without = ask(gateway, options.seconds)
            before, started = gateway.cpu(), time.monotonic()
            go.set()
            with_events = ask(gateway, options.seconds)
            go.clear()
            cpu += gateway.cpu() - before
            busy += time.monotonic() - started
            pairs.append((without, with_events))
        end.set()
        told = [said.get(timeout=30) for _ in workers]
        time.sleep(2)
        seen = metrics(gateway)
    sent = sum(each[0] for each in told)
    quantiles = [[phase[len(phase) * 99 // 100] for phase in pair] for pair in pairs]
    return {
        "publishers": options.publishers,
        "events_per_message": options.batch,
        "events_sent": sent,
        "events_per_second": sum(count / spent for count, spent, _ in told),
        "events_taken": seen.get("moongate_kv_events_total", 0.0),
        "missed_and_noticed": sum(
            seen.get(f"moongate_kv_event_{name}_total", 0.0) for name in ("gaps", "bad", "forgotten")
        ),
        "blocks_of_publishers": sum(sum(held) for *_, held in told),
        "blocks_held": seen["moongate_engine_held_blocks"],
        "gateway_cores": cpu / busy,
        "requests": sum(len(phase) for pair in pairs for phase in pair),
        "p50_without": statistics.median(pair[0][len(pair[0]) // 2] for pair in pairs),
        "p50_with": statistics.median(pair[1][len(pair[1]) // 2] for pair in pairs),
        "p99_without": statistics.median(each[0] for each in quantiles),
        "p99_with": statistics.median(each[1] for each in quantiles),
        "p99_ratio": statistics.median(each[1] / each[0] for each in quantiles),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Which bounds are broken."""
    broken = []
    whole = found["events_taken"] == found["events_sent"] and found["blocks_held"] == found["blocks_of_publishers"]
    if not whole and not found["missed_and_noticed"]:
        broken.append("events were lost and nobody noticed")
    if found["p99_ratio"] > SLOWER:
        broken.append(f"requests took {found['p99_ratio']:.1f} times as long at p99")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.events",
        description=__doc__,
        epilog="example: python -m tests.benchmarks.events --seconds 5 --pairs 1",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rate", type=int, default=50_000, help="events a second, all publishers; default 50000")
    parser.add_argument("--publishers", type=int, default=8, help="default 8")
    parser.add_argument("--processes", type=int, default=2, help="that they share; default 2")
    parser.add_argument("--batch", type=int, default=25, help="events of a message, as of an engine's step; default 25")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase; default 10")
    parser.add_argument("--pairs", type=int, default=3, help="of phases, without and with events; default 3")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        json.dump(found, sys.stdout, indent=2)
    else:
        rows = [
            ["events a second", f"{found['events_per_second']:,.0f} from {found['publishers']} publishers"],
            ["events of a message", str(found["events_per_message"])],
            ["sent, taken in", f"{found['events_sent']:,.0f}, {found['events_taken']:,.0f}"],
            ["missed, and noticed", f"{found['missed_and_noticed']:.0f}"],
            ["blocks held, of publishers", f"{found['blocks_held']:,.0f}, {found['blocks_of_publishers']:,.0f}"],
            ["gateway, cores", f"{found['gateway_cores']:.2f}"],
            ["request p50 without, with", f"{found['p50_without'] * 1000:.2f}, {found['p50_with'] * 1000:.2f} ms"],
            ["request p99 without, with", f"{found['p99_without'] * 1000:.2f}, {found['p99_with'] * 1000:.2f} ms"],
            ["p99 ratio, median of pairs", f"{found['p99_ratio']:.2f}"],
        ]
        print(table(["", ""], rows))
    broken = faults(found)
    for fault in broken:
        say(fault)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
