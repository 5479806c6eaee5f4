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


class _Shape:
    """What is known of one shape."""

    __slots__ = ("asked", "audits", "counts", "counts_in_a_row", "ids_in_a_row", "off", "off_for_ids")

    def __init__(self) -> None:
        self.asked = 0
        self.counts = 0
        self.audits = 0
        self.off: str | None = None
        self.off_for_ids = False
        self.counts_in_a_row = 0
        self.ids_in_a_row = 0


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
        return found.off if found is not None else None

    @property
    def shapes_off(self) -> int:
        """How many shapes are off exact mode."""
        return sum(shape.off is not None for shape in self._shapes.values())

    def verified(self, shape: str) -> bool:
        """Whether ids agreed so often that they may be sent in the prompt's place."""
        found = self._shapes.get(shape)
        return (
            found is not None and found.off is None and found.audits >= FIRST_AUDITS and found.counts >= VERIFIED_COUNTS
        )

    def due(self, shape: str) -> bool:
        """Count one request of this shape; whether it should be audited."""
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = _Shape()
        found.asked += 1
        if not self._every:
            return False
        if found.off is not None:
            return found.asked % OFF_EVERY == 1
        return found.audits < FIRST_AUDITS or found.asked % self._every == 0

    def counted(self, ours: Counted, theirs: int) -> None:
        """An engine counted a prompt's tokens."""
        found = self._shapes.setdefault(ours.shape, _Shape())
        self._checks.inc(self._model, "count", "agrees" if ours.tokens == theirs else "differs")
        if ours.tokens != theirs:
            found.counts = found.counts_in_a_row = 0
            if found.off is None:
                self._turn_off(ours.shape, found, "count", f"the engine counts {theirs} tokens, we {ours.tokens}")
            return
        found.counts += 1
        found.counts_in_a_row += 1
        if found.off is not None and not found.off_for_ids and found.counts_in_a_row >= COUNTS_BACK:
            self._turn_on(ours.shape, found)

    def audited(self, shape: str, reason: str | None, detail: str = "") -> None:
        """An audit compared all ids: None where they are equal, else the likely reason and a sentence."""
        found = self._shapes.setdefault(shape, _Shape())
        self._checks.inc(self._model, "ids", reason or "agrees")
        if reason is not None:
            found.audits = found.ids_in_a_row = 0
            if found.off != reason:
                self._turn_off(shape, found, reason, detail)
            found.off_for_ids = True
            return
        found.audits += 1
        found.ids_in_a_row += 1
        if found.off is not None and found.ids_in_a_row >= IDS_BACK:
            self._turn_on(shape, found)

    def _turn_off(self, shape: str, found: _Shape, reason: str, detail: str) -> None:
        found.off = reason
        found.counts = found.counts_in_a_row = found.ids_in_a_row = 0
        log.warning("model %s, requests of the shape %r: token ids disagree (%s): %s; they are placed by load until "
                    "they agree again; moongate doctor tells more", self._model, shape, reason, detail)  # fmt: skip

    def _turn_on(self, shape: str, found: _Shape) -> None:
        found.off, found.off_for_ids = None, False
        log.info("model %s, requests of the shape %r: token ids agree again", self._model, shape)


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
