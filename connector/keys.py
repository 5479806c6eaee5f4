"""How vLLM names a block's objects in the pool. Pure.

    [cache_prefix@]MODEL[namespace]@tp_rank:T@pcpP@dcpD@pp_rank:R@group:G@HASH

MODEL is the last component of the engine's --model. A block can be loaded only if the object of every
rank is there. Heads that are replicated over ranks are stored once: one KV head (MLA, MQA) is one object
whatever `tp` is. An engine whose connector has a `store_tp_size` writes a namespace and one object for
each of so many shards instead, so that engines of several `tp` share a pool; where it cannot, the
namespace says that nobody else reads what it writes.

Sources: PoolKey, TPShardedStoreLayout, _select_store_layout, _spec_tp_replication_factor and
_init_lookup_key_prefixes in vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/{data,worker}.py,
the same in vLLM 0.30 to 0.33, and compared with the keys that this code makes (tests/connector/golden).

A hybrid model has a group of layers for each kind of attention. Full attention needs its objects for all
blocks, a sliding window for the last ones only: `groups` are those that must hold every block.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from connector.errors import Inexact

_PREFIX = re.compile(r"(?P<name>.+)@tp_rank:(\d+)@pcp(\d+)@dcp(\d+)@pp_rank:(\d+)@group:(\d+)@", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The parallel layout of the engines that write the pool."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    kv_heads: int | None = None
    """KV heads of the model, 1 with MLA; fewer than `tp` are replicated and stored once each. None: enough."""
    groups: tuple[int, ...] = (0,)
    """The KV cache groups that must hold every block."""
    store_tp: int | None = None
    """`store_tp_size` of the connector, or the least common multiple of its `prefill_tp_sizes`; not with MLA."""
    layout: Literal["LBHNC", "LBNHC"] = "LBHNC"
    """The engines' KV cache layout, which counts with `store_tp` only."""

    @property
    def namespace(self) -> str:
        """What `store_tp` puts behind the model's name."""
        if self.store_tp is None:
            return ""
        if not self._can_share:
            return f"@store_pp:{self.pp}@store_format:rank_local_tp{self.tp}_layout_{self.layout}"
        if self._sharded:
            form = f"tp_shared_{self.layout.lower()}"
            return f"@store_tp:{self.store_tp}@store_pp:{self.pp}@store_format:{form}"
        return f"@store_pp:{self.pp}@store_format:tp_shared_mqa"

    def suffixes(self) -> tuple[str, ...]:
        """The part of the key between the name with its namespace and the hash, for every object."""
        if self.store_tp is not None and self._can_share and self._sharded:
            shards = self.store_tp
        else:
            replicas = 1 if self.kv_heads is None or self.dcp > 1 else max(1, self.tp // self.kv_heads)
            shards = self.tp // replicas
        return tuple(
            f"@tp_rank:{tp}@pcp{pcp}@dcp{tp % self.dcp}@pp_rank:{pp}@group:{group}@"
            for group, pcp, tp, pp in product(self.groups, range(self.pcp), range(shards), range(self.pp))
        )

    @property
    def _sharded(self) -> bool:
        return self.store_tp is not None and (self.kv_heads is None or self.kv_heads % self.store_tp == 0)

    @property
    def _can_share(self) -> bool:
        return (
            self.store_tp is not None
            and self.store_tp % self.tp == 0
            and self.pcp == self.dcp == len(self.groups) == 1
            and (self._sharded or self.kv_heads == 1)
        )


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How one cache domain names its objects."""

    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, ranks: Ranks | None = None) -> "KeyScheme":
        """`name` is the model folder's name, behind `cache_prefix@` where the engines set one."""
        layout = ranks or Ranks()
        return cls(tuple(name + layout.namespace + suffix for suffix in layout.suffixes()))

    @classmethod
    def from_found(cls, prefixes: Collection[str]) -> "KeyScheme":
        """The scheme of the prefixes that a block was found under, one that must be there.

        Raises `Inexact`: `keys_not_found` where there are none, `keys_of_several` where they are of more
        than one name, `keys_incomplete` where the object of a rank is missing between others.
        """
        names = set()
        ranks: defaultdict[int, set[tuple[int, int, int]]] = defaultdict(set)
        for prefix in prefixes:
            parts = _PREFIX.fullmatch(prefix)
            if parts is None:
                raise Inexact("keys_not_found")
            names.add(parts["name"])
            tp, pcp, _, pp, group = (int(number) for number in parts.groups()[1:])
            ranks[group].add((tp, pcp, pp))
        if not names:
            raise Inexact("keys_not_found")
        if len(names) > 1:
            raise Inexact("keys_of_several")
        if any(len(seen) != prod(max(numbers) + 1 for numbers in zip(*seen, strict=True)) for seen in ranks.values()):
            raise Inexact("keys_incomplete")
        return cls(tuple(sorted(prefixes)))

    def keys(self, block_hash: bytes) -> tuple[str, ...]:
        """Every object that must exist for this block to be usable."""
        digest = block_hash.hex()
        return tuple(prefix + digest for prefix in self.prefixes)
