"""From a call to a placement: what is known of its prompt, who could take it, what the pool holds, who gets it.

The steps of gateway/serve.py that decide and send nothing; `moongate explain` takes the same ones. A step that
cannot know something says so, and the request goes on without it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson
from msgspec import Struct

from connector.blocks import Adapter, HashScheme, Prefix
from connector.errors import Inexact
from connector.keys import KeyScheme
from connector.landmarks import NOWHERE, PIECE, Landmarks, of_prefix, of_text
from connector.prompts import Known, hashed
from connector.residency import Residency
from gateway.agreement import Agreement, Counted, shape_of
from gateway.audit import AUDITED, Auditor
from gateway.bodies import EXACT_BYTES, Call, to_answer
from gateway.endpoints import Endpoint, PromptKind
from gateway.errors import BadRequest, Unavailable, UnknownModel
from gateway.fleet import Fleet
from gateway.models import Model
from gateway.tenants import Tenant, Tenants
from gateway.trace import Telemetry
from policies.guard import Guarded
from policies.interface import Candidate, Job, NoCapacity, Placement

log = logging.getLogger("moongate")

BILLING = "x-anthropic-billing-header"
"""A system line that begins so differs each time and is no part of the prompt: vLLM drops it."""


class Prompt(Struct, frozen=True):
    """What is known of a call's prompt."""

    tokens: int | None = None
    prefix: Prefix | None = None
    keys: KeyScheme | None = None
    inexact: str | None = None
    """Why there is no prefix."""
    counted: Counted | None = None
    known: Known | None = None
    landmarks: Landmarks = NOWHERE
    """Of its blocks, or of its text where there is no prefix."""

    @property
    def reusable_tokens(self) -> int:
        """Tokens that a cache can give at most."""
        return self.prefix.reusable * self.prefix.block_size if self.prefix is not None else 0


class Placing:
    """Decides where a call goes."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        models: Mapping[str, Model],
        agreements: Mapping[str, Agreement],
        auditor: Auditor,
        fleet: Fleet,
        policy: Guarded,
        telemetry: Telemetry,
    ) -> None:
        """`models` are by every name that clients may use."""
        self._tenants = tenants
        self._models = models
        self._agreements = agreements
        self._auditor = auditor
        self._fleet = fleet
        self._policy = policy
        self._telemetry = telemetry
        self._sick_pools: set[str] = set()

    def call(
        self,
        tenant: Tenant,
        endpoint: Endpoint,
        raw: bytes,
        body: Mapping[str, Any],
        *,
        target: str,
        content_type: bytes | None = None,
        session: bytes | None = None,
    ) -> Call:
        """What a tenant asks for. Raises `BadRequest`, or `UnknownModel` for one that it may not ask."""
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise BadRequest("model must be the name of a model; GET /v1/models lists them.", param="model")
        if not isinstance(body.get("stream"), bool | None):
            raise BadRequest("stream must be true or false.", param="stream")
        model, adapter = self._model(tenant, name)
        return Call(
            tenant=tenant,
            endpoint=endpoint,
            target=target,
            model=model,
            adapter=adapter,
            salt=self._tenants.salt(tenant, body.get("cache_salt")) if endpoint.salted else None,
            raw=raw,
            body=body,
            rename=model.name if adapter is None and name != model.name else None,
            content_type=content_type,
            session=_session(tenant, session) if session else None,
        )

    async def know(self, call: Call) -> Prompt:
        """Render, tokenize and hash the prompt, as the engine will."""
        try:
            prompt = await self._prompt(call)
        except Inexact as error:
            prompt = Prompt(inexact=error.reason, landmarks=self._landmarks(call, None))
        if prompt.inexact is not None:
            self._telemetry.inexact.inc(call.model.name, prompt.inexact)
        return prompt

    def survey(self, call: Call, prompt: Prompt) -> list[Candidate]:
        """The engines that could take it. Raises `Unavailable` where there are none."""
        candidates = self._fleet.candidates(call.model.name, call.adapter, prompt.prefix, prompt.landmarks)
        if not candidates:
            raise Unavailable(f"No engine for {call.model.name} is available; try again shortly.")
        return candidates

    async def look_up(self, call: Call, prompt: Prompt) -> Residency | None:
        """What the pool holds of the prompt; None where there is nothing to ask about, or no use in it.

        There is none where each engine holds all that a cache can give: the answer would change neither where the
        request goes nor what is predicted of it.
        """
        pool = call.model.pool
        if pool is None or prompt.prefix is None or prompt.keys is None or not prompt.prefix.reusable:
            return None
        candidates = self.survey(call, prompt)
        if all(candidate.own_tokens >= prompt.reusable_tokens for candidate in candidates):
            return None
        if not any(candidate.pooled for candidate in candidates):
            self._telemetry.inexact.inc(call.model.name, "engines_disagree")
            return None
        started = time.perf_counter()
        residency = await pool.residence.look_up(prompt.prefix, prompt.keys)
        self._telemetry.lookup_seconds.observe(time.perf_counter() - started, pool.name)
        self._telemetry.lookups.inc(pool.name, residency.trouble or "known")
        self._telemetry.lookup_keys.add(residency.asked, pool.name)
        if (residency.trouble is None) is (pool.name in self._sick_pools):
            self._tell_of_pool(pool.name, residency.trouble)
        return residency

    @staticmethod
    def job(call: Call, prompt: Prompt, residency: Residency | None) -> Job:
        """What policies are told of it."""
        run = residency.run if residency is not None else None
        return Job(
            model=call.model.name,
            tenant=call.tenant.name,
            prompt_tokens=prompt.tokens,
            pool_tokens=run * prompt.prefix.block_size if run is not None and prompt.prefix is not None else None,
            disk_tokens=residency.disk * prompt.prefix.block_size if residency is not None and prompt.prefix else 0,
            session=call.session,
            landmarks=prompt.landmarks.keys,
            whole=prompt.landmarks.whole,
            landmark_tokens=prompt.landmarks.apart,
            block_tokens=prompt.prefix.block_size if prompt.prefix is not None else 1,
        )

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        """The policy's choice. Raises `Unavailable` where no candidate can take it."""
        try:
            return self._policy.place(job, candidates)
        except NoCapacity as error:
            raise Unavailable(f"{job.model}: {error}; try again shortly.") from None

    def _model(self, tenant: Tenant, name: str) -> tuple[Model, Adapter | None]:
        """The model that is meant by a name: its own, an alias, or an adapter's."""
        adapter: Adapter | None = None
        model = self._models.get(name)
        if model is None:
            base, adapter = self._fleet.adapter(name) or (None, None)
            model = self._models.get(base) if base is not None else None
        if model is None or (tenant.models is not None and model.name not in tenant.models):
            raise UnknownModel
        return model, adapter

    async def _prompt(self, call: Call) -> Prompt:
        kind, model = call.endpoint.prompt, call.model
        if kind is None or (model.prompts is None and model.render is None):
            raise Inexact("no_tokenizer" if kind in AUDITED else "endpoint")
        if len(call.raw) > EXACT_BYTES:
            raise Inexact("too_long")
        shape = shape_of(kind, call.body)
        reason = self._agreements[model.name].off(shape)
        off = reason is not None
        scheme: HashScheme | None = None
        if _scores_its_prompt(call):
            reason = "prompt_logprobs"
        elif not off:
            try:
                scheme = model.scheme(self._fleet.facts(model.name))
            except Inexact as error:
                reason = error.reason
        known = await self._known(call, kind, scheme)
        return Prompt(
            None if off else known.tokens,
            known.prefix,
            self._auditor.keys(model) if scheme is not None else None,
            reason,
            Counted(shape, known.tokens),
            known,
            self._landmarks(call, known.prefix),
        )

    def _landmarks(self, call: Call, prefix: Prefix | None) -> Landmarks:
        if self._policy.blind:
            return NOWHERE
        return of_prefix(prefix) if prefix is not None else _of_text(call)

    async def _known(self, call: Call, kind: PromptKind, scheme: HashScheme | None) -> Known:
        """A prompt's ids and hashes: made here where that is exact, else by a server that renders. Raises `Inexact`."""
        model, salt, adapter = call.model, call.salt, call.adapter
        here = kind if kind == "chat" or kind == "completion" else None  # noqa: PLR1714 - this way mypy follows
        why = Inexact("endpoint" if here is None else "no_tokenizer")
        if model.prompts is not None and here is not None:
            try:
                return await model.prompts.know(
                    here, call.raw, call.body, domain=call.tenant.domain, scheme=scheme, salt=salt, adapter=adapter
                )
            except Inexact as error:
                why = error
        if model.render is None:
            raise why
        rendered = await model.render.render(call.endpoint.path, await to_answer(call))
        return await hashed(rendered.token_ids, scheme, salt=salt, adapter=adapter, media=rendered.media)

    def _tell_of_pool(self, pool: str, trouble: str | None) -> None:
        """Log once when a pool stops to answer, and once when it answers again."""
        if trouble is None:
            self._sick_pools.discard(pool)
            log.info("pool %s answers again", pool)
        else:
            self._sick_pools.add(pool)
            log.warning("pool %s does not answer look-ups: %s; requests go on without", pool, trouble)


def _session(tenant: Tenant, named: bytes) -> str:
    """A tenant's session, of any length and whatever its name says; of a header that came twice the first."""
    first, _, _ = named.partition(b", ")
    return blake2b(first, key=tenant.domain.encode()[:64], digest_size=16).hexdigest()


def _of_text(call: Call) -> Landmarks:
    """The landmarks of a prompt's text, for one whose blocks are not known; none of what has no prompt or little.

    All that the template renders is in it, tools and pictures too, with what stays the same in every turn first.
    """
    if call.endpoint.prompt is None or len(call.raw) < PIECE:
        return NOWHERE
    body = call.body
    system = body.get("system")
    if isinstance(system, list):
        system = [part for part in system if not (isinstance(part, dict) and _is_billing(part.get("text")))]
    said = body.get("messages") or body.get("prompt") or body.get("input") or ""
    domain = orjson.dumps([call.tenant.domain, call.salt, call.adapter.name if call.adapter is not None else None])
    return of_text(orjson.dumps([body.get("tools"), system, body.get("instructions"), said]), domain)


def _is_billing(text: object) -> bool:
    return isinstance(text, str) and text.startswith(BILLING)


def divides(call: Call, prompt: Prompt) -> bool:
    """Whether there is a way to have the prompt computed by itself."""
    return call.endpoint.prompt in AUDITED or (prompt.known is not None and not prompt.known.media)


def _scores_its_prompt(call: Call) -> bool:
    """Whether the prompt's own logprobs are asked for: vLLM then computes all of it and reads no cache."""
    body = call.body
    echoed = call.endpoint.prompt == "completion" and bool(body.get("echo")) and body.get("logprobs") is not None
    return body.get("prompt_logprobs") is not None or echoed
