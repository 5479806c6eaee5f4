"""Where a request would go, and why: the steps of gateway/placing.py for one that is sent to nobody.

    Question       what POST /admin/explain takes, and `moongate explain` sends
    Explanation    what it answers; the README lists every member

The policy chooses from a copy of its state, so that no turn, memory or learnt rate moves; nothing is charged
to the tenant, and what is counted on the way is counted in metrics that nobody reads. What is remembered of
the prompt itself (connector/prompts.py) is remembered as of any other.

A number that is not known is null. That is not zero: an engine that holds 0 tokens was looked at.

Why a policy is copied on the event loop: only there nobody changes it meanwhile. A copy takes 4 us for each value
that it keeps; one that keeps many should have a `__deepcopy__` that shares those that never change.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from connector.residency import Residency
from gateway.bodies import Call, read_object
from gateway.endpoints import ENDPOINTS, Endpoint
from gateway.errors import BadRequest, Unavailable
from gateway.fleet import Engine, Fleet
from gateway.placing import Placing, Prompt, divides
from gateway.tenants import Tenant, Tenants
from policies.guard import Guarded, among
from policies.interface import Candidate, Job, NoCapacity, Placement, Policy, Role, expected, uncached

log = logging.getLogger("moongate")

SECONDS = 30.0
"""For all steps together."""
AT_ONCE = 2
"""Questions that are looked into side by side, so that requests keep most of the threads that render and count."""
FIRST_IDS = 16
"""Token ids that are told of a prompt where not all are asked for."""
HASH_DIGITS = 16
"""Hexadecimal digits by which a block is told from others."""
NAMED = 20
"""Tenants that an error lists."""

KnownBy = Literal["events", "estimate", "disagrees"]
Terms = Mapping[str, Mapping[str, float]]
"""Engine id to what the policy weighs there, by names that end in their unit."""


@runtime_checkable
class Explains(Protocol):
    """A policy that tells what it weighs. The method is no policy's duty."""

    def explain(self, job: Job, candidates: Sequence[Candidate]) -> Terms:
        """What `place` would weigh for each candidate. Changes nothing."""
        ...


class Question(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request as a client would send it, and whose it is."""

    body: msgspec.Raw
    """The request's body, byte for byte."""
    path: str = "/v1/chat/completions"
    tenant: str | None = None
    """None: the only one that there is."""
    session: str | None = None
    """What the client would send as its session."""
    ids: bool = False
    """Tell all token ids and block hashes."""


class Blocks(Struct, frozen=True):
    """A prompt's blocks."""

    size: int
    """Tokens in each."""
    full: int
    reusable: int
    """Leading ones that a cache can give: at least one token is computed."""
    first: str | None
    """The first digits of its hash, in hexadecimal; so `last`."""
    last: str | None
    hashes: tuple[str, ...] | None
    """The whole of each, where ids were asked for."""


class PromptTold(Struct, frozen=True):
    """What is known of the prompt."""

    tokens: int | None
    inexact: str | None
    """Why its blocks are not known."""
    blocks: Blocks | None
    ids: tuple[int, ...]
    """The first token ids, all where ids were asked for; none where they are not known here."""
    landmarks: int
    """Names for its leading parts, by which requests under way are compared."""
    landmark_tokens: int
    """Tokens from one to the next."""


class PoolTold(Struct, frozen=True):
    """What the pool holds of the prompt."""

    name: str | None
    state: Literal["known", "unknown", "not_asked"]
    why: str | None
    """What came in the way of an answer, or why the pool was not asked."""
    blocks: int | None
    """Leading blocks that are wholly there."""
    tokens: int | None
    disk_tokens: int | None
    """How many of them are on disk only."""
    keys_asked: int
    ms: float | None
    """Milliseconds that the answer took."""


class EngineTold(Struct, frozen=True):
    """One engine of the model, as the policy saw it."""

    id: str
    role: Role
    out: str | None
    """Why it gets no such request now; what is not told of such an engine is null."""
    requests: int
    """Requests of this gateway under way there."""
    backlog_tokens: int
    """Their prompt tokens that are not computed yet."""
    waiting: float | None = None
    running: float | None = None
    cache_usage: float | None = None
    """Share of its KV blocks in use, 0 to 1."""
    signal_age_seconds: float | None = None
    """Since it told these three."""
    own_tokens: int | None = None
    """Leading tokens of this prompt that it holds itself."""
    likely_tokens: int | None = None
    """Those that it likely holds when it comes to this request."""
    from_pool_tokens: int | None = None
    """Those that it would load from the pool beyond its own; null where the pool's are not known."""
    to_compute_tokens: int | None = None
    """The rest. An unknown pool counts as empty here."""
    newcomer_seconds: float | None = None
    """Since it came in or came back; null where it was there from the start."""
    known_by: KnownBy = "estimate"
    """How what it holds is known; disagrees: it names blocks otherwise, so that nothing of the pool is expected."""
    terms: Mapping[str, float] = msgspec.field(default_factory=dict)
    """What the policy weighed, where it tells."""


class PolicyTold(Struct, frozen=True):
    """The policy as configured."""

    name: str
    settings: dict[str, Any]


class PlacementTold(Struct, frozen=True):
    """Where the request would go."""

    engine: str
    prefill: str | None
    spares: tuple[str, ...]
    own_tokens: int
    pool_tokens: int
    reason: str
    by: str
    """The policy that chose; least_loaded where the configured one failed or is out of service."""


class Explanation(Struct, frozen=True):
    """All of it."""

    path: str
    model: str
    adapter: str | None
    tenant: str
    session: bool
    """Whether the request names one."""
    prompt: PromptTold
    pool: PoolTold
    engines: tuple[EngineTold, ...]
    policy: PolicyTold
    placement: PlacementTold | None
    unplaced: str | None
    """Why there is no placement."""
    why: str
    """Two sentences."""


class Explain:
    """Explains where requests would go."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        placing: Placing,
        fleet: Fleet,
        policy: Guarded,
        fallback: Policy,
        name: str,
        settings: Mapping[str, Any],
    ) -> None:
        """`placing` takes the steps before the choice, and counts where nobody reads; `name` is the policy's."""
        self._tenants = tenants
        self._placing = placing
        self._fleet = fleet
        self._policy = policy
        self._fallback = fallback
        self._told = PolicyTold(name, dict(settings))
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, raw: bytes) -> Explanation:
        """Answer a `Question`. Raises what the request itself would, as far as it would be refused here."""
        try:
            async with asyncio.timeout(SECONDS), self._turns:
                return await self._explain(await _question(raw))
        except TimeoutError:
            raise Unavailable(f"To explain this took longer than {SECONDS:g} s; try again.") from None

    async def _explain(self, question: Question) -> Explanation:
        placing = self._placing
        body = bytes(question.body)
        call = placing.call(
            self._tenant(question.tenant),
            _endpoint(question.path),
            body,
            await read_object(body),
            target=question.path,
            session=question.session.encode("utf-8", "surrogatepass") if question.session else None,
        )
        if call.endpoint.makes and call.body.get("previous_response_id") is not None:
            raise BadRequest("What goes on from a response goes to the engine that keeps it, whatever the policy says.")
        prompt = await placing.know(call)
        candidates, unplaced = self._survey(call, prompt)
        began = time.perf_counter()
        residency = await placing.look_up(call, prompt) if candidates else None
        took = (time.perf_counter() - began) * 1000
        known = _Known(call, prompt, tuple(candidates), residency, took, placing.job(call, prompt, residency))
        placement: PlacementTold | None = None
        terms: Terms = {}
        if unplaced is None:
            placement, terms, unplaced = self._place(known)
        pool, engines = _pool_told(known), self._engines_told(known, terms)
        return Explanation(
            path=question.path,
            model=call.model.name,
            adapter=call.adapter.name if call.adapter is not None else None,
            tenant=call.tenant.name,
            session=call.session is not None,
            prompt=_prompt_told(prompt, whole=question.ids),
            pool=pool,
            engines=engines,
            policy=self._told,
            placement=placement,
            unplaced=unplaced,
            why=f"{_what_is_known(prompt, pool, engines, placement)} {_who_gets_it(engines, placement, unplaced)}",
        )

    def _tenant(self, name: str | None) -> Tenant:
        tenants = self._tenants.by_name
        if name is None and len(tenants) == 1:
            return next(iter(tenants.values()))
        tenant = tenants.get(name or "")
        if tenant is None:
            names = sorted(tenants)
            listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            said = "name one of the tenants" if name is None else "there is no such tenant"
            raise BadRequest(f"tenant: {said}; there are: {listed or 'none'}.", param="tenant")
        return tenant

    def _survey(self, call: Call, prompt: Prompt) -> tuple[Sequence[Candidate], str | None]:
        """The engines that could take it; or none, and why."""
        try:
            return self._placing.survey(call, prompt), None
        except Unavailable as error:
            return (), error.message

    def _place(self, known: "_Known") -> tuple[PlacementTold | None, Terms, str | None]:
        """What the policy would choose now and what it weighs; or why there is no choice. The policy is left alone."""
        job, candidates = known.job, known.candidates
        try:
            policy, fallback = copy.deepcopy((self._policy.policy, self._fallback))
        except Exception as error:  # noqa: BLE001 - what a policy keeps is its own
            return None, {}, f"the policy's state cannot be copied ({type(error).__name__}), so it was not asked"
        terms = _terms(policy, job, candidates)
        try:
            placement = among(candidates, policy.place(job, candidates))
            by = "least_loaded, since the policy is out of service" if policy is fallback else self._told.name
        except NoCapacity as error:
            return None, terms, str(error)
        except Exception:
            log.exception("the policy failed while a request was explained")
            try:
                placement, by = fallback.place(job, candidates), "least_loaded, since the policy failed"
            except NoCapacity as error:
                return None, terms, str(error)
        return _placement_told(placement, by, apart=divides(known.call, known.prompt)), terms, None

    def _engines_told(self, known: "_Known", terms: Terms) -> tuple[EngineTold, ...]:
        """Every engine of the model."""
        seen = {candidate.id: candidate for candidate in known.candidates}
        model, adapter = known.call.model.name, known.call.adapter
        return tuple(
            _candidate_told(engine, seen[engine.id], known, terms.get(engine.id, {}))
            if engine.id in seen
            else _absent_told(engine, self._fleet.unfit(engine, adapter) or "it came in just now")
            for engine in self._fleet.engines
            if engine.spec.model == model
        )


class _Known(Struct, frozen=True):
    """What the steps before the choice found."""

    call: Call
    prompt: Prompt
    candidates: Sequence[Candidate]
    residency: Residency | None
    took: float
    """Milliseconds that the look-up took."""
    job: Job


async def _question(raw: bytes) -> Question:
    """Raises `BadRequest`."""
    try:
        return await asyncio.to_thread(msgspec.json.decode, raw, type=Question)
    except msgspec.ValidationError as error:  # it names members and types, never a value
        raise BadRequest(f'{error}; send {{"body": the request, "tenant": NAME, ...}}.') from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None


def _endpoint(path: str) -> Endpoint:
    endpoint = ENDPOINTS.get(path)
    if endpoint is None or endpoint.form:
        known = ", ".join(one.path for one in ENDPOINTS.values() if not one.form)
        raise BadRequest(f"path must be one of {known}.", param="path")
    return endpoint


def _terms(policy: Policy, job: Job, candidates: Sequence[Candidate]) -> Terms:
    if not isinstance(policy, Explains):
        return {}
    try:
        told = policy.explain(job, candidates)
        return {engine: {name: float(value) for name, value in terms.items()} for engine, terms in told.items()}
    except Exception:
        log.exception("the policy failed to explain itself")
        return {}


def _placement_told(placement: Placement, by: str, *, apart: bool) -> PlacementTold:
    """`apart`: there is a way to have the prompt computed by itself."""
    return PlacementTold(
        placement.engine,
        placement.prefill if apart else None,
        placement.spares,
        placement.own_tokens,
        placement.pool_tokens,
        placement.reason,
        by,
    )


def _prompt_told(prompt: Prompt, *, whole: bool) -> PromptTold:
    prefix = prompt.prefix
    blocks: Blocks | None = None
    if prefix is not None:
        hashes = prefix.hashes
        blocks = Blocks(
            size=prefix.block_size,
            full=len(hashes),
            reusable=prefix.reusable,
            first=hashes[0].hex()[:HASH_DIGITS] if hashes else None,
            last=hashes[-1].hex()[:HASH_DIGITS] if hashes else None,
            hashes=tuple(block.hex() for block in hashes) if whole else None,
        )
    ids = prompt.known.ids() if prompt.known is not None and prompt.tokens is not None else []
    return PromptTold(
        prompt.tokens,
        prompt.inexact,
        blocks,
        tuple(ids if whole else ids[:FIRST_IDS]),
        len(prompt.landmarks.keys),
        prompt.landmarks.apart,
    )


def _pool_told(known: _Known) -> PoolTold:
    name = known.call.model.pool.name if known.call.model.pool is not None else None
    found, job = known.residency, known.job
    if found is None:
        return PoolTold(name, "not_asked", _why_not_asked(known), None, None, None, 0, None)
    if found.run is None:
        return PoolTold(name, "unknown", found.trouble, None, None, None, found.asked, known.took)
    return PoolTold(name, "known", None, found.run, job.pool_tokens, job.disk_tokens, found.asked, known.took)


def _why_not_asked(known: _Known) -> str:
    """What left nothing to ask, in the order in which `Placing.look_up` finds it."""
    prompt = known.prompt
    reasons = (
        (known.call.model.pool is None, "the model has no pool"),
        (not known.candidates, "no engine could take the request"),
        (prompt.prefix is None, f"the prompt's blocks are not known: {prompt.inexact}"),
        (prompt.keys is None, "no engine has told yet how the pool names its blocks"),
        (prompt.prefix is not None and not prompt.prefix.reusable, "the prompt fills no block that could be reused"),
        (not any(c.pooled for c in known.candidates), "no engine's blocks bear the names that would be looked up"),
    )
    return next((reason for so, reason in reasons if so), "no answer could have changed the placement")


def _candidate_told(engine: Engine, seen: Candidate, known: _Known, terms: Mapping[str, float]) -> EngineTold:
    job = known.job
    own, pool = expected(job, seen)
    exact = known.prompt.prefix is not None
    return EngineTold(
        id=seen.id,
        role=seen.role,
        out=None,
        requests=seen.requests,
        backlog_tokens=seen.tokens,
        waiting=seen.waiting,
        running=seen.running,
        cache_usage=seen.cache_usage,
        signal_age_seconds=seen.signal_age,
        own_tokens=own if exact else None,
        likely_tokens=seen.likely_tokens,
        from_pool_tokens=pool if job.pool_tokens is not None else None,
        to_compute_tokens=uncached(job, seen) if job.prompt_tokens is not None else None,
        newcomer_seconds=seen.since,
        known_by=_known_by(engine),
        terms=terms,
    )


def _absent_told(engine: Engine, out: str) -> EngineTold:
    return EngineTold(engine.id, engine.spec.role, out, engine.requests, engine.backlog, known_by=_known_by(engine))


def _known_by(engine: Engine) -> KnownBy:
    if not engine.pooled:
        return "disagrees"
    return "events" if engine.spec.events is not None else "estimate"


def _what_is_known(
    prompt: Prompt, pool: PoolTold, engines: Sequence[EngineTold], placement: PlacementTold | None
) -> str:
    """A sentence on the prompt, and on what the engine that computes it has of it."""
    counted = f"{prompt.tokens:,} tokens" if prompt.tokens is not None else "tokens that are not counted here"
    if prompt.prefix is None:
        return (
            f"The prompt has {counted}, and its blocks are not known ({prompt.inexact}): nor is what engines and the "
            "pool hold of it."
        )
    held = f"the pool was not asked ({pool.why})"
    if pool.state != "not_asked":
        held = f"the pool holds {pool.tokens:,} of them" if pool.tokens is not None else "the pool could not tell"
    first = placement.prefill or placement.engine if placement is not None else None
    told = next((engine for engine in engines if engine.id == first), None)
    if told is None or placement is None:
        return f"The prompt has {counted}; {held}."
    return (
        f"The prompt has {counted}; {held}, and {told.id} would take {placement.own_tokens:,} from its own cache, "
        f"load {placement.pool_tokens:,} from the pool and compute {told.to_compute_tokens or 0:,}."
    )


def _who_gets_it(engines: Sequence[EngineTold], placement: PlacementTold | None, unplaced: str | None) -> str:
    """A sentence on the choice."""
    if placement is None:
        return f"It would go nowhere: {(unplaced or '').rstrip('.')}."
    chose = f"{placement.by}: {placement.reason}"
    gets = f"{placement.engine} would get it ({chose})"
    if placement.prefill is not None:
        gets = f"{placement.prefill} would compute it and {placement.engine}, as things stand, answer it ({chose})"
    others = sorted(
        (engine.to_compute_tokens, engine.id)
        for engine in engines
        if engine.to_compute_tokens is not None and engine.id not in (placement.engine, placement.prefill)
    )
    other = f"; of the others {others[0][1]} has the least to compute, {others[0][0]:,}" if others else ""
    return f"{gets}{other}."
