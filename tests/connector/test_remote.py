"""Renders by a server, against a peer that says exactly what it is told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from connector import remote
from connector.blocks import Media
from connector.errors import Inexact
from connector.remote import RemoteRender, Rendered
from tests.connector.peer import Line, Peer, Script, answers, free_port, hold, listen, ok, until

CHAT = "/v1/chat/completions"
BODY = b'{"messages":[]}'
UNSUPPORTED = "previous_response_id is not supported by the stateless render endpoint."


@asynccontextmanager
async def rendering(
    *scripts: Script, deadline: float = 5.0, key: str | None = None
) -> AsyncIterator[tuple[RemoteRender, Peer]]:
    async with listen(*scripts) as peer:
        render = RemoteRender(peer.url, deadline, key)
        try:
            yield render, peer
            await until(lambda: render._wire.busy == 0)
        finally:
            render.close()


def rendered(tokens: list[int], **more: object) -> dict[str, Any]:
    return {"request_id": "chatcmpl-1", "token_ids": tokens, "features": None, "sampling_params": {"n": 1}} | more


def features(hashes: object, places: object) -> bytes:
    return orjson.dumps(rendered([1, 2, 3], features={"mm_hashes": hashes, "mm_placeholders": places}))


def error(message: str, kind: str = "BadRequestError", code: int = 400) -> bytes:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return ok(orjson.dumps(body), status=b"%d Oh" % code)


async def refusal(answer: bytes) -> str:
    async with rendering(answers(answer)) as (render, _):
        with pytest.raises(Inexact) as caught:
            await render.render(CHAT, [BODY])
        return caught.value.reason


async def test_the_body_goes_to_the_render_of_its_endpoint_as_it_is_but_for_the_pixels() -> None:
    answer = ok(orjson.dumps(rendered([1, 2, 3])))
    async with rendering(answers(answer), key="a key") as (render, peer):
        got = await render.render(CHAT, [b" {", b'"a" : 1e2,', b'"b":"\\u00e9"}'])
        await render.render("/v1/messages", [b'{"c":1}'])

    assert got == Rendered([1, 2, 3], ())
    first, second = peer.requests
    assert (first.method, first.target) == ("POST", "/v1/chat/completions/render")
    assert first.body == b' {"mm_payload":"none","a" : 1e2,"b":"\\u00e9"}'
    assert first.headers["content-type"] == "application/json"
    assert first.headers["authorization"] == "Bearer a key"
    assert second.target == "/v1/messages/render"
    assert len(peer.lines) == 1, "the connection is kept"


async def test_a_completion_is_one_of_a_list() -> None:
    async with rendering(answers(ok(orjson.dumps([rendered([4, 5])])))) as (render, _):
        assert (await render.render("/v1/completions", [BODY])).token_ids == [4, 5]
    assert await refusal(ok(orjson.dumps([rendered([4]), rendered([5])]))) == "render_several"
    assert await refusal(ok(b"[]")) == "render_failed"


async def test_media_come_by_their_offset() -> None:
    hashes = {"image": ["i1", "i2"], "audio": ["a1"]}
    places = {"image": [{"offset": 1, "length": 4}, {"offset": 20, "length": 4}], "audio": [{"offset": 7, "length": 2}]}
    async with rendering(answers(ok(features(hashes, places)))) as (render, _):
        got = await render.render(CHAT, [BODY])
    assert got.media == (Media("i1", 1, 4), Media("a1", 7, 2), Media("i2", 20, 4))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (error("no such role"), "render_refused"),
        (error("The model `x` does not exist.", "NotFoundError", 404), "render_refused"),
        (error(UNSUPPORTED, "invalid_request_error"), "render_unsupported"),
        (error("Scale-out endpoints are disabled.", "PermissionDeniedError", 403), "render_forbidden"),
        (error("Unauthorized", "Unauthorized", 401), "render_forbidden"),
        (ok(b'{"detail":"Not Found"}', status=b"404 Not Found"), "render_failed"),
        (error("busy", "Service Unavailable", 503), "render_failed"),
        (error("broken", "InternalServerError", 500), "render_failed"),
        (error("slow down", "RateLimit", 429), "render_failed"),
        (ok(b"", status=b"302 Found"), "render_failed"),
    ],
)
async def test_refusals_have_their_reasons(answer: bytes, reason: str) -> None:
    assert await refusal(answer) == reason


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"7", b"{}", b'{"token_ids":[]}', b'{"token_ids":null}', b'{"token_ids":[1.5]}',
     b'{"token_ids":[-1]}', b'{"token_ids":["1"]}', b'{"token_ids":[true]}', b'{"token_ids":"\xff"}', b"[" * 100_000,
     b'[[{"token_ids":[1]}]]', features({"image": ["a"]}, {}), features({}, {"image": []}),
     features({"image": ["a"]}, {"image": []}), features({"image": ["a"]}, {"image": [{"offset": -1, "length": 1}]}),
     features({"image": ["a"]}, {"image": [{"offset": 1, "length": 0}]}), features({"image": [7]}, {"image": []})],
    ids=lambda body: repr(body[-30:]),
)  # fmt: skip
async def test_what_is_no_render_is_a_failure(body: bytes) -> None:
    assert await refusal(ok(body)) == "render_failed"


async def test_an_answer_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ANSWER", 10)
    assert await refusal(ok(orjson.dumps(rendered([1])))) == "render_failed"


async def test_nobody_there_is_a_failure() -> None:
    render = RemoteRender(f"http://127.0.0.1:{free_port()}", 5.0)
    with pytest.raises(Inexact, match="render_failed"):
        await render.render(CHAT, [BODY])


async def trickle(line: Line) -> None:
    await line.request()
    await line.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    await line.left()


@pytest.mark.parametrize("script", [hold, trickle])
async def test_the_deadline_is_for_all_of_it(script: Script) -> None:
    async with rendering(script, deadline=0.05) as (render, peer):
        with pytest.raises(Inexact, match="render_timeout"):
            await render.render(CHAT, [BODY])
        await until(peer.lines[0].ended.is_set)


@pytest.mark.parametrize("answer", [error("your prompt: secret words"), ok(b'{"token_ids":"secret words"}')])
async def test_nothing_of_a_prompt_is_in_what_is_raised(answer: bytes) -> None:
    async with rendering(answers(answer)) as (render, _):
        with pytest.raises(Inexact) as caught:
            await render.render(CHAT, [b'{"messages":"secret words"}'])
    raised: BaseException | None = caught.value
    while raised is not None:
        assert "secret" not in repr(raised)
        raised = raised.__cause__


@pytest.mark.parametrize("url", ["ftp://engine", "engine:8000", "http://"])
def test_a_url_is_checked(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        RemoteRender(url, 1.0)
