"""session: consistent hashing with bounded loads."""

from collections import Counter

import pytest
from msgspec.structs import replace

from policies.interface import Job
from policies.session import By, Session
from tests.policies.scenes import engine, engines, job

KEYS = [f"session-{number}" for number in range(1000)]


def homes(names: str, keys: list[str] = KEYS) -> dict[str, str]:
    return {key: Session().place(job(session=key), engines(names)).engine for key in keys}


def test_sessions_are_spread_and_each_keeps_its_engine() -> None:
    found = homes("abcd")

    assert found == homes("dcba")
    assert all(150 < times < 350 for times in Counter(found.values()).values())


def test_an_engine_that_goes_moves_its_own_sessions_alone() -> None:
    before, after = homes("abcdefghij"), homes("abcdefghi")
    moved = {key for key in KEYS if before[key] != after[key]}

    assert moved == {key for key in KEYS if before[key] == "j"}
    assert len({after[key] for key in moved}) == 9, "and they go to all others"


def test_an_engine_that_comes_takes_its_own_alone() -> None:
    before, after = homes("abcd"), homes("abcde")

    assert {after[key] for key in KEYS if before[key] != after[key]} == {"e"}


def test_two_policies_agree() -> None:
    one, other = Session(), Session()
    for key in KEYS[:20]:
        one.place(job(session=key), engines("abcd"))
    assert [one.place(job(session=key), engines("abcd")) for key in KEYS] == [
        other.place(job(session=key), engines("abcd")) for key in KEYS
    ]


def test_an_engine_that_is_full_passes_its_sessions_on() -> None:
    """Of 40 requests and this one four engines may have ceil(1.25 * 41 / 4) = 13 each."""
    for key in KEYS[:50]:
        home = Session().place(job(session=key), engines("abcd")).engine
        some = [engine(name, requests=12 if name == home else 10) for name in "abcd"]
        many = [engine(name, requests=13 if name == home else 9) for name in "abcd"]
        queued = [engine(name, waiting=3, running=10 if name == home else 6) for name in "abcd"]

        assert Session().place(job(session=key), some).engine == home
        for full in (many, queued):
            found = Session().place(job(session=key), full)
            assert found.engine != home
            assert found.reason == "session, but its engine is full"
            assert found.spares[-1] == home, "a full engine is the last resort"


def test_a_few_requests_fill_nobody() -> None:
    home = Session().place(job(session="s"), engines("ab")).engine
    fleet = [engine(name, requests=7 if name == home else 0) for name in "ab"]

    assert Session().place(job(session="s"), fleet).engine == home
    assert Session(at_least=1).place(job(session="s"), fleet).engine != home


def test_only_engines_that_can_answer_count() -> None:
    """The prefill engine's idleness makes no room, and its load none less."""
    for idle in (engine("p", role="prefill"), engine("p", role="prefill", requests=1000)):
        for key in KEYS[:50]:
            fleet = [engine(name, requests=10) for name in "abcd"]
            assert Session().place(job(session=key), fleet) == Session().place(job(session=key), [idle, *fleet])


@pytest.mark.parametrize(
    ("by", "what", "reason"),
    [
        ("header", job(session="s", marks="abc"), "session"),
        ("header", job(session="", marks="abc"), "session"),
        ("header", job(marks="abc"), "prefix"),
        ("header", job(), "tenant"),
        ("prefix", job(session="s", marks="abc"), "prefix"),
        ("prefix", job(session="s"), "tenant"),
        ("tenant", job(session="s", marks="abc"), "tenant"),
    ],
)
def test_what_the_key_is(by: By, what: Job, reason: str) -> None:
    assert Session(by).place(what, engines("abcd")).reason == reason


def keyed(what: Job, by: By = "header", prefix_tokens: int = 1024) -> tuple[str, ...]:
    """The order in which a job ranks sixteen engines, which is its key's alone."""
    found = Session(by, prefix_tokens=prefix_tokens).place(what, engines("abcdefghijklmnop"))
    return (found.engine, *found.spares)


def test_a_session_is_its_tenants_alone() -> None:
    assert keyed(job(session="s", tenant="t")) != keyed(job(session="s", tenant="u"))
    assert keyed(job(session="t")) != keyed(job(tenant="t"))
    assert keyed(replace(job(session="b"), tenant="a")) != keyed(replace(job(session=""), tenant="ab"))


@pytest.mark.parametrize("session", ["X" * 10_000, "\u00e9\u4e2d\U0001f600", "s\x00"])
def test_any_text_is_a_session(session: str) -> None:
    assert keyed(job(session=session)) == keyed(job(5, None, session=session))


def test_the_prefix_is_what_comes_before_so_many_tokens() -> None:
    assert keyed(job(marks="abcd")) == keyed(job(marks="abxyz"))
    assert keyed(job(marks="abcd"), prefix_tokens=2048) != keyed(job(marks="abxyz"), prefix_tokens=2048)
    assert keyed(job(marks="a"), prefix_tokens=2048) != keyed(job(marks="b"), prefix_tokens=2048), "the last there is"
    assert keyed(job(marks="ax"), prefix_tokens=1) == keyed(job(marks="ay"), prefix_tokens=1), "but one at least"
