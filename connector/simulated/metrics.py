"""What a simulated engine counts, under the names and labels of vLLM 0.32 (vllm/v1/metrics/loggers.py)."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
FINISHES = ("stop", "length", "abort", "error", "repetition")


class Metrics:
    """One engine's counters and gauges."""

    def __init__(self, model: str, block_size: int, blocks: int, algorithm: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        self.running = self._gauge("num_requests_running", "Requests in execution batches.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting to be processed.")
        self.usage = self._gauge("kv_cache_usage_perc", "KV-cache usage, 1 is all of it.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason.",
            ["engine", "model_name", "reason"],
            registry=self._registry,
        )
        self.waiting_by_reason = {
            reason: by_reason.labels(**self._labels, reason=reason) for reason in ("capacity", "deferred")
        }
        self.queries = self._counter("prefix_cache_queries", "Tokens asked of the engine's own cache.")
        self.hits = self._counter("prefix_cache_hits", "Tokens found in the engine's own cache.")
        self.external_queries = self._counter("external_prefix_cache_queries", "Tokens asked of the pool.")
        self.external_hits = self._counter("external_prefix_cache_hits", "Tokens found in the pool.")
        self.prompt = self._counter("prompt_tokens", "Prefill tokens processed.")
        self.generated = self._counter("generation_tokens", "Generation tokens processed.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source.",
            ["engine", "model_name", "source"],
            registry=self._registry,
        )
        self.by_source = {source: by_source.labels(**self._labels, source=source) for source in SOURCES}
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            ["engine", "finished_reason", "model_name"],
            registry=self._registry,
        )
        self.success = {reason: success.labels(**self._labels, finished_reason=reason) for reason in FINISHES}
        self.first_token = self._histogram("time_to_first_token_seconds", "Time to first token in seconds.", SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "Request latency in seconds.", SECONDS)
        self.between = self._histogram("inter_token_latency_seconds", "Time between tokens in seconds.", SECONDS)
        self.computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed for a request.", TOKENS
        )
        self._cache_info(block_size, blocks, algorithm)
        started = Gauge(
            "process_start_time_seconds", "Start time of the process since unix epoch.", registry=self._registry
        )
        started.set(time.time())

    def text(self) -> bytes:
        """The exposition, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _cache_info(self, block_size: int, blocks: int, algorithm: str) -> None:
        values = {
            "block_size": str(block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_size_tokens": str(block_size * blocks),
            "num_gpu_blocks": str(blocks),
            "prefix_caching_hash_algo": algorithm,
        }
        info = Gauge("vllm:cache_config_info", "The cache's settings.", list(values), registry=self._registry)
        info.labels(**values).set(1)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"vllm:{name}", help_text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"vllm:{name}", help_text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", help_text, list(self._labels), registry=self._registry, buckets=buckets)
        return metric.labels(**self._labels)
