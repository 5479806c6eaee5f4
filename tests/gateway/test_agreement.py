"""When a shape of request is off exact mode, and when it comes back."""

import pytest

from gateway.agreement import COUNTS_BACK, FIRST_AUDITS, IDS_BACK, VERIFIED_COUNTS, Agreement, Counted, shape_of
from gateway.trace import Counts

OURS = Counted("chat", 10)


@pytest.fixture
def agreement() -> Agreement:
    return Agreement("m", Counts("checks", "", ("model", "check", "result")), every=100)


def test_one_count_that_differs_is_enough_and_some_that_agree_bring_it_back(agreement: Agreement) -> None:
    agreement.counted(OURS, "a", 11)
    assert agreement.off("chat") == "count"
    assert agreement.off("chat tools") is None
    assert agreement.shapes_off == 1
    for _ in range(COUNTS_BACK - 1):
        agreement.counted(OURS, "a", 10)
    assert agreement.off("chat") == "count"
    agreement.counted(OURS, "a", 10)
    assert agreement.off("chat") is None


def test_agreement_in_a_row_is_in_a_row(agreement: Agreement) -> None:
    for theirs in (11, *[10] * (COUNTS_BACK - 1), 11, *[10] * (COUNTS_BACK - 1)):
        agreement.counted(OURS, "a", theirs)
    assert agreement.off("chat") == "count"


def test_counts_do_not_take_back_what_ids_have_shown(agreement: Agreement) -> None:
    agreement.audited("chat", "a", "template")
    for _ in range(2 * COUNTS_BACK):
        agreement.counted(OURS, "a", 10)
    assert agreement.off("chat") == "template"
    for _ in range(IDS_BACK):
        agreement.audited("chat", "a", None)
    assert agreement.off("chat") is None


def test_another_engines_word_takes_nothing_back(agreement: Agreement) -> None:
    agreement.audited("chat", "a", "template")
    for _ in range(9):
        agreement.audited("chat", "b", None)
        agreement.counted(OURS, "b", 10)
    assert agreement.off("chat") == "template"
    assert agreement.against("a")
    assert not agreement.against("b")
    agreement.forget("a")
    assert agreement.off("chat") is None


def test_prompts_made_here_take_back_only_what_they_have_shown(agreement: Agreement) -> None:
    agreement.audited("chat", "a", "template", made_here=True)
    for _ in range(IDS_BACK):
        agreement.audited("chat", "a", None, made_here=True)
    assert agreement.off("chat") is None
    agreement.audited("chat", "a", "template", made_here=True)
    agreement.audited("chat", "a", "template")
    for _ in range(IDS_BACK):
        agreement.audited("chat", "a", None, made_here=True)
    assert agreement.off("chat") == "template"


def test_ids_are_verified_by_audits_and_counts_and_a_single_difference_ends_it(agreement: Agreement) -> None:
    for _ in range(FIRST_AUDITS):
        agreement.audited("chat", "a", None)
    for _ in range(VERIFIED_COUNTS - 1):
        agreement.counted(OURS, "a", 10)
    assert not agreement.verified("chat")
    agreement.counted(OURS, "b", 10)
    assert agreement.verified("chat")
    assert not agreement.verified("chat tools")
    agreement.counted(OURS, "b", 9)
    assert not agreement.verified("chat")
    for _ in range(COUNTS_BACK):
        agreement.counted(OURS, "b", 10)
    assert agreement.off("chat") is None
    assert not agreement.verified("chat"), "it must be earned again"


def test_the_first_requests_are_audited_then_one_in_a_hundred(agreement: Agreement) -> None:
    assert all(agreement.due("chat") for _ in range(5)), "until as many were made"
    for _ in range(FIRST_AUDITS):
        agreement.audited("chat", "a", None)
    assert sum(agreement.due("chat") for _ in range(1000)) == 10
    agreement.audited("chat", "a", "template")
    assert sum(agreement.due("chat") for _ in range(100)) == 20


def test_an_engine_that_tells_no_ids_is_not_asked_with_every_request(agreement: Agreement) -> None:
    for _ in range(FIRST_AUDITS):
        assert agreement.due("chat")
        agreement.unanswered("chat")
    assert sum(agreement.due("chat") for _ in range(1000)) == 10
    agreement.counted(OURS, "a", 11)
    assert sum(agreement.due("chat") for _ in range(1000)) == 10


def test_none_are_audited_where_none_are_wanted() -> None:
    never = Agreement("m", Counts("checks", "", ("model", "check", "result")), every=0)
    assert not any(never.due("chat") for _ in range(100))


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "chat"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": [{}]},
            "chat parts tools",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}, {"role": "tool", "tool_call_id": "1"}]}, "chat calls"),
        ({"messages": [{"role": "developer"}, {"role": "assistant", "reasoning": "x"}]}, "chat developer reasoning"),
        ({"messages": [], "reasoning_effort": "low", "continue_final_message": True}, "chat continued kwargs"),
        ({"messages": 5}, "chat"),
        ({"messages": [5, None]}, "chat"),
        ({}, "chat"),
    ],
)
def test_a_chats_shape(body: dict[str, object], shape: str) -> None:
    assert shape_of("chat", body) == shape


def test_other_shapes() -> None:
    assert shape_of("completion", {"prompt": "x"}) == "completion"
    assert shape_of("completion", {"prompt": [1]}) == "completion ids"
    assert shape_of("responses", {}) == "responses"
