"""Where texts can be cut: what is certain of a tokenizer, and that it is tried."""

import logging
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from connector import cuts as subject
from connector.cuts import LONGEST, REACH, STRIDE, Cuts, cuts_of, tried
from tests.connector.families import BYTE_LEVEL, OTHERS, TOKENS, made

BACKENDS = {
    (family, tokens): Tokenizer.from_str(made(family, tokens)) for family in (BYTE_LEVEL | OTHERS) for tokens in TOKENS
}
GPT_2 = cuts_of(BACKENDS["gpt-2", "plain"])
PARTS = ["<", "|", ">", "a", "b", "ab", "im", " ", "\n", "é", "e\u0301", "漢", "。", "<a", "s", "_", "\u212a", "\u3000"]
contents = st.lists(st.sampled_from([*PARTS, "word", "x "]), min_size=1, max_size=4).map("".join)
flags = st.sampled_from([False, False, True])
added_tokens = st.builds(
    AddedToken, contents, lstrip=flags, rstrip=flags, normalized=flags, single_word=flags, special=flags
)


def token(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **({"normalized": False} | flags))


def with_tokens(family: str, added: Sequence[AddedToken]) -> Tokenizer:
    backend = Tokenizer.from_str(made(family, "none"))
    backend.add_special_tokens([each for each in added if each.special])
    backend.add_tokens([each for each in added if not each.special])
    return backend


def ids(backend: Tokenizer, texts: Sequence[str]) -> list[int] | None:
    """The ids of texts, one after the other; None where the library fails."""
    try:
        encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None
    return [token for each in encoded for token in each.ids]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*BYTE_LEVEL, *OTHERS]),
    st.lists(added_tokens, max_size=6, unique_by=lambda each: each.content),
    st.data(),
)
def test_what_is_thought_of_tokens_is_true_before_it_is_tried(
    family: str, added: list[AddedToken], data: st.DataObject
) -> None:
    backend = with_tokens(family, added)
    within = subject._splits_words(backend) and subject._leaves_words(added, backend)
    cuts = subject._cuts(subject._apart(added), within=within)
    fragments = st.sampled_from(
        [*subject._FRAGMENTS, *PARTS, *(each.content for each in added), *(each.content for each in added)]
    )
    for text in data.draw(st.lists(st.lists(fragments, max_size=16).map("".join), max_size=6)):
        whole = ids(backend, [text])
        assert whole is None or ids(backend, list(subject._pieces(text, cuts))) == whole


@pytest.mark.parametrize("family", BYTE_LEVEL)
@pytest.mark.parametrize("tokens", ["none", "plain", "of words", "greedy"])
def test_byte_level_texts_are_cut_within(family: str, tokens: str) -> None:
    cuts = cuts_of(BACKENDS[family, tokens])
    assert cuts.within
    assert cuts.before == (tokens != "none")


@pytest.mark.parametrize("family", OTHERS)
def test_others_only_before_tokens(family: str) -> None:
    cuts = cuts_of(BACKENDS[family, "plain"])
    assert (cuts.before, cuts.within) == (True, False)


@pytest.mark.parametrize(
    ("others", "cut"),
    [
        ([], True),
        ([token("<turn>x")], True),
        ([token("<turn>x", single_word=True)], False),
        ([token("<turn>x", lstrip=True)], False),
        ([token("x<turn")], False),
        ([token("a<t")], False),
        ([token("a<turn>b")], False),
        ([token("a<t", normalized=True)], True),
        ([token("solo", single_word=True)], True),
        ([token("keep", rstrip=True, lstrip=True)], True),
    ],
)
def test_a_token_that_others_reach_into_is_not_cut_before(others: list[AddedToken], cut: bool) -> None:
    assert ("<turn>" in subject._apart([token("<turn>"), *others])) is cut


@pytest.mark.parametrize(
    "odd",
    [token("<t>", lstrip=True), token("<t>", single_word=True), token("<t>", normalized=True), token(" <t>"),
     token("<a<"), token("<" * (LONGEST + 1))],
    ids=str,
)  # fmt: skip
def test_nor_is_one_that_minds_what_stands_before_it(odd: AddedToken) -> None:
    assert subject._apart([odd]) == []


def test_nor_one_that_is_a_letter_to_tokens_that_want_to_be_words() -> None:
    words = [token("solo", single_word=True)]
    assert subject._apart([token("turn"), token("<t>"), *words]) == ["<t>"]
    assert subject._apart([token("turn"), token("<t>")]) == ["turn", "<t>"]


@pytest.mark.parametrize(
    "odd",
    [token("b c"), token("b c", normalized=True), token("\u212a c", normalized=True), token("keep", rstrip=True),
     token(" solo", single_word=True), token("漢。"), token("漢", rstrip=True)],
    ids=str,
)  # fmt: skip
def test_nothing_is_cut_within_where_a_token_reaches_over_words(odd: AddedToken) -> None:
    assert not cuts_of(with_tokens("qwen-2", [odd])).within


@pytest.mark.parametrize(
    "pattern",
    [r"\w+ \w+|\s+|.", r"(?<=a)\s|\p{L}+|\p{N}|\s+", r"\p{N}{1,3}", r"\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+|\s+"],
)
def test_an_expression_that_is_not_known_is_not_cut_within(pattern: str) -> None:
    backend = Tokenizer.from_str(made("llama-3", "none"))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    assert not cuts_of(backend).within


@settings(deadline=None)
@given(st.lists(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=9), st.text("ab<|", max_size=60))
def test_tokens_are_found_wherever_one_begins(tokens: list[str], text: str) -> None:
    found = re.compile("|".join(each.decode() for each in subject._any_of([token.encode() for token in tokens])))
    for at in range(len(text)):
        assert (found.match(text, at) is not None) == any(text.startswith(token, at) for token in tokens)


def test_alternatives_are_those_at_the_top() -> None:
    assert subject._alternatives(r"a|(?:b|c)|[|)]|\||d\\|e") == ["a", "(?:b|c)", "[|)]", r"\|", r"d\\", "e"]


def test_what_is_tried_and_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    backend = BACKENDS["metaspace first", "plain"]
    monkeypatch.setattr(subject, "_splits_words", lambda _: True)
    with caplog.at_level(logging.DEBUG, "moongate"):
        cuts = cuts_of(backend)
    assert (cuts.before, cuts.within) == (True, False)
    assert "cannot be cut as it seemed" in caplog.text
    monkeypatch.setattr(subject, "_apart", lambda _: ["e", "a"])
    assert cuts_of(backend).after(b"e" * 10_000, 0) is None


def test_a_trial_that_fails_is_no_success() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    assert not tried(backend, Cuts(before=False, within=False, places=re.compile(b"(?!)")), [])


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40), st.text(st.characters(codec="utf-8"), max_size=40))
def test_a_cut_is_certain_as_soon_as_it_is_seen(before: str, after: str) -> None:
    """Whether a place is a cut depends on no more than what the expression looks at."""
    cuts = GPT_2
    for found in cuts.places.finditer((before + "a <|im_start|>").encode()):
        part = (before + "a <|im_start|>").encode()[: found.end()]
        assert cuts.holds(part + after.encode(), found.start())


def test_cuts_are_a_stride_apart_and_within_reach() -> None:
    cuts = cuts_of(BACKENDS["gpt-2", "plain"])
    text = b"word " * 1000
    places = []
    at: int | None = 0
    while at is not None and (at := cuts.after(text, at)) is not None:
        places.append(at)
    gaps = [end - begin for begin, end in zip([0, *places], places, strict=False)]
    assert all(STRIDE <= gap <= STRIDE + 5 for gap in gaps)
    assert cuts.after(b"-" * (2 * REACH) + b"word ", 0) is None
