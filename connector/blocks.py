"""Token ids, a salt and an adapter to vLLM's block hashes. Pure.

    hash_i = H((hash_{i-1}, token ids of block i, extra keys of block i or None))
    hash_{-1} = H(seed text)

Only full blocks have a hash. The extra keys are `("lora", name, path)` in every block of a request
that uses an adapter, and `("cache_salt", salt)` in the first block only, in that order. Sources:
vllm/v1/core/kv_cache_utils.py (hash_block_tokens, generate_block_hash_extra_keys,
resolve_none_hash_seed) and vllm/utils/hashing.py of vLLM 0.32.0; the tagged form dates from 0.31.

Why pickle with so much care: pickle writes an object that it has met before as a reference, so two
equal strings hash differently from one string used twice. In the engine the adapter's name and
path and the salt arrive over a socket and are always objects of their own; so they are made here.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import cbor2
import xxhash

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM from 0.29 on derives the root from when PYTHONHASHSEED is not set (sha256 only)."""


class Algorithm(StrEnum):
    """vLLM's --prefix-caching-hash-algo."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


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


@dataclass(frozen=True)
class HashScheme:
    """How one fleet of engines hashes: algorithm, tokens in a block, and PYTHONHASHSEED if set."""

    algorithm: Algorithm
    block_size: int
    seed: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the root is known. Without a seed, xxhash engines draw a random one each."""
        return self.seed is not None or self.algorithm in (Algorithm.SHA256, Algorithm.SHA256_CBOR)

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
) -> Prefix:
    """Hash the full blocks of a prompt as the engine would.

    `tokens` are Python ints, the whole prompt. `salt` is the request's cache_salt as the engine
    gets it; an empty one counts as none, as it does in vLLM.
    """
    everywhere: tuple[tuple[str, ...], ...] = ()
    if adapter is not None:
        everywhere = (("lora", _another(adapter.name), _another(adapter.path)),)
    first = everywhere + ((("cache_salt", _another(salt)),) if salt else ())
    size = scheme.block_size
    dump, digest = _STEPS[scheme.algorithm]
    hashes: list[bytes] = []
    parent = scheme.root
    extra = first or None
    for start in range(0, len(tokens) - size + 1, size):
        parent = digest(dump((parent, tuple(tokens[start : start + size]), extra)))
        hashes.append(parent)
        extra = everywhere or None
    return Prefix(tokens=len(tokens), block_size=size, hashes=tuple(hashes))


def _another(text: str) -> str:
    """An equal string that is another object, as far as Python allows."""
    return "".join(list(text))
