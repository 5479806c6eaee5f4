"""The end of a request: predicted against actual, usage to the tenant's meter, the outcome to the policy, its span."""

import logging
import time
from collections.abc import Mapping, Sequence

import orjson
from msgspec import Struct

from gateway.agreement import Agreement, Counted
from gateway.audit import Audit, Auditor
from gateway.exchange import Exchange
from gateway.limits import Limits
from gateway.relay import Result
from gateway.tenants import Tenant
from gateway.trace import Telemetry, Trace
from policies.interface import Candidate, Job, Outcome, Placement, Policy, expected

log = logging.getLogger("moongate")
access = logging.getLogger("moongate.access")

TOKEN_BYTES = 4
"""Bytes of a body that count as a token, where nobody has counted."""


class Account(Struct, frozen=True):
    """What is left of a plan when its answer begins: what was predicted, and for whom."""

    tenant: Tenant
    job: Job
    candidates: Sequence[Candidate]
    placement: Placement
    predicted: bool
    """Whether residency was known well enough to be held against what engines say."""
    size: int
    """Bytes of the request's body."""
    prefilled: Result | None = None
    """The prefill leg, where there was one."""
    counted: Counted | None = None
    """Our own count of the prompt, where the engine's is worth comparing with it."""
    audit: Audit | None = None
    """What is to be audited when the answer was given."""


class Settle:
    """Closes the books of each request."""

    def __init__(
        self,
        *,
        limits: Limits,
        policy: Policy,
        agreements: Mapping[str, Agreement],
        auditor: Auditor,
        telemetry: Telemetry,
        access_log: bool,
    ) -> None:
        """`agreements` are by the model's name."""
        self._limits = limits
        self._agreements = agreements
        self._auditor = auditor
        self._policy = policy
        self._telemetry = telemetry
        self._access_log = access_log

    def given(self, trace: Trace, account: Account, result: Result) -> None:
        """The answer was given: compare predicted and actual cached tokens on the engine that prefilled."""
        telemetry, tenant, model = self._telemetry, account.tenant, account.job.model
        prefilled = account.prefilled or result
        if account.prefilled is not None and not result.ok:
            telemetry.handoffs.inc(model, "decode_failed")
        actual = prefilled.cached_tokens
        if account.predicted and prefilled.status < 400 and actual is not None:
            own, pool = expected(account.job, next(c for c in account.candidates if c.id == prefilled.engine))
            telemetry.predicted.add(own, tenant.name, prefilled.engine, "own")
            telemetry.predicted.add(pool, tenant.name, prefilled.engine, "pool")
            telemetry.actual.add(actual, tenant.name, prefilled.engine)
            telemetry.error.observe(abs(own + pool - actual), prefilled.engine)
        telemetry.ttft.observe(result.ttft, model, result.engine)
        usage = result.usage
        if account.counted is not None and result.ok and usage is not None and usage.prompt is not None:
            self._agreements[model].counted(account.counted, result.engine, usage.prompt)
        if account.audit is not None and result.ok:
            self._auditor.submit(account.audit, prefilled.engine)
        prompt = usage.prompt if usage is not None and usage.prompt is not None else 0
        completion = usage.completion if usage is not None and usage.completion is not None else 0
        telemetry.prompt_tokens.add(prompt, tenant.name, model)
        telemetry.completion_tokens.add(completion, tenant.name, model)
        self._limits.settle(tenant, completion + (prompt if account.job.prompt_tokens is None else 0))
        if trace.recorded:
            trace.fact("moongate.answered_by", result.engine)
            trace.fact("moongate.actual.cached_tokens", actual)
            trace.fact("moongate.decode.cached_tokens", result.cached_tokens if account.prefilled else None)
            trace.fact("moongate.completion_tokens", completion)
            trace.fact("moongate.ttft_seconds", result.ttft)
        self._policy.observe(account.placement, _outcome(account, result, actual))

    def left(self, account: Account, result: Result) -> None:
        """The client left an answer: what had gone by is charged, an event as a token.

        A prompt that was not counted here is charged as the engine says, or else as so many bytes.
        """
        tenant, model, usage = account.tenant, account.job.model, result.usage
        completion = max(result.events, usage.completion or 0 if usage is not None else 0)
        self._telemetry.completion_tokens.add(completion, tenant.name, model)
        prompt = usage.prompt if usage is not None else None
        self._telemetry.prompt_tokens.add(prompt or account.job.prompt_tokens or 0, tenant.name, model)
        owed = 0 if account.job.prompt_tokens is not None else prompt or account.size // TOKEN_BYTES
        self._limits.settle(tenant, completion + owed)

    def failed(self, placement: Placement) -> None:
        """No engine answered."""
        self._policy.observe(placement, Outcome(ok=False, engine=placement.engine, ttft=None, cached_tokens=None))

    def close(self, exchange: Exchange, trace: Trace) -> None:
        """The request is over: its metrics, its span, its line in the access log."""
        seconds = time.perf_counter() - trace.started
        self._telemetry.requests.inc(trace.tenant, trace.model, trace.status)
        self._telemetry.seconds.observe(seconds, trace.model)
        if self._access_log:
            line = {"request": exchange.request_id.decode(), "tenant": trace.tenant, "model": trace.model,
                    "path": exchange.path, "status": trace.status, "seconds": round(seconds, 4)}  # fmt: skip
            access.info(orjson.dumps(line).decode())
        if trace.recorded:
            trace.fact("moongate.request_id", exchange.request_id.decode())
            for name, value in (("tenant", trace.tenant), ("model", trace.model), ("status", trace.status)):
                trace.fact(f"moongate.{name}", value)
        self._telemetry.end(trace)


def _outcome(account: Account, result: Result, cached: int | None) -> Outcome:
    """What the policy is told. The first byte of an answer that is no stream comes with its last."""
    tokens = account.job.prompt_tokens
    return Outcome(
        ok=result.ok,
        engine=result.engine,
        ttft=result.ttft if result.events else None,
        cached_tokens=cached,
        computed_tokens=max(0, tokens - cached) if tokens is not None and cached is not None else None,
        queued_tokens=next((c.tokens for c in account.candidates if c.id == result.engine), None),
    )
