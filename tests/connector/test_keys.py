"""How blocks are named in the pool: as vLLM's own code names them.

golden/keys.json was made by the store connector itself (golden/make.py): tp, pp, pcp, dcp, KV heads, kinds of
attention, store_tp_size and layouts in all small combinations.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.errors import Inexact
from connector.keys import KeyScheme, Ranks

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "keys.json").read_bytes())

layouts = st.builds(
    Ranks,
    tp=st.integers(1, 16),
    pp=st.integers(1, 4),
    pcp=st.integers(1, 3),
    dcp=st.integers(1, 4),
    kv_heads=st.none() | st.integers(1, 32),
    groups=st.sampled_from([(0,), (0, 1), (1,)]),
    store_tp=st.none() | st.integers(1, 16),
    layout=st.sampled_from(["LBHNC", "LBNHC"]),
)


def test_names_are_those_that_vllm_looks_up_and_writes() -> None:
    for tp, pp, pcp, dcp, heads, kinds, store_tp, layout, count, first, last, digest in GOLDEN["rows"]:
        ranks = Ranks(
            tp=tp,
            pp=pp,
            pcp=pcp,
            dcp=dcp,
            kv_heads=1 if kinds == ["mla"] else heads,
            groups=tuple(range(len(kinds))),
            store_tp=store_tp,
            layout=layout,
        )
        prefixes = KeyScheme.of(GOLDEN["name"], ranks).prefixes
        assert (len(prefixes), prefixes[0], prefixes[-1]) == (count, first, last), ranks
        assert hashlib.sha256("".join(f"{p}\n" for p in prefixes).encode()).hexdigest()[:16] == digest, ranks


def test_enough_heads_need_not_be_counted() -> None:
    for tp, store_tp in ((1, None), (2, None), (2, 4), (4, 4)):
        counted = Ranks(tp=tp, store_tp=store_tp, kv_heads=8)
        assert KeyScheme.of("m", Ranks(tp=tp, store_tp=store_tp)) == KeyScheme.of("m", counted)


def test_a_key_is_spelled_as_vllm_spells_it() -> None:
    assert KeyScheme.of("space@Qwen3-8B").keys(bytes.fromhex("00ff")) == (
        "space@Qwen3-8B@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@00ff",
    )


@given(layouts)
def test_no_object_is_named_twice(ranks: Ranks) -> None:
    prefixes = KeyScheme.of("m", ranks).prefixes
    assert len(set(prefixes)) == len(prefixes) >= 1


@pytest.mark.parametrize(
    ("ranks", "tp_ranks"),
    [
        (Ranks(), [0]),
        (Ranks(tp=4), [0, 1, 2, 3]),
        (Ranks(tp=4, kv_heads=8), [0, 1, 2, 3]),
        (Ranks(tp=8, kv_heads=2), [0, 1]),
        (Ranks(tp=8, kv_heads=1), [0]),
        (Ranks(tp=4, dcp=2, kv_heads=1), [0, 1, 2, 3]),
    ],
)
def test_replicated_kv_heads_are_stored_once(ranks: Ranks, tp_ranks: list[int]) -> None:
    assert [int(suffix.split("@")[1].removeprefix("tp_rank:")) for suffix in ranks.suffixes()] == tp_ranks


@given(layouts, st.text(min_size=1, max_size=8))
def test_a_scheme_that_is_found_whole_is_known(ranks: Ranks, name: str) -> None:
    scheme = KeyScheme.of(name, ranks)
    found = KeyScheme.from_found(frozenset(scheme.prefixes))
    assert set(found.prefixes) == set(scheme.prefixes)
    assert set(found.keys(b"\x01")) == set(scheme.keys(b"\x01"))


@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_a_scheme_with_a_hole_is_incomplete(tp: int, pp: int, data: st.DataObject) -> None:
    prefixes = KeyScheme.of("m", Ranks(tp=tp, pp=pp)).prefixes
    hole = data.draw(st.integers(0, len(prefixes) - 1 - pp))
    with pytest.raises(Inexact, match="keys_incomplete"):
        KeyScheme.from_found(set(prefixes) - {prefixes[hole]})


def test_names_of_several_models_are_not_mixed() -> None:
    with pytest.raises(Inexact, match="keys_of_several"):
        KeyScheme.from_found({*KeyScheme.of("a").prefixes, *KeyScheme.of("b").prefixes})


@pytest.mark.parametrize("prefixes", [[], ["m@"], ["@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"], ["m@tp_rank:x@"]])
def test_what_names_no_rank_makes_no_scheme(prefixes: list[str]) -> None:
    with pytest.raises(Inexact, match="keys_not_found"):
        KeyScheme.from_found(prefixes)
