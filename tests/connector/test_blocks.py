"""Block hashes: equal to what vLLM 0.32.0 printed, and lawful where it printed nothing.

golden/vllm-0.32.0.json was made by vLLM itself: four algorithms, three block sizes, with and
without a salt, an adapter and PYTHONHASHSEED.
"""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from connector.blocks import DEFAULT_SEED, Adapter, Algorithm, HashScheme, Prefix, hash_prompt

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "vllm-0.32.0.json").read_bytes())
PICKLED = (Algorithm.SHA256, Algorithm.XXHASH)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
salts = st.text(min_size=1, max_size=12)
schemes = st.builds(HashScheme, st.sampled_from(Algorithm), st.integers(1, 8), st.sampled_from(["0", "seed"]))
adapters = st.none() | st.builds(Adapter, st.text(max_size=8), st.text(max_size=8))


def ident(vector: dict[str, Any]) -> str:
    extras = "".join(f"-{name}" for name in ("salted", "adapted") if vector[name])
    return f"{vector['algorithm']}-{vector['seed']}-{vector['block_size']}-{vector['tokens']}{extras}"


def another(text: str) -> str:
    """An equal string that is another object, as strings from a socket are."""
    return pickle.loads(pickle.dumps(text, protocol=5)) if len(text) > 1 else text


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=ident)
def test_hashes_are_the_ones_that_vllm_computed(vector: dict[str, Any]) -> None:
    scheme = HashScheme(Algorithm(vector["algorithm"]), vector["block_size"], vector["seed"])
    prompt = GOLDEN["tokens"][vector["tokens"]]

    prefix = hash_prompt(
        prompt,
        scheme,
        salt=GOLDEN["salt"] if vector["salted"] else None,
        adapter=Adapter(*GOLDEN["adapter"]) if vector["adapted"] else None,
    )

    assert scheme.root.hex() == vector["root"]
    assert [block.hex() for block in prefix.hashes] == vector["hashes"]
    assert vector["hashes"], "a vector without a hash checks nothing"


def test_golden_vectors_cover_every_choice() -> None:
    seen = {(v["algorithm"], v["block_size"], v["salted"], v["adapted"]) for v in GOLDEN["vectors"]}

    assert seen == {(a.value, b, s, d) for a in Algorithm for b in (16, 32, 64) for s in (0, 1) for d in (0, 1)}


@given(tokens, schemes, st.none() | salts, adapters)
def test_only_full_blocks_have_a_hash(
    prompt: list[int], scheme: HashScheme, salt: str | None, adapter: Adapter | None
) -> None:
    prefix = hash_prompt(prompt, scheme, salt=salt, adapter=adapter)

    assert len(prefix.hashes) == len(prompt) // scheme.block_size
    assert len(set(prefix.hashes)) == len(prefix.hashes)
    assert {len(block) for block in prefix.hashes} <= {len(scheme.root)}
    assert (prefix.tokens, prefix.block_size) == (len(prompt), scheme.block_size)


@given(tokens, st.integers(0, 40), schemes, st.none() | salts, adapters)
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(
    prompt: list[int], cut: int, scheme: HashScheme, salt: str | None, adapter: Adapter | None
) -> None:
    whole = hash_prompt(prompt, scheme, salt=salt, adapter=adapter).hashes
    part = hash_prompt(prompt[:cut], scheme, salt=salt, adapter=adapter).hashes

    assert whole[: len(part)] == part


@given(st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=40), st.data(), schemes)
def test_a_changed_token_changes_its_block_and_all_behind_it(
    prompt: list[int], data: st.DataObject, scheme: HashScheme
) -> None:
    place = data.draw(st.integers(0, len(prompt) - 1))
    changed = [*prompt[:place], prompt[place] ^ 1, *prompt[place + 1 :]]
    before = hash_prompt(prompt, scheme).hashes
    after = hash_prompt(changed, scheme).hashes
    block = place // scheme.block_size

    assert before[:block] == after[:block]
    assert set(before[block:]).isdisjoint(after[block:])


@given(tokens, schemes, salts, salts, adapters)
def test_a_salt_changes_every_hash(
    prompt: list[int], scheme: HashScheme, salt: str, other: str, adapter: Adapter | None
) -> None:
    plain = hash_prompt(prompt, scheme, adapter=adapter).hashes
    salted = hash_prompt(prompt, scheme, salt=salt, adapter=adapter).hashes
    salted_otherwise = hash_prompt(prompt, scheme, salt=other, adapter=adapter).hashes

    assert set(plain).isdisjoint(salted)
    assert set(salted).isdisjoint(salted_otherwise) or salt == other


@given(tokens, schemes, adapters)
def test_an_empty_salt_is_none(prompt: list[int], scheme: HashScheme, adapter: Adapter | None) -> None:
    assert hash_prompt(prompt, scheme, salt="", adapter=adapter) == hash_prompt(prompt, scheme, adapter=adapter)


@given(tokens, schemes, salts, st.text(min_size=1, max_size=8))
def test_an_adapter_and_a_salt_of_one_name_do_not_collide(
    prompt: list[int], scheme: HashScheme, name: str, path: str
) -> None:
    adapted = hash_prompt(prompt, scheme, adapter=Adapter(name, path)).hashes
    salted = hash_prompt(prompt, scheme, salt=name).hashes
    swapped = hash_prompt(prompt, scheme, adapter=Adapter(path, name)).hashes

    assert set(adapted).isdisjoint(salted)
    assert set(adapted).isdisjoint(swapped) or name == path


@given(tokens, st.sampled_from(Algorithm), st.integers(1, 8), st.integers(1, 8))
def test_block_sizes_share_no_hash(prompt: list[int], algorithm: Algorithm, size: int, other: int) -> None:
    one = hash_prompt(prompt, HashScheme(algorithm, size, "0")).hashes
    two = hash_prompt(prompt, HashScheme(algorithm, other, "0")).hashes

    assert size == other or set(one).isdisjoint(two)


@given(tokens, schemes, st.none() | salts, adapters)
def test_prompts_do_not_touch_each_other(
    prompt: list[int], scheme: HashScheme, salt: str | None, adapter: Adapter | None
) -> None:
    alone = hash_prompt(prompt, scheme, salt=salt, adapter=adapter)
    hash_prompt([7, *prompt], scheme, salt="other", adapter=Adapter("x", "y"))

    assert hash_prompt(tuple(prompt), scheme, salt=salt, adapter=adapter) == alone


@given(st.integers(0, 10_000), st.integers(1, 256))
def test_reusable_leaves_at_least_one_token(count: int, size: int) -> None:
    reusable = Prefix(count, size, ()).reusable

    assert reusable * size < count or count == reusable == 0
    assert (reusable + 1) * size >= count, "and not a block more than it has to"


@pytest.mark.parametrize("algorithm", PICKLED)
@pytest.mark.parametrize(("name", "path"), [("sql", "sql"), ("lora", "lora"), ("cache_salt", "lora"), ("s", "s")])
def test_equal_strings_hash_as_distinct_objects(algorithm: Algorithm, name: str, path: str) -> None:
    """Whichever objects the caller happens to hold: the engine's come from a socket."""
    scheme = HashScheme(algorithm, 4, "0")
    digest = {Algorithm.SHA256: lambda d: hashlib.sha256(d).digest(), Algorithm.XXHASH: xxhash.xxh3_128_digest}
    prompt = list(range(8))

    extra = (("lora", another(name), another(path)), ("cache_salt", another(name)))
    first = digest[algorithm](pickle.dumps((scheme.root, tuple(prompt[:4]), extra), protocol=5))
    second = digest[algorithm](pickle.dumps((first, tuple(prompt[4:]), extra[:1]), protocol=5))

    assert hash_prompt(prompt, scheme, salt=name, adapter=Adapter(name, path)).hashes == (first, second)


def test_one_object_used_twice_would_hash_otherwise() -> None:
    """The reason for the test above: pickle writes the second of two equal objects as a reference."""
    same = "sql-adapter"

    assert pickle.dumps((same, same), protocol=5) != pickle.dumps((same, another(same)), protocol=5)


@pytest.mark.parametrize(
    ("algorithm", "seed", "exact"),
    [
        (Algorithm.SHA256, None, True),
        (Algorithm.SHA256_CBOR, None, True),
        (Algorithm.XXHASH, None, False),
        (Algorithm.XXHASH_CBOR, None, False),
        (Algorithm.XXHASH, "0", True),
        (Algorithm.XXHASH_CBOR, "", True),
    ],
)
def test_an_engine_without_a_seed_is_exact_only_with_sha256(
    algorithm: Algorithm, seed: str | None, *, exact: bool
) -> None:
    assert HashScheme(algorithm, 16, seed).exact is exact


def test_no_seed_is_vllms_default_and_an_empty_one_is_not() -> None:
    unset = HashScheme(Algorithm.SHA256, 16).root

    assert unset == HashScheme(Algorithm.SHA256, 16, DEFAULT_SEED).root
    assert unset != HashScheme(Algorithm.SHA256, 16, "").root
