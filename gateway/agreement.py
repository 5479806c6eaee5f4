"""Whether our token ids are the engines': what answers and audits say of each shape of request.

Every answer's usage counts its prompt's tokens, which is held against our own count. Now and then, and
for the first requests of a shape, an audit asks the engine for the prompt's ids (gateway/audit.py).
Where they disagree, that shape is off exact mode: its requests are placed by load, as if nothing were
known of their prompts, but they go on being compared. It comes back when they agree again.

Why shapes: a template may be wrong for tools only, and what is right must not suffer for it.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from gateway.trace import Counts

log = logging.getLogger("moongate")

FIRST_AUDITS = 3
"""Audits that a shape must pass, one request each, before audits become rare."""
OFF_EVERY = 5
"""Requests of a shape that is off, of which one is audited."""
COUNTS_BACK = 5
"""Counts that must agree in a row before a shape that was off for its counts comes back."""
IDS_BACK = 2
"""Audits that must agree in a row before a shape that was off for its ids comes back."""
VERIFIED_COUNTS = 20
"""Counts that must have agreed, beside the first audits, before ids are sent in a prompt's place."""


class Counted(Struct, frozen=True):
    """Our count of a prompt's tokens, to be held against the engine's."""

    shape: str
    tokens: int


class _Against:
    """An engine that disagrees about a shape."""

    __slots__ = ("counts_in_a_row", "for_ids", "ids_in_a_row", "made_here", "reason")

    def __init__(self, reason: str, *, for_ids: bool, made_here: bool = False) -> None:
        self.reason = reason
        self.for_ids = for_ids
        self.made_here = made_here
        """Only prompts made here have shown it so far: they can then take it back as well."""
        self.counts_in_a_row = 0
        self.ids_in_a_row = 0


class _Shape:
    """What is known of one shape."""

    __slots__ = ("against", "asked", "audits", "counts", "unanswered")

    def __init__(self) -> None:
        self.asked = 0
        self.counts = 0
        self.audits = 0
        self.unanswered = 0
        """Audits that came to nothing: an engine may tell no ids."""
        self.against: dict[str, _Against] = {}


class Agreement:
    """How far one model's engines agree with what is computed here."""

    def __init__(self, model: str, checks: Counts, *, every: int) -> None:
        """One of `every` requests is audited, beside a shape's first ones; 0: none is."""
        self._model = model
        self._checks = checks
        self._every = every
        self._shapes: dict[str, _Shape] = {}

    def off(self, shape: str) -> str | None:
        """Why requests of this shape are not placed by their prefix; None: they are."""
        found = self._shapes.get(shape)
        if found is None or not found.against:
            return None
        return next(iter(found.against.values())).reason

    @property
    def shapes_off(self) -> int:
        """How many shapes are off exact mode."""
        return sum(bool(shape.against) for shape in self._shapes.values())

    def verified(self, shape: str) -> bool:
        """Whether ids agreed so often that they may be sent in the prompt's place."""
        found = self._shapes.get(shape)
        return (
            found is not None and not found.against and found.audits >= FIRST_AUDITS and found.counts >= VERIFIED_COUNTS
        )

    def due(self, shape: str) -> bool:
        """Count one request of this shape; whether it should be audited."""
        found = self._shapes.setdefault(shape, _Shape())
        found.asked += 1
        if not self._every:
            return False
        if found.unanswered < FIRST_AUDITS:
            if found.against:
                return found.asked % OFF_EVERY == 1
            if found.audits < FIRST_AUDITS:
                return True
        return found.asked % self._every == 0

    def unanswered(self, shape: str) -> None:
        """An audit came to nothing."""
        self._shapes.setdefault(shape, _Shape()).unanswered += 1

    def counted(self, ours: Counted, engine: str, theirs: int) -> None:
        """An engine counted a prompt's tokens."""
        found = self._shapes.setdefault(ours.shape, _Shape())
        agrees = ours.tokens == theirs
        self._checks.inc(self._model, "count", "agrees" if agrees else "differs")
        against = found.against.get(engine)
        if not agrees:
            found.counts = 0
            if against is None:
                detail = f"it counts {theirs} tokens where we count {ours.tokens}"
                found.against[engine] = _Against("count", for_ids=False)
                self._tell(ours.shape, engine, "count", detail)
            else:
                against.counts_in_a_row = 0
            return
        found.counts += 1
        if against is not None:
            against.counts_in_a_row += 1
            if not against.for_ids and against.counts_in_a_row >= COUNTS_BACK:
                self._turn_on(ours.shape, found, engine)

    def audited(
        self, shape: str, engine: str, reason: str | None, detail: str = "", *, made_here: bool = False
    ) -> None:
        """All of a prompt's ids were compared: None where they are equal, else the likely reason and a sentence.

        `made_here`: it was no client's prompt; it does not take back what a client's has shown, and is not logged.
        """
        found = self._shapes.setdefault(shape, _Shape())
        self._checks.inc(self._model, "ids", reason or "agrees")
        against = found.against.get(engine)
        if reason is not None:
            found.audits = found.counts = 0
            if against is None or against.reason != reason:
                found.against[engine] = _Against(reason, for_ids=True, made_here=made_here)
                if not made_here:
                    self._tell(shape, engine, reason, detail)
            else:
                against.ids_in_a_row = 0
                against.made_here &= made_here
            return
        found.audits += 1
        if against is not None and (against.made_here or not made_here):
            against.ids_in_a_row += 1
            if against.ids_in_a_row >= IDS_BACK:
                self._turn_on(shape, found, engine)

    def against(self, engine: str) -> bool:
        """Whether this engine disagrees about some shape."""
        return any(engine in shape.against for shape in self._shapes.values())

    def forget(self, engine: str) -> None:
        """An engine is away: when it is back it may be another."""
        for shape in self._shapes.values():
            shape.against.pop(engine, None)

    def _tell(self, shape: str, engine: str, reason: str, detail: str) -> None:
        log.warning("model %s, requests of the shape %r: engine %s has other token ids (%s): %s; they are placed by "
                    "load until it agrees again", self._model, shape, engine, reason, detail)  # fmt: skip

    def _turn_on(self, shape: str, found: _Shape, engine: str) -> None:
        del found.against[engine]
        log.info("model %s, requests of the shape %r: engine %s agrees again", self._model, shape, engine)


_FEATURES = {"tool_calls": "calls", "tool_call_id": "calls", "reasoning": "reasoning", "reasoning_content": "reasoning"}
"""Keys of messages that templates treat in ways of their own."""


def shape_of(kind: str, body: Mapping[str, Any]) -> str:
    """What decides how a prompt is rendered, as a few words of a fixed set, such as `chat calls tools`."""
    if kind == "completion" and not isinstance(body.get("prompt"), str):
        return "completion ids"
    if kind != "chat":
        return kind
    messages = body.get("messages")
    words = {word for message in messages for word in _features(message)} if isinstance(messages, list) else set()
    if body.get("tools"):
        words.add("tools")
    if "chat_template_kwargs" in body or "reasoning_effort" in body:
        words.add("kwargs")
    if body.get("add_generation_prompt") is False or body.get("continue_final_message"):
        words.add("continued")
    return " ".join(("chat", *sorted(words)))


def _features(message: object) -> Iterator[str]:
    if not isinstance(message, dict):
        return
    for key in _FEATURES.keys() & message.keys():
        yield _FEATURES[key]
    if isinstance(message.get("content"), list):
        yield "parts"
    if message.get("role") == "developer":
        yield "developer"
