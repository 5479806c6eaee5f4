"""Prefill on one real engine, decode on another, the prompt handed over through the pool."""

import pytest

from .ask import CHAT, COMPLETIONS, chat, completion, metric, post, stream, words
from .conftest import KEYS, Serve
from .stack import Gateway, Pool

BLOCK = 32


@pytest.fixture(scope="module")
def apart(serve: Serve) -> Gateway:
    """A gateway whose first engine prefills and whose second decodes."""
    return serve(policy="disaggregated", roles=("prefill", "decode"))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
def test_decode_computes_only_the_tail_and_says_what_one_engine_says(
    pool: Pool, apart: Gateway, path: str, *, streamed: bool
) -> None:
    prefill, decode = pool.engines
    text = words(1500)
    body = chat(text, max_tokens=24) if path == CHAT else completion(text, max_tokens=24)
    handed = metric(apart.url, "moongate_handoffs_total", result="seen")
    computed = decode.count("request_prefill_kv_computed_tokens_sum")
    external = decode.count("prompt_tokens_by_source_total", source="external_kv_transfer")
    local = prefill.count("prompt_tokens_by_source_total", source="local_compute")

    if streamed:
        through, _ = stream(apart.url, path, body, KEYS["team-a"])
    else:
        answer = post(apart.url, path, body, KEYS["team-a"])
        through = answer.text
        assert answer.route["prefill"].endswith(f":{prefill.port}")
        assert answer.route["engine"].endswith(f":{decode.port}")

    after = {
        "computed": decode.count("request_prefill_kv_computed_tokens_sum") - computed,
        "external": decode.count("prompt_tokens_by_source_total", source="external_kv_transfer") - external,
        "prefilled": prefill.count("prompt_tokens_by_source_total", source="local_compute") - local,
    }
    own = post(pool.urls[0], path, body)
    tokens = own.usage["prompt_tokens"]
    reusable = (tokens - 1) // BLOCK * BLOCK
    assert through == own.text
    assert metric(apart.url, "moongate_handoffs_total", result="seen") == handed + 1
    assert after == {"computed": tokens - reusable, "external": reusable, "prefilled": tokens}


def test_a_second_turn_prefills_only_what_is_new(pool: Pool, apart: Gateway) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": words(900)}]
    first = post(apart.url, CHAT, chat("", messages=messages), KEYS["team-b"])
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": words(600)}]
    second = post(apart.url, CHAT, chat("", messages=messages), KEYS["team-b"])
    assert first.status == second.status == 200
    assert metric(apart.url, "moongate_prediction_error_tokens_sum") <= BLOCK
    assert metric(apart.url, "moongate_actual_cached_tokens_total", tenant="team-b") >= 800


def test_a_short_prompt_is_not_worth_a_second_engine(apart: Gateway) -> None:
    answer = post(apart.url, CHAT, chat("hi"), KEYS["team-a"])
    assert answer.status == 200
    assert "prefill" not in answer.route


def test_a_refused_prefill_is_the_clients_to_read(pool: Pool, apart: Gateway) -> None:
    body = chat(words(9000))
    own = post(pool.urls[0], CHAT, body)
    through = post(apart.url, CHAT, body, KEYS["team-a"])
    assert (through.status, through.data) == (own.status, own.data)
