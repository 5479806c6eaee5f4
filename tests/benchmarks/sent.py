"""What it saves to send a real engine a prompt's ids, so that it skips its own template and tokenizer.

One vLLM engine (.venv-vllm, no GPU), two gateways before it: one sends text, the other ids as soon as they
have agreed often enough. Conversations of some 5,000 tokens are asked for one token, again and again with
another last message: what the engine does not hold is some hundred tokens. The gateways take turns within
a run; the figures are medians of all requests.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.stage import KEY, TENANT, say, table
from tests.real.stack import Engine, Gateway, start_engine, start_gateway, start_master, tiny_model

SENTENCE = "the engine loads a block of the prefix from the pool "
TURNS = 12
WARM = 30
"""Requests after which ids are sent."""


def conversation() -> list[dict[str, str]]:
    """Some 5,000 tokens that nobody has sent before."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": SENTENCE * 36} for at in range(TURNS)]
    return [{"role": "system", "content": str(uuid.uuid4())}, *turns]


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[float, int]:
    """Seconds of one request, and its prompt's tokens."""
    body = {"model": "tiny", "messages": [*messages, {"role": "user", "content": str(uuid.uuid4())}], "max_tokens": 1}
    started = time.perf_counter()
    answer = client.post("/v1/chat/completions", json=body).raise_for_status()
    return time.perf_counter() - started, answer.json()["usage"]["prompt_tokens"]


def cpu(engine: Engine) -> float:
    """User and system seconds of the engine's server process, which renders and tokenises."""
    fields = Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(requests: int, folder: Path) -> dict[str, Any]:
    model = tiny_model()
    with ExitStack() as stop:
        master = stop.enter_context(start_master(folder))
        say("starting a vLLM engine (half a minute)")
        engine = stop.enter_context(start_engine(model, "engine", master, folder=folder).ready())

        def gateway(send: str) -> Gateway:
            tree: dict[str, Any] = {
                "secret": "of the benchmark",
                "tenants": [TENANT],
                "models": [{"name": "tiny", "tokenizer": str(model), "send_tokens": send}],
                "engines": {"static": [{"url": engine.url, "model": "tiny"}]},
            }
            return stop.enter_context(start_gateway(tree, folder / send))

        clients = {}
        for send in ("never", "verified"):
            headers = {"authorization": f"Bearer {KEY}"}
            clients[send] = stop.enter_context(
                httpx.Client(base_url=gateway(send).url, headers=headers, timeout=60, trust_env=False)
            )
        messages = conversation()
        for client in clients.values():
            for _ in range(WARM):
                ask(client, messages)
        seconds: dict[str, list[float]] = {send: [] for send in clients}
        spent = dict.fromkeys(clients, 0.0)
        tokens = 0
        for number in range(requests):
            for send, client in clients.items():
                before = cpu(engine)
                for _ in range(10):
                    taken, tokens = ask(client, messages)
                    seconds[send].append(taken)
                spent[send] += cpu(engine) - before
            say(f"{number + 1} of {requests} rounds")
    return {
        "prompt_tokens": tokens,
        "ms": {send: statistics.median(taken) * 1000 for send, taken in seconds.items()},
        "engine_cpu_ms": {send: spent[send] / (10 * requests) * 1000 for send in spent},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python -m tests.benchmarks.sent --rounds 5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10, help="of ten requests with each gateway")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.rounds, Path(folder))
    if arguments.json:
        json.dump(found, sys.stdout, indent=2)
        return
    rows = [
        [name, f"{found['ms'][send]:.1f}", f"{found['engine_cpu_ms'][send]:.1f}"]
        for name, send in (("text", "never"), ("token ids", "verified"))
    ]
    print(f"A prompt of {found['prompt_tokens']} tokens, all but its end held by the engine:\n")
    print(table(["what is sent", "ms for a request", "CPU ms of the engine's server process"], rows))


if __name__ == "__main__":
    main()
