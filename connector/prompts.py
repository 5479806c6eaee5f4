"""What is known of a prompt: its token ids, and its blocks' hashes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from connector.blocks import Adapter, HashScheme, Media, Prefix, hash_prompt
from connector.tokens import Tokenizer

Kind = Literal["chat", "completion"]
INLINE_BYTES = 16 * 1024
"""Bodies above this many bytes are rendered and encoded off the event loop."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one prompt."""

    tokens: int
    """How many tokens it has, special ones included."""
    prefix: Prefix | None
    """Its blocks' hashes; None where it was not said how engines hash."""
    encoded: int
    """How many of its tokens had to be encoded anew."""
    _made: Callable[[], list[int]]
    media: bool = False
    """Whether it is more than its ids: pictures, sound."""

    def ids(self) -> list[int]:
        """All token ids, made on demand."""
        return self._made()


async def hashed(
    ids: list[int], scheme: HashScheme | None, *, salt: str | None, adapter: Adapter | None, media: Sequence[Media] = ()
) -> Known:
    """What is known of a prompt whose ids were made elsewhere."""
    if scheme is None:
        return Known(len(ids), None, 0, lambda: ids, bool(media))
    prefix = await asyncio.to_thread(hash_prompt, ids, scheme, salt=salt, adapter=adapter, media=media)
    return Known(len(ids), prefix, 0, lambda: ids, bool(media))


class Prompts:
    """The prompts of one model, as they come."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int) -> None:
        """`max_bytes` bounds what is remembered of earlier prompts."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes

    async def know(
        self,
        kind: Kind,
        raw: bytes,
        body: Mapping[str, Any],
        *,
        domain: str | None,  # noqa: ARG002 - nothing is remembered yet
        scheme: HashScheme | None,
        salt: str | None,
        adapter: Adapter | None,
    ) -> Known:
        """Render, encode and hash a prompt. Raises `Inexact` where it cannot be known.

        `raw` is the JSON that `body` was read from; `domain` is whose cache this is: what is
        remembered of one domain's prompts is never used for another's.
        """
        if len(raw) > INLINE_BYTES:
            return await asyncio.to_thread(self._know, kind, body, scheme, salt, adapter)
        return self._know(kind, body, scheme, salt, adapter)

    def full(self, kind: Kind, body: Mapping[str, Any]) -> list[int]:
        """All ids, encoded at once and from nothing that is remembered; blocks. Raises `Inexact`."""
        return list(self._tokenizer.chat(body) if kind == "chat" else self._tokenizer.completion(body))

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, special tokens included."""
        return self._tokenizer.text(ids)

    def forget(self) -> None:
        """Forget what is remembered of earlier prompts."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that earlier prompts take."""
        return 0

    def close(self) -> None:
        """Forget everything and end what runs."""

    def _know(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        scheme: HashScheme | None,
        salt: str | None,
        adapter: Adapter | None,
    ) -> Known:
        ids: Sequence[int] = self.full(kind, body)
        prefix = hash_prompt(ids, scheme, salt=salt, adapter=adapter) if scheme is not None else None
        return Known(len(ids), prefix, len(ids), lambda: list(ids))
