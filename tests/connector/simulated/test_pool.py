"""Simulated engines as processes, over a real Mooncake pool."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector.blocks import Algorithm, HashScheme, hash_prompt
from connector.keys import KeyScheme
from connector.simulated.model import NAME
from gateway.processes import Child
from tests.real.ask import COMPLETIONS, completion, eventually, post
from tests.real.stack import LIBRARIES, MASTER, Master, free_port, inherited, start_master

BLOCK = 16
SOON = 3
"""Seconds: the client's own way out takes 0.7 to 1.8."""
SCHEME = HashScheme(Algorithm.SHA256_CBOR, BLOCK)


def missing() -> str | None:
    """Why there is no pool here, in one sentence."""
    if not MASTER.exists():
        return f"{MASTER.name} is not installed beside {sys.executable}."
    for library in LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"the shared library {library} is missing."
    return None


REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


class Engine(Child):
    def __init__(self, name: str, folder: Path, model: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command: Sequence[str | Path] = (
            *(sys.executable, "-m", "connector.simulated", "--model", model, "--served-model-name", "tiny"),
            *("--port", str(self.port), "--time-scale", "0.1", *options),
        )
        super().__init__(name, command, folder, inherited())


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with start_master(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def engines(master: Master, sim_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as stop:
        started = [
            stop.enter_context(Engine(f"engine-{n}", folder, sim_folder, "--master", master.rpc)) for n in (1, 2)
        ]
        for engine in started:
            engine.wait_for(f"{engine.url}/health", 30)
        yield started


def prompt(first: int, blocks: int) -> list[int]:
    return [(first + place * 7) % 4000 + 4 for place in range(blocks * BLOCK + 5)]


def keys(tokens: Sequence[int], salt: str | None = None) -> set[str]:
    names = KeyScheme.of(NAME)
    return {key for block in hash_prompt(tokens, SCHEME, salt=salt).hashes for key in names.keys(block)}


def cached(engine: Engine, tokens: Sequence[int], **fields: object) -> int:
    return post(engine.url, COMPLETIONS, completion(list(tokens), **fields)).cached


def test_a_repeat_on_the_other_engine_loads_what_the_first_one_put(master: Master, engines: list[Engine]) -> None:
    first, second = engines
    tokens = prompt(1, 9)
    assert cached(first, tokens) == 0
    eventually(lambda: keys(tokens) <= set(master.keys()), "every block is in the pool")
    assert cached(second, tokens) == 9 * BLOCK
    assert cached(second, tokens) == 9 * BLOCK
    text = httpx.get(f"{second.url}/metrics", trust_env=False).text
    assert f'source="external_kv_transfer"}} {9 * BLOCK}.0' in text
    assert f'source="local_cache_hit"}} {9 * BLOCK}.0' in text


def test_the_keys_are_ours_and_only_a_prompts_blocks_are_there(master: Master, engines: list[Engine]) -> None:
    before = set(master.keys())
    tokens = prompt(2, 3)
    cached(engines[0], tokens, max_tokens=100, ignore_eos=True)
    eventually(lambda: len(set(master.keys()) - before) >= 3, "the prompt is in the pool")
    assert set(master.keys()) - before == keys(tokens)


def test_salts_keep_apart(master: Master, engines: list[Engine]) -> None:
    first, second = engines
    tokens = prompt(3, 4)
    cached(first, tokens, cache_salt="a")
    eventually(lambda: keys(tokens, "a") <= set(master.keys()), "every block is in the pool")
    assert cached(second, tokens, cache_salt="b") == 0
    assert cached(second, tokens) == 0
    assert cached(second, tokens, cache_salt="a") == 4 * BLOCK


def test_ten_turns_on_two_engines_in_turn(engines: list[Engine]) -> None:
    """As real engines do: the other engine's last answer is all that is computed twice."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "the engine loads a block from the pool " * 20}]
    earlier = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"turn {turn}: " + "and another tool says so " * 20})
        body = {"model": "tiny", "messages": messages, "max_tokens": 32, "ignore_eos": True}
        answer = post(engines[turn % 2].url, "/v1/chat/completions", body)
        assert answer.cached == earlier // BLOCK * BLOCK
        earlier = answer.usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer.text})
        time.sleep(0.1)


def test_a_dead_master_is_a_miss_and_a_signal_ends_the_engine(sim_folder: Path, tmp_path: Path) -> None:
    with start_master(tmp_path) as master, Engine("engine", tmp_path, sim_folder, "--master", master.rpc) as engine:
        engine.wait_for(f"{engine.url}/health", 30)
        segments = httpx.get(f"{master.admin}/get_all_segments", trust_env=False).text
        assert segments.strip()
        cached(engine, prompt(4, 4))
        master.kill()
        started = time.monotonic()
        for first in (5, 6, 7):
            assert cached(engine, prompt(first, 4)) == 0
        assert time.monotonic() - started < 5
        assert ended(engine) < SOON


def test_a_signal_unmounts_the_segment(master: Master, sim_folder: Path, tmp_path: Path) -> None:
    before = httpx.get(f"{master.admin}/get_all_segments", trust_env=False).text
    with Engine("engine", tmp_path, sim_folder, "--master", master.rpc) as engine:
        engine.wait_for(f"{engine.url}/health", 30)
        assert httpx.get(f"{master.admin}/get_all_segments", trust_env=False).text != before
        with httpx.stream("POST", engine.url + COMPLETIONS, json=endless(), trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert ended(engine) < SOON
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        eventually(
            lambda: httpx.get(f"{master.admin}/get_all_segments", trust_env=False).text == before, "it is unmounted", 3
        )


def endless() -> dict[str, Any]:
    return completion("on and on", stream=True, max_tokens=20_000, ignore_eos=True)


def ended(engine: Engine) -> float:
    """End an engine by SIGTERM; how many seconds that took."""
    started = time.monotonic()
    os.kill(engine.process.pid, signal.SIGTERM)
    assert engine.process.wait(10) == 0
    return time.monotonic() - started
