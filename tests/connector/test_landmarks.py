"""Landmarks: names for what prompts begin with, and where such prompts were sent."""

import random

from connector.blocks import Algorithm, HashScheme, Prefix, hash_prompt
from connector.landmarks import APART, GRACE, Landmarks, Sent, of_prefix, of_text


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
    assert of_text(b"short", b"a").keys == ()
    assert of_text(b"short", b"a").whole != of_text(b"other", b"a").whole


def marks(*keys: bytes, whole: bytes = b"", tokens: int = 0) -> Landmarks:
    return Landmarks(keys, 512, whole, tokens)


def test_what_is_being_computed_is_told_from_what_was_sent() -> None:
    sent = Sent(lambda: 0.0)
    long, short = marks(b"1", b"2", b"3"), marks(b"1", b"2")
    asked = marks(b"1", b"2", b"3", b"4")
    sent.begin(long)
    assert (sent.under_way(asked), sent.lately(asked)) == (1536, 1536)
    sent.begin(short)
    sent.failed(long)
    assert (sent.under_way(asked), sent.lately(asked)) == (1024, 1536)
    sent.failed(short)
    assert (sent.under_way(asked), sent.lately(asked)) == (0, 1536)
    sent.failed(short)
    assert sent.under_way(asked) == 0, "a request ends once, but an engine that was away has forgotten it"


def test_the_same_prompt_is_under_way_to_its_last_block() -> None:
    sent = Sent(lambda: 0.0)
    whole = of_prefix(prompt(*range(1000)))
    sent.begin(whole)

    assert whole.tokens == 992
    assert sent.under_way(whole) == 992
    assert sent.under_way(of_prefix(prompt(*range(2000)))) == 512
    exact = of_prefix(prompt(*range(1025)))
    assert exact.keys[-1] != exact.whole, "so that one is not taken for the other"
    assert of_prefix(prompt(*range(16))) == Landmarks((), 512)


def test_what_was_sent_long_ago_is_forgotten_from_its_end() -> None:
    sent = Sent(lambda: 0.0, most=4)
    sent.begin(marks(b"1", b"2", b"3"))
    sent.begin(marks(b"1", b"5", b"6"))

    assert len(sent) == 4
    assert sent.lately(marks(b"1", b"2", b"3")) == 1024
    assert sent.lately(marks(b"1", b"5", b"6")) == 1536
    sent.forget()
    assert len(sent) == 0


def test_what_was_answered_counts_for_a_moment_more() -> None:
    now = 10.0
    sent = Sent(lambda: now)
    sent.begin(marks(b"1"))
    sent.ended(marks(b"1"))
    assert sent.under_way(marks(b"1")) == 512
    now += GRACE + 0.1
    assert (sent.under_way(marks(b"1")), sent.lately(marks(b"1"))) == (0, 512)


def test_what_was_answered_is_bounded_though_nobody_asks_what_is_under_way() -> None:
    now = 10.0
    sent = Sent(lambda: now, most=8)
    for number in range(100):
        landmarks = marks(b"%d" % number, whole=b"w%d" % number)
        sent.begin(landmarks)
        sent.ended(landmarks)
    assert sent.answered == 4, "two landmarks each"
    now += GRACE + 0.1
    sent.begin(marks(b"1"))
    sent.ended(marks(b"1"))
    assert sent.answered == 1
