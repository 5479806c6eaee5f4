"""Which web pages may read answers."""

import pytest

from gateway.cors import Cors

APP = b"https://app.example"
ALLOWED = {b"access-control-allow-origin": APP, b"access-control-expose-headers": b"*", b"vary": b"origin"}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ([], APP, False),
        ([], None, False),
        (["https://app.example"], APP, True),
        (["https://other.example", "https://app.example"], APP, True),
        (["https://app.example"], None, False),
        (["https://app.example"], b"https://app.example.evil", False),
        (["https://app.example"], b"http://app.example", False),
        (["https://app.example"], b"null", False),
        (["*"], APP, True),
        (["*"], None, False),
    ],
)
def test_who_may_read(origins: list[str], origin: bytes | None, allowed: bool) -> None:
    cors = Cors(origins)
    assert dict(cors.headers(origin)) == (ALLOWED if allowed else {})
    fields = {b"access-control-request-method": b"POST"} | ({b"origin": origin} if origin is not None else {})
    assert bool(cors.preflight(fields)) is allowed


def test_a_preflight_is_told_what_it_may_do() -> None:
    told = dict(
        Cors(["*"]).preflight(
            {
                b"origin": APP,
                b"access-control-request-method": b"POST",
                b"access-control-request-headers": b"authorization, x-stainless-os",
            }
        )
    )
    assert b"POST" in told[b"access-control-allow-methods"]
    assert told[b"access-control-allow-headers"] == b"authorization, x-stainless-os"
    assert int(told[b"access-control-max-age"]) > 0


def test_credentials_of_the_browser_are_never_asked_for() -> None:
    """A key is sent by the page itself; cookies mean nothing here."""
    fields = {b"origin": APP, b"access-control-request-method": b"POST"}
    assert b"access-control-allow-credentials" not in dict(Cors(["*"]).preflight(fields))


def test_an_options_request_that_is_no_preflight() -> None:
    assert Cors(["*"]).preflight({b"origin": APP}) == []
