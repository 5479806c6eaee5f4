"""The gateway's check of itself: are its token ids, block hashes and keys those of its engines?

    calibrate   when an engine comes in: prompts made here, their ids and their keys in the pool
    events      what an engine's KV events say of its hashes
    audit       now and then, of a request that was answered: the engine is asked for its prompt's ids

All of it happens beside requests, a little at a time. An audit is the request again with one token of
answer, to the engine that has just computed it, so that it costs a block at most. What is found goes to
the model's `Agreement`, to the engine's `finding`, to the log and to moongate_agreement_checks_total.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import orjson
from msgspec import Struct

from connector.batches import witness
from connector.blocks import Algorithm, HashScheme, hashing_of
from connector.calibrate import Finding, calibrate, diagnose_event, random_root, suspect_of, suspects
from connector.errors import Inexact, WireError
from connector.handoff import audit_body
from connector.held import Reported
from connector.keys import KeyScheme
from connector.parity import COMPLETION, SHAPES, Difference, TextFinding, calibrate_text, compare_ids, prompt_ids
from connector.prompts import Known
from connector.splice import NotAnObject
from connector.vllm import CacheFacts
from gateway.agreement import Agreement, shape_of
from gateway.bodies import Call
from gateway.fleet import Engine, Fleet
from gateway.models import Model
from gateway.trace import Counts

log = logging.getLogger("moongate")

LOOK = 0.5
"""Seconds between two looks for engines that are to be calibrated."""
AGAIN = 30.0
"""Seconds after which an engine that disagrees, or could not be asked, is calibrated again."""
AT_ONCE = 4
"""Engines that are calibrated at the same time."""
WAITING = 4
"""Audits that may wait for their turn; more are dropped."""
AUDIT_SECONDS = 30.0
"""For an audit's answer."""
AUDITED = frozenset({"chat", "completion"})
"""Prompts of which an engine tells the ids with its answer."""
MAX_AUDIT_BODY = 1024 * 1024
"""Bytes of a request's body above which it is not audited."""
MAX_ANSWER = 16 * 1024 * 1024
_JSON = ((b"content-type", b"application/json"), (b"accept-encoding", b"identity"))


STRANGE = Finding(
    "seed",
    "hashes in none of the ways that were tried: most likely it has another PYTHONHASHSEED",
    "set models[].hash_seed to the engines' PYTHONHASHSEED, or start them without one",
)


class Audit(Struct, frozen=True):
    """A request whose prompt's ids are to be compared."""

    call: Call
    known: Known
    shape: str


class Auditor:
    """Compares, and notes what it finds."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        models: Mapping[str, Model],
        agreements: Mapping[str, Agreement],
        checks: Counts,
        calibrates: bool,
    ) -> None:
        """`models` and `agreements` are by the model's name; without `calibrates`, only audits are made."""
        self._fleet = fleet
        self._models = models
        self._agreements = agreements
        self._checks = checks
        self._calibrates = calibrates
        self._waiting: asyncio.Queue[tuple[Audit, str]] = asyncio.Queue(WAITING)
        self._tasks: list[asyncio.Task[None]] = []
        self._places = asyncio.Semaphore(AT_ONCE)
        self._learned: dict[str, KeyScheme] = {}

    def open(self) -> None:
        """Begin to look after the fleet."""
        self._tasks = [asyncio.create_task(self._audits())]
        if self._calibrates:
            self._tasks.append(asyncio.create_task(self._look_after()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, audit: Audit, engine: str) -> None:
        """Audit a request that this engine has answered, unless too many wait already."""
        if not self._waiting.full():
            self._waiting.put_nowait((audit, engine))

    def keys(self, model: Model) -> KeyScheme | None:
        """How the pool names a model's blocks: as was learned from it, else as is believed."""
        return model.keys(self._fleet.root, self._learned.get(model.name))

    async def _audits(self) -> None:
        while True:
            audit, engine = await self._waiting.get()
            try:
                async with asyncio.timeout(AUDIT_SECONDS):
                    await self._audit(audit, self._fleet.engine(engine))
            except (WireError, TimeoutError, NotAnObject, Inexact, ValueError) as error:
                log.debug("an audit on engine %s came to nothing: %s", engine, type(error).__name__)
                self._agreements[audit.call.model.name].unanswered(audit.shape)
            except Exception:
                log.exception("an audit on engine %s met a defect", engine)

    async def _audit(self, audit: Audit, engine: Engine) -> None:
        theirs = await self._ids_of(audit.call, engine)
        if theirs is None:
            self._agreements[audit.call.model.name].unanswered(audit.shape)
            return
        ours = audit.known.ids()
        difference = await asyncio.to_thread(compare_ids, ours, theirs)
        model, prompts = audit.call.model.name, audit.call.model.prompts
        if difference is None or prompts is None:
            self._agreements[model].audited(audit.shape, engine.id, None)
            return
        kind: Literal["chat", "completion"] = "completion" if audit.shape.startswith("completion") else "chat"
        if await asyncio.to_thread(prompts.full, kind, audit.call.body) == theirs:
            log.error("model %s: remembered token ids were wrong, and are forgotten; please report this", model)
            prompts.forget()
            self._checks.inc(model, "ids", "cache")
            return
        detail = f"they part at token {difference.at} of {len(ours)}"
        reason = _likely(difference, audit.shape)
        found = await self._texts(engine)
        if found is not None and found.differ:
            reason, detail = found.kind, f"{detail}; it {found.detail}; {found.fix}"
        self._agreements[model].audited(audit.shape, engine.id, reason, detail)

    async def _ids_of(self, call: Call, engine: Engine) -> list[int] | None:
        """The ids that an engine has for a request's prompt; None where it does not tell."""
        parts = await asyncio.to_thread(audit_body, call.raw, call.body, call.salt, call.rename)
        deadline = asyncio.get_running_loop().time() + AUDIT_SECONDS
        lease = self._fleet.lease(engine.id, 0, None)
        try:
            answer = await engine.wire.send("POST", call.target, (*_JSON, *engine.headers), parts, deadline)
            body = await answer.body(MAX_ANSWER)
        finally:
            lease.release()
        return prompt_ids(orjson.loads(body)) if answer.status == 200 else None

    async def _look_after(self) -> None:
        """Calibrate engines that came in, and again those that disagreed; judge what events tell."""
        under_way: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for engine in self._fleet.engines:
                    agreement = self._agreements[engine.spec.model]
                    if not engine.alive:
                        agreement.forget(engine.id)
                    elif engine.id not in under_way and engine.due(
                        time.monotonic(), AGAIN, agreement.against(engine.id)
                    ):
                        under_way[engine.id] = asyncio.create_task(self._calibrate(engine))
                    else:
                        self._judge_events(engine)
                await asyncio.sleep(LOOK)
                under_way = {name: task for name, task in under_way.items() if not task.done()}
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)

    async def _calibrate(self, engine: Engine) -> None:
        try:
            async with self._places:
                await self._texts(engine)
                finding = await self._keys_of(engine)
                self._hear(engine)
        except Exception:
            log.exception("calibrating engine %s met a defect", engine.id)
            finding = Finding("unknown")
        self._note(engine, finding, "keys")

    async def _texts(self, engine: Engine) -> TextFinding | None:
        """Compare the ids of prompts made here, shape by shape."""
        model = self._models[engine.spec.model]
        if model.prompts is None:
            return None
        agreement = self._agreements[model.name]
        found = await calibrate_text(engine.control, model.name, model.prompts.full, model.prompts.text)
        if found.differ and not agreement.against(engine.id):
            log.warning("engine %s %s; until it agrees, requests like these are placed by load (%s): %s", engine.id,
                        found.detail, ", ".join(found.differ), found.fix)  # fmt: skip
        for name, shape in _LABELS.items():
            if name in found.differ:
                agreement.audited(shape, engine.id, found.kind, made_here=True)
            elif name in found.agree:
                agreement.audited(shape, engine.id, None, made_here=True)
        return found

    async def _keys_of(self, engine: Engine) -> Finding:
        """Whether an engine's blocks are in the pool under our keys."""
        model = self._models[engine.spec.model]
        try:
            believed = model.scheme(self._fleet.facts(model.name))
        except Inexact as error:
            return Finding("unknown", f"cannot be calibrated: {error.reason}")
        keys = model.keys(self._fleet.root)
        told = _told(believed, engine.facts)
        way = suspect_of(believed, told)
        if not told.exact and told.algorithm == believed.algorithm:
            return random_root(told)
        if way.kinds:
            return Finding(way.kinds[0], way.detail, way.fix, told)
        if model.pool is None or keys is None or model.prompts is None or engine.spec.role == "decode":
            return Finding("not_asked")
        found = await calibrate(
            engine.control,
            model.name,
            believed,
            model.pool.master,
            keys,
            block_sizes=(told.block_size,),
            max_tokens=next((card.max_tokens for card in engine.cards if card.id == model.name), None),
        )
        if found.kind == "key_prefix" and found.scheme == believed and model.key_prefix is None:
            return self._learn(model, found)
        return found

    def _learn(self, model: Model, found: Finding) -> Finding:
        """Take the names that a sample's block was found under, if the objects of all ranks are among them."""
        try:
            self._learned[model.name] = KeyScheme.from_found(found.prefixes)
        except Inexact as error:
            return Finding("unknown", f"has a block in the pool under names that make no scheme: {error.reason}")
        log.info("model %s: the pool's keys begin with %s; learned", model.name, " and ".join(found.prefixes))
        return Finding("agrees", scheme=found.scheme, prefixes=found.prefixes)

    def _hear(self, engine: Engine) -> None:
        """An engine that has answered prompts must have told of their blocks."""
        if isinstance(engine.held, Reported) and not engine.held.received and not engine.held.missed:
            engine.held.missed = True
            self._checks.inc(engine.spec.model, "events", "none")
            log.warning("engine %s has sent no KV event: nothing is known of what it holds; see that kv_events names "
                        "its port, and `connect` where its own endpoint has a *, else `bind`", engine.id)  # fmt: skip

    def _judge_events(self, engine: Engine) -> None:
        """Whether the newest prompt that an engine told of has our hashes."""
        if not isinstance(engine.held, Reported) or (event := witness(engine.held)) is None:
            return
        model = self._models[engine.spec.model]
        try:
            believed = model.scheme(self._fleet.facts(model.name))
            verdict = diagnose_event(event, suspects(believed, block_sizes={event["block_size"]}))
        except (Inexact, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            return  # an engine may write anything there
        if verdict is None:
            return
        way = verdict.suspect
        if way is None:
            self._note(engine, STRANGE, "events")
        elif way.kinds:
            self._note(engine, Finding(way.kinds[0], way.detail, way.fix, way.scheme), "events")
        else:
            self._checks.inc(model.name, "events", "agrees")

    def _note(self, engine: Engine, finding: Finding, check: str) -> None:
        self._checks.inc(engine.spec.model, check, finding.kind)
        known = engine.finding
        if known is not None and known.disagrees and not finding.agrees and not finding.disagrees:
            finding = known  # what could not be found out this time disproves nothing
        engine.found(finding, time.monotonic())
        if (known is None or known.kind != finding.kind) and finding.disagrees:
            log.warning(
                "engine %s %s: nothing of the pool is expected of it; %s", engine.id, finding.detail, finding.fix
            )
        elif finding.agrees and known is not None and known.disagrees:
            log.info("engine %s agrees again", engine.id)


_LABELS = {COMPLETION: "completion", **{shape.name: shape_of(shape.kind, shape.body) for shape in SHAPES}}
"""The prompts made here, and the shapes of requests that they stand for."""


def _told(believed: HashScheme, facts: CacheFacts) -> HashScheme:
    """What is believed, but for what an engine says of itself."""
    hashing = hashing_of(facts.version) if facts.version is not None else None
    return replace(
        believed,
        algorithm=Algorithm(facts.algorithm) if facts.algorithm in set(Algorithm) else believed.algorithm,
        block_size=facts.block_size or believed.block_size,
        tagged=hashing.tagged if hashing is not None else believed.tagged,
        fixed_root=hashing.fixed_root if hashing is not None else believed.fixed_root,
    )


def _likely(difference: Difference, shape: str) -> str:
    """Why ids differ, where no prompt made here shows it."""
    if difference.part == "bos":
        return "bos"
    if shape.startswith("completion"):
        return "tokenizer"
    if "tools" in shape or "calls" in shape:
        return "tools"
    return "generation_prompt" if difference.part == "tail" else "template"
