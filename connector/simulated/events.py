"""KV events as vLLM publishes them: what the engine stored, what it gave up. Pure.

Each event is a map with its `type`. Source: vllm/distributed/kv_events.py of 0.32.0, and for the
medium `cpu` (blocks that this engine put into the pool) mooncake/store/worker.py; both compared with
a running engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks of one request."""

    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    block_size: int
    extra_keys: Sequence[tuple[str, ...] | None]
    """For each block the adapter's name and the salt, where they go into its hash."""
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Numbers:
    """How block hashes are written: full bytes, or by vLLM's default their low 64 bits."""

    whole: bool = True

    def of(self, digest: bytes) -> bytes | int:
        return digest if self.whole else int.from_bytes(digest[-8:], "big")


def stored(chain: Chain, numbers: Numbers) -> Event:
    """The engine has computed or loaded these blocks."""
    return {
        "type": "BlockStored",
        "block_hashes": [numbers.of(digest) for digest in chain.hashes],
        "parent_block_hash": None if chain.parent is None else numbers.of(chain.parent),
        "token_ids": list(chain.tokens),
        "block_size": chain.block_size,
        "lora_id": chain.lora_id,
        "medium": "GPU",
        "lora_name": chain.lora_name,
        "extra_keys": list(chain.extra_keys),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def put(chain: Chain, numbers: Numbers) -> list[Event]:
    """The engine has put these blocks into the pool: an event each, the adapter unnamed."""
    events = []
    parent = chain.parent
    for count, digest in enumerate(chain.hashes):
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": [numbers.of(digest)],
                "parent_block_hash": None if parent is None else numbers.of(parent),
                "token_ids": list(chain.tokens[count * chain.block_size : (count + 1) * chain.block_size]),
                "block_size": chain.block_size,
                "lora_id": None,
                "medium": "cpu",
                "lora_name": None,
                "group_idx": 0,
            }
        )
        parent = digest
    return events


def removed(digest: bytes, numbers: Numbers) -> Event:
    """The engine has given up this block."""
    return {"type": "BlockRemoved", "block_hashes": [numbers.of(digest)], "medium": "GPU", "group_idx": 0}


def cleared() -> Event:
    """The engine has given up all blocks."""
    return {"type": "AllBlocksCleared"}
