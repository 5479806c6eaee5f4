"""One engine's control side: is it well, what does it serve, how does it hash, how busy is it.

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

_WANTED = (
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting{",
    "vllm:kv_cache_usage_perc",
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
class Load:
    """How busy the engine says it is."""

    running: float
    waiting: float
    cache_usage: float
    """Share of the engine's KV blocks in use, 0 to 1."""


class EngineControl:
    """The control side of one engine. Every call raises a `WireError` when it fails."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 5.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._origin = url
        self._timeout = timeout
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=timeout,
            trust_env=False,
            verify=tls or url.startswith("https:"),  # a TLS context costs 14 ms, for http as well
            follow_redirects=False,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        )

    async def healthy(self) -> bool:
        return (await self._get("/health")).status_code == 200

    async def models(self) -> tuple[Card, ...]:
        answer = await self._get("/v1/models")
        try:
            return tuple(_card(entry) for entry in orjson.loads(answer.content)["data"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(self._origin, f"its /v1/models ({answer.status_code}) is no list of models") from error

    async def version(self) -> str | None:
        """The version of vLLM, such as `0.32.0`; None from an engine that does not tell."""
        answer = await self._get("/version")
        try:
            version = orjson.loads(answer.content)["version"]
        except (ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) else None

    async def metrics(self) -> tuple[CacheFacts, Load | None]:
        """What /metrics says of the cache and the load. The load is None where a gauge is missing.

        An engine that has no /metrics says nothing, and is none the worse for it.
        """
        answer = await self._get("/metrics")
        lines = [line for line in answer.text.splitlines() if line.startswith(_WANTED)]
        values: defaultdict[str, list[float]] = defaultdict(list)
        labels: dict[str, str] = {}
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    values[sample.name].append(sample.value)
                    if sample.name == "vllm:cache_config_info":
                        labels = sample.labels
            return _cache_facts(labels), _load(values)
        except (ValueError, ArithmeticError, LookupError) as error:
            raise BadAnswer(self._origin, "its /metrics is not in Prometheus' format") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> httpx.Response:
        try:
            async with asyncio.timeout(self._timeout):  # httpx's own limit is for each read
                return await self._client.get(path)
        except httpx.ConnectTimeout:
            raise TimedOut(self._origin, "connect", self._timeout) from None
        except (httpx.TimeoutException, TimeoutError):
            raise TimedOut(self._origin, "head", self._timeout) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            raise Unreachable(self._origin, "no connection") from error
        except httpx.DecodingError as error:
            raise BadAnswer(self._origin, "its body is not encoded as its head says") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError) as error:
            raise Disconnected(self._origin, type(error).__name__) from error


def _card(entry: Mapping[str, Any]) -> Card:
    card = Card(id=entry["id"], root=entry.get("root"), parent=entry.get("parent"), raw=entry)
    if not isinstance(card.id, str) or not isinstance(card.root, str | None) or not isinstance(card.parent, str | None):
        raise TypeError("id, root and parent are strings")
    return card


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
    return Load(running=sum(running), waiting=sum(waiting), cache_usage=fmean(usage))


__all__ = ["CacheFacts", "Card", "EngineControl", "Load", "WireError"]
