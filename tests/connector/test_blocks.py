"""Block hashes: equal to what each release of vLLM computes, and lawful where none was asked.

golden/hashes-*.json were made by vLLM's own functions (golden/make.py): four algorithms, three block sizes,
PYTHONHASHSEED none, 0 and 42, with and without a salt, an adapter, media and prompt embeddings.
"""

import asyncio
import hashlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from connector import blocks
from connector.blocks import (
    DEFAULT_SEED,
    HASHING,
    Adapter,
    Algorithm,
    Embeds,
    Hashing,
    HashScheme,
    Media,
    Prefix,
    extend,
    hash_prompt,
    hashing_of,
)

GOLDEN: dict[str, dict[str, Any]] = {
    document["vllm"]: document
    for path in sorted((Path(__file__).parent / "golden").glob("hashes-*.json"))
    if (document := json.loads(path.read_bytes()))
}
PICKLED = (Algorithm.SHA256, Algorithm.XXHASH)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
salts = st.text(min_size=1, max_size=12)
schemes = st.builds(
    HashScheme, st.sampled_from(Algorithm), st.integers(1, 8), st.sampled_from(["0", "seed"]), st.booleans()
)
tagged = schemes.filter(lambda scheme: scheme.tagged)
adapters = st.none() | st.builds(Adapter, st.text(max_size=8), st.text(max_size=8))
pictures = st.lists(st.builds(Media, st.text(max_size=3), st.integers(0, 40), st.integers(1, 20)), max_size=4).map(
    lambda media: sorted(media, key=lambda item: item.offset)
)
embeddings = st.none() | st.builds(Embeds, st.binary(min_size=80, max_size=80), st.just(2))


def another(text: str) -> str:
    """An equal string that is another object, as strings from a socket are."""
    return pickle.loads(pickle.dumps(text, protocol=5)) if len(text) > 1 else text


@pytest.mark.parametrize("version", GOLDEN)
def test_hashes_are_the_ones_that_vllm_computes(version: str) -> None:
    """Each chain's last hash, which stands for all before it."""
    golden = GOLDEN[version]
    hashing = hashing_of(version)
    assert hashing is not None
    for algorithm, seed, size, case, root, last in golden["vectors"]:
        scheme = HashScheme(Algorithm(algorithm), size, seed, hashing.tagged, hashing.fixed_root)
        prompt = golden["tokens"]
        prefix = hash_prompt(
            [0] * len(prompt) if "embeds" in case else prompt,
            scheme,
            salt=golden["salt"] if "salt" in case else None,
            adapter=Adapter(*golden["adapter"]) if "adapter" in case else None,
            media=[Media(*item) for item in golden["media"]] if "media" in case else (),
            embeds=Embeds(bytes.fromhex(golden["embeds"]["data"]), golden["embeds"]["width"])
            if "embeds" in case
            else None,
        )
        assert scheme.exact
        assert scheme.root.hex() == root
        assert prefix.hashes[-1].hex() == last, (algorithm, seed, size, case)
        assert len(prefix.hashes) == len(prompt) // size


@pytest.mark.parametrize("version", GOLDEN)
def test_golden_vectors_cover_every_choice_that_is_not_left_to_chance(version: str) -> None:
    hashing = hashing_of(version)
    assert hashing is not None
    seen = {(algorithm, seed, size) for algorithm, seed, size, *_ in GOLDEN[version]["vectors"]}

    assert seen == {
        (algorithm, seed, size)
        for algorithm in Algorithm
        for seed in (None, "0", "42")
        for size in (16, 32, 128)
        if HashScheme(algorithm, size, seed, hashing.tagged, hashing.fixed_root).exact
    }


def test_every_release_in_the_table_has_vectors_of_its_own() -> None:
    assert {version.rpartition(".")[0] for version in GOLDEN} == set(HASHING)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32", "0.32.0.post1", "0.32.0+cpu", " 0.32.0\n"])
def test_a_release_is_known_by_its_number(version: str) -> None:
    assert hashing_of(version) == Hashing(tagged=True, fixed_root=True)


@pytest.mark.parametrize(
    "version",
    ["0.27.0", "0.34.0", "1.32.0", "0.32.1.dev7+gabcdef", "0.32.0rc1", "dev", "", "0", "0.3", "0.320.0", "v0.32.0"],
)
def test_a_version_that_was_not_checked_is_not_known(version: str) -> None:
    assert hashing_of(version) is None


@given(tokens, st.integers(0, 40), schemes, st.none() | salts, adapters, pictures, embeddings)
def test_a_chain_that_is_continued_is_the_whole_chain(
    prompt: list[int],
    cut: int,
    scheme: HashScheme,
    salt: str | None,
    adapter: Adapter | None,
    media: list[Media],
    embeds: Embeds | None,
) -> None:
    whole = hash_prompt(prompt, scheme, salt=salt, adapter=adapter, media=media, embeds=embeds).hashes
    known = min(cut // scheme.block_size, len(whole))
    rest = extend(
        whole[known - 1] if known else None,
        prompt[known * scheme.block_size :],
        scheme,
        salt=salt,
        adapter=adapter,
        media=media,
        embeds=embeds,
        first_block=known,
    )

    assert whole == (*whole[:known], *rest)


def test_only_a_prompts_first_block_is_without_a_parent() -> None:
    with pytest.raises(ValueError, match="a block that is not the first has a parent"):
        extend(None, range(64), HashScheme(Algorithm.SHA256, 16), first_block=1)


@given(tokens, schemes, st.none() | salts, adapters, pictures)
def test_media_change_the_blocks_that_they_reach_into_and_all_behind(
    prompt: list[int], scheme: HashScheme, salt: str | None, adapter: Adapter | None, media: list[Media]
) -> None:
    plain = hash_prompt(prompt, scheme, salt=salt, adapter=adapter).hashes
    rich = hash_prompt(prompt, scheme, salt=salt, adapter=adapter, media=media).hashes
    first = media[0].offset // scheme.block_size if media else len(plain)

    assert plain[:first] == rich[:first]
    if all(item.end <= media[-1].end for item in media):
        assert set(plain[first:]).isdisjoint(rich[first:])


async def test_a_long_prompt_hashed_in_a_thread_leaves_the_others_their_turns() -> None:
    """Counted, not timed: with the interpreter's own switching as good as off, only given turns are left."""
    scheme = HashScheme(Algorithm.SHA256_CBOR, 16)
    interval = sys.getswitchinterval()
    loop = asyncio.get_running_loop()
    turns = 0
    sys.setswitchinterval(60)
    try:
        hashing = loop.run_in_executor(None, extend, None, range(32 * 16 * blocks.TURN), scheme)
        while not hashing.done():
            turns += 1
            await asyncio.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert len(await hashing) == 32 * blocks.TURN
    assert turns > 8


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


@given(tokens, tagged, salts, st.text(min_size=1, max_size=8))
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


@pytest.mark.parametrize("algorithm", Algorithm)
def test_before_the_root_was_fixed_only_a_seed_makes_it_known(algorithm: Algorithm) -> None:
    assert not HashScheme(algorithm, 16, fixed_root=False).exact
    assert HashScheme(algorithm, 16, "0", fixed_root=False).exact
