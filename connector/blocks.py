"""Token ids, and what else a prompt is made of, to vLLM's block hashes. Pure.

    hash_i = H((hash_{i-1}, token ids of block i, extra keys of block i or None))
    hash_{-1} = H(seed text)

Only full blocks have a hash. The extra keys of a block are, in this order and only where they apply:

    ("lora", name, path)                  in every block of a request that uses an adapter
    ("mm", identifier, offset)            for each picture, clip or sound that reaches into the block;
                                          where it begins, counted from the block's first token
    ("cache_salt", salt)                  in the first block only
    ("prompt_embeds", sha256 of the rows) in every block of a prompt given as embeddings

Before vLLM 0.31 they were not tagged, and the adapter's path was not among them: name, (identifier,
offset), salt, sha256. Sources: vllm/v1/core/kv_cache_utils.py (hash_block_tokens,
generate_block_hash_extra_keys, resolve_none_hash_seed) and vllm/utils/hashing.py, read in every
release of `hashing_of` and compared with what each of them computes (tests/connector/golden).

Left out: from 0.33 on, an engine with EAGLE or MTP drafting and without a KV connector puts the
tokens behind a block into its extra keys as well. Engines with a connector do not, so all that
share a pool hash as above (num_hash_lookahead_tokens in vllm/config/vllm.py).

Why pickle with so much care: pickle writes an object that it has met before as a reference, so two
equal strings hash differently from one string used twice. In the engine names, paths, identifiers
and the salt arrive over a socket and are always objects of their own; so they are made here.

Why cbor2 and no encoder of our own: joining the bytes of each id from a table takes 1 to 2.4 times as
long, and keeping one encoder for all blocks saves a tenth at most.
"""

import hashlib
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain, islice, repeat

import cbor2
import xxhash

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM from 0.29 on derives the root from when PYTHONHASHSEED is not set (sha256 only)."""
TURN = 512
TURN_TOKENS = 32 * 1024
"""Blocks, or tokens, after which hashing lets other threads run: half a millisecond to one and a half."""
PAUSE = 1e-6
"""Seconds; a pause of none would not do, as the lock is taken back before a thread that waits for it wakes."""


class Algorithm(StrEnum):
    """vLLM's --prefix-caching-hash-algo."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, 5)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_STEPS: dict[Algorithm, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    Algorithm.SHA256: (_pickle, _sha256),
    Algorithm.SHA256_CBOR: (_cbor, _sha256),
    Algorithm.XXHASH: (_pickle, xxhash.xxh3_128_digest),
    Algorithm.XXHASH_CBOR: (_cbor, xxhash.xxh3_128_digest),
}


@dataclass(frozen=True, slots=True)
class Hashing:
    """What a release of vLLM decides about hashes."""

    tagged: bool
    """Extra keys say what they are, and an adapter's path is one."""
    fixed_root: bool
    """Without PYTHONHASHSEED the root of sha256 and sha256_cbor is the same everywhere."""


HASHING = {
    "0.28": Hashing(tagged=False, fixed_root=False),
    "0.29": Hashing(tagged=False, fixed_root=True),
    "0.30": Hashing(tagged=False, fixed_root=True),
    "0.31": Hashing(tagged=True, fixed_root=True),
    "0.32": Hashing(tagged=True, fixed_root=True),
    "0.33": Hashing(tagged=True, fixed_root=True),
}
"""The releases of vLLM that were checked, each by vectors of its own."""
_RELEASE = re.compile(r"(\d+\.\d+)(?:\.\d+)?(?:\.post\d+)?(?:\+.*)?")


def hashing_of(version: str) -> Hashing | None:
    """How a version of vLLM hashes, as `/version` tells it. None: not known, as between two releases."""
    release = _RELEASE.fullmatch(version.strip())
    return HASHING.get(release[1]) if release else None


@dataclass(frozen=True)
class HashScheme:
    """How one fleet of engines hashes: algorithm, tokens in a block, PYTHONHASHSEED if set, vLLM's release."""

    algorithm: Algorithm
    block_size: int
    seed: str | None = None
    tagged: bool = True
    """As in `Hashing`."""
    fixed_root: bool = True
    """As in `Hashing`."""

    @property
    def exact(self) -> bool:
        """Whether the root is known. Without a seed, engines draw a random one each: with xxhash, and before 0.29."""
        cryptographic = self.algorithm in (Algorithm.SHA256, Algorithm.SHA256_CBOR)
        return self.seed is not None or (cryptographic and self.fixed_root)

    @cached_property
    def root(self) -> bytes:
        """The parent of the first block (vLLM's NONE_HASH)."""
        return self.digest(DEFAULT_SEED if self.seed is None else self.seed)

    def digest(self, value: object) -> bytes:
        """Hash one value: 32 bytes for sha256, 16 for xxhash."""
        dump, digest = _STEPS[self.algorithm]
        return digest(dump(value))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its name, and its path as the engines know it (`root` in /v1/models)."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, clip or sound of a prompt: the engine's name for its content, and the tokens that it takes."""

    identifier: str
    """`features.mm_hashes` of vLLM's render endpoints, or the uuid that the client gave it."""
    offset: int
    """Its first token, counted from the prompt's first."""
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Embeds:
    """A prompt given as embeddings: the tensor's bytes, row by row, and the bytes of one token's row."""

    data: bytes
    width: int

    def rows(self, start: int, end: int) -> bytes:
        """The rows of these tokens; fewer, or none, behind the prompt's end."""
        return self.data[start * self.width : end * self.width]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The hashes of a prompt's full blocks, first to last."""

    tokens: int
    """How many tokens the whole prompt has."""
    block_size: int
    hashes: tuple[bytes, ...]

    @property
    def reusable(self) -> int:
        """How many leading blocks can be taken from a cache: at least one token is computed."""
        return max(0, self.tokens - 1) // self.block_size


def hash_prompt(
    tokens: Sequence[int],
    scheme: HashScheme,
    *,
    salt: str | None = None,
    adapter: Adapter | None = None,
    media: Sequence[Media] = (),
    embeds: Embeds | None = None,
) -> Prefix:
    """Hash the full blocks of a prompt as the engine would.

    `tokens` are Python ints, the whole prompt; of a prompt given as embeddings, as the engine numbers
    them (zeros). `salt` is the request's cache_salt as the engine gets it; an empty one counts as none,
    as it does in vLLM. `media` are in the order of their offsets.
    """
    hashes = extend(None, tokens, scheme, salt=salt, adapter=adapter, media=media, embeds=embeds)
    return Prefix(tokens=len(tokens), block_size=scheme.block_size, hashes=tuple(hashes))


def extend(
    parent: bytes | None,
    tokens: Sequence[int],
    scheme: HashScheme,
    *,
    salt: str | None = None,
    adapter: Adapter | None = None,
    media: Sequence[Media] = (),
    embeds: Embeds | None = None,
    first_block: int = 0,
) -> list[bytes]:
    """Hash the full blocks that follow `parent`, in whichever thread: others come to run in between.

    `tokens` begin where the parent's block ends. Without a parent they are the prompt's own beginning, and
    only then the salt counts. `first_block` is the number of the first block of `tokens` in its prompt:
    `media` and `embeds` are those of the whole prompt, and nothing else needs it.
    """
    if parent is None and first_block:
        raise ValueError("a block that is not the first has a parent")
    size = scheme.block_size
    dump, digest = _STEPS[scheme.algorithm]
    whole = tuple(tokens)
    extras = _extra_keys(
        scheme,
        salt=salt if parent is None else None,
        adapter=adapter,
        media=media,
        embeds=embeds,
        first_block=first_block,
    )
    current = scheme.root if parent is None else parent
    hashes: list[bytes] = []
    blocks = zip(range(0, len(whole) - size + 1, size), extras, strict=False)
    turn = max(1, min(TURN, TURN_TOKENS // size))
    for done in range(0, len(whole) // size, turn):
        if done:
            time.sleep(PAUSE)
        for start, extra in islice(blocks, turn):
            current = digest(dump((current, whole[start : start + size], extra)))
            hashes.append(current)
    return hashes


def _extra_keys(
    scheme: HashScheme,
    *,
    salt: str | None,
    adapter: Adapter | None,
    media: Sequence[Media],
    embeds: Embeds | None,
    first_block: int,
) -> Iterator[tuple[object, ...] | None]:
    """The extra keys of a block, of the next one, and so on without an end."""
    lora: tuple[object, ...] = ()
    if adapter is not None:
        name, path = _another(adapter.name), _another(adapter.path)
        lora = (("lora", name, path),) if scheme.tagged else (name,)
    salted: tuple[object, ...] = ()
    if salt:
        text = _another(salt)
        salted = (("cache_salt", text),) if scheme.tagged else (text,)
    if not media and embeds is None:
        return chain([lora + salted or None], repeat(lora or None))
    return _rich_keys(scheme, salted=salted, lora=lora, media=media, embeds=embeds, first_block=first_block)


def _rich_keys(
    scheme: HashScheme,
    *,
    salted: tuple[object, ...],
    lora: tuple[object, ...],
    media: Sequence[Media],
    embeds: Embeds | None,
    first_block: int,
) -> Iterator[tuple[object, ...] | None]:
    """Those of a prompt that is more than text. `media` that the blocks have passed are dropped on the way."""
    left = [(item, _another(item.identifier)) for item in media]
    start = first_block * scheme.block_size
    while True:
        end = start + scheme.block_size
        while left and left[0][0].end <= start:
            left.pop(0)
        keys = lora + _media_keys(scheme, left, start, end) + salted
        if embeds is not None:
            rows = hashlib.sha256(embeds.rows(start, end)).digest()
            keys += (("prompt_embeds", rows),) if scheme.tagged else (rows,)
        yield keys or None
        salted = ()
        start = end


def _media_keys(
    scheme: HashScheme, media: Sequence[tuple[Media, str]], start: int, end: int
) -> tuple[tuple[object, ...], ...]:
    """One key for each that reaches into the block, up to the first that reaches beyond it, as vLLM has it."""
    keys: list[tuple[object, ...]] = []
    if media and media[-1][0].end > start:
        for item, identifier in media:
            if item.offset >= end:
                break
            if item.end > start:
                keys.append(
                    ("mm", identifier, item.offset - start) if scheme.tagged else (identifier, item.offset - start)
                )
                if item.end > end:
                    break
    return tuple(keys)


def _another(text: str) -> str:
    """An equal string that is another object, as far as Python allows."""
    return "".join(list(text))
