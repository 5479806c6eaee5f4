"""One engine's control side: what vLLM says of itself, and everything that can go wrong with it."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import vllm as module
from connector.errors import BadAnswer, Disconnected, TimedOut, Unreachable, WireError
from connector.vllm import CacheFacts, Card, EngineControl, EventSource, Load
from tests.connector.peer import Line, Peer, Script, answers, free_port, hold, listen, ok, once

CARDS: list[dict[str, Any]] = [
    {"id": "qwen3", "object": "model", "root": "/models/Qwen3-8B", "parent": None, "max_model_len": 4096},
    {"id": "sql", "object": "model", "root": "/adapters/sql", "parent": "qwen3"},
]
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",num_gpu_blocks="8192",prefix_caching_hash_algo="sha256_cbor",engine="0"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen3"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="qwen3"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="qwen3",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="qwen3",reason="deferred"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="qwen3"} 0.25
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="qwen3"} 0.0
"""


def text(body: str) -> bytes:
    return ok(body.encode(), b"text/plain; version=0.0.4; charset=utf-8")


@asynccontextmanager
async def controlled(*scripts: Script, limit: float = 5.0) -> AsyncIterator[tuple[EngineControl, Peer]]:
    async with listen(*scripts) as peer:
        control = EngineControl(peer.url, timeout=limit)
        try:
            yield control, peer
        finally:
            await control.close()


# models


async def test_models_and_their_adapters() -> None:
    async with controlled(answers(ok(orjson.dumps({"object": "list", "data": CARDS})))) as (control, peer):
        base, adapter = await control.models()

    assert base == Card("qwen3", "/models/Qwen3-8B", None, CARDS[0])
    assert (adapter.id, adapter.root, adapter.parent) == ("sql", "/adapters/sql", "qwen3")
    assert [request.target for request in peer.requests] == ["/v1/models"]


async def test_a_card_may_be_bare() -> None:
    async with controlled(answers(ok(b'{"data":[{"id":"m"}]}'))) as (control, _):
        assert await control.models() == (Card("m", None, None, {"id": "m"}),)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"<html>", b"[]", b"7", b"null", b"{}", b'{"data":null}', b'{"data":7}', b'{"data":{"id":"m"}}',
     b'{"data":["m"]}', b'{"data":[null]}', b'{"data":[["id"]]}', b'{"data":[{}]}', b'{"data":[{"id":7}]}',
     b'{"data":[{"id":null}]}', b'{"data":[{"id":"m","root":7}]}', b'{"data":[{"id":"m","parent":{}}]}',
     b'{"error":"no"}', b"[" * 100_000, b'{"data":"\xff"}'],
    ids=lambda body: repr(body[:30]),
)  # fmt: skip
async def test_what_is_no_list_of_models(body: bytes) -> None:
    async with controlled(answers(ok(body))) as (control, peer):
        with pytest.raises(BadAnswer, match="no list of models") as caught:
            await control.models()
        assert caught.value.origin == peer.url


# metrics


async def test_the_cache_and_the_load() -> None:
    async with controlled(answers(text(METRICS))) as (control, peer):
        facts, load = await control.metrics()

    assert facts == CacheFacts(block_size=32, algorithm="sha256_cbor", blocks=8192)
    assert load == Load(running=3, waiting=2, cache_usage=0.25)
    assert [request.target for request in peer.requests] == ["/metrics"]


@pytest.mark.parametrize(
    ("said", "started"),
    [
        ("", None),
        ("process_start_time_seconds 1.79603e+09\n", 1_796_030_000.0),
        ("process_start_time_seconds 1.0\nprocess_start_time_seconds 2.0\n", None),
    ],
)
async def test_when_the_engine_began(said: str, started: float | None) -> None:
    async with controlled(answers(text(METRICS + said))) as (control, _):
        _, load = await control.metrics()

    assert load is not None
    assert load.started == started


async def test_a_rank_that_is_not_there_is_named() -> None:
    async with listen(answers(text(METRICS)), answers(text(METRICS))) as peer:
        zero, one = (EngineControl(peer.url, rank=rank) for rank in (0, 1))
        assert (await zero.metrics())[1] == Load(running=3, waiting=2, cache_usage=0.25)
        with pytest.raises(BadAnswer, match="it has no data parallel rank 1; set its data_parallel"):
            await one.metrics()
        for control in (zero, one):
            await control.close()


async def test_data_parallel_ranks_are_one_engine() -> None:
    """Requests add up; of the caches, which have one size, the mean is the share in use."""
    said = "".join(
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",engine="{rank}"}} 1.0\n'
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank + 1}.0\n'
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} {rank * 10}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {rank / 4}\n'
        for rank in range(3)
    )
    async with controlled(answers(text(said))) as (control, _):
        facts, load = await control.metrics()

    assert load == Load(running=6, waiting=30, cache_usage=0.25)
    assert facts == CacheFacts(block_size=16, algorithm=None, blocks=100)


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ({}, 32),
        ({"effective_attention_block_size": "32", "mamba_block_size": "None", "sliding_window": "None"}, 32),
        ({"effective_attention_block_size": "64"}, 64),  # over two decode context parallel ranks
        ({"effective_attention_block_size": "None", "prefix_match_unit": "None"}, 32),
        ({"prefix_match_unit": "16", "mamba_block_size": "528", "mamba_cache_mode": "align"}, 16),
        ({"sliding_window": "4096"}, 32),
        ({"sliding_window": "4096", "effective_attention_block_size": "32"}, 32),
        ({"sliding_window": "4096", "effective_attention_block_size": "64"}, None),
        ({"sliding_window": "4096", "mamba_block_size": "32", "mamba_cache_mode": "align"}, None),
        ({"mamba_block_size": "528", "mamba_cache_mode": "align", "effective_attention_block_size": "528"}, 528),
        ({"mamba_block_size": "528", "mamba_cache_mode": "align", "effective_attention_block_size": "32"}, 16),
        ({"mamba_block_size": "528", "mamba_cache_mode": "align"}, None),
        ({"mamba_block_size": "8192", "mamba_cache_mode": "none", "effective_attention_block_size": "32"}, None),
    ],
)
async def test_a_hashed_block_follows_from_what_is_said_or_is_not_known(said: dict[str, str], size: int | None) -> None:
    more = "".join(f',{name}="{value}"' for name, value in said.items())
    async with controlled(answers(text(METRICS.replace(',engine="0"} 1.0', f'{more},engine="0"}} 1.0', 1)))) as (c, _):
        facts, _ = await c.metrics()

    assert facts.block_size == size


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"version":"0.32.0"}', "0.32.0"),
        (b'{"version":7}', None),
        (b"{}", None),
        (b"[]", None),
        (b"null", None),
        (b"<html>", None),
        (b"", None),
    ],
)
async def test_the_version(body: bytes, version: str | None) -> None:
    async with controlled(answers(ok(body))) as (control, peer):
        assert await control.version() == version
    assert [request.target for request in peer.requests] == ["/version"]


@pytest.mark.parametrize("gauge", ["num_requests_running", "num_requests_waiting{", "kv_cache_usage_perc"])
async def test_a_missing_gauge_leaves_the_load_unknown(gauge: str) -> None:
    said = "\n".join(line for line in METRICS.splitlines() if not line.startswith(f"vllm:{gauge}")) + "\n"
    async with controlled(answers(text(said))) as (control, _):
        facts, load = await control.metrics()

    assert load is None
    assert facts.block_size == 32


@pytest.mark.parametrize("value", ["", "None", "auto", "0", "-1", "1.5", "\u00b2"])
async def test_a_number_that_is_none_is_not_said(value: str) -> None:
    said = METRICS.replace('block_size="32"', f'block_size="{value}"').replace('num_gpu_blocks="8192",', "")
    async with controlled(answers(text(said))) as (control, _):
        facts, load = await control.metrics()

    assert facts == CacheFacts(block_size=None, algorithm="sha256_cbor", blocks=None)
    assert load is not None


async def test_an_engine_that_says_nothing() -> None:
    async with controlled(answers(text("# nothing\n"))) as (control, _):
        assert await control.metrics() == (CacheFacts(None, None, None), None)


@pytest.mark.parametrize(
    "line",
    [
        "vllm:kv_cache_usage_perc{engine=0} 1",
        'vllm:kv_cache_usage_perc{engine="0"}',
        'vllm:kv_cache_usage_perc{engine="0"} banana',
        'vllm:kv_cache_usage_perc{engine="0',
        "vllm:num_requests_running",
        f'vllm:cache_config_info{{block_size="{"9" * 5000}"}} 1.0',
    ],
    ids=lambda line: line[:40],
)
async def test_what_is_not_prometheus_format(line: str) -> None:
    async with controlled(answers(text(METRICS + line + "\n"))) as (control, _):
        with pytest.raises(BadAnswer, match="Prometheus"):
            await control.metrics()


@given(
    st.lists(st.sampled_from(["{", "}", '"', "=", ",", " ", "1", "x", "\\", "engine", "\u00b2", "NaN"]), max_size=12)
)
def test_no_line_gets_past_as_another_error(pieces: list[str]) -> None:
    async def ask() -> None:
        control = EngineControl("http://engine")
        line = "vllm:cache_config_info" + "".join(pieces) + "\n"
        control._client = httpx.AsyncClient(
            base_url="http://engine", transport=httpx.MockTransport(lambda _: httpx.Response(200, text=line))
        )
        try:
            await control.metrics()
        except BadAnswer:
            pass
        finally:
            await control.close()

    asyncio.run(ask())


@pytest.mark.parametrize("status", [b"404 Not Found", b"401 Unauthorized", b"307 Temporary Redirect"])
async def test_an_engine_may_have_no_metrics_but_must_have_models(status: bytes) -> None:
    async with controlled(answers(ok(b'{"error":"no"}', status=status))) as (control, _):
        assert await control.metrics() == (CacheFacts(None, None, None), None)
        with pytest.raises(BadAnswer, match=status[:3].decode()):
            await control.models()


# health


@pytest.mark.parametrize(
    ("status", "well"), [(b"200 OK", True), (b"503 Service Unavailable", False), (b"204 X", False)]
)
async def test_health(status: bytes, *, well: bool) -> None:
    said = b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n"
    async with controlled(answers(said)) as (control, peer):
        assert await control.healthy() is well
        assert peer.requests[0].target == "/health"


async def test_the_key_is_the_engines() -> None:
    async with listen(answers(ok(b""))) as peer:
        for key in ("secret", None):
            control = EngineControl(peer.url, api_key=key)
            await control.healthy()
            await control.close()

    assert [request.headers.get("authorization") for request in peer.requests] == ["Bearer secret", None]


async def test_a_redirect_is_not_followed() -> None:
    async with listen(answers(ok(b""))) as elsewhere:
        said = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: %b/health\r\ncontent-length: 0\r\n\r\n"
        async with controlled(answers(said % elsewhere.url.encode())) as (control, _):
            assert await control.healthy() is False
        assert elsewhere.lines == []


async def test_proxies_of_the_environment_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    async with controlled(answers(ok(b""))) as (control, _):
        assert await control.healthy()


# what goes wrong on the way


async def test_refused() -> None:
    control = EngineControl(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unreachable):
        await control.healthy()
    await control.close()


@pytest.mark.parametrize(
    "script", [once(), once(b"SSH-2.0\r\n"), once(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n.")]
)
async def test_a_broken_exchange(script: Script) -> None:
    async with controlled(script) as (control, _):
        with pytest.raises(Disconnected):
            await control.healthy()


async def test_a_body_that_is_not_encoded_as_its_head_says() -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope"
    async with controlled(answers(said)) as (control, _):
        with pytest.raises(BadAnswer):
            await control.metrics()


async def drips(line: Line) -> None:
    """A byte now and then, for ever: no single read takes long."""
    await line.request()
    await line.send(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await asyncio.sleep(0.005)
        await line.send(b".")


@pytest.mark.parametrize("script", [hold, drips])
async def test_an_engine_that_is_slow(script: Script) -> None:
    async with controlled(script, limit=0.05) as (control, _):
        with pytest.raises(TimedOut) as caught:
            await control.metrics()
        assert (caught.value.phase, caught.value.limit) == ("head", 0.05)


FOREIGN = [
    kind
    for _, kind in inspect.getmembers(httpx, inspect.isclass)
    if issubclass(kind, Exception) and kind.__module__.startswith("httpx")
]


def make(kind: type[Exception]) -> Exception:
    """An instance of any of httpx's errors, whatever its constructor asks for."""
    request = httpx.Request("GET", "http://engine")
    given_values = {"request": request, "response": httpx.Response(500, request=request)}
    names = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "message", "request")]
    extra = {name: given_values[name] for name in names if name in given_values}
    takes_message = "message" in inspect.signature(kind.__init__).parameters
    if issubclass(kind, httpx.HTTPStatusError):
        extra["request"] = request
    return kind("x", **extra) if takes_message else kind()


@pytest.mark.parametrize("kind", FOREIGN, ids=lambda kind: kind.__name__)
async def test_no_error_of_httpxs_gets_past(kind: type[Exception]) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise make(kind)

    control = EngineControl("http://engine")
    await control.close()
    control._client = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(fail))
    with pytest.raises(WireError) as caught:
        await control.healthy()
    await control.close()

    assert caught.value.origin == "http://engine"
    assert isinstance(caught.value, TimedOut) == issubclass(kind, httpx.TimeoutException)
    assert isinstance(caught.value, Unreachable) == issubclass(kind, httpx.ConnectError | httpx.UnsupportedProtocol)
    assert isinstance(caught.value, BadAnswer) == issubclass(kind, httpx.DecodingError)


def test_the_errors_of_httpx_are_all_there() -> None:
    """A new branch of httpx's tree would show here."""
    assert len(FOREIGN) > 20
    roots = {kind.__mro__[-4] if kind.__mro__[-4] is not RuntimeError else kind.__mro__[-5] for kind in FOREIGN}
    assert {root.__name__ for root in roots} == {"HTTPError", "InvalidURL", "CookieConflict", "StreamError"}


# version, event sources, what is open, calibration

SOURCES: dict[str, dict[str, Any]] = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }
}


async def test_the_event_sources_of_each_rank() -> None:
    said = SOURCES | {"1": SOURCES["0"] | {"publisher": "null", "replay_endpoint": "tcp://*:5600", "topic": "kv"}}
    async with controlled(answers(ok(orjson.dumps(said)), ok(b"{}"))) as (control, _):
        assert await control.event_sources() == {
            0: EventSource(True, "tcp://*:5557", None, "", 10_000),
            1: EventSource(False, "tcp://*:5557", "tcp://*:5600", "kv", 10_000),
        }
        assert await control.event_sources() == {}


@pytest.mark.parametrize(
    "said",
    [[], None, {"x": SOURCES["0"]}, {"0": None}, {"0": {}}, {"0": SOURCES["0"] | {"endpoint": 7}},
     {"0": SOURCES["0"] | {"replay_endpoint": 7}}, {"0": SOURCES["0"] | {"buffer_steps": "many"}}],
)  # fmt: skip
async def test_what_are_no_event_sources(said: object) -> None:
    async with controlled(answers(ok(orjson.dumps(said)))) as (control, _):
        with pytest.raises(BadAnswer, match="/kv_event_sources"):
            await control.event_sources()


@pytest.mark.parametrize(("status", "on"), [(b"405 Method Not Allowed", True), (b"404 Not Found", False)])
async def test_dev_mode_is_seen_without_using_it(status: bytes, *, on: bool) -> None:
    async with controlled(answers(ok(b"{}", status=status))) as (control, peer):
        assert await control.dev_mode() is on
    assert [(request.method, request.target) for request in peer.requests] == [("GET", "/reset_prefix_cache")]


@pytest.mark.parametrize(("status", "on"), [(b"400 Bad Request", True), (b"403 Forbidden", False), (b"404 X", False)])
async def test_scale_out_is_seen_without_a_prompt(status: bytes, *, on: bool) -> None:
    async with controlled(answers(ok(b"{}", status=status))) as (control, peer):
        assert await control.scale_out() is on
    assert peer.requests[0].body == b"{}"


@pytest.mark.parametrize("status", [b"200 OK", b"401 Unauthorized", b"500 Oh"])
async def test_what_says_neither_yes_nor_no(status: bytes) -> None:
    async with controlled(answers(ok(b"{}", status=status))) as (control, _):
        for question in (control.dev_mode, control.scale_out):
            with pytest.raises(BadAnswer, match=status[:3].decode()):
                await question()
        if status != b"200 OK":
            with pytest.raises(BadAnswer, match=status[:3].decode()):
                await control.event_sources()


async def test_a_question_and_its_answer_whatever_the_status() -> None:
    said = (ok(b'{"choices":[]}'), ok(b'{"error":{}}', status=b"400 No"), ok(b"oh"))
    async with controlled(answers(*said)) as (control, peer):
        assert await control.ask("/v1/completions", {"prompt": [1, 2]}) == (200, {"choices": []})
        assert await control.ask("/v1/completions", {}) == (400, {"error": {}})
        with pytest.raises(BadAnswer, match="no JSON"):
            await control.ask("/v1/completions", {})
    assert (peer.requests[0].method, peer.requests[0].body) == ("POST", b'{"prompt":[1,2]}')
    assert peer.requests[0].headers["content-type"] == "application/json"


async def test_a_question_has_a_deadline_of_its_own() -> None:
    async with controlled(hold, limit=60) as (control, _):
        with pytest.raises(TimedOut) as caught:
            await control.ask("/v1/completions", {}, deadline=0.05)
    assert caught.value.limit == 0.05


async def test_an_answer_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER", 10)
    async with controlled(answers(ok(b'{"version":"0.32.0"}'))) as (control, _):
        with pytest.raises(BadAnswer, match="larger than 10 bytes"):
            await control.version()
