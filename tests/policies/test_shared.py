"""Which beginnings many conversations share."""

import pytest
from msgspec.structs import replace

from policies.interface import Job
from policies.shared import MOST_WAYS, NONE, Part, Shared
from tests.policies.scenes import job

STEP = 512


def see(shared: Shared, what: Job, *own: int, coming: int = 0) -> Part:
    return shared.see(what, what.prompt_tokens or 0, own or (0,), coming)


def talk(marks: str, more: int = 100, pool: int | None = None) -> Job:
    """A prompt with these landmarks and so many tokens after the last."""
    return job(len(marks) * STEP + more, pool, marks=marks, whole=f"{marks}+{more}".encode())


def test_nothing_is_shared_by_the_first() -> None:
    shared = Shared()

    assert see(shared, talk("abc")) == see(shared, talk("xyz")) == NONE
    assert see(shared, talk("")) == NONE


def test_two_that_part_share_what_is_before() -> None:
    shared = Shared()
    see(shared, talk("aab"))

    assert see(shared, talk("aac")) == Part(2 * STEP, 2)
    assert see(shared, talk("aad")) == Part(2 * STEP, 3)
    assert see(shared, talk("aace")) == Part(2 * STEP, 3), "and one of them that goes on is no new one"


def test_a_conversation_that_grows_shares_nothing() -> None:
    shared = Shared()
    for turn in range(1, 40):
        assert see(shared, talk("a" * turn), (turn - 1) * STEP + 96) == NONE


def test_nor_does_one_that_grows_within_a_landmark() -> None:
    """Each turn is held to the end of the one before it, in whole blocks."""
    shared = Shared()
    for turn in range(1, 10):
        assert see(shared, talk("a", turn * 50), STEP + (turn * 50 - 50) // 16 * 16) == NONE


@pytest.mark.parametrize("more", [50, 100, 500])
def test_two_that_part_after_the_last_landmark_show_in_what_is_held(more: int) -> None:
    shared = Shared()
    see(shared, talk("aa", more))

    assert see(shared, talk("aa", more + 1), 2 * STEP) == Part(2 * STEP, 2)
    assert see(shared, talk("aa", more + 2), 2 * STEP) == Part(2 * STEP, 3)


def test_or_in_what_is_being_computed() -> None:
    shared = Shared()
    see(shared, talk("aa", 50))

    assert see(shared, talk("aa", 50), coming=2 * STEP) == NONE, "the same prompt again"
    assert see(shared, talk("aa", 60), coming=2 * STEP) == Part(2 * STEP, 2)


def test_or_in_its_length() -> None:
    """What continues a prompt is longer; a prompt that was not counted has no length."""
    shared = Shared()
    see(shared, talk("aa", 50))
    see(shared, talk("aa", 60))

    assert see(shared, talk("aa", 61)) == NONE
    assert see(shared, replace(talk("aa", 61), whole=b"other")) == Part(2 * STEP, 2)
    assert see(shared, talk("aa", 50)) == Part(2 * STEP, 3)
    assert see(shared, replace(talk("aa", 40), prompt_tokens=None)) == Part(0, 3), "nor one more way"


def test_what_does_not_show_counts_as_the_same_conversation() -> None:
    shared = Shared()
    see(shared, talk("aa", 50))

    assert see(shared, talk("aa", 80)) == NONE, "nothing is held of it"
    unnamed = Job("m", "t", 2 * STEP + 90, None, landmarks=talk("aa").landmarks)
    assert see(shared, unnamed, coming=2 * STEP) == NONE, "nor is it known whether it is the same"


def test_the_pool_tells_as_engines_do() -> None:
    shared = Shared()
    see(shared, talk("aa", 400))

    assert see(shared, talk("aa", 401, pool=2 * STEP + 384), 2 * STEP) == NONE, "the pool holds all of the first"
    assert see(shared, talk("aa", 300, pool=2 * STEP + 160), 2 * STEP) == Part(2 * STEP, 2)


def test_where_they_part_shows_in_an_engine_that_holds_no_more() -> None:
    shared = Shared()
    see(shared, talk("aab"))
    see(shared, talk("aac"))

    assert see(shared, talk("aad"), 0, 2 * STEP + 320, 3 * STEP) == Part(2 * STEP + 320, 3)
    assert see(shared, talk("aab"), 0, 3 * STEP) == Part(2 * STEP, 3)


def test_the_deepest_part_that_is_shared_counts() -> None:
    shared = Shared()
    for marks in ("ab", "ac", "ad", "aeef", "aeeg"):
        see(shared, talk(marks))

    assert see(shared, talk("aeef")) == Part(3 * STEP, 2)
    assert see(shared, talk("ab")) == Part(STEP, 4)


def test_no_more_is_shared_than_there_is() -> None:
    shared = Shared()
    see(shared, talk("aab"))

    assert shared.see(talk("aac"), 2 * STEP - 7, (0,), 0) == Part(2 * STEP - 7, 2)


def test_ways_are_counted_up_to_a_bound() -> None:
    shared = Shared()
    for number in range(2 * MOST_WAYS):
        part = see(shared, talk("a" + chr(1000 + number)))

    assert part == Part(STEP, MOST_WAYS)


def test_it_is_bounded_and_tails_go_first() -> None:
    shared = Shared(most=10)
    for number in range(100):
        see(shared, talk("aa" + chr(1000 + number) * 3))

    assert len(shared) == 10
    assert see(shared, talk("aab")) == Part(2 * STEP, MOST_WAYS), "what all begin with is used again and again"


def test_a_prompt_longer_than_all_that_is_remembered() -> None:
    shared = Shared(most=5)
    for _ in range(3):
        see(shared, talk("a" * 20), 20 * STEP + 96)
        assert len(shared) == 5
