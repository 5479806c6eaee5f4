"""The real pool is one: what one engine has prefilled, the other loads instead of computing it."""

import time
import uuid

import httpx

from .stack import Engine, Pool

PROMPT_TOKENS = 1000


def fresh_prompt() -> list[int]:
    """Token ids that no engine has seen: the first ones come from a random number."""
    return [8 + byte for byte in uuid.uuid4().bytes] + [300 + n for n in range(PROMPT_TOKENS - 16)]


def complete(engine: Engine, prompt: list[int]) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60).raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def wait_for_keys(pool: Pool, count: int) -> None:
    """Blocks reach the store a little after the answer that came from them."""
    end = time.monotonic() + 20
    while len(pool.master.keys()) < count:
        assert time.monotonic() < end, f"fewer than {count} keys in the store"
        time.sleep(0.05)


def loaded(engine: Engine) -> float:
    return engine.count("prompt_tokens_by_source_total", source="external_kv_transfer")


def test_second_engine_loads_what_the_first_computed(pool: Pool) -> None:
    first, second = pool.engines
    prompt = fresh_prompt()
    keys_before, loaded_before = len(pool.master.keys()), loaded(second)

    text = complete(first, prompt)
    wait_for_keys(pool, keys_before + PROMPT_TOKENS // 32)

    assert complete(second, prompt) == text
    assert loaded(second) - loaded_before >= 0.9 * PROMPT_TOKENS
