import pytest

from connector.blocks import Algorithm, Hashing
from connector.errors import Inexact
from connector.keys import KeyScheme, Ranks
from connector.vllm import CacheFacts
from gateway.models import Model

SAID = CacheFacts(block_size=32, algorithm="sha256_cbor", blocks=8192)


def nothing(_: str) -> str | None:
    return None


def test_the_scheme_is_what_engines_say() -> None:
    scheme = Model("m").scheme(SAID)
    assert (scheme.algorithm, scheme.block_size, scheme.seed) == (Algorithm.SHA256_CBOR, 32, None)


def test_the_configuration_wins_over_the_engines() -> None:
    model = Model("m", algorithm=Algorithm.SHA256, block_size=16, seed="0")
    scheme = model.scheme(SAID)
    assert (scheme.algorithm, scheme.block_size, scheme.seed) == (Algorithm.SHA256, 16, "0")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (CacheFacts(None, None, None), "block_size_unknown"),
        (CacheFacts(None, "sha256_cbor", 1), "block_size_unknown"),
        (CacheFacts(32, None, 1), "algorithm_unknown"),
        (CacheFacts(32, "sha3", 1), "algorithm_unknown"),
        (CacheFacts(32, "xxhash", 1), "random_seed"),
        (CacheFacts(32, "sha256", 1, "0.28.0"), "random_seed"),
    ],
)
def test_what_is_not_known_is_not_guessed(facts: CacheFacts, reason: str) -> None:
    with pytest.raises(Inexact) as caught:
        Model("m").scheme(facts)
    assert caught.value.reason == reason


def test_a_seed_makes_xxhash_known() -> None:
    assert Model("m", seed="0").scheme(CacheFacts(32, "xxhash", 1)).exact


@pytest.mark.parametrize(
    ("version", "tagged"), [(None, True), ("0.30.2", False), ("0.31.0", True), ("0.33.0", True), ("0.99.0", True)]
)
def test_engines_hash_as_their_version_does(version: str | None, tagged: bool) -> None:
    assert Model("m").scheme(CacheFacts(32, "sha256", 1, version)).tagged is tagged


def test_a_configured_release_wins_over_what_engines_say() -> None:
    old = Hashing(tagged=False, fixed_root=True)
    scheme = Model("m", hashing=old).scheme(CacheFacts(32, "sha256", 1, "0.31.0"))
    assert (scheme.tagged, scheme.fixed_root) == (False, True)


@pytest.mark.parametrize(
    ("root", "name"),
    [("/models/Qwen3-8B", "Qwen3-8B"), ("/models/Qwen3-8B/", "Qwen3-8B"), ("Qwen/Qwen3-8B", "Qwen3-8B"), ("m", "m")],
)
def test_keys_begin_with_the_engines_model_folder(root: str, name: str) -> None:
    scheme = Model("m").keys(lambda _: root)
    assert scheme is not None
    assert scheme.keys(b"\xab") == (f"{name}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ab",)


def test_keys_begin_with_the_configured_prefix() -> None:
    scheme = Model("m", key_prefix="cache@M", ranks=Ranks(tp=2)).keys(nothing)
    assert scheme is not None
    assert [key.split("@tp")[0] for key in scheme.keys(b"\xab")] == ["cache@M", "cache@M"]


def test_no_engine_has_said_its_folder() -> None:
    assert Model("m").keys(nothing) is None


def test_what_was_learnt_wins_over_the_folder_and_not_over_the_configuration() -> None:
    learnt = KeyScheme.of("Qwen3-8B@cfg:0123456789ab", Ranks(tp=2))
    assert Model("m").keys(lambda _: "/models/Qwen3-8B", learnt) == learnt
    assert Model("m").keys(nothing, learnt) == learnt
    assert Model("m", key_prefix="cache@M").keys(nothing, learnt) == KeyScheme.of("cache@M")
