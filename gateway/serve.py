"""The path of one request, top to bottom. Read this first.

    identify   whose key is it                                   tenants
    gate       may they send one more now                        limits
    parse      bytes to an object, once                          here
    tokenize   the prompt's token ids, as the engine would have  connector.render, connector.tokens
    hash       ids and salt to the engine's own block hashes     connector.blocks
    charge     the prompt's tokens, to the tenant's budget       limits
    survey     which engines are there, and what each holds      fleet
    look up    how many leading blocks the pool holds            connector.mooncake
    place      one engine, or a prefill and a decode engine      policies
    relay      one leg, or two, and the bytes to the client      relay, connector.handoff
    settle     predicted against actual, usage, the span         here

Each step takes what the step before it made and returns a new frozen value. A step that cannot know
something says so and the request goes on without it: it is then placed by load.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson

from connector.blocks import Adapter, Prefix, hash_prompt
from connector.errors import Inexact
from connector.handoff import engine_body, prefill_body, wants_usage
from connector.mooncake import KeyScheme, Residency
from gateway.errors import BadRequest, Broken, ClientLeft, EngineFailed, GatewayError, Unavailable, UnknownModel
from gateway.exchange import Exchange
from gateway.fleet import Fleet
from gateway.limits import Limits
from gateway.models import Model
from gateway.relay import Leg, LegFailed, Relay, Result, Target
from gateway.tenants import Tenant, Tenants
from gateway.trace import Telemetry, Trace
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, Policy, expected, uncached

log = logging.getLogger("moongate")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

INLINE_BYTES = 16 * 1024
"""Bodies above this many bytes are tokenised and hashed in a thread, so that others go on."""


EXACT_BYTES = 8 * 1024 * 1024
"""Bodies above this many bytes are placed by load: no context is so long, and tokens take a hundredfold of memory."""


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request."""

    tenant: Tenant
    path: str
    model: Model
    adapter: Adapter | None
    salt: str | None
    raw: bytes
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a call's prompt."""

    tokens: int | None
    prefix: Prefix | None
    keys: KeyScheme | None
    inexact: str | None = None
    """Why there is no prefix."""

    @property
    def reusable_tokens(self) -> int:
        """Tokens that a cache can give at most."""
        return self.prefix.reusable * self.prefix.block_size if self.prefix is not None else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A call, what is known of it, and where it goes."""

    call: Call
    prompt: Prompt
    job: Job
    candidates: tuple[Candidate, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long and how often: seconds, and engines tried."""

    body_bytes: int
    body: float
    handoff: float
    attempts: int
    local_prefill: bool


class Serve:
    """Answers /v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        limits: Limits,
        models: Mapping[str, Model],
        fleet: Fleet,
        policy: Policy,
        fallback: Policy,
        relay: Relay,
        telemetry: Telemetry,
        bounds: Bounds,
        expose_routing: bool = False,
    ) -> None:
        """`fallback` places a request where `policy` fails to."""
        self._tenants = tenants
        self._limits = limits
        self._models = models
        self._fleet = fleet
        self._policy = policy
        self._fallback = fallback
        self._relay = relay
        self._telemetry = telemetry
        self._bounds = bounds
        self._expose_routing = expose_routing
        self._sick_pools: set[str] = set()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, whatever happens to it."""
        trace = self._telemetry.begin(exchange.headers)
        trace.fact("moongate.request_id", exchange.request_id)
        tenant, model, status = "", "", "500"
        try:
            caller = self._tenants.identify(exchange.headers)
            tenant = caller.name
            trace.step("identify")
            with self._limits.admit(caller):
                call = self._parse(
                    caller, exchange.path, await exchange.body(self._bounds.body_bytes, self._bounds.body)
                )
                model = call.model.name
                trace.step("parse")
                async with exchange.present():
                    result = await self._answer(exchange, trace, call)
            status = str(result.status) if result.error is None else result.error
        except ClientLeft:
            status = "client_left"
        except GatewayError as error:
            status = str(error.status)
            await exchange.refuse(error)
        except Exception:
            log.exception("request %s met a defect", exchange.request_id)
            if not exchange.started:
                await exchange.refuse(Broken("The gateway failed on this request; the operator's log says why."))
        finally:
            self._telemetry.requests.labels(tenant, model, status).inc()
            self._telemetry.seconds.labels(model).observe(time.perf_counter() - trace.started)
            for name, value in (("tenant", tenant), ("model", model), ("status", status)):
                trace.fact(f"moongate.{name}", value)
            self._telemetry.end(trace)

    async def _answer(self, exchange: Exchange, trace: Trace, call: Call) -> Result:
        prompt = await self._know(call)
        trace.step("tokenize and hash")
        self._charge(call, prompt)
        candidates = tuple(self._survey(call, prompt))
        residency = await self._look_up(call, prompt)
        trace.step("look up")
        job = self._job(call, prompt, residency)
        placement = self._place(job, candidates)
        self._telemetry.placements.labels(job.model, placement.prefill or placement.engine, placement.reason).inc()
        trace.step("place")
        self._note(trace, call, prompt, residency, placement)
        plan = Plan(call, prompt, job, candidates, placement)
        deadline = self._relay.deadline()
        try:
            if placement.prefill is None:
                result = await self._one_leg(exchange, trace, plan, deadline)
            else:
                result = await self._two_legs(exchange, trace, plan, deadline)
        except GatewayError:
            self._observe(placement, Outcome(ok=False, engine=placement.engine, ttft=None, cached_tokens=None))
            raise
        trace.step("relay")
        return result

    def _parse(self, tenant: Tenant, path: str, raw: bytes) -> Call:
        """Bytes to an object, once. What the gateway does not need itself is the engine's to judge."""
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"The body is not JSON: line {error.lineno}, column {error.colno}.") from None
        if not isinstance(body, dict):
            raise BadRequest("The body must be a JSON object.")
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise BadRequest("model must be the name of a model; GET /v1/models lists them.", param="model")
        if not isinstance(body.get("stream"), bool | None):
            raise BadRequest("stream must be true or false.", param="stream")
        adapter: Adapter | None = None
        model = self._models.get(name)
        if model is None:
            base, adapter = self._fleet.adapter(name) or (None, None)
            model = self._models.get(base) if base is not None else None
        if model is None:
            raise UnknownModel
        salt = self._tenants.salt(tenant, body.get("cache_salt"))
        return Call(tenant, path, model, adapter, salt, raw, body)

    async def _know(self, call: Call) -> Prompt:
        """Render, tokenize and hash the prompt, as the engine will."""
        try:
            if len(call.raw) > INLINE_BYTES:
                prompt = await asyncio.to_thread(self._hash, call)
            else:
                prompt = self._hash(call)
        except Inexact as error:
            prompt = Prompt(None, None, None, error.reason)
        if prompt.inexact is not None:
            self._telemetry.inexact.labels(call.model.name, prompt.inexact).inc()
        return prompt

    def _hash(self, call: Call) -> Prompt:
        if len(call.raw) > EXACT_BYTES:
            raise Inexact("too_long")
        tokenizer = call.model.tokenizer
        if tokenizer is None:
            raise Inexact("no_tokenizer")
        ids = tokenizer.chat(call.body) if call.path == CHAT else tokenizer.completion(call.body)
        if _scores_its_prompt(call):
            return Prompt(len(ids), None, None, "prompt_logprobs")
        try:
            scheme = call.model.scheme(self._fleet.facts(call.model.name))
        except Inexact as error:
            return Prompt(len(ids), None, None, error.reason)
        prefix = hash_prompt(ids, scheme, salt=call.salt, adapter=call.adapter)
        return Prompt(len(ids), prefix, call.model.keys(self._fleet.root))

    def _charge(self, call: Call, prompt: Prompt) -> None:
        """Take the prompt from the tenant's budget; one that was not counted is charged when it is settled."""
        self._limits.charge(call.tenant, prompt.tokens or 0)

    def _survey(self, call: Call, prompt: Prompt) -> list[Candidate]:
        candidates = self._fleet.candidates(call.model.name, call.adapter, prompt.prefix)
        if not candidates:
            raise Unavailable(f"No engine for {call.model.name} is available; try again shortly.")
        return candidates

    async def _look_up(self, call: Call, prompt: Prompt) -> Residency | None:
        """What the pool holds of the prompt; None where there is nothing to ask about."""
        pool = call.model.pool
        if pool is None or prompt.prefix is None or prompt.keys is None or not prompt.prefix.reusable:
            return None
        started = time.perf_counter()
        residency = await pool.master.look_up(prompt.prefix, prompt.keys)
        self._telemetry.lookup_seconds.labels(pool.name).observe(time.perf_counter() - started)
        self._telemetry.lookups.labels(pool.name, residency.trouble or "known").inc()
        self._telemetry.lookup_keys.labels(pool.name).inc(residency.asked)
        if (residency.trouble is None) is (pool.name in self._sick_pools):
            self._tell_of_pool(pool.name, residency.trouble)
        return residency

    def _tell_of_pool(self, pool: str, trouble: str | None) -> None:
        """Log once when a pool stops to answer, and once when it answers again."""
        if trouble is None:
            self._sick_pools.discard(pool)
            log.info("pool %s answers again", pool)
        else:
            self._sick_pools.add(pool)
            log.warning("pool %s does not answer look-ups: %s; requests go on without", pool, trouble)

    @staticmethod
    def _job(call: Call, prompt: Prompt, residency: Residency | None) -> Job:
        run = residency.run if residency is not None else None
        return Job(
            model=call.model.name,
            tenant=call.tenant.name,
            prompt_tokens=prompt.tokens,
            pool_tokens=run * prompt.prefix.block_size if run is not None and prompt.prefix is not None else None,
        )

    def _place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        try:
            placement = _among(candidates, self._policy.place(job, candidates))
        except NoCapacity as error:
            raise Unavailable(f"{job.model}: {error}; try again shortly.") from None
        except Exception:
            log.exception("the policy failed; least_loaded placed the request")
            self._telemetry.policy_failures.inc()
            try:
                placement = self._fallback.place(job, candidates)
            except NoCapacity as error:
                raise Unavailable(f"{job.model}: {error}; try again shortly.") from None
        return placement

    async def _one_leg(self, exchange: Exchange, trace: Trace, plan: Plan, deadline: float) -> Result:
        """The whole request on one engine."""
        result = await self._relay.answer(exchange, trace, self._answer_leg(plan), self._targets(plan), deadline)
        self._settle(trace, plan, result.engine, result, result)
        return result

    async def _two_legs(self, exchange: Exchange, trace: Trace, plan: Plan, deadline: float) -> Result:
        """Prefill on one engine, the last block seen in the pool, then decode on the engine that suits best now."""
        first = await self._prefill(exchange, trace, plan, deadline)
        trace.step("prefill")
        if first is not None and not first.ok:
            self._settle(trace, plan, first.engine, first, first)
            return first
        job = replace(plan.job, prefilled=True)
        if first is not None and await self._handed_over(plan):
            job = replace(job, pool_tokens=plan.prompt.reusable_tokens)
        trace.step("hand over")
        able = [c for c in self._survey(plan.call, plan.prompt) if c.role != "prefill"]
        others = [c for c in able if first is None or c.id != first.engine]
        candidates = tuple(others or able)
        placement = replace(self._place(job, candidates), prefill=None, reason=plan.placement.reason)
        decode = replace(plan, job=job, candidates=candidates, placement=placement)
        lost = self._telemetry.handoffs.labels(plan.call.model.name, "decode_failed")
        try:
            result = await self._relay.answer(
                exchange,
                trace,
                self._answer_leg(decode),
                self._targets(decode, first.engine if first is not None else None),
                deadline,
            )
        except GatewayError:
            lost.inc()
            raise
        trace.fact("moongate.decode.cached_tokens", result.cached_tokens)
        if not result.ok:
            lost.inc()
        if first is None:
            self._settle(trace, decode, result.engine, result, result)
        else:
            self._settle(trace, plan, first.engine, first, result)
        return result

    async def _prefill(self, exchange: Exchange, trace: Trace, plan: Plan, deadline: float) -> Result | None:
        """Run the prefill leg, on another engine where one fails. None: let the decode engine compute the prompt."""
        call, placement, candidates = plan.call, plan.placement, list(plan.candidates)
        with _writing():
            leg = Leg(call.path, prefill_body(call.body, call.salt), plan.prompt.prefix)
        failed: GatewayError = EngineFailed("No prefill engine was tried; this is a defect of the gateway.")
        for _ in range(self._bounds.attempts):
            chosen = next((c for c in candidates if c.id == placement.prefill), None)
            if chosen is None:
                break
            try:
                target = Target(chosen.id, uncached(plan.job, chosen))
                result = await self._relay.prefill(exchange, trace, leg, target, deadline)
            except LegFailed as failure:
                failed = failure.error
                self._telemetry.handoffs.labels(call.model.name, "prefill_failed").inc()
                candidates.remove(chosen)
                placement = self._place(plan.job, candidates)
            else:
                return result
        if not self._bounds.local_prefill:
            raise failed
        self._telemetry.handoffs.labels(call.model.name, "local_prefill").inc()
        return None

    async def _handed_over(self, plan: Plan) -> bool:
        """Wait until the pool has the prompt's last full block: a prefill's answer comes before its blocks."""
        pool, prefix, keys = plan.call.model.pool, plan.prompt.prefix, plan.prompt.keys
        if pool is None or prefix is None or keys is None or not prefix.reusable:
            return False
        started = time.perf_counter()
        seen = await pool.master.wait_for(prefix.hashes[prefix.reusable - 1], keys, self._bounds.handoff)
        self._telemetry.handoff_seconds.labels(plan.call.model.name).observe(time.perf_counter() - started)
        self._telemetry.handoffs.labels(plan.call.model.name, "seen" if seen else "late").inc()
        return seen

    @staticmethod
    def _answer_leg(plan: Plan) -> Leg:
        call = plan.call
        with _writing():
            body = engine_body(call.raw, call.body, call.salt)
        return Leg(call.path, body, plan.prompt.prefix, hide_usage=not wants_usage(call.body))

    def _targets(self, plan: Plan, prefill: str | None = None) -> list[Target]:
        """The placement's engine and its spares, each with what it would have to compute."""
        candidates = {c.id: c for c in plan.candidates}
        return [
            Target(name, uncached(plan.job, candidates[name]), self._route(plan, candidates[name], prefill))
            for name in (plan.placement.engine, *plan.placement.spares)
        ]

    def _route(self, plan: Plan, candidate: Candidate, prefill: str | None) -> bytes | None:
        if not self._expose_routing:
            return None
        own, pool = expected(plan.job, candidate)
        legs = f"engine={candidate.id}" + (f"; prefill={prefill}" if prefill else "")
        reason = "".join(letter for letter in plan.placement.reason if letter.isprintable())
        return f"{legs}; reason={reason}; own={own}; pool={pool}".encode("ascii", "replace")

    @staticmethod
    def _note(trace: Trace, call: Call, prompt: Prompt, residency: Residency | None, placement: Placement) -> None:
        """The facts of the decision, onto the request's span."""
        trace.fact("moongate.prompt_tokens", prompt.tokens)
        trace.fact("moongate.inexact", prompt.inexact)
        trace.fact("moongate.adapter", call.adapter.name if call.adapter is not None else None)
        if residency is not None:
            trace.fact("moongate.pool.trouble", residency.trouble)
            trace.fact("moongate.pool.run_blocks", residency.run)
            trace.fact("moongate.pool.keys_asked", residency.asked)
        trace.fact("moongate.engine", placement.engine)
        trace.fact("moongate.prefill", placement.prefill)
        trace.fact("moongate.reason", placement.reason)
        trace.fact("moongate.predicted.own_tokens", placement.own_tokens)
        trace.fact("moongate.predicted.pool_tokens", placement.pool_tokens)

    def _settle(self, trace: Trace, plan: Plan, engine: str, prefilled: Result, answered: Result) -> None:
        """Compare predicted and actual cached tokens on the engine that prefilled, and settle the usage."""
        tenant, model = plan.call.tenant, plan.call.model.name
        candidate = next(c for c in plan.candidates if c.id == engine)
        own, pool = expected(plan.job, candidate)
        actual = prefilled.cached_tokens
        predicted = plan.prompt.prefix is not None and (
            plan.call.model.pool is None or plan.job.pool_tokens is not None
        )
        if predicted and prefilled.status < 400 and actual is not None:
            self._telemetry.predicted.labels(tenant.name, engine, "own").inc(own)
            self._telemetry.predicted.labels(tenant.name, engine, "pool").inc(pool)
            self._telemetry.actual.labels(tenant.name, engine).inc(actual)
            self._telemetry.error.labels(engine).observe(abs(own + pool - actual))
        self._telemetry.ttft.labels(model, answered.engine).observe(answered.ttft)
        prompt_tokens = answered.tokens("prompt_tokens")
        completion_tokens = answered.tokens("completion_tokens")
        self._telemetry.prompt_tokens.labels(tenant.name, model).inc(prompt_tokens or 0)
        self._telemetry.completion_tokens.labels(tenant.name, model).inc(completion_tokens or 0)
        uncharged = (prompt_tokens or 0) if plan.prompt.tokens is None else 0
        self._limits.settle(tenant, uncharged + (completion_tokens or 0))
        trace.fact("moongate.answered_by", answered.engine)
        trace.fact("moongate.actual.cached_tokens", actual)
        trace.fact("moongate.completion_tokens", completion_tokens)
        trace.fact("moongate.ttft_seconds", answered.ttft)
        self._observe(
            plan.placement,
            Outcome(ok=answered.ok, engine=answered.engine, ttft=answered.ttft, cached_tokens=actual),
        )

    def _observe(self, placement: Placement, outcome: Outcome) -> None:
        try:
            self._policy.observe(placement, outcome)
        except Exception:
            log.exception("the policy failed to observe an outcome")
            self._telemetry.policy_failures.inc()


@contextmanager
def _writing() -> Iterator[None]:
    """Refuse what orjson reads but does not write: it reads 1024 levels and writes 254."""
    try:
        yield
    except orjson.JSONEncodeError:
        raise BadRequest("The body is nested too deeply; 250 levels are certain to pass.") from None


def _among(candidates: Sequence[Candidate], placement: Placement) -> Placement:
    """The placement, if every engine that it names is a candidate."""
    named = {placement.engine, placement.prefill or placement.engine, *placement.spares}
    if strange := named.difference(c.id for c in candidates):
        raise ValueError(f"the policy named engines that are no candidates: {', '.join(map(str, strange))}")
    return placement


def _scores_its_prompt(call: Call) -> bool:
    """Whether the prompt's own logprobs are asked for: vLLM then computes all of it and reads no cache."""
    body = call.body
    echoed = call.path == COMPLETIONS and bool(body.get("echo")) and body.get("logprobs") is not None
    return body.get("prompt_logprobs") is not None or echoed
