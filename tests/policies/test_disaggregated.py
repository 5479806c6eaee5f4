"""disaggregated: decode first, prefill elsewhere where that is worth a second engine."""

import pytest
from msgspec.structs import replace

from policies.disaggregated import Disaggregated
from policies.interface import Candidate, Job, NoCapacity
from tests.policies.scenes import engine, job

FLEET = [engine("p", role="prefill"), engine("q", role="prefill", own=1024), engine("d", role="decode")]


def test_a_long_prompt_is_prefilled_elsewhere() -> None:
    found = Disaggregated().place(job(5000, 2048), FLEET)

    assert (found.engine, found.prefill, found.spares) == ("d", "q", ())
    assert (found.own_tokens, found.pool_tokens) == (1024, 1024), "what is predicted is the prefill engine's"
    assert found.reason == "prefill elsewhere"


@pytest.mark.parametrize(
    ("what", "decode", "elsewhere"),
    [
        (job(255, 0), engine("d", role="decode"), False),
        (job(256, 0), engine("d", role="decode"), True),
        (job(5000, 4768), engine("d", role="decode"), False),
        (job(5000, 4736), engine("d", role="decode"), True),
        (job(5000, 0), engine("d", role="decode", own=4768), False),
        (job(5000, 0), engine("d", role="decode", own=4736), True),
        (job(5000, 4736), engine("d", role="decode", own=4768), False),
        (job(5000, 2368), engine("d", role="decode", own=2400), True),
        (job(0, 0), engine("d", role="decode"), False),
    ],
)
def test_what_counts_is_the_tokens_that_nobody_holds(what: Job, decode: Candidate, *, elsewhere: bool) -> None:
    found = Disaggregated(min_prefill_tokens=256).place(what, [*FLEET[:2], decode])

    assert found.engine == "d"
    assert (found.prefill is not None) is elsewhere
    assert elsewhere or found.reason == "too little to prefill elsewhere"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (job(5000, None), "pool unknown, prefill where it decodes"),
        (job(None, 0), "prompt not counted"),
        (job(None, None), "prompt not counted"),
    ],
)
@pytest.mark.parametrize("least", [0, 1, 256])
def test_what_is_not_known_means_no_second_engine(what: Job, reason: str, least: int) -> None:
    found = Disaggregated(min_prefill_tokens=least).place(what, FLEET)

    assert (found.engine, found.prefill, found.reason) == ("d", None, reason)


def test_decode_is_chosen_by_load_and_has_spares() -> None:
    fleet = [*FLEET, engine("e", role="decode", tokens=1), engine("f", role="both", tokens=2)]

    found = Disaggregated().place(job(), fleet)

    assert (found.engine, found.spares, found.prefill) == ("d", ("e", "f"), "q")


def test_prefill_is_chosen_by_prefix_and_load() -> None:
    fleet = [engine("p", role="prefill", own=4096, tokens=10**6), *FLEET[1:]]

    assert Disaggregated().place(job(), fleet).prefill == "q"


def test_engines_of_role_both_take_either_part() -> None:
    fleet = [engine("a", own=4096), engine("b", tokens=1)]

    found = Disaggregated().place(job(9000), fleet)
    assert (found.engine, found.prefill, found.own_tokens) == ("a", "b", 0)


@pytest.mark.parametrize(
    "fleet", [[engine("a")], [engine("d", role="decode")], [engine("d", role="decode"), engine("e", role="decode")]]
)
def test_where_nobody_else_can_prefill_one_does_the_whole(fleet: list[Candidate]) -> None:
    found = Disaggregated().place(job(), fleet)

    assert (found.engine, found.prefill, found.reason) == (fleet[0].id, None, "no prefill engine")


def test_without_a_decode_engine_there_is_no_capacity() -> None:
    with pytest.raises(NoCapacity):
        Disaggregated().place(job(), FLEET[:2])


def test_a_prefilled_job_goes_where_the_least_is_under_way() -> None:
    policy = Disaggregated()
    busy = [engine("d", role="decode", tokens=900), engine("e", role="decode")]
    found = policy.place(replace(job(), prefilled=True), busy)
    assert (found.engine, found.prefill, found.spares) == ("e", None, ("d",))


def test_what_the_decode_engine_is_computing_is_not_prefilled_elsewhere() -> None:
    found = Disaggregated().place(job(5000, 0), [engine("a", likely=4864, tokens=5000), engine("b", tokens=20_000)])

    assert (found.engine, found.prefill, found.reason) == ("a", None, "too little to prefill elsewhere")


def test_equal_prompts_are_prefilled_where_the_first_one_is() -> None:
    fleet = [
        engine("p", role="prefill", likely=4096, tokens=4096),
        engine("q", role="prefill"),
        engine("d", role="decode"),
    ]

    assert Disaggregated().place(job(5000, 0), fleet).prefill == "p"
