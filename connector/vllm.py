"""One engine's control side: is it well, what does it serve, how does it hash, how busy is it, what is it open to.

httpx, since none of this is on the path of a request. The names are vLLM's own metrics
(docs.vllm.ai, "Production metrics") and fields of its /v1/models.

An engine with data parallel ranks gives each gauge once a rank, under its label `engine`. Requests
are summed over them; of the cache's usage the mean is taken, since ranks have caches of one size.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from statistics import fmean
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from connector.errors import BadAnswer, Disconnected, TimedOut, Unreachable, WireError

MAX_ANSWER = 16 * 1024 * 1024
"""Bytes of one answer that are read."""
INFO_SECONDS = 30.0
"""For /server_info, which looks through the whole machine the first time."""
_WANTED = (
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting{",
    "vllm:kv_cache_usage_perc",
    "process_start_time_seconds",
)


@dataclass(frozen=True, slots=True)
class Card:
    """One entry of an engine's /v1/models; `raw` is the entry with every field vLLM gave it."""

    id: str
    root: str | None
    """The model's or the adapter's path on the engine."""
    parent: str | None
    """The base model of an adapter; None for a base model."""
    raw: Mapping[str, Any]

    @property
    def max_tokens(self) -> int | None:
        """The longest prompt and answer together; None where it is not told."""
        length = self.raw.get("max_model_len")
        return length if type(length) is int and length > 0 else None


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """vllm:cache_config_info, and the engine's version. None where the engine does not say."""

    block_size: int | None
    """Tokens in a block that is hashed; of a hybrid model None, too, where that does not follow from what it says."""
    algorithm: str | None
    blocks: int | None
    """KV blocks of the engine's own cache."""
    version: str | None = None
    """vLLM's version, from /version."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """How one data parallel rank publishes KV events (vLLM's KVEventsConfig), as it was set at its start."""

    enabled: bool
    endpoint: str
    """What the engine binds, where there is a `*` in it, or connects to."""
    replay_endpoint: str | None
    topic: str
    buffer_steps: int
    """Messages that the replay endpoint can give again."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine says it is."""

    running: float
    waiting: float
    cache_usage: float
    """Share of the engine's KV blocks in use, 0 to 1."""
    started: float | None = None
    """When its HTTP server's process began, in seconds since 1970 by its machine's clock. The server ends with the
    engine, so another moment is another engine. None where several servers share the work (--api-server-count), as
    prometheus_client tells nothing of processes then (get_prometheus_registry in vllm/v1/metrics/prometheus.py)."""


class EngineControl:
    """The control side of one engine. Every call raises a `WireError` when it fails."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 5.0,
        tls: ssl.SSLContext | None = None,
        rank: int | None = None,
    ) -> None:
        """`rank` is the data parallel rank that is meant, where the engine has several."""
        self._origin = url
        self._timeout = timeout
        self._rank = rank
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if rank is not None:
            headers["x-data-parallel-rank"] = str(rank)
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=timeout,
            trust_env=False,
            verify=tls or url.startswith("https:"),  # a TLS context costs 14 ms, for http as well
            follow_redirects=False,
            headers=headers,
        )

    async def healthy(self) -> bool:
        status, _ = await self._send("GET", "/health")
        return status == 200

    async def models(self) -> tuple[Card, ...]:
        status, body = await self._send("GET", "/v1/models")
        try:
            return tuple(_card(entry) for entry in orjson.loads(body)["data"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(self._origin, f"its /v1/models ({status}) is no list of models") from error

    async def version(self) -> str | None:
        """The version of vLLM, such as `0.32.0`; None from an engine that does not tell."""
        _, body = await self._send("GET", "/version")
        try:
            version = orjson.loads(body)["version"]
        except (ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) else None

    async def metrics(self) -> tuple[CacheFacts, Load | None]:
        """What /metrics says of the cache and the load. The load is None where a gauge is missing.

        An engine that has no /metrics says nothing, and is none the worse for it.
        """
        _, body = await self._send("GET", "/metrics")
        lines = [line for line in body.decode(errors="replace").splitlines() if line.startswith(_WANTED)]
        values: defaultdict[str, list[float]] = defaultdict(list)
        labels: dict[str, str] = {}
        ranks: set[str] = set()
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    if (rank := sample.labels.get("engine")) is not None:
                        ranks.add(rank)
                        if self._rank is not None and rank != str(self._rank):
                            continue
                    values[sample.name].append(sample.value)
                    if sample.name == "vllm:cache_config_info":
                        labels = sample.labels
            found = _cache_facts(labels), _load(values)
        except (ValueError, ArithmeticError, LookupError) as error:
            raise BadAnswer(self._origin, "its /metrics is not in Prometheus' format") from error
        if self._rank is not None and ranks and str(self._rank) not in ranks:
            raise BadAnswer(self._origin, f"it has no data parallel rank {self._rank}; set its data_parallel")
        return found

    async def event_sources(self) -> Mapping[int, EventSource]:
        """How each data parallel rank publishes KV events; empty where none does (/kv_event_sources)."""
        status, body = await self._send("GET", "/kv_event_sources")
        try:
            if status == 200:
                return {int(rank): _event_source(entry) for rank, entry in orjson.loads(body).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(self._origin, f"its /kv_event_sources ({status}) are none") from error
        raise BadAnswer(self._origin, f"its /kv_event_sources ({status}) are none")

    async def dev_mode(self) -> bool:
        """Whether whoever reaches the engine can empty its cache and the pool (VLLM_SERVER_DEV_MODE=1).

        A GET of /reset_prefix_cache does nothing: it is answered with 405 where a POST would do it, else with 404.
        """
        status, _ = await self._send("GET", "/reset_prefix_cache")
        if status not in (404, 405):
            raise BadAnswer(self._origin, f"its /reset_prefix_cache ({status}) is neither there nor missing")
        return status == 405

    async def server_info(self) -> Mapping[str, Any]:
        """What an engine in dev mode tells of its settings; `vllm_config` is vLLM's own VllmConfig as JSON."""
        status, body = await self._send("GET", "/server_info?config_format=json", deadline=INFO_SECONDS)
        try:
            info = orjson.loads(body)
        except ValueError as error:
            raise BadAnswer(self._origin, f"its /server_info ({status}) is no JSON") from error
        if status != 200 or not isinstance(info, dict):
            raise BadAnswer(self._origin, f"its /server_info ({status}) tells nothing")
        return info

    async def scale_out(self) -> bool:
        """Whether it renders prompts (--enable-scale-out, or `vllm launch render`).

        It is asked to render nothing, which is refused with 400 where it could, else with 403.
        """
        status, _ = await self._send("POST", "/v1/chat/completions/render", b"{}")
        if status not in (400, 403, 404, 405, 422):
            raise BadAnswer(self._origin, f"its /v1/chat/completions/render ({status}) is neither open nor closed")
        return status in (400, 422)

    async def ask(self, path: str, body: Mapping[str, Any], deadline: float = 60.0) -> tuple[int, Any]:
        """Post a body; the answer's status and its JSON, which is to be there within `deadline` seconds."""
        status, answer = await self._send("POST", path, orjson.dumps(body), deadline)
        try:
            return status, orjson.loads(answer)
        except ValueError as error:
            raise BadAnswer(self._origin, f"its {path} ({status}) is no JSON") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(
        self, method: str, path: str, content: bytes | None = None, deadline: float | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        limit = self._timeout if deadline is None else deadline
        headers = None if content is None else {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(limit),  # httpx's own limit is for each read
                self._client.stream(method, path, content=content, headers=headers, timeout=limit) as answer,
            ):
                return answer.status_code, await self._body(answer)
        except httpx.ConnectTimeout:
            raise TimedOut(self._origin, "connect", limit) from None
        except (httpx.TimeoutException, TimeoutError):
            raise TimedOut(self._origin, "head", limit) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            raise Unreachable(self._origin, "no connection") from error
        except httpx.DecodingError as error:
            raise BadAnswer(self._origin, "its body is not encoded as its head says") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError) as error:
            raise Disconnected(self._origin, type(error).__name__) from error

    async def _body(self, answer: httpx.Response) -> bytes:
        body = bytearray()
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > MAX_ANSWER:
                raise BadAnswer(self._origin, f"answer is larger than {MAX_ANSWER} bytes")
        return bytes(body)


def _card(entry: Mapping[str, Any]) -> Card:
    card = Card(id=entry["id"], root=entry.get("root"), parent=entry.get("parent"), raw=entry)
    if not isinstance(card.id, str) or not isinstance(card.root, str | None) or not isinstance(card.parent, str | None):
        raise TypeError("id, root and parent are strings")
    return card


def _event_source(entry: Mapping[str, Any]) -> EventSource:
    source = EventSource(
        enabled=entry["enable_kv_cache_events"] is True and entry["publisher"] == "zmq",
        endpoint=entry["endpoint"],
        replay_endpoint=entry.get("replay_endpoint"),
        topic=entry.get("topic", ""),
        buffer_steps=entry.get("buffer_steps", 0),
    )
    texts = (source.endpoint, source.replay_endpoint or "", source.topic)
    if not all(isinstance(text, str) for text in texts) or type(source.buffer_steps) is not int:
        raise TypeError("endpoints and topic are strings, buffer_steps is a number")
    return source


def _cache_facts(labels: Mapping[str, str]) -> CacheFacts:
    return CacheFacts(
        block_size=_hashed_block(labels),
        algorithm=labels.get("prefix_caching_hash_algo"),
        blocks=_number(labels, "num_gpu_blocks"),
    )


def _hashed_block(labels: Mapping[str, str]) -> int | None:
    """Tokens in a hashed block: `resolve_kv_cache_block_sizes` in vllm/v1/core/kv_cache_utils.py (0.30 to 0.33).

    Of one kind of layers it is their block, over all ranks of a decode context parallel group. Of several
    kinds it is the greatest common divisor of theirs, or `--prefix-match-unit`. Told are `block_size`, the
    least on one rank; `effective_attention_block_size` (from 0.31 on), full attention's over all ranks; and
    `mamba_block_size`. A sliding window's is not; blocks of attention are multiples of the least of them, so
    it does not matter where that is full attention's and there are no other ranks.
    """
    unit = _number(labels, "prefix_match_unit")
    least = _number(labels, "block_size")
    attention = _number(labels, "effective_attention_block_size")
    state = _number(labels, "mamba_block_size")
    window = _number(labels, "sliding_window")
    if unit is not None:
        return unit
    if state is not None:
        aligned = labels.get("mamba_cache_mode") == "align" and window is None
        return gcd(attention, state) if attention is not None and aligned else None
    if window is not None and attention is not None:
        return least if attention == least else None
    return attention or least


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _load(values: Mapping[str, Sequence[float]]) -> Load | None:
    running, waiting, usage = (
        values.get(name)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    )
    if not running or not waiting or not usage:
        return None
    started = values.get("process_start_time_seconds")
    return Load(
        running=sum(running),
        waiting=sum(waiting),
        cache_usage=fmean(usage),
        started=started[0] if started is not None and len(started) == 1 else None,
    )


__all__ = ["CacheFacts", "Card", "EngineControl", "EventSource", "Load", "WireError"]
