"""What is known of a prompt: its token ids and its blocks' hashes, from what was known of its beginning.

    render    a chat's text; a large one's in another process         connector.rendering
    find      how far an earlier prompt of the same chain went on alike  connector.tree
    encode    what is new, in pieces that do not mind each other         connector.cuts, connector.tokens
    hash      the blocks that are new                                    connector.blocks
    add       what was made, for the next one                            connector.tree

The event loop alone reads and changes what is remembered; threads get what they need and give back
what they made. Two equal prompts at the same time are both encoded, and one of them is remembered.

Ids that a client sends go the same way, as a text of four bytes each that can be cut every 64 ids.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from connector.blocks import PAUSE, Adapter, HashScheme, Media, Prefix, extend, hash_prompt
from connector.cuts import STRIDE
from connector.errors import Inexact
from connector.rendering import Rendering
from connector.tokens import Frame, Kind, Text, Tokenizer
from connector.tree import Chain, Forest, Found, Marks, Stretch

INLINE_BYTES = 16 * 1024
"""Bodies above this many bytes are rendered in another process, and as much new text is encoded in a thread."""
INLINE_BLOCKS = 1000
"""Blocks above this many are hashed in a thread."""
_BATCH = 256
"""Pieces that are encoded at once, some 16,000 tokens: their ids become Python's in half a millisecond."""
_PACKED = 64 * 1024
"""Ids that are looked at, packed or hashed at once: some two milliseconds at most."""
_FORGOTTEN = 100
"""Leaves that are forgotten at once, in less than a millisecond where they are small."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one prompt."""

    tokens: int
    """How many tokens it has, special ones included."""
    prefix: Prefix | None
    """Its blocks' hashes; None where it was not said how engines hash."""
    encoded: int
    """How many of its tokens had to be encoded anew."""
    _runs: Sequence[tuple[Sequence[int], int]]
    media: bool = False
    """Whether it is more than its ids: pictures, sound."""

    def ids(self) -> list[int]:
        """All token ids, made on demand."""
        found: list[int] = []
        for ids, length in self._runs:
            found += ids[:length]
        return found


@dataclass(frozen=True, slots=True)
class _Hashing:
    """All that a block's hash depends on beside tokens."""

    scheme: HashScheme
    salt: str | None
    adapter: Adapter | None

    def extend(self, parent: bytes | None, tokens: "array[int]", block: int) -> list[bytes]:
        """The hashes of the full blocks that follow the parent; `block` is the number of the first."""
        size = self.scheme.block_size
        some = size * max(1, _PACKED // size)
        hashes: list[bytes] = []
        for begin in range(0, len(tokens), some):
            before = hashes[-1] if hashes else parent
            hashes += extend(
                before,
                tokens[begin : begin + some],
                self.scheme,
                salt=self.salt,
                adapter=self.adapter,
                first_block=block + begin // size,
            )
        return hashes


@dataclass(frozen=True, slots=True)
class _Source:
    """A prompt in pieces: its bytes, where they can be cut, and how they are encoded."""

    data: bytes
    marks: Marks
    encode: Callable[[Sequence[bytes]], Iterable[Sequence[int]]]
    frame: Frame
    given: bool = False
    """Whether the ids came with the request."""


@dataclass(frozen=True, slots=True)
class _Ids:
    """Where ids can be cut that stand for a text."""

    def after(self, text: bytes, at: int) -> int | None:
        return at + STRIDE if at + STRIDE <= len(text) else None

    def holds(self, text: bytes, at: int) -> bool:
        return at <= len(text)


def _unpacked(pieces: Sequence[bytes]) -> Iterable[Sequence[int]]:
    return (array("I", piece) for piece in pieces)


def _packed(ids: Sequence[int]) -> bytes:
    """Ids in four bytes each. Raises `OverflowError`."""
    packed = bytearray()
    for begin in range(0, len(ids), _PACKED):
        if begin:
            time.sleep(PAUSE)
        packed += array("I", ids[begin : begin + _PACKED]).tobytes()
    return bytes(packed)


async def hashed(
    ids: Sequence[int],
    scheme: HashScheme | None,
    *,
    salt: str | None,
    adapter: Adapter | None,
    media: Sequence[Media] = (),
) -> Known:
    """What is known of a prompt whose ids were made elsewhere."""
    prefix = None
    if scheme is not None:
        prefix = await asyncio.to_thread(hash_prompt, ids, scheme, salt=salt, adapter=adapter, media=media)
    return Known(len(ids), prefix, 0, ((ids, len(ids)),), bool(media))


class Prompts:
    """The prompts of one model, as they come."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int) -> None:
        """`max_bytes` bounds what is remembered of earlier prompts; 0 remembers nothing."""
        self._tokenizer = tokenizer
        self._forest = Forest(max_bytes)
        self._rendering = Rendering(tokenizer.chats)

    async def know(
        self,
        kind: Kind,
        raw: bytes,
        body: Mapping[str, Any],
        *,
        domain: str | None,
        scheme: HashScheme | None,
        salt: str | None,
        adapter: Adapter | None,
    ) -> Known:
        """Render, encode and hash a prompt. Raises `Inexact` where it cannot be known.

        `raw` is the JSON that `body` was read from; `domain` is whose cache this is: what is
        remembered of one domain's prompts is never used for another's.
        """
        prompt = await self._prompt(kind, raw, body)
        hashing = _Hashing(scheme, salt or None, adapter) if scheme is not None else None
        size = scheme.block_size if scheme is not None else 0
        source = await self._source(prompt)
        if source is None:
            return await self._whole(prompt, scheme, salt, adapter)
        chain = Chain(domain, source.marks, source.frame.before, hashing, size)
        found = self._forest.find(chain, source.data)
        more = len(source.data) - found.at
        if more > min(INLINE_BYTES, INLINE_BLOCKS * (size or INLINE_BYTES)):
            made = await asyncio.to_thread(_make, source, found, hashing)
        else:
            made = _make(source, found, hashing)
        self._forest.add(chain, source.data, found.at, made.stretch)
        while not self._forest.shrink(_FORGOTTEN):  # noqa: ASYNC110 - others have their turn in between
            await asyncio.sleep(0)
        tokens = found.tokens + len(made.ids)
        prefix = Prefix(tokens, size, (*found.hashes, *made.hashes)) if size else None
        return Known(tokens, prefix, 0 if source.given else len(made.ids), (*found.runs, (made.ids, len(made.ids))))

    def full(self, kind: Kind, body: Mapping[str, Any]) -> list[int]:
        """All ids, encoded at once and from nothing that is remembered; blocks. Raises `Inexact`."""
        if self._brings_template(kind, body):
            raise Inexact("chat_template")
        return list(self._tokenizer.ids(kind, body))

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, special tokens included."""
        return self._tokenizer.text(ids)

    def forget(self) -> None:
        """Forget what is remembered of earlier prompts."""
        self._forest.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that earlier prompts take."""
        return self._forest.held_bytes

    def close(self) -> None:
        """Forget everything and end what runs."""
        self._forest.clear()
        self._rendering.close()

    async def _prompt(self, kind: Kind, raw: bytes, body: Mapping[str, Any]) -> Text | Sequence[int]:
        if self._brings_template(kind, body):
            self._tokenizer.check()
            self._rendering.start()
            if not self._rendering.ready:
                raise Inexact("chat_template")
            return await self._rendering.text(raw)
        if len(raw) <= INLINE_BYTES or (kind == "completion" and isinstance(body.get("prompt"), str)):
            return self._tokenizer.prompt(kind, body)
        if kind == "chat":
            if self._rendering.ready:
                self._tokenizer.check()
                return await self._rendering.text(raw)
            self._rendering.start()
        return await asyncio.to_thread(self._tokenizer.prompt, kind, body)

    def _brings_template(self, kind: Kind, body: Mapping[str, Any]) -> bool:
        """Whether a client's program would be run, which may take for ever: in the other process, which has a limit."""
        trusted = self._tokenizer.chats.rules.trust_request_template
        if kind != "chat" or not trusted:
            return False
        variables = body.get("chat_template_kwargs")
        named = variables.get("chat_template") if isinstance(variables, dict) else None
        return body.get("chat_template") is not None or named is not None

    async def _whole(
        self, prompt: Text | Sequence[int], scheme: HashScheme | None, salt: str | None, adapter: Adapter | None
    ) -> Known:
        """What is known of a prompt of which nothing can be remembered."""
        if not isinstance(prompt, Text):
            return await hashed(prompt, scheme, salt=salt, adapter=adapter)
        ids = await asyncio.to_thread(self._tokenizer.encode, prompt)
        return replace(await hashed(ids, scheme, salt=salt, adapter=adapter), encoded=len(ids))

    async def _source(self, prompt: Text | Sequence[int]) -> _Source | None:
        """A prompt in pieces; None where it can only be taken as a whole."""
        if isinstance(prompt, Text):
            frame = self._tokenizer.frame(prompt)
            tokenizer = self._tokenizer
            return _Source(prompt.data, tokenizer.cuts, tokenizer.encode_pieces, frame) if frame is not None else None
        try:
            data = _packed(prompt) if len(prompt) <= _PACKED else await asyncio.to_thread(_packed, prompt)
        except OverflowError:  # which ids exist is the engine's to say
            return None
        return _Source(data, _Ids(), _unpacked, Frame(), given=True)


@dataclass(frozen=True, slots=True)
class _Made:
    """What was made of a prompt from a mark on."""

    ids: "array[int]"
    """To its end."""
    hashes: list[bytes]
    """Of the blocks that end within them."""
    stretch: Stretch
    """Of this, what goes up to the last mark."""


def _make(source: _Source, found: Found, hashing: _Hashing | None) -> _Made:
    """Encode and hash what is not known. Pure; in a thread it lets others run."""
    ids = array("I", () if found.at else source.frame.before)
    ends, counts = array("I"), array("I")
    pieces = _pieces(source, found.at)
    while batch := list(islice(pieces, _BATCH)):
        for piece, encoded in zip(batch, source.encode(batch), strict=True):
            ids.extend(encoded)
            ends.append((ends[-1] if ends else 0) + len(piece))
            counts.append(len(ids))
        if len(batch) == _BATCH:
            time.sleep(PAUSE)
    ends.pop()  # the last piece ends with the text, which is no mark
    counts.pop()
    ids.extend(source.frame.after)
    hashes: list[bytes] = []
    kept = 0
    if hashing is not None:
        size = hashing.scheme.block_size
        block = found.tokens // size
        tokens = array("I", found.last(found.tokens % size))
        tokens += ids
        hashes = hashing.extend(found.hashes[-1] if block else None, tokens, block)
        kept = (found.tokens + counts[-1]) // size - block if counts else 0
    length = counts[-1] if counts else 0
    return _Made(ids, hashes, Stretch(ends, counts, ids[:length], hashes[:kept]))


def _pieces(source: _Source, at: int) -> Iterator[bytes]:
    """What the text is cut into from a mark on; the last piece may be empty."""
    while (end := source.marks.after(source.data, at)) is not None:
        yield source.data[at:end]
        at = end
    yield source.data[at:]
