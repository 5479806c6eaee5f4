"""What is sent to engines, and what is known of each path."""

import pytest

from gateway.dialects import Dialect
from gateway.endpoints import ENDPOINTS, STORED


def test_only_what_was_thought_of_is_sent_to_engines() -> None:
    """Engines serve much more, some of it an operator's: a new row is a decision."""
    assert set(ENDPOINTS) == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/audio/transcriptions", "/tokenize", "/detokenize",
    }  # fmt: skip


@pytest.mark.parametrize(("fact", "paths"), [
    ("prompt", {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}),
    ("asks_usage", {"/v1/chat/completions", "/v1/completions"}),
    ("form", {"/v1/audio/transcriptions"}),
    ("makes", {"/v1/responses"}),
])  # fmt: skip
def test_of_which_it_is_so(fact: str, paths: set[str]) -> None:
    assert {path for path, endpoint in ENDPOINTS.items() if getattr(endpoint, fact)} == paths


def test_whose_request_has_no_salt() -> None:
    """What they compute is kept in no cache of blocks, or vLLM has no field for it."""
    assert {path for path, endpoint in ENDPOINTS.items() if not endpoint.salted} == {
        "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/audio/transcriptions"
    }  # fmt: skip


@pytest.mark.parametrize("path", ENDPOINTS)
def test_each_speaks_the_protocol_of_its_path(path: str) -> None:
    others = {"messages": Dialect.MESSAGES, "responses": Dialect.RESPONSES}
    assert ENDPOINTS[path].dialect is others.get(path.removeprefix("/v1/").split("/")[0], Dialect.CHAT)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/responses/resp_1", ("resp_1", None)),
        ("/v1/responses/resp_1/cancel", ("resp_1", "/cancel")),
        ("/v1/responses/" + "x" * 128, ("x" * 128, None)),
    ],
)
def test_a_response_is_asked_for_by_its_id(path: str, found: tuple[str, str | None]) -> None:
    match = STORED.fullmatch(path)
    assert match is not None
    assert match.groups() == found


@pytest.mark.parametrize(
    "rest", ["", "/cancel", "a/b", "a/cancel/", "a/input_items", "x" * 129, "a b", "a%2f..", "a\n", "é", "../health"]
)
def test_no_other_path_is_one(rest: str) -> None:
    assert STORED.fullmatch("/v1/responses/" + rest) is None
