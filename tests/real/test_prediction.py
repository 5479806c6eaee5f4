"""What the gateway predicts is what real engines count: own tokens, pool tokens, nobody else's."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from .ask import CHAT, COMPLETIONS, chat, completion, eventually, metric, post, words
from .conftest import KEYS
from .stack import Engine, Gateway, Pool

BLOCK = 32


@contextmanager
def out(gateway: Gateway, engine: Engine) -> Iterator[None]:
    """The engine's HTTP side stands still, so that the gateway takes it out; its part of the store stays."""
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        eventually(lambda: not up(gateway, engine), f"{engine.name} is out")
        yield
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
        eventually(lambda: up(gateway, engine), f"{engine.name} is in again")


def up(gateway: Gateway, engine: Engine) -> bool:
    return metric(gateway.url, "moongate_engine_up", engine=f"127.0.0.1:{engine.port}") == 1


def by_source(engine: Engine) -> dict[str, float]:
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: engine.count("prompt_tokens_by_source_total", source=source) for source in sources}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_one_engine_computed_the_other_loads_and_a_repeat_finds_its_own(
    pool: Pool, gateway: Gateway, path: str
) -> None:
    text = words(900)
    body = chat(text) if path == CHAT else completion(text)
    key = KEYS["team-a"]
    keys_before = len(pool.master.keys())

    cold = post(gateway.url, path, body, key)
    tokens = cold.usage["prompt_tokens"]
    reusable = (tokens - 1) // BLOCK * BLOCK
    assert (cold.own, cold.pool, cold.cached) == (0, 0, 0)
    eventually(lambda: len(pool.master.keys()) >= keys_before + tokens // BLOCK, "the prompt is stored")

    first = next(engine for engine in pool.engines if cold.route["engine"].endswith(f":{engine.port}"))
    second = next(engine for engine in pool.engines if engine is not first)
    before = by_source(second)
    with out(gateway, first):
        loaded = post(gateway.url, path, body, key)
        assert loaded.status == httpx.codes.OK
        assert loaded.route["engine"].endswith(f":{second.port}")
        after = by_source(second)
        assert (loaded.own, loaded.pool) == (0, reusable)
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == loaded.pool
        assert after["local_compute"] - before["local_compute"] == tokens - reusable
        assert loaded.text == cold.text

        again = post(gateway.url, path, body, key)
        last = by_source(second)
        assert (again.own, again.pool) == (reusable, 0)
        assert last["local_cache_hit"] - after["local_cache_hit"] == again.own
        assert last["external_kv_transfer"] == after["external_kv_transfer"]
        assert again.text == cold.text

    assert metric(gateway.url, "moongate_prediction_error_tokens_sum") == 0


def test_a_tenant_gets_nothing_of_anothers(pool: Pool, gateway: Gateway) -> None:
    body = chat(words(600))
    mine = post(gateway.url, CHAT, body, KEYS["team-a"])
    mine_again = post(gateway.url, CHAT, body, KEYS["team-a"])
    theirs = post(gateway.url, CHAT, body, KEYS["team-b"])
    assert mine.cached == 0
    assert mine_again.cached > 0
    assert (theirs.cached, theirs.own, theirs.pool) == (0, 0, 0)


def test_a_growing_conversation_is_predicted_within_a_block(pool: Pool, gateway: Gateway) -> None:
    messages: list[dict[str, object]] = [{"role": "system", "content": words(200)}]
    for _ in range(6):
        messages.append({"role": "user", "content": words(120)})
        answer = post(gateway.url, CHAT, chat("", messages=messages, max_tokens=16), KEYS["team-a"])
        assert abs(answer.own + answer.pool - answer.cached) <= BLOCK
        messages.append({"role": "assistant", "content": answer.text})


def test_a_prompt_that_no_cache_is_read_for_is_predicted_as_such(gateway: Gateway) -> None:
    body = completion(words(300))
    assert post(gateway.url, COMPLETIONS, body, KEYS["team-a"]).status == httpx.codes.OK
    scored = post(gateway.url, COMPLETIONS, {**body, "prompt_logprobs": 1}, KEYS["team-a"])
    assert (scored.own, scored.pool, scored.cached) == (0, 0, 0)
