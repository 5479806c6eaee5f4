"""The path of one request, top to bottom. Read this first.

    identify   whose key is it                                   tenants
    gate       may they send one more now                        limits
    parse      bytes to an object, once                          bodies
    tokenize   the prompt's token ids, as the engine would have  connector.render, connector.tokens
    hash       ids and salt to the engine's own block hashes     connector.blocks
    charge     the prompt's tokens, to the tenant's budget       limits
    look up    how many leading blocks the pool holds            connector.residency
    survey     which engines are there, and what each holds      fleet
    place      one engine, or a prefill and a decode engine      policies
    relay      one leg, or two, and the bytes to the client      relay, connector.handoff
    settle     predicted against actual, usage, the span         settle

The steps that decide, from tokenize to place, stand in gateway/placing.py. From the survey until the engine
is leased nothing is waited for, so that requests that come together see each other.

Each step takes what the step before it made and returns a new frozen value. A step that cannot know
something says so and the request goes on without it: it is then placed by load. All of them up to the
first byte of the answer happen in `_open`, whose end is the end of the request's body: while the answer
streams, only `Account` remembers what it was about.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from connector.handoff import ids_body, wants_usage
from connector.residency import Residency
from gateway import forms
from gateway.agreement import Agreement
from gateway.audit import AUDITED, MAX_AUDIT_BODY, Audit
from gateway.bodies import Call, read_object, to_answer, to_prefill
from gateway.dialects import Dialect
from gateway.encodings import decoded
from gateway.endpoints import ENDPOINTS, STORED, Endpoint
from gateway.errors import (
    Broken,
    EngineFailed,
    GatewayError,
    NotStored,
    Unavailable,
    UnsupportedMedia,
)
from gateway.exchange import Exchange
from gateway.fleet import Fleet
from gateway.front import Handler
from gateway.limits import Bytes, Limits
from gateway.placing import Placing, Prompt, divides
from gateway.relay import Leg, LegFailed, Relay, Reply, Result, Target
from gateway.settle import Account, Settle
from gateway.stored import Stored
from gateway.tenants import Tenant, Tenants
from gateway.trace import Telemetry, Trace
from policies.interface import Candidate, Job, Placement, expected, uncached

log = logging.getLogger("moongate")


class Plan(Struct, frozen=True):
    """A call, what is known of it, and where it goes."""

    call: Call
    prompt: Prompt
    job: Job
    candidates: Sequence[Candidate]
    placement: Placement
    ids: Sequence[int] | None = None
    """The prompt's ids, where they go to the engines in its place."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long and how often: seconds, and engines tried."""

    body_bytes: int
    held_bytes: int
    body: float
    handoff: float
    attempts: int
    local_prefill: bool


class Serve:
    """Answers every hot endpoint."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        limits: Limits,
        placing: Placing,
        agreements: Mapping[str, Agreement],
        fleet: Fleet,
        relay: Relay,
        settle: Settle,
        telemetry: Telemetry,
        bounds: Bounds,
        session_header: str,
        expose_routing: bool = False,
    ) -> None:
        self._tenants = tenants
        self._limits = limits
        self._placing = placing
        self._agreements = agreements
        self._fleet = fleet
        self._relay = relay
        self._settle = settle
        self._telemetry = telemetry
        self._bounds = bounds
        self._session_header = session_header.lower().encode()
        self._expose_routing = expose_routing
        self._held = Bytes(bounds.held_bytes)
        self._stored = Stored()

    def route(self, method: str, path: str) -> Handler | None:
        """Who answers this; None where it is no hot endpoint."""
        if method == "POST" and path in ENDPOINTS:
            return self
        stored = STORED.fullmatch(path) if path.startswith("/v1/responses/") else None
        if stored is not None and method == ("POST" if stored[2] else "GET"):
            return self
        return None

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, whatever happens to it."""
        trace = self._telemetry.begin(exchange.fields)
        endpoint = ENDPOINTS.get(exchange.path)
        if endpoint is not None and endpoint.dialect is Dialect.MESSAGES:
            exchange.add(b"request-id", exchange.request_id)  # Anthropic's name for it
        try:
            tenant = self._tenants.identify(exchange.fields)
            trace.tenant = tenant.name
            trace.step("identify")
            with self._limits.admit(tenant):
                if endpoint is not None:
                    await self._answer(exchange, trace, tenant, endpoint)
                else:
                    await self._recall(exchange, trace, tenant)
        except GatewayError as error:
            trace.status = str(error.status)
            self._refuse(exchange, error, endpoint.dialect if endpoint is not None else Dialect.CHAT)
        except asyncio.CancelledError:
            trace.status = "client_left" if exchange.left else "stopped"
            if not exchange.left:
                if not exchange.finished:
                    self._refuse(exchange, Unavailable("The gateway is being stopped; send it again."), Dialect.CHAT)
                raise
        except Exception:
            log.exception("request %s met a defect", exchange.request_id.decode())
            self._refuse(exchange, Broken(), endpoint.dialect if endpoint is not None else Dialect.CHAT)
        finally:
            exchange.release()
            self._settle.close(exchange, trace)

    async def _answer(self, exchange: Exchange, trace: Trace, tenant: Tenant, endpoint: Endpoint) -> None:
        reply, account = await self._open(exchange, trace, tenant, endpoint)
        exchange.release()
        if endpoint.makes:
            self._keep(account, reply.result())  # who leaves a stream may come back to it
        try:
            result = await self._relay.give(exchange, reply)
            if exchange.undelivered:
                await exchange.taken()
        except asyncio.CancelledError:
            self._settle.left(account, reply.result())
            raise
        trace.step("relay")
        self._settle.given(trace, account, result)
        if endpoint.makes:
            self._keep(account, result)
        trace.status = str(result.status) if result.error is None else result.error

    async def _open(
        self, exchange: Exchange, trace: Trace, tenant: Tenant, endpoint: Endpoint
    ) -> tuple[Reply, Account]:
        """All steps up to the first byte of the answer."""
        call = await self._parse(exchange, tenant, endpoint)
        trace.model = call.model.name
        trace.step("parse")
        prompt = await self._placing.know(call)
        trace.step("tokenize and hash")
        self._charge(call, prompt)
        residency = await self._placing.look_up(call, prompt)
        trace.step("look up")
        ids = self._ids(call, prompt)
        headers = ((b"x-request-id", exchange.request_id), *trace.context())
        leg = await self._answer_leg(call, prompt, ids, headers)
        deadline = self._relay.deadline()
        candidates = self._survey(call, prompt)
        job = self._placing.job(call, prompt, residency)
        placement = self._placing.place(job, candidates)
        self._telemetry.placements.inc(job.model, placement.prefill or placement.engine, placement.reason)
        trace.step("place")
        if trace.recorded:
            _note(trace, call, prompt, residency, placement)
        plan = Plan(call, prompt, job, candidates, placement, ids)
        try:
            if placement.prefill is None or not divides(call, prompt):
                return await self._relay.open(leg, self._targets(plan), deadline), self._account(plan)
            return await self._open_apart(trace, plan, leg, deadline)
        except GatewayError:
            self._settle.failed(placement)
            raise

    async def _parse(self, exchange: Exchange, tenant: Tenant, endpoint: Endpoint) -> Call:
        """Bytes to an object, once. What the gateway does not need itself is the engine's to judge."""
        raw = await exchange.body(self._bounds.body_bytes, self._bounds.body, self._held)
        coding = exchange.fields.get(b"content-encoding")
        if coding is not None:
            raw = await asyncio.to_thread(decoded, raw, coding, self._bounds.body_bytes)
            exchange.grow(len(raw))
        kind = exchange.fields.get(b"content-type", b"")
        if endpoint.form:
            body = await asyncio.to_thread(forms.fields, raw, kind)
        elif b"charset" in kind and b"utf-8" not in kind.lower():
            raise UnsupportedMedia("The body must be JSON in UTF-8.")
        else:
            body = await read_object(raw)
        return self._placing.call(
            tenant,
            endpoint,
            raw,
            body,
            target=f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path,
            content_type=kind if endpoint.form else None,
            session=exchange.fields.get(self._session_header),
        )

    def _ids(self, call: Call, prompt: Prompt) -> Sequence[int] | None:
        """The prompt's ids for the engines, where that is wanted and they have agreed often enough."""
        counted, known = prompt.counted, prompt.known
        if (
            not call.model.sends_tokens
            or call.endpoint.prompt not in AUDITED
            or counted is None
            or known is None
            or call.body.get("echo")
        ):
            return None
        return known.ids() if self._agreements[call.model.name].verified(counted.shape) else None

    def _charge(self, call: Call, prompt: Prompt) -> None:
        """Take the prompt from the tenant's budget; one that was not counted is charged when it is settled."""
        self._limits.charge(call.tenant, prompt.tokens or 0)

    def _survey(self, call: Call, prompt: Prompt) -> Sequence[Candidate]:
        candidates = self._placing.survey(call, prompt)
        if call.endpoint.makes and (previous := call.body.get("previous_response_id")) is not None:
            home = self._stored.home(call.tenant.name, previous) if isinstance(previous, str) else None
            if home is None:
                raise NotStored(param="previous_response_id")
            candidates = [candidate for candidate in candidates if candidate.id == home[1]]
            if not candidates:
                raise Unavailable("The engine that keeps this response is not available; try again shortly.")
        return candidates

    async def _open_apart(self, trace: Trace, plan: Plan, leg: Leg, deadline: float) -> tuple[Reply, Account]:
        """Prefill on one engine, the last block seen in the pool, then decode on the engine that suits best now."""
        first = await self._prefill(plan, leg.headers, deadline)
        trace.step("prefill")
        if first is not None and first.status >= 400:
            return first, self._account(plan)
        job = replace(plan.job, prefilled=True)
        if first is not None and await self._handed_over(plan):
            job = replace(job, pool_tokens=plan.prompt.reusable_tokens)
        trace.step("hand over")
        able = [c for c in self._survey(plan.call, plan.prompt) if c.role != "prefill"]
        others = [c for c in able if first is None or c.id != first.lease.engine.id]
        candidates = others or able
        placement = replace(self._placing.place(job, candidates), prefill=None, reason=plan.placement.reason)
        decode = replace(plan, job=job, candidates=candidates, placement=placement)
        targets = self._targets(decode, first.lease.engine.id if first is not None else None)
        try:
            reply = await self._relay.open(leg, targets, deadline)
        except GatewayError:
            self._telemetry.handoffs.inc(plan.call.model.name, "decode_failed")
            raise
        return reply, self._account(plan, first.result()) if first is not None else self._account(decode)

    async def _prefill(self, plan: Plan, headers: Sequence[tuple[bytes, bytes]], deadline: float) -> Reply | None:
        """Run the prefill leg, on another engine where one fails. None: let the decode engine compute the prompt."""
        call, placement, candidates = plan.call, plan.placement, list(plan.candidates)
        leg = await self._prefill_leg(plan, headers)
        failed: GatewayError = EngineFailed("No prefill engine was tried; this is a defect of the gateway.")
        for number in range(self._bounds.attempts):
            chosen = next((c for c in candidates if c.id == placement.prefill), None)
            if chosen is None or (number and not self._relay.may_try_again()):
                break
            try:
                target = Target(chosen.id, uncached(plan.job, chosen))
                reply = await self._relay.prefill(leg, target, deadline)
            except LegFailed as failure:
                failed = failure.error
                self._telemetry.handoffs.inc(call.model.name, "prefill_failed")
                candidates.remove(chosen)
                placement = self._placing.place(plan.job, candidates)
            else:
                return reply
        if not self._bounds.local_prefill:
            raise failed
        self._telemetry.handoffs.inc(call.model.name, "local_prefill")
        return None

    @staticmethod
    async def _prefill_leg(plan: Plan, headers: Sequence[tuple[bytes, bytes]]) -> Leg:
        """The prompt alone. Of an endpoint that is no chat and no completion, by its ids, as a completion."""
        call, prompt = plan.call, plan.prompt
        if call.endpoint.prompt in AUDITED or prompt.known is None:
            return Leg(call.target, await to_prefill(call, plan.ids), prompt.prefix, prompt.landmarks, headers=headers)
        body = ids_body(call.rename or call.body["model"], prompt.known.ids(), call.salt)
        return Leg("/v1/completions", (body,), prompt.prefix, prompt.landmarks, headers=headers)

    async def _handed_over(self, plan: Plan) -> bool:
        """Wait until the pool has the prompt's last full block: a prefill's answer comes before its blocks."""
        pool, prefix, keys = plan.call.model.pool, plan.prompt.prefix, plan.prompt.keys
        if pool is None or prefix is None or keys is None or not prefix.reusable:
            return False
        started = time.perf_counter()
        seen = await pool.master.wait_for(prefix.hashes[prefix.reusable - 1], keys, self._bounds.handoff)
        self._telemetry.handoff_seconds.observe(time.perf_counter() - started, plan.call.model.name)
        self._telemetry.handoffs.inc(plan.call.model.name, "seen" if seen else "late")
        return seen

    @staticmethod
    async def _answer_leg(
        call: Call, prompt: Prompt, ids: Sequence[int] | None, headers: Sequence[tuple[bytes, bytes]]
    ) -> Leg:
        endpoint = call.endpoint
        return Leg(
            call.target,
            await to_answer(call, ids),
            prompt.prefix,
            prompt.landmarks,
            dialect=endpoint.dialect,
            content_type=call.content_type,
            hide_usage=endpoint.asks_usage and not wants_usage(call.body),
            headers=headers,
        )

    def _account(self, plan: Plan, prefilled: Result | None = None) -> Account:
        call, prompt = plan.call, plan.prompt
        known = prompt.prefix is not None and (
            call.model.pool is None
            or plan.job.pool_tokens is not None
            or all(candidate.own_tokens >= prompt.reusable_tokens for candidate in plan.candidates)
        )
        return Account(
            call.tenant,
            plan.job,
            plan.candidates,
            plan.placement,
            known,
            len(call.raw),
            prefilled,
            prompt.counted if plan.ids is None else None,
            self._audit(call, prompt),
        )

    def _audit(self, call: Call, prompt: Prompt) -> Audit | None:
        """What is needed to audit this request, if it is one of those that are."""
        counted, known = prompt.counted, prompt.known
        if counted is None or known is None or call.endpoint.prompt not in AUDITED:
            return None
        if not self._agreements[call.model.name].due(counted.shape):
            return None
        return Audit(call, known, counted.shape) if len(call.raw) <= MAX_AUDIT_BODY else None

    def _targets(self, plan: Plan, prefill: str | None = None) -> list[Target]:
        """The placement's engine and its spares, as many as are tried, each with what it would have to compute."""
        tried = (plan.placement.engine, *plan.placement.spares)[: self._bounds.attempts]
        candidates = {c.id: c for c in plan.candidates if c.id in tried}
        return [
            Target(name, uncached(plan.job, candidates[name]), self._route(plan, candidates[name], prefill))
            for name in tried
        ]

    def _route(self, plan: Plan, candidate: Candidate, prefill: str | None) -> bytes | None:
        if not self._expose_routing:
            return None
        own, pool = expected(plan.job, candidate)
        legs = f"engine={candidate.id}" + (f"; prefill={prefill}" if prefill else "")
        reason = "".join(letter for letter in plan.placement.reason if letter.isprintable())
        return f"{legs}; reason={reason}; own={own}; pool={pool}".encode("ascii", "replace")

    async def _recall(self, exchange: Exchange, trace: Trace, tenant: Tenant) -> None:
        """GET or cancel a response that an engine keeps: it goes to that engine, or nowhere."""
        found = STORED.fullmatch(exchange.path)
        home = self._stored.home(tenant.name, found[1]) if found is not None else None
        if home is None:
            raise NotStored
        trace.model, engine = home
        if not any(candidate.id == engine for candidate in self._fleet.candidates(trace.model, None, None)):
            raise Unavailable("The engine that keeps this response is not available; try again shortly.")
        body = await exchange.body(self._bounds.body_bytes, self._bounds.body, self._held)
        leg = Leg(
            f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path,
            (body,),
            method=exchange.method,
            dialect=Dialect.RESPONSES,
            headers=((b"x-request-id", exchange.request_id), *trace.context()),
        )
        reply = await self._relay.open(leg, [Target(engine, 0)], self._relay.deadline())
        result = await self._relay.give(exchange, reply)
        trace.status = str(result.status) if result.error is None else result.error

    def _keep(self, account: Account, result: Result) -> None:
        """Remember where a response was made."""
        if result.made is not None:
            self._stored.keep(account.tenant.name, result.made, account.job.model, result.engine)

    @staticmethod
    def _refuse(exchange: Exchange, error: GatewayError, dialect: Dialect) -> None:
        if exchange.started:
            exchange.drop()
        else:
            headers = [(b"content-type", b"application/json"), *error.headers]
            exchange.answer(error.status, headers, dialect.refusal(error))


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
