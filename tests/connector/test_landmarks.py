"""Landmarks: names for what prompts begin with, and where such prompts were sent."""

import random

from connector.blocks import Algorithm, HashScheme, Prefix, hash_prompt
from connector.landmarks import APART, NOWHERE, Sent, of_prefix, of_text


def prompt(*tokens: int, salt: str | None = None, size: int = 16) -> Prefix:
    return hash_prompt(tokens, HashScheme(Algorithm.SHA256_CBOR, size), salt=salt)


def test_prompts_that_begin_alike_share_their_first_landmarks() -> None:
    one = of_prefix(prompt(*range(2000)))
    other = of_prefix(prompt(*range(1200), *range(5000, 6000)))

    assert one.apart == APART
    assert len(one.keys) == 3
    assert one.keys[:2] == other.keys[:2]
    assert not set(one.keys[2:]) & set(other.keys[2:])


def test_the_salt_sets_them_apart() -> None:
    assert not set(of_prefix(prompt(*range(2000))).keys) & set(of_prefix(prompt(*range(2000), salt="s")).keys)


def test_only_what_can_be_reused_has_one() -> None:
    assert len(of_prefix(prompt(*range(512))).keys) == 0, "its last token is computed anyhow"
    assert len(of_prefix(prompt(*range(513))).keys) == 1


def test_large_blocks_have_one_each() -> None:
    found = of_prefix(prompt(*range(3001), size=1000))

    assert (found.apart, len(found.keys)) == (1000, 3)


def test_text_that_begins_alike_shares_them_too() -> None:
    text = random.Random(1).randbytes(10_000)
    one, other = of_text(text, b"a"), of_text(text[:5000] + b"?" + text[5000:], b"a")

    assert len(one.keys) == 4
    assert one.keys[:2] == other.keys[:2]
    assert not set(one.keys[2:]) & set(other.keys[2:])
    assert not set(one.keys) & set(of_text(text, b"b").keys)
    assert of_text(b"short", b"a") == NOWHERE


def test_what_is_being_computed_is_told_from_what_was_sent() -> None:
    sent = Sent()
    keys = [b"1", b"2", b"3", b"4"]
    sent.begin(keys[:3])
    assert (sent.under_way(keys), sent.lately(keys)) == (3, 3)
    sent.begin(keys[:2])
    sent.done(keys[:3])
    assert (sent.under_way(keys), sent.lately(keys)) == (2, 3)
    sent.done(keys[:2])
    assert (sent.under_way(keys), sent.lately(keys)) == (0, 3)
    sent.done(keys[:2])
    assert sent.under_way(keys) == 0, "a request ends once, but an engine that was away has forgotten it"


def test_what_was_sent_long_ago_is_forgotten_from_its_end() -> None:
    sent = Sent(most=4)
    sent.begin([b"1", b"2", b"3"])
    sent.begin([b"1", b"5", b"6"])

    assert len(sent) == 4
    assert sent.lately([b"1", b"2", b"3"]) == 2
    assert sent.lately([b"1", b"5", b"6"]) == 3
    sent.forget()
    assert len(sent) == 0
