"""Do the engines hash blocks and name them as believed? And if not, what do they do instead?

    suspects         every way in which engines may hash otherwise than believed, the belief first
    diagnose_event   one BlockStored event of an engine against them. Pure
    calibrate        a prompt of random ids to one engine, then its keys in the pool

Nothing that a tenant sent is needed or kept: prompts and salts are made here, and an event's salt goes into
a hash and nowhere else. Token ids are compared in connector/parity.py.

The seed of an engine (PYTHONHASHSEED) is told by nothing that it answers. It is found by trying: the
usual ones together with all other differences, and some ten thousand numbers alone.
"""

import asyncio
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, Protocol, TypeVar

from connector.blocks import Adapter, Algorithm, HashScheme, hash_prompt
from connector.errors import WireError
from connector.keys import KeyScheme

SEEDS = (None, "0", "42", "1", "1234")
"""What PYTHONHASHSEED is set to where it is set; tried together with every other difference."""
MORE_SEEDS = 100_000
"""Numbers that are tried as a seed where nothing else explains what an engine does."""
SEEDS_OF_EVENTS = 10_000
"""The same where events are judged, which takes longer."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
IDS = (range(1000, 2000), range(32, 256))
"""Token ids that prompts are made of: special ones lie below or far above the former. Some models have fewer."""
TRIED_BLOCKS = 2
"""Full blocks of the largest suspected size in a prompt."""
DEADLINE = 6.0
"""Seconds for a prompt's blocks to appear in the pool: puts were seen to take up to 2.6 s."""
PAUSE = 0.1
UPGRADE = "run engines that share a pool on one version of vLLM, 0.31 or newer"
FLAG = "--prefix-caching-hash-algo"

Value = TypeVar("Value")

Kind = Literal[
    "agrees",
    "algorithm",
    "seed",
    "random_seed",
    "tagging",
    "block_size",
    "adapter",
    "key_prefix",
    "ranks",
    "not_stored",
    "not_asked",
    "unknown",
    "unreachable",
    "refused",
    "pool_unreachable",
]


@dataclass(frozen=True, slots=True)
class Suspect:
    """One way in which an engine may hash."""

    scheme: HashScheme
    kinds: tuple[Kind, ...] = ()
    """In what it differs from the belief; empty for the belief itself."""
    detail: str = ""
    """What the engine does, as a sentence's end: `hashes with xxhash`."""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one engine, with a sentence of what it does and one of what to do."""

    kind: Kind
    detail: str = ""
    fix: str = ""
    scheme: HashScheme | None = None
    """How the engine hashes, where that is known."""
    prefixes: tuple[str, ...] = ()
    """What stands before the hash in the pool's keys, where it was found there."""
    sample: "Sample | None" = field(default=None, repr=False, compare=False)
    """The prompt that was sent, where all agrees: another engine of the pool must find it there."""

    @property
    def agrees(self) -> bool:
        return self.kind == "agrees"

    @property
    def final(self) -> bool:
        """Whether asking again would tell nothing else."""
        return self.kind in ("agrees", "not_asked")

    @property
    def disagrees(self) -> bool:
        """Whether blocks are known to bear other names than ours. Neither: it could not be found out."""
        return self.kind in _DISAGREE


_DISAGREE = frozenset(
    {"algorithm", "seed", "random_seed", "tagging", "block_size", "adapter", "key_prefix", "ranks", "not_stored"}
)


class Asked(Protocol):
    """One engine, as `EngineControl` asks it."""

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Post a body; the status, and the answer's JSON. Raises a `WireError`."""
        ...


class Keys(Protocol):
    """One pool, as `Master` asks it. Both raise a `WireError`."""

    async def resident(self, keys: Sequence[str]) -> Collection[str]:
        """Those of `keys` that are there."""
        ...

    async def keys_of(self, hashes: Collection[bytes]) -> Collection[str]:
        """What stands before any of these hashes in the pool's keys."""
        ...


def suspects(believed: HashScheme, *, block_sizes: Collection[int] = ()) -> tuple[Suspect, ...]:
    """Every way in which engines may hash, the belief first, then those that differ from it least.

    `block_sizes` are further sizes that something speaks for, such as an engine's metrics or events.
    """
    algorithms = _first(believed.algorithm, tuple(Algorithm))
    seeds = _first(believed.seed, SEEDS)
    tagged = _first(believed.tagged, (True, False))
    sizes = _first(believed.block_size, (*sorted(block_sizes), *BLOCK_SIZES))
    every = (
        suspect_of(believed, replace(believed, algorithm=algorithm, seed=seed, tagged=tag, block_size=size))
        for algorithm, seed, tag, size in product(algorithms, seeds, tagged, sizes)
    )
    known = (one for one in every if one.scheme.exact or not one.kinds)
    return tuple(sorted(known, key=_distance))


def _first(one: Value, others: Collection[Value]) -> list[Value]:
    return list(dict.fromkeys((one, *others)))


def suspect_of(believed: HashScheme, scheme: HashScheme) -> Suspect:
    """One way of hashing, and in what it differs from the belief."""
    told = list(_differences(believed, scheme))
    return Suspect(
        scheme,
        tuple(kind for kind, _, _ in told),
        " and ".join(detail for _, detail, _ in told),
        "; ".join(fix for _, _, fix in told),
    )


def _differences(believed: HashScheme, scheme: HashScheme) -> Iterator[tuple[Kind, str, str]]:
    """Kind, what the engine does, what to do."""
    if scheme.block_size != believed.block_size:
        size, ours = scheme.block_size, believed.block_size
        yield (
            "block_size",
            f"has blocks of {size} tokens, not {ours}",
            f"set models[].block_size to {size} or auto, or start the engine with --block-size {ours}",
        )
    if scheme.algorithm != believed.algorithm:
        yield (
            "algorithm",
            f"hashes with {scheme.algorithm}, not {believed.algorithm}",
            f"set models[].hash to {scheme.algorithm} or auto, or start the engine with {FLAG} {believed.algorithm}",
        )
    if scheme.seed != believed.seed:
        yield (
            "seed",
            f"has {_seed(scheme.seed)}, where {_seed(believed.seed)} is believed",
            f"{_set_seed(scheme.seed)}, or start the engine with {_seed(believed.seed)}",
        )
    if scheme.tagged != believed.tagged:
        how, version = ("tagged", "0.31 or newer") if scheme.tagged else ("untagged", "before 0.31")
        yield (
            "tagging",
            f"hashes salts and adapters {how}, as vLLM {version} does",
            f'set models[].vllm to "{"0.32" if scheme.tagged else "0.30"}", or {UPGRADE}',
        )


def _seed(seed: str | None) -> str:
    return "no PYTHONHASHSEED" if seed is None else f"PYTHONHASHSEED={seed}"


def _set_seed(seed: str | None) -> str:
    return "remove models[].hash_seed" if seed is None else f'set models[].hash_seed to "{seed}"'


def more_seeds(believed: HashScheme) -> Iterator[Suspect]:
    """The belief with other numbers for a seed."""
    return (suspect_of(believed, replace(believed, seed=str(number))) for number in range(SEEDS_OF_EVENTS))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an event's hashes say."""

    suspect: Suspect | None
    """The way that gives them; None where no known one does."""
    hashes: tuple[bytes, ...] = ()
    """Full hashes of its blocks, to judge those that follow them by; empty where no known way gives them."""

    @property
    def agrees(self) -> bool:
        return self.suspect is not None and not self.suspect.kinds


def diagnose_event(
    event: Mapping[str, Any],
    ways: Sequence[Suspect],
    *,
    parent: bytes | None = None,
    adapter: Adapter | None = None,
) -> Verdict | None:
    """Which of `ways` gives the hashes of a BlockStored event; None where the event cannot be judged.

    A block's hash hangs on its parent's, so what can be judged is a prompt's first block, a block whose
    parent's full hash the event tells or the caller gives, and those behind it in the event. An event
    without `extra_keys` (such as one of the medium `cpu`) does not tell the salt and cannot be judged,
    nor one of a hybrid model's other groups. `adapter` is the one that the event names, with its path.

    Events write extra keys untagged: the adapter's name, `(id, offset)` of media, the salt, a digest of
    embeddings (vllm/distributed/kv_events.py, to_event_extra_keys in v1/core/kv_cache_utils.py, 0.32.0).
    Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for what is no such event.
    """
    if event["type"] != "BlockStored" or event.get("extra_keys") is None or event.get("group_idx") not in (None, 0):
        return None
    given: Sequence[int | bytes] = event["block_hashes"]
    above = event.get("parent_block_hash")
    if isinstance(above, bytes):
        parent = above
    if above is not None and parent is None:
        return None
    name = event.get("lora_name")
    if name is not None and (adapter is None or adapter.name != name):
        return None
    size, ids = event["block_size"], tuple(event["token_ids"])
    blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    keys = [tuple(one) if one else () for one in event["extra_keys"]]
    if not given or not size or not len(blocks) == len(given) == len(keys):
        return None
    for way in ways:
        if way.scheme.block_size == size:
            hashes = _chain(way.scheme, parent, blocks, keys, adapter)
            if all(_same(told, ours) for told, ours in zip(given, hashes, strict=True)):
                return Verdict(way, tuple(hashes))
    return Verdict(None)


def _chain(
    scheme: HashScheme,
    parent: bytes | None,
    blocks: Sequence[tuple[int, ...]],
    keys: Sequence[tuple[Any, ...]],
    adapter: Adapter | None,
) -> list[bytes]:
    hashes = []
    above = scheme.root if parent is None else parent
    for block, told in zip(blocks, keys, strict=True):
        above = scheme.digest((above, block, _extra(scheme, told, adapter) or None))
        hashes.append(above)
    return hashes


def _extra(scheme: HashScheme, told: tuple[Any, ...], adapter: Adapter | None) -> tuple[Any, ...]:
    """A block's extra keys as they were hashed."""
    if not scheme.tagged:
        return tuple(tuple(key) if isinstance(key, list) else key for key in told)
    return tuple(_tagged(key, adapter if place == 0 else None) for place, key in enumerate(told))


def _tagged(key: Any, adapter: Adapter | None) -> tuple[Any, ...]:
    if adapter is not None:
        return ("lora", key, adapter.path)
    if isinstance(key, list | tuple):
        return ("mm", *key)
    return ("prompt_embeds", key) if isinstance(key, bytes) else ("cache_salt", key)


def _same(told: int | bytes, ours: bytes) -> bool:
    return told == ours if isinstance(told, bytes) else told & 0xFFFFFFFFFFFFFFFF == int.from_bytes(ours[-8:], "big")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt that was made here, and its salt."""

    tokens: tuple[int, ...]
    salt: str
    adapter: Adapter | None = None
    """The adapter that it asks for."""

    @classmethod
    def draw(cls, length: int, ids: Sequence[int] = IDS[0], adapter: Adapter | None = None) -> "Sample":
        return cls(tuple(secrets.choice(ids) for _ in range(length)), secrets.token_hex(16), adapter)

    def first(self, scheme: HashScheme) -> bytes:
        """The hash of its first block."""
        tokens = self.tokens[: scheme.block_size]
        return hash_prompt(tokens, scheme, salt=self.salt, adapter=self.adapter).hashes[0]

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model if self.adapter is None else self.adapter.name,
            "prompt": list(self.tokens),
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": self.salt,
        }


async def calibrate(
    engine: Asked,
    model: str,
    believed: HashScheme,
    pool: Keys,
    keys: KeyScheme,
    *,
    block_sizes: Collection[int] = (),
    max_tokens: int | None = None,
    adapter: Adapter | None = None,
    deadline: float = DEADLINE,
) -> Finding:
    """Send one engine a prompt and look for its blocks in the pool, under every key that they may have. Never raises.

    `model` is the name that the engine serves it under; `adapter` is one of the engine's, to ask in its
    place. `block_sizes` are further sizes that something speaks for. `max_tokens` is the model's length,
    where it is known. `deadline` in seconds is for the blocks to appear.
    """
    ways = suspects(believed, block_sizes=block_sizes)
    room = (max_tokens or 1 << 30) - 2
    ways = tuple(way for way in ways if way.scheme.block_size <= room)
    length = min(room, TRIED_BLOCKS * max((way.scheme.block_size for way in ways), default=0) + 1)
    if not ways or ways[0].kinds:
        return Finding("refused", f"takes {max_tokens} tokens, less than a block of {believed.block_size}")
    sample = await send(engine, model, length, adapter)
    if isinstance(sample, Finding):
        return sample
    try:
        found = await _seen(sample, ways, pool, keys, deadline)
    except WireError as error:
        return Finding("pool_unreachable", f"is of a pool whose master fails: {error.detail}", "see pools[].admin")
    return replace(found, sample=sample) if found.agrees else found


async def send(engine: Asked, model: str, length: int, adapter: Adapter | None = None) -> Sample | Finding:
    """A prompt of random ids that the engine has answered, or why there is none. Never raises."""
    for ids in IDS:
        sample = Sample.draw(length, ids, adapter)
        try:
            status, _ = await engine.ask("/v1/completions", sample.body(model))
        except WireError as error:
            return Finding("unreachable", f"does not answer a prompt: {error.detail}", "see the engine's log")
        if status == 200:
            return sample
    return Finding(
        "refused", f"answers {status} to a prompt of {length} token ids", "see the engine's log, and engines[].api_key"
    )


def _seeded(sample: Sample, believed: HashScheme) -> dict[bytes, str]:
    """The hashes that the sample's first block has with other numbers for a seed."""
    return {sample.first(replace(believed, seed=str(number))): str(number) for number in range(MORE_SEEDS)}


def _firsts(sample: Sample, ways: Iterable[Suspect]) -> dict[bytes, Suspect]:
    """The hashes that the sample's first block may have, and the way that gives each."""
    return {sample.first(way.scheme): way for way in ways}


def _pathless(sample: Sample, ways: Iterable[Suspect]) -> dict[bytes, Suspect]:
    """The same for an engine that leaves an adapter's path out."""
    if sample.adapter is None:
        return {}
    told = f"hashes the adapter {sample.adapter.name} without its path"
    bare = replace(sample, adapter=replace(sample.adapter, path=""))
    kind: Kind = "adapter"
    return {
        bare.first(way.scheme): Suspect(way.scheme, (kind, *way.kinds), _and(told, way.detail), _and(UPGRADE, way.fix))
        for way in ways
        if way.scheme.tagged
    }


async def _seen(sample: Sample, ways: Sequence[Suspect], pool: Keys, keys: KeyScheme, deadline: float) -> Finding:
    """Wait for the sample's blocks under the believed keys and under those of all suspects."""
    firsts = {**_pathless(sample, reversed(ways)), **_firsts(sample, reversed(ways))}
    try:
        async with asyncio.timeout(deadline):
            first = await _first_there(firsts, pool, keys)
    except TimeoutError:
        return await _elsewhere(sample, ways[0].scheme, firsts, pool, keys)
    await asyncio.sleep(PAUSE)  # each rank puts its own
    more = await pool.resident(_further_ranks(keys, first))
    return _named(firsts[first], keys, _prefixes(more, first))


async def _first_there(firsts: Collection[bytes], pool: Keys, keys: KeyScheme) -> bytes:
    """Which of these blocks comes up under the believed names."""
    asked = [key for first in firsts for key in keys.keys(first)]
    while True:
        there = frozenset(await pool.resident(asked))
        for first in firsts:
            if there.issuperset(keys.keys(first)):
                return first
        await asyncio.sleep(PAUSE)


def _prefixes(keys: Collection[str], block: bytes) -> tuple[str, ...]:
    digest = block.hex()
    return tuple(sorted(key.removesuffix(digest) for key in keys if key.endswith(digest)))


def _named(way: Suspect, keys: KeyScheme, further: tuple[str, ...]) -> Finding:
    """The blocks are there under the believed names, and perhaps under some of more ranks."""
    if further:
        return _ranks(way, keys, (*keys.prefixes, *further))
    if way.kinds:
        return Finding(way.kinds[0], way.detail, way.fix, way.scheme, keys.prefixes)
    return Finding("agrees", scheme=way.scheme, prefixes=keys.prefixes)


_RANK = re.compile(r"@tp_rank:(\d+)@pcp(\d+)@dcp(\d+)@pp_rank:(\d+)@group:\d+@$")


def _further_ranks(keys: KeyScheme, block: bytes) -> list[str]:
    """The keys that a block would have as well, had the engines one rank more than is believed."""
    found = [(prefix, match) for prefix in keys.prefixes if (match := _RANK.search(prefix))]
    if not found:
        return []
    last = [max(int(match[group]) for _, match in found) for group in range(1, 5)]
    head = found[0][0][: found[0][1].start()]
    further = []
    for dimension in (0, 1, 3):  # a rank of dcp is one of tp as well
        ranks = [number + 1 if place == dimension else 0 for place, number in enumerate(last)]
        for dcp in range(last[2] + 2) if dimension == 0 else (0,):
            tp, pcp, _, pp = ranks
            further.append(f"{head}@tp_rank:{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:0@{block.hex()}")
    return further


async def _elsewhere(
    sample: Sample, believed: HashScheme, firsts: Mapping[bytes, Suspect], pool: Keys, keys: KeyScheme
) -> Finding:
    """Not under the believed names: look through the pool's keys for any that ends in one of the hashes."""
    seeds = await asyncio.to_thread(_seeded, sample, believed)
    there = await pool.resident(sorted(await pool.keys_of([*firsts, *seeds])))
    digests = {key.rpartition("@")[2] for key in there}
    block = next((block for block in (*firsts, *seeds) if block.hex() in digests), None)
    if block is None and not believed.exact:
        return random_root(believed)
    if block is None:
        return Finding(
            "not_stored",
            "has put nothing into the pool that has a known name",
            "see that it has the MooncakeStoreConnector, kv_role kv_both or kv_producer, and the master of this pool; "
            "or its PYTHONHASHSEED is none of those that were tried: set models[].hash_seed to it",
        )
    way = firsts.get(block) or suspect_of(believed, replace(believed, seed=seeds[block]))
    learned = _prefixes(there, block)
    if set(learned) == set(keys.prefixes):
        return _named(way, keys, ())
    if _models(learned) == _models(keys.prefixes):
        return _ranks(way, keys, learned)
    model = " or ".join(sorted(_models(learned)))
    ours = " or ".join(sorted(_models(keys.prefixes)))
    return Finding(
        "key_prefix",
        _and(f"names its blocks {model}@..., not {ours}@...", way.detail),
        _and(f"set models[].keys.prefix to {model}", way.fix),
        way.scheme,
        learned,
    )


def _ranks(way: Suspect, keys: KeyScheme, learned: Sequence[str]) -> Finding:
    there, ours = len(learned), len(keys.prefixes)
    return Finding(
        "ranks",
        _and(f"stores {there} objects for a block, where {ours} are believed", way.detail),
        _and("set models[].keys.tp, pp, pcp, dcp and kv_heads to the engines' parallel sizes", way.fix),
        way.scheme,
        tuple(sorted(learned)),
    )


def random_root(scheme: HashScheme) -> Finding:
    """What an engine does whose scheme is not exact."""
    return Finding(
        "random_seed",
        f"hashes with {scheme.algorithm} and no known PYTHONHASHSEED: each start draws another root, "
        "so that no two engines share a block",
        "start all engines with --prefix-caching-hash-algo sha256_cbor (vLLM 0.29 or newer), "
        "or with one PYTHONHASHSEED and set models[].hash_seed to it",
        scheme,
    )


def _distance(way: Suspect) -> int:
    return len(way.kinds)


def _models(prefixes: Collection[str]) -> frozenset[str]:
    """The part of the keys before their ranks."""
    return frozenset(prefix.partition("@tp_rank:")[0] for prefix in prefixes)


def _and(one: str, other: str) -> str:
    return f"{one} and {other}" if other else one
