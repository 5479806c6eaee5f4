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
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


ANONYMOUS = Tenant("anonymous")
"""Everybody, with auth mode none."""


class Tenants:
    """All tenants, by the SHA-256 of their keys."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None, secret: str | None) -> None:
        """`by_digest` None lets everybody in as `anonymous`; no `secret` leaves requests unsalted."""
        self._by_digest = by_digest
        self._secret = secret.encode() if secret is not None else None

    def identify(self, headers: list[tuple[bytes, bytes]]) -> Tenant:
        """The tenant whose key the headers carry. Raises `Unauthorized`, before any body is read."""
        if self._by_digest is None:
            return ANONYMOUS
        key = bearer_key(headers)
        if key is None:
            raise Unauthorized("No API key was sent; send it as 'Authorization: Bearer KEY'.", code="missing_api_key")
        digest = hashlib.sha256(key).hexdigest()
        tenant = self._by_digest.get(digest)
        if tenant is None:
            raise Unauthorized(
                "This API key is not known here; ask whoever runs the gateway for one.", code="invalid_api_key"
            )
        return tenant

    def salt(self, tenant: Tenant, client_salt: object = None) -> str | None:
        """The cache_salt for a request: 64 hex digits, or None where nothing is to be kept apart.

        Raises `BadRequest` where the client's own salt is not a string.
        """
        if client_salt is not None and not isinstance(client_salt, str):
            raise BadRequest("cache_salt must be a string.", param="cache_salt")
        if client_salt and len(client_salt) > MAX_CLIENT_SALT:
            raise BadRequest(f"cache_salt is longer than {MAX_CLIENT_SALT} characters.", param="cache_salt")
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
                (client_salt or "").encode("utf-8", "surrogatepass"),
            )
        )
        return hmac.new(self._secret or b"", message, hashlib.sha256).hexdigest()


def bearer_key(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key in `Authorization: Bearer`, or in `x-api-key`."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            return value.strip()
    return None
