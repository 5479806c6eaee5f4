"""The same conversations on real and on simulated engines: cached tokens agree, turn for turn.

What the agents answered is fixed beforehand, since a real model and made-up words say different things;
everything else is the demo's.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway import commands
from gateway.demo import ANSWER_TOKENS, SYSTEM, TURNS, WORK
from gateway.processes import Child, free_port

from .ask import CHAT, chat, eventually, post
from .stack import Master, Pool, inherited, start_master

BLOCK = 32
REPLY = "The files are read and the change is made: the prefix stays as it was, and only the new blocks are computed."


class Simulated:
    """Two simulated engines and a pool of their own."""

    def __init__(self, model: Path, folder: Path, stop: ExitStack) -> None:
        self.master = stop.enter_context(start_master(folder))
        self.urls = []
        children = []
        for number in (1, 2):
            flags = commands.EngineFlags(
                model=model,
                name="tiny",
                port=free_port(),
                master=self.master.rpc,
                block_size=BLOCK,
                more=("--max-model-len", "8192"),
            )
            child = Child(f"simulated-{number}", commands.simulated(flags), folder, inherited())
            children.append(stop.enter_context(child))
            self.urls.append(f"http://127.0.0.1:{flags.port}")
        for child, url in zip(children, self.urls, strict=True):
            child.wait_for(f"{url}/health", 60)


@pytest.fixture(scope="module")
def simulated(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with ExitStack() as stop:
        yield Simulated(model_folder, tmp_path_factory.mktemp("simulated"), stop)


def order(kind: str) -> list[int]:
    """Which engine takes each turn of a conversation."""
    return [turn % 2 if kind == "alternating" else 0 for turn in range(TURNS)]


def play(urls: Sequence[str], master: Master, salts: Sequence[str], engines: Sequence[int]) -> list[tuple[int, int]]:
    """Prompt and cached tokens of each turn of each tenant."""
    seen = []
    messages: dict[str, list[dict[str, Any]]] = {salt: [{"role": "system", "content": SYSTEM}] for salt in salts}
    for turn, engine in enumerate(engines, 1):
        for number, salt in enumerate(salts):
            messages[salt].append({"role": "user", "content": f"tenant {number}, step {turn}. {WORK}"})
            body = chat("", messages=messages[salt], max_tokens=ANSWER_TOKENS, ignore_eos=True, cache_salt=salt)
            answer = post(urls[(engine + number) % 2], CHAT, body)
            assert answer.status == 200, answer.data
            seen.append((answer.usage["prompt_tokens"], answer.cached))
            messages[salt].append({"role": "assistant", "content": REPLY})
            quiet(master)
    return seen


def quiet(master: Master) -> None:
    """Wait until what was prefilled is in the store."""
    counts = [-1]

    def unchanged() -> bool:
        counts.append(len(master.keys()))
        return len(counts) > 4 and len(set(counts[-4:])) == 1

    eventually(unchanged, "the store is quiet")


@pytest.mark.parametrize("kind", ["alternating", "sticky"])
def test_cached_tokens_agree_within_a_block(pool: Pool, simulated: Simulated, kind: str) -> None:
    salts = [uuid.uuid4().hex, uuid.uuid4().hex]
    real = play(pool.urls, pool.master, salts, order(kind))
    made_up = play(simulated.urls, simulated.master, salts, order(kind))
    for turn, ((prompt, cached), (same_prompt, simulated_cached)) in enumerate(zip(real, made_up, strict=True)):
        assert prompt == same_prompt
        assert abs(cached - simulated_cached) <= BLOCK, f"turn {turn}: real {real}, simulated {made_up}"
    assert [cached for _, cached in real[:2]] == [0, 0]
    assert sum(cached for _, cached in real) > 0.6 * sum(prompt for prompt, _ in real)
