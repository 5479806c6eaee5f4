"""Messages of KV events to what an engine holds.

vLLM writes msgpack (vllm/distributed/kv_events.py, 0.28 to 0.32): `[time, [event, ...], data parallel rank]`. Events
are maps with a `type` and are read by name, so that new fields and unknown kinds do no harm. What is not needed,
token ids above all, is skipped without being made into objects.

Only blocks in the engine's own cache count. Events of the medium `cpu` tell of puts into the pool, never of removals
from it, so the pool is asked instead (connector/mooncake.py).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from connector.held import KEY_BYTES, Reported

OWN_MEDIA = frozenset({None, "GPU"})
MAX_BLOCKS = 16_384
"""Blocks that a message may tell of, so that none holds requests up for long: a step of an engine that computes
262,144 tokens, in blocks of 16, has as many."""
MAX_WITNESS = 1024 * 1024
"""Bytes of a message that is kept to judge hashes by."""
_WORD = 0xFFFFFFFFFFFFFFFF
_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_MAPS = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))


class _Event(msgspec.Struct, gc=False):
    """An event of any kind, as far as it is needed."""

    type: str
    block_hashes: list[int | bytes] | None = None
    parent_block_hash: int | bytes | None = None
    block_size: int | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class _Kind(msgspec.Struct, gc=False):
    type: str


class _Row(msgspec.Struct, array_like=True, gc=False):
    """A batch as vLLM writes it."""

    ts: msgspec.Raw
    events: list[_Event]


class _Map(msgspec.Struct, gc=False):
    """A batch with names, as some builds of vLLM write it."""

    events: list[_Event]


class _RawRow(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: list[msgspec.Raw]


class _RawMap(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]


class Decoder:
    """Messages to what an engine holds."""

    def __init__(self) -> None:
        self._row = msgspec.msgpack.Decoder(_Row)
        self._map = msgspec.msgpack.Decoder(_Map)
        self._raw_row = msgspec.msgpack.Decoder(_RawRow)
        self._raw_map = msgspec.msgpack.Decoder(_RawMap)
        self._event = msgspec.msgpack.Decoder(_Event)
        self._kind = msgspec.msgpack.Decoder(_Kind)

    def take(self, payload: bytes, held: Reported) -> None:
        """Apply a message's events. Where one cannot be read, what came before is trusted no more."""
        try:
            batch = self._map.decode(payload) if _is_map(payload) else self._row.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._one_by_one(payload, held)
            return
        if sum(1 + len(event.block_hashes or ()) for event in batch.events) > 2 * MAX_BLOCKS:
            _bad(held)
            return
        for event in batch.events:
            self._apply(event, payload, held)

    def _one_by_one(self, payload: bytes, held: Reported) -> None:
        """Apply the events of a message in which something cannot be read."""
        try:
            batch = self._raw_map.decode(payload) if _is_map(payload) else self._raw_row.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            _bad(held)
            return
        if len(batch.events) > MAX_BLOCKS:
            _bad(held)
            return
        for raw in batch.events:
            try:
                if self._kind.decode(raw).type in _KINDS:
                    self._apply(self._event.decode(raw), payload, held)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                _bad(held)

    @staticmethod
    def _apply(event: _Event, payload: bytes, held: Reported) -> None:
        kind = event.type
        if kind not in _KINDS:
            return
        held.events += 1
        if kind == "AllBlocksCleared":
            held.clear()
            return
        if event.medium not in OWN_MEDIA or event.locality == "REMOTE":
            return
        if event.block_hashes is None:
            _bad(held)
            return
        keys = [
            block[-KEY_BYTES:] if isinstance(block, bytes) else (block & _WORD).to_bytes(KEY_BYTES, "big")
            for block in event.block_hashes
        ]
        if kind == "BlockRemoved":
            held.removed(keys, event.group_idx)
            return
        parent = event.parent_block_hash
        if parent is None:
            if len(payload) <= MAX_WITNESS:
                held.newest = payload
        else:
            parent = parent[-KEY_BYTES:] if isinstance(parent, bytes) else (parent & _WORD).to_bytes(KEY_BYTES, "big")
        held.stored(keys, parent, event.block_size or 0, event.group_idx, event.kv_cache_spec_kind)


def witness(held: Reported) -> Mapping[str, Any] | None:
    """The newest event that tells of a prompt's first block, whole, to judge hashes by; once."""
    payload, held.newest = held.newest, None
    if payload is None:
        return None
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        for event in reversed(events):
            first = event["type"] == "BlockStored" and event.get("parent_block_hash") is None
            if first and event.get("medium") in OWN_MEDIA:
                assert isinstance(event, dict)
                return event
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # what lies beside the fields that were read may be anything
    return None


def _is_map(payload: bytes) -> bool:
    """Whether msgpack begins with a map."""
    return payload[:1] in _MAPS


def _bad(held: Reported) -> None:
    """Something may have been removed that is believed in."""
    held.bad += 1
    held.forget()
