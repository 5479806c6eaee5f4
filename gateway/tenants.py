"""Who is calling, and the salt that keeps their cache apart.

    salt = HMAC-SHA256(secret, domain tag, tenant or sharing group, epoch, client's own salt)

every field framed by its length, so that no two identities meet. A tenant's salt belongs to the
gateway. What a client sends as cache_salt can only narrow its own domain: it is folded in and never
passed on.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import BadRequest, Unauthorized

MAX_CLIENT_SALT = 1024
"""Characters of a client's own cache_salt that are accepted."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer. Its name may be shown; nothing else of it may."""

    name: str
    share: str | None = None
    salt_epoch: int = 0
    models: frozenset[str] | None = None
    """What may be asked for; None: everything."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    @property
    def domain(self) -> str:
        """Whose cache it is: its own, or that of the tenants that it shares one with."""
        return f"group {self.share}" if self.share is not None else f"tenant {self.name}"


ANONYMOUS = Tenant("anonymous")
"""Everybody, with auth mode none."""


class Tenants:
    """All tenants, by the SHA-256 of their keys."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None, secret: str | None) -> None:
        """`by_digest` None lets everybody in as `anonymous`; no `secret` leaves requests unsalted."""
        self._by_digest = {bytes.fromhex(d): t for d, t in by_digest.items()} if by_digest is not None else None
        self._secret = secret.encode() if secret is not None else None
        self._salts: dict[tuple[str, str | None, int], str | None] = {}

    @property
    def by_name(self) -> Mapping[str, Tenant]:
        """Every tenant that has a key."""
        tenants = self._by_digest.values() if self._by_digest is not None else (ANONYMOUS,)
        return {tenant.name: tenant for tenant in tenants}

    def identify(self, fields: Mapping[bytes, bytes]) -> Tenant:
        """The tenant whose key the header carries. Raises `Unauthorized`, before any body is read."""
        if self._by_digest is None:
            return ANONYMOUS
        key = bearer_key(fields)
        if key is None:
            raise Unauthorized("No API key was sent; send it as 'Authorization: Bearer KEY'.", code="missing_api_key")
        tenant = self._by_digest.get(hashlib.sha256(key).digest())
        if tenant is None:
            raise Unauthorized(
                "This API key is not known here; ask whoever runs the gateway for one.", code="invalid_api_key"
            )
        return tenant

    def salt(self, tenant: Tenant, client_salt: object = None) -> str | None:
        """The cache_salt for a request: 64 hex digits, or None where nothing is to be kept apart.

        Raises `BadRequest` where the client's own salt is not a string.
        """
        if client_salt is None:
            domain = (tenant.name, tenant.share, tenant.salt_epoch)  # as many as the configuration has
            if domain not in self._salts:
                self._salts[domain] = self._salt(tenant, "")
            return self._salts[domain]
        if not isinstance(client_salt, str):
            raise BadRequest("cache_salt must be a string.", param="cache_salt")
        if len(client_salt) > MAX_CLIENT_SALT:
            raise BadRequest(f"cache_salt is longer than {MAX_CLIENT_SALT} characters.", param="cache_salt")
        return self._salt(tenant, client_salt)

    def _salt(self, tenant: Tenant, client_salt: str) -> str | None:
        if self._secret is None and not client_salt:
            return None
        kind, owner = ("group", tenant.share) if tenant.share is not None else ("tenant", tenant.name)
        message = b"".join(
            len(field).to_bytes(8, "big") + field
            for field in (
                b"moongate cache salt 1",
                kind.encode(),
                owner.encode(),
                str(tenant.salt_epoch).encode(),
                client_salt.encode("utf-8", "surrogatepass"),
            )
        )
        return hmac.new(self._secret or b"", message, hashlib.sha256).hexdigest()


def bearer_key(fields: Mapping[bytes, bytes]) -> bytes | None:
    """The key in `Authorization: Bearer`, or in `x-api-key`."""
    scheme, _, key = fields.get(b"authorization", b"").partition(b" ")
    if scheme in (b"Bearer", b"bearer") or scheme.lower() == b"bearer":
        key = key.strip()
        if key:
            return key
    return fields.get(b"x-api-key", b"").strip() or None
