"""Who may ask for which response, and where it is."""

from gateway.stored import Stored


def test_a_response_is_found_by_the_tenant_that_made_it_only() -> None:
    stored = Stored()
    stored.keep("a", "resp_1", "tiny", "e1")
    assert stored.home("a", "resp_1") == ("tiny", "e1")
    assert stored.home("b", "resp_1") is None
    assert stored.home("a", "resp_2") is None


def test_tenants_with_equal_names_of_responses_have_their_own() -> None:
    stored = Stored()
    stored.keep("a", "resp_1", "tiny", "e1")
    stored.keep("b", "resp_1", "tiny", "e2")
    assert (stored.home("a", "resp_1"), stored.home("b", "resp_1")) == (("tiny", "e1"), ("tiny", "e2"))


def test_a_response_that_is_made_again_is_where_it_was_made_last() -> None:
    stored = Stored()
    stored.keep("a", "resp_1", "tiny", "e1")
    stored.keep("a", "resp_1", "tiny", "e2")
    assert stored.home("a", "resp_1") == ("tiny", "e2")


def test_the_one_not_used_for_longest_is_forgotten_first() -> None:
    stored = Stored(most=2)
    stored.keep("a", "1", "tiny", "e")
    stored.keep("a", "2", "tiny", "e")
    assert stored.home("a", "1") is not None
    stored.keep("a", "3", "tiny", "e")
    assert [stored.home("a", name) is not None for name in "123"] == [True, False, True]
    stored.keep("a", "1", "tiny", "e")
    assert stored.home("a", "3") is not None, "what is kept again takes no other's place"
