"""A prompt's token ids and media from a server that renders: vLLM's own template and tokenizer, over HTTP.

A real engine with --enable-scale-out answers, and so does `vllm launch render`, which needs no GPU. It
gets the very body that the engine would get and answers what the engine would compute on (vllm 0.32.0,
entrypoints/scale_out/render and token_in_token_out/protocol.py, GenerateRequest):

    token_ids                  the whole prompt, placeholders of media expanded
    features.mm_hashes         by modality, what vLLM calls each image, sound or film
    features.mm_placeholders   by modality and in the same order: offset and length in token_ids

/v1/completions/render answers a list, one for each prompt. The media's pixels are not asked for
(`mm_payload`): they are megabytes and nobody here reads them.

What a render does not tell: with --enable-tower-connector-lora an engine puts the adapter's name before
each identifier.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from connector.blocks import Media
from connector.errors import Inexact, TimedOut, WireError
from connector.wire import Headers, Timeouts, Wire

MAX_ANSWER = 32 * 1024 * 1024
"""Bytes of an answer that are read: some four million token ids."""
NO_PIXELS = b'{"mm_payload":"none",'

Reason = Literal[
    "render_timeout",  # no answer within the deadline
    "render_refused",  # the body is wrong, the engine will refuse it as well
    "render_unsupported",  # an engine answers it, a render does not: previous_response_id, beam search
    "render_forbidden",  # an engine without --enable-scale-out, or not with this key
    "render_several",  # more than one prompt
    "render_failed",  # anything else
]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One prompt as the engine will see it."""

    token_ids: list[int]
    media: tuple[Media, ...]
    """By their offset."""


class RemoteRender:
    """One rendering server, such as `http://10.0.0.9:8100`."""

    def __init__(
        self, url: str, deadline: float, api_key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """`deadline` is in seconds, for a whole render. Raises `ValueError` where `url` is no URL with a host."""
        self._deadline = deadline
        self._wire = Wire(url, Timeouts(head=deadline, idle=deadline, total=deadline), tls)
        self._headers: Headers = [(b"content-type", b"application/json")]
        if api_key is not None:
            self._headers = [*self._headers, (b"authorization", b"Bearer " + api_key.encode())]

    async def render(self, path: str, parts: Sequence[bytes]) -> Rendered:
        """The ids and media of an engine's body, given in parts, for /v1/chat/completions, /v1/completions,
        /v1/messages or /v1/responses. Raises `Inexact` with a `Reason`; nothing of the body is in it.
        """
        try:
            async with asyncio.timeout(self._deadline):
                answer = await self._wire.send("POST", f"{path}/render", self._headers, _without_pixels(parts))
                body = await answer.body(MAX_ANSWER)
        except (TimedOut, TimeoutError):
            raise _inexact("render_timeout") from None
        except WireError as error:
            raise _inexact("render_failed") from error
        if answer.status != 200:
            raise _inexact(_refusal(answer.status, body))
        return _rendered(body)

    def close(self) -> None:
        """Drop the connections; a render under way fails."""
        self._wire.close()


class _Range(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(gt=0)]


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Prompt(msgspec.Struct):
    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    features: _Features | None = None


_ANSWER = msgspec.json.Decoder(_Prompt | list[_Prompt])


def _without_pixels(parts: Sequence[bytes]) -> Sequence[bytes]:
    """The body with `mm_payload` before all that the client wrote, whose own one would win."""
    if not parts:
        return parts
    space, brace, rest = parts[0].partition(b"{")
    return [space + NO_PIXELS, rest, *parts[1:]] if brace else parts


def _refusal(status: int, body: bytes) -> Reason:
    if status in (401, 403):
        return "render_forbidden"
    if status == 400 and b"render endpoint" in body:  # so vLLM ends what it says of both
        return "render_unsupported"
    if status in (400, 413, 422) or (status == 404 and b'"NotFoundError"' in body):  # else the route is unknown
        return "render_refused"
    return "render_failed"


def _rendered(body: bytes) -> Rendered:
    try:
        answer = _ANSWER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _inexact("render_failed") from None
    if isinstance(answer, _Prompt):
        return Rendered(answer.token_ids, _media(answer.features))
    if len(answer) > 1:
        raise _inexact("render_several")
    if not answer:
        raise _inexact("render_failed")
    return Rendered(answer[0].token_ids, _media(answer[0].features))


def _media(features: _Features | None) -> tuple[Media, ...]:
    if features is None:
        return ()
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise _inexact("render_failed")
    media = []
    for modality, identifiers in features.mm_hashes.items():
        places = features.mm_placeholders[modality]
        if len(places) != len(identifiers):
            raise _inexact("render_failed")
        pairs = zip(identifiers, places, strict=True)
        media += [Media(identifier, place.offset, place.length) for identifier, place in pairs]
    return tuple(sorted(media, key=lambda one: one.offset))


def _inexact(reason: Reason) -> Inexact:
    return Inexact(reason)
