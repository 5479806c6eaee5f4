"""The HTTP side alone: refusals, answers, streams, what is counted, and leaving early."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from connector.blocks import Algorithm, HashScheme, hash_prompt
from connector.simulated.serving import Model
from connector.simulated.timing import Speed

from .conftest import ADAPTER, BLOCK, OnePool, Run
from .exchanges import ANSWERED, ANY, CHAT, COMPLETIONS, REFUSED, STREAMED, Refused, chat, completion, stream_shape


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
async def test_what_vllm_refuses_is_refused_alike(run: Run, refused: Refused) -> None:
    async with run() as (client, _):
        answer = await client.post(refused.path, content=refused.content, headers=dict(refused.headers))
    assert answer.status_code == refused.status
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (refused.kind, refused.status)
    assert refused.param in (ANY, error["param"])


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in ANSWERED], ids=[case[0] for case in ANSWERED])
async def test_what_vllm_answers_is_answered(run: Run, path: str, body: dict[str, Any]) -> None:
    async with run() as (client, _):
        assert (await client.post(path, json=body)).status_code == httpx.codes.OK


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in STREAMED], ids=[case[0] for case in STREAMED])
async def test_a_stream_says_what_the_whole_says(run: Run, path: str, body: dict[str, Any]) -> None:
    options = body.get("stream_options") or {}
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    async with run() as (client, _):
        whole = (await client.post(path, json=plain)).json()
        answer = await client.post(path, json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [orjson.loads(line) for line in lines[:-1]]
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                finishes[choice["index"]] = choice["finish_reason"]
    said = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in whole["choices"]]
    assert [texts[index] for index in sorted(texts)] == said
    assert finishes == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    fingerprints = [event for event in events if "system_fingerprint" in event]
    if options.get("include_usage"):
        assert fingerprints == events[-1:]
        assert events[-1]["choices"] == []
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert events[-1]["usage"][count] == whole["usage"][count]
    else:
        assert len(fingerprints) == len(said)
        assert not any("usage" in event for event in events)
    assert all(("usage" in event) for event in events) is (options.get("continuous_usage_stats") is True)
    assert stream_shape(answer.content)[-1] == "[DONE]"


async def test_a_text_ends_at_its_stop_or_of_its_own(run: Run) -> None:
    async with run() as (client, _):
        full = (await client.post(COMPLETIONS, json=completion(max_tokens=6))).json()["choices"][0]["text"]
        words = full.split(" ")
        at = next(n for n in range(1, 6) if full.index(" " + words[n]) == len(" ".join(words[:n])))
        stopped = (await client.post(COMPLETIONS, json=completion(max_tokens=6, stop=[" " + words[at]]))).json()
        choice = stopped["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" ".join(words[:at]), "stop")
        assert choice["stop_reason"] == " " + words[at]

        ends = (await client.post(COMPLETIONS, json=completion(max_tokens=500, return_token_ids=True))).json()
        assert ends["choices"][0]["finish_reason"] == "stop"
        length = ends["usage"]["completion_tokens"]
        longer = completion(max_tokens=length + 20, min_tokens=length + 10)
        assert (await client.post(COMPLETIONS, json=longer)).json()["usage"]["completion_tokens"] == length + 11
        endless = completion(max_tokens=length + 20, ignore_eos=True)
        choice = (await client.post(COMPLETIONS, json=endless)).json()["choices"][0]
        assert choice["finish_reason"] == "length"


async def test_a_repeat_is_cached_but_for_the_last_token(run: Run) -> None:
    async with run() as (client, engine):
        body = completion(prompt=list(range(100, 100 + 4 * BLOCK)), max_tokens=2)
        cold = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        warm = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        salted = (await client.post(COMPLETIONS, json={**body, "cache_salt": "other"})).json()["usage"]
        metrics = (await client.get("/metrics")).text
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    labels = 'engine="0",model_name="tiny"'
    assert f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} {3 * BLOCK}.0' in metrics
    assert f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} {9 * BLOCK}.0' in metrics
    assert f"vllm:prefix_cache_queries_total{{{labels}}} {12 * BLOCK}.0" in metrics
    assert f"vllm:prefix_cache_hits_total{{{labels}}} {3 * BLOCK}.0" in metrics
    assert f"vllm:request_prefill_kv_computed_tokens_sum{{{labels}}} {9 * BLOCK}.0" in metrics
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 3.0" in metrics
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 3.0' in metrics
    assert 'vllm:cache_config_info{block_size="16"' in metrics
    assert engine.cache.usage == 0.0


async def test_what_was_generated_is_cached_but_for_the_last_token(run: Run) -> None:
    async with run() as (client, _):
        body = completion(prompt=list(range(100, 100 + BLOCK)), max_tokens=BLOCK, ignore_eos=True)
        answer = (await client.post(COMPLETIONS, json={**body, "return_token_ids": True})).json()["choices"][0]
        turn = answer["prompt_token_ids"] + answer["token_ids"] + [7, 8, 9]
        next_one = (await client.post(COMPLETIONS, json=completion(prompt=turn))).json()["usage"]
        assert next_one["prompt_tokens_details"]["cached_tokens"] == BLOCK
        body["max_tokens"] = BLOCK + 1
        answer = (await client.post(COMPLETIONS, json={**body, "return_token_ids": True})).json()["choices"][0]
        turn = answer["prompt_token_ids"] + answer["token_ids"] + [7, 8, 9]
        next_one = (await client.post(COMPLETIONS, json=completion(prompt=turn))).json()["usage"]
        assert next_one["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK


async def test_what_one_engine_prefilled_another_loads_and_never_the_sum(run: Run) -> None:
    pool = OnePool()
    prompt = list(range(100, 100 + 6 * BLOCK + 3))
    async with run(pool=pool) as (first, _), run(pool=pool) as (second, engine):
        await second.post(COMPLETIONS, json=completion(prompt=prompt[: 2 * BLOCK + 1]))
        await first.post(COMPLETIONS, json=completion(prompt=prompt, max_tokens=40, ignore_eos=True))
        await settled(pool, 6)
        usage = (await second.post(COMPLETIONS, json=completion(prompt=prompt))).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        sources = {source: counter._value.get() for source, counter in engine.metrics.by_source.items()}
        assert sources["local_cache_hit"] == 2 * BLOCK
        assert sources["external_kv_transfer"] == 4 * BLOCK
        scheme = HashScheme(Algorithm.SHA256_CBOR, BLOCK)
        assert pool.there == set(hash_prompt(prompt, scheme).hashes)


async def settled(pool: OnePool, blocks: int) -> None:
    async with asyncio.timeout(5):
        while len(pool.there) < blocks:  # noqa: ASYNC110 -- an answer comes before its blocks are put
            await asyncio.sleep(0.005)


async def test_a_decode_engine_puts_nothing(run: Run) -> None:
    pool = OnePool()
    async with run(pool=pool, role="kv_consumer") as (client, _):
        await client.post(COMPLETIONS, json=completion(prompt=list(range(100, 200))))
        await asyncio.sleep(0.05)
    assert pool.there == set()


async def test_an_adapter_has_its_own_blocks_and_its_place_in_the_list(run: Run, sim_model: Model) -> None:
    async with run() as (client, _):
        prompt = list(range(100, 100 + 3 * BLOCK))
        await client.post(COMPLETIONS, json=completion(prompt=prompt))
        adapted = await client.post(COMPLETIONS, json=completion(prompt=prompt, model="legal"))
        assert adapted.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert adapted.json()["model"] == "legal"
        base, adapter = (await client.get("/v1/models")).json()["data"]
    assert (base["id"], base["root"], base["max_model_len"]) == ("tiny", str(sim_model.folder), 8192)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("legal", ADAPTER.path, "tiny")


async def test_who_leaves_frees_the_place_at_once(run: Run) -> None:
    speed = Speed(max_running=1, decode_step_seconds=0.01)
    async with run(speed=speed, time_scale=1.0) as (client, engine):
        for stream in (False, True):
            body = completion(max_tokens=5000, ignore_eos=True, stream=stream)
            asked = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await asyncio.sleep(0.1)
            assert engine.metrics.running._value.get() == 1
            asked.cancel()
            await asyncio.wait({asked})
            assert (await client.post(COMPLETIONS, json=completion(max_tokens=1))).status_code == httpx.codes.OK
            assert engine.metrics.running._value.get() == 0
            assert engine.cache.usage == 0.0
        assert engine.metrics.success["abort"]._value.get() == 2


async def test_an_engine_that_is_told_to_stop_says_so(run: Run) -> None:
    async with run(time_scale=1.0) as (client, engine):
        body = chat(max_tokens=5000, ignore_eos=True)
        asked = asyncio.create_task(client.post(CHAT, json=body))
        await asyncio.sleep(0.1)
        engine.abort()
        answer = await asked
    assert answer.json()["choices"][0]["finish_reason"] == "abort"


async def test_requests_beyond_the_places_wait_their_turn(run: Run) -> None:
    async with run(speed=Speed(max_running=1, decode_step_seconds=0.01), time_scale=1.0) as (client, _):
        first = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=20, ignore_eos=True)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=1)))
        await asyncio.sleep(0.03)
        metrics = (await client.get("/metrics")).text
        assert 'num_requests_waiting{engine="0",model_name="tiny"} 1.0' in metrics
        assert 'by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0' in metrics
        await asyncio.gather(first, second)


async def test_the_small_routes(run: Run) -> None:
    async with run() as (client, _):
        assert (await client.get("/health")).content == b""
        assert (await client.post("/ping")).status_code == httpx.codes.OK
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.get("/kv_event_sources")).json() == {}
        unknown = await client.get("/nope")
        assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
        wrong = await client.get(CHAT)
        assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
        answer = await client.post(CHAT, json=chat(), headers={"x-request-id": "abc"})
        assert (answer.json()["id"], answer.headers["x-request-id"]) == ("chatcmpl-abc", "abc")
