import hashlib
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, Unauthorized
from gateway.tenants import ANONYMOUS, MAX_CLIENT_SALT, Tenant, Tenants, bearer_key

KEY = b"sk-a"
TEAM = Tenant("team-a")
TENANTS = Tenants({hashlib.sha256(KEY).hexdigest(): TEAM}, "secret")

Identity = tuple[str, str | None, int, str]
identities = st.tuples(
    st.text(max_size=8),
    st.none() | st.text(max_size=8),
    st.integers(-20, 20),
    st.text(max_size=8),
)


def salt_of(identity: Identity, secret: str = "s") -> str:
    name, share, epoch, client = identity
    salt = Tenants(None, secret).salt(Tenant(name, share=share, salt_epoch=epoch), client)
    assert salt is not None
    return salt


def domain(identity: Identity) -> tuple[str, str, int, str]:
    """Who shares a cache: a group's members by its name, everybody else alone."""
    name, share, epoch, client = identity
    return ("tenant", name, epoch, client) if share is None else ("group", share, epoch, client)


@given(identities, identities)
def test_salts_are_equal_only_for_equal_identities(one: Identity, other: Identity) -> None:
    assert (salt_of(one) == salt_of(other)) == (domain(one) == domain(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("org_1", None, 0, "2345"), ("org_12345", None, 0, "")),
        (("a|b", None, 0, "c"), ("a", None, 0, "b|c")),
        (("Team", None, 0, ""), ("team", None, 0, "")),
        ((unicodedata.normalize("NFC", "é"), None, 0, ""), (unicodedata.normalize("NFD", "é"), None, 0, "")),
        (("a", None, 0, ""), ("a ", None, 0, "")),
        (("a", None, 0, ""), ("a\0", None, 0, "")),
        (("", None, 0, "a"), ("a", None, 0, "")),
        (("a", None, 1, "1"), ("a", None, 11, "")),
        (("a", None, 0, ""), ("b", "a", 0, "")),
        (("a", None, 1, ""), ("a", None, -1, "")),
    ],
)
def test_fields_do_not_run_into_each_other(one: Identity, other: Identity) -> None:
    assert salt_of(one) != salt_of(other)


@given(identities)
def test_a_salt_tells_nothing_and_does_not_change(identity: Identity) -> None:
    salt = salt_of(identity)
    assert len(salt) == 64
    assert not salt.strip("0123456789abcdef")
    assert salt == salt_of(identity)
    assert salt != salt_of(identity, secret="another")


def test_a_salt_is_the_same_in_every_release() -> None:
    """A changed recipe would throw away every tenant's cache: change it on purpose only."""
    assert Tenants(None, "s").salt(Tenant("team-a")) == (
        "ef2b1dc868aae8df05ab842a371954c8601128b8fde46bd64a83459232324d4b"
    )


def test_a_group_shares_and_its_name_is_no_tenant() -> None:
    one, other = Tenant("a", share="g"), Tenant("b", share="g")
    assert TENANTS.salt(one) == TENANTS.salt(other)
    assert TENANTS.salt(one) != TENANTS.salt(Tenant("g"))


def test_an_epoch_leaves_the_cache_behind() -> None:
    assert salt_of(("a", None, 1, "")) != salt_of(("a", None, 0, ""))


def test_a_clients_salt_narrows_and_never_passes() -> None:
    plain, own, another = (TENANTS.salt(TEAM, salt) for salt in (None, "mine", "other"))
    assert len({plain, own, another}) == 3
    assert own != "mine"


def test_a_clients_salt_reaches_nobody_elses_domain() -> None:
    victim = TENANTS.salt(Tenant("victim"))
    assert TENANTS.salt(TEAM, victim) != victim
    assert TENANTS.salt(TEAM, "mine") != TENANTS.salt(Tenant("team-b"), "mine")


@pytest.mark.parametrize("salt", [None, ""])
def test_no_client_salt_is_the_tenants(salt: str | None) -> None:
    assert TENANTS.salt(TEAM, salt) == TENANTS.salt(TEAM)


@pytest.mark.parametrize("salt", [0, 1, True, 1.5, [], {}, ["a"]])
def test_a_client_salt_that_is_no_text_is_refused(salt: object) -> None:
    with pytest.raises(BadRequest) as caught:
        TENANTS.salt(TEAM, salt)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("salt", ["\0", "\n", "\ud800", "🦀" * MAX_CLIENT_SALT, " "])
def test_hostile_client_salts_are_only_input(salt: str) -> None:
    got = TENANTS.salt(TEAM, salt)
    assert got is not None
    assert len(got) == 64
    assert got != TENANTS.salt(TEAM)


def test_a_client_salt_is_bounded_and_not_repeated() -> None:
    with pytest.raises(BadRequest) as caught:
        TENANTS.salt(TEAM, "x" * (MAX_CLIENT_SALT + 1))
    assert "xxx" not in caught.value.message


def test_without_a_secret_nothing_is_salted_but_what_the_client_asks_for() -> None:
    open_house = Tenants(None, None)
    assert open_house.salt(ANONYMOUS) is None
    own = open_house.salt(ANONYMOUS, "mine")
    assert own is not None
    assert own != "mine"


@pytest.mark.parametrize(
    "fields",
    [
        {b"authorization": b"Bearer sk-a"},
        {b"authorization": b"bearer sk-a"},
        {b"authorization": b"BEARER  sk-a "},
        {b"x-api-key": b"sk-a"},
        {b"authorization": b"Basic xyz", b"x-api-key": b"sk-a"},
    ],
)
def test_a_key_is_known_in_each_form(fields: dict[bytes, bytes]) -> None:
    assert TENANTS.identify(fields) is TEAM


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Basic sk-a"},
        {b"authorization": b"sk-a"},
        {b"api-key": b"sk-a"},
        {b"x-api-key": b""},
        {b"x-tenant-id": b"team-a"},
    ],
)
def test_no_key_is_told_apart_from_a_wrong_one(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthorized) as caught:
        TENANTS.identify(fields)
    assert caught.value.code == "missing_api_key"


@pytest.mark.parametrize("key", [b"sk-b", b"sk-", b"sk-aa", b"SK-A", b"\xff", b"x" * 100_000])
def test_a_wrong_key_is_refused_and_not_repeated(key: bytes) -> None:
    with pytest.raises(Unauthorized) as caught:
        TENANTS.identify({b"authorization": b"Bearer " + key})
    assert caught.value.code == "invalid_api_key"
    assert key.decode("latin-1") not in caught.value.message


def test_a_digest_is_no_key() -> None:
    digest = hashlib.sha256(KEY).hexdigest().encode()
    with pytest.raises(Unauthorized):
        TENANTS.identify({b"authorization": b"Bearer " + digest})


def test_tenant_headers_change_nothing() -> None:
    spoofed = {b"x-tenant-id": b"team-b", b"authorization": b"Bearer sk-a", b"x_tenant_id": b"team-b"}
    assert TENANTS.identify(spoofed) is TEAM


def test_the_bearer_goes_before_the_other_header() -> None:
    assert bearer_key({b"x-api-key": b"one", b"authorization": b"Bearer two"}) == b"two"


def test_a_cached_salt_is_of_nobody_else() -> None:
    """Salts are made once for each tenant of a configuration, where each has its own name."""
    tenants = Tenants(None, "s")
    kinds = [Tenant("a"), Tenant("b"), Tenant("c", share="g"), Tenant("d", salt_epoch=1)]
    first = [tenants.salt(tenant) for tenant in kinds]
    assert len(set(first)) == len(kinds)
    assert [tenants.salt(tenant) for tenant in kinds] == first
    assert tenants.salt(Tenant("a"), "mine") != tenants.salt(Tenant("a")) == first[0]


def test_auth_none_lets_everybody_in() -> None:
    assert Tenants(None, "s").identify({b"authorization": b"Bearer whatever"}) is ANONYMOUS
