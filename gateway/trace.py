"""Spans, metrics, and the names of both. The only file that knows OpenTelemetry and Prometheus.

A request makes one root span. Its steps become child spans when it has ended, from the times that
were noted on the way, and only where the trace is recorded: live SDK spans for each step would cost
ten times as much, sampled or not. Label values come from the configuration, never from a client.
"""

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Fact = str | int | float | bool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (0.0, 1.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Headers(Getter[dict[bytes, bytes]]):
    def get(self, carrier: dict[bytes, bytes], key: str) -> list[str] | None:
        value = carrier.get(key.encode())
        return [value.decode("latin-1")] if value is not None else None

    def keys(self, carrier: dict[bytes, bytes]) -> list[str]:
        return [name.decode("latin-1") for name in carrier]


_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, 3.2."""
_PROPAGATOR = TraceContextTextMapPropagator()
_HEADERS = _Headers()


class Counts(Collector):
    """A counter: what was added, by label values. Read at each scrape, cheap in between.

    prometheus_client's own takes a lock and two checks for each `inc`, 1 us; a request counts nine things.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def inc(self, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + 1.0

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return [family]


class Spread(Collector):
    """A histogram: how often values fell into each bucket, by label values."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._bounds = tuple(buckets)
        self._values: dict[tuple[str, ...], list[float]] = {}
        """Each bucket's own count, the last without a bound; then the sum of what was observed."""

    def observe(self, value: float, *labels: str) -> None:
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = [0.0] * (len(self._bounds) + 2)
        found[bisect_left(self._bounds, value)] += 1
        found[-1] += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        for labels, found in self._values.items():
            buckets = list(zip(names, accumulate(found[:-1]), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=found[-1])
        return [family]


class Trace:
    """One request's notes: whose it is, the times of its steps and the facts of its placement."""

    __slots__ = ("_facts", "_marked", "_span", "_steps", "_traceparent", "model", "started", "status", "tenant")

    def __init__(self, span: otel.Span | None, traceparent: bytes | None) -> None:
        self._span = span
        self._traceparent = traceparent
        self._facts: dict[str, Fact] = {}
        self._steps: list[tuple[str, int, int]] = []
        self.tenant = ""
        self.model = ""
        self.status = "500"
        self.started = time.perf_counter()
        self._marked = time.time_ns() if span is not None else 0

    @property
    def recorded(self) -> bool:
        """Whether facts are noted at all."""
        return self._span is not None

    def step(self, name: str) -> None:
        """The step called `name` ends now; it began where the one before it ended."""
        if self._span is not None:
            now = time.time_ns()
            self._steps.append((name, self._marked, now))
            self._marked = now

    def fact(self, name: str, value: Fact | None) -> None:
        """Note an attribute of the root span; None notes nothing."""
        if self._span is not None and value is not None:
            self._facts[name] = value

    def context(self) -> list[tuple[bytes, bytes]]:
        """The headers that make an engine's span a child of this request."""
        if self._span is not None:
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier, otel.set_span_in_context(self._span))
            return [(name.encode(), value.encode()) for name, value in carrier.items()]
        return [(b"traceparent", self._traceparent)] if self._traceparent is not None else []

    def end(self, tracer: otel.Tracer) -> None:
        span = self._span
        if span is None:
            return
        if span.is_recording():
            span.set_attributes(self._facts)
            parent = otel.set_span_in_context(span)
            for name, start, stop in self._steps:
                tracer.start_span(name, parent, start_time=start).end(stop)
        span.end()


class Telemetry:
    """The process's metrics and its tracer."""

    def __init__(self, *, otlp: str | None = None, sample: float = 1.0) -> None:
        """`otlp` is an OTLP/HTTP traces endpoint; without one no span is made."""
        self._provider: TracerProvider | None = None
        self._tracer: otel.Tracer = otel.NoOpTracer()
        if otlp is not None:
            self._provider = TracerProvider(
                sampler=ParentBased(TraceIdRatioBased(sample)),
                resource=Resource.create({"service.name": "moongate"}),
                shutdown_on_exit=False,
            )
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp)))
            self._tracer = self._provider.get_tracer("moongate")
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests",
            "Requests ended, by what the client got: a status, client_left, stopped (gateway), or why it broke off.",
            "tenant",
            "model",
            "status",
        )
        self.seconds = self._histogram("request_seconds", "Whole requests.", _SECONDS, "model")
        self.ttft = self._histogram("ttft_seconds", "Until the first byte of an answer.", _SECONDS, "model", "engine")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as engines counted.", "tenant", "model")
        self.completion_tokens = self._counter("completion_tokens", "Completion tokens.", "tenant", "model")
        self.predicted = self._counter(
            "predicted_cached_tokens", "Prompt tokens predicted to be cached.", "tenant", "engine", "source"
        )
        self.actual = self._counter(
            "actual_cached_tokens", "Prompt tokens that engines say were cached.", "tenant", "engine"
        )
        self.error = self._histogram(
            "prediction_error_tokens", "Predicted against actual cached tokens, per request.", _TOKENS, "engine"
        )
        self.inexact = self._counter("inexact", "Requests placed without a prefix, by reason.", "model", "reason")
        self.checks = self._counter(
            "agreement_checks",
            "Comparisons with engines: of a prompt's count, ids or keys; agrees, differs, or what is likely wrong.",
            "model",
            "check",
            "result",
        )
        self.lookups = self._counter(
            "lookups",
            "Pool look-ups by result: known, timeout, error (no connection), answer (unreadable), "
            "open (not asked: none serves, or the last ones failed).",
            "pool",
            "result",
        )
        self.lookup_seconds = self._histogram("lookup_seconds", "Pool look-ups.", _SECONDS, "pool")
        self.lookup_keys = self._counter("lookup_keys", "Keys asked for in pool look-ups.", "pool")
        self.placements = self._counter("placements", "Placements by reason.", "model", "engine", "reason")
        self.policy_failures = self._counter(
            "policy_failures", "Calls of the policy that failed, were slow, or put it out of service.", "failure"
        )
        self.refused = self._counter("refused_connections", "Connections that spoke no valid HTTP/1.1.")
        self.retries = self._counter("retries", "Requests given to a spare.", "engine")
        self.failures = self._counter("engine_failures", "Exchanges with engines that failed.", "engine", "cause")
        self.handoffs = self._counter(
            "handoffs", "Hand overs: seen, late, prefill_failed, local_prefill, decode_failed.", "model", "result"
        )
        self.handoff_seconds = self._histogram(
            "handoff_seconds", "From a prefill's answer to its last block.", _SECONDS, "model"
        )

    def begin(self, fields: dict[bytes, bytes]) -> Trace:
        """Start a request's trace, as a child of the client's traceparent where there is one."""
        if self._provider is None:
            parent = fields.get(b"traceparent")
            return Trace(None, parent if parent is not None and _TRACEPARENT.fullmatch(parent) else None)
        context = _PROPAGATOR.extract(fields, getter=_HEADERS)
        return Trace(self._tracer.start_span("moongate.request", context, kind=otel.SpanKind.SERVER), None)

    def end(self, trace: Trace) -> None:
        """Send a request's spans on their way."""
        trace.end(self._tracer)

    def gauges(self, read: Callable[[], Mapping[str, tuple[str, Sequence[tuple[str, float]]]]], label: str) -> None:
        """Values that are read when somebody asks: name to (help, [(label value, value)]); counters end in `_total`."""
        self._registry.register(_Gauges(read, label))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Send what is left, within the exporter's own time limit."""
        if self._provider is not None:
            self._provider.shutdown()

    def _counter(self, name: str, text: str, *labels: str) -> Counts:
        counts = Counts(f"moongate_{name}", text, labels)
        self._registry.register(counts)
        return counts

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Spread:
        spread = Spread(f"moongate_{name}", text, buckets, labels)
        self._registry.register(spread)
        return spread


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Mapping[str, tuple[str, Sequence[tuple[str, float]]]]], label: str) -> None:
        self._read = read
        self._label = label

    def collect(self) -> Iterable[Metric]:
        for name, (text, values) in self._read().items():
            made = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = made(f"moongate_{name}", text, labels=[self._label])
            for label, value in values:
                family.add_metric([label], value)
            yield family
