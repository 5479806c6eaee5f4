"""Rendering in a process of its own, which may die."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from connector.errors import Inexact
from connector.rendering import Rendering
from connector.tokens import Text, Tokenizer
from tests.connector.families import folder

BODY = {"messages": [{"role": "user", "content": "h\u00e9llo \u6f22 \U0001f642"}]}
RAW = orjson.dumps(BODY)
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def ready(rendering: Rendering) -> Rendering:
    rendering.start()
    while not rendering.ready:
        time.sleep(0.02)
    return rendering


def text(rendering: Rendering, raw: bytes = RAW) -> Text:
    return asyncio.run(rendering.text(raw))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(folder(tmp_path_factory.mktemp("model"), "gpt-2", "plain"))


@pytest.fixture(scope="module")
def rendering(tokenizer: Tokenizer) -> Iterator[Rendering]:
    with closing(Rendering(tokenizer.chats)) as rendering:
        yield rendering


def test_it_runs_once_it_is_wanted(rendering: Rendering) -> None:
    assert rendering.pid is None
    with pytest.raises(Inexact, match="renderer_died"):
        text(rendering)


def test_texts_are_the_same_as_here(tokenizer: Tokenizer, rendering: Rendering) -> None:
    ready(rendering)
    for body in (BODY, {**BODY, "add_special_tokens": True}, {**BODY, "add_generation_prompt": False}):
        assert text(rendering, orjson.dumps(body)) == tokenizer.prompt("chat", body)


async def test_several_wait_for_each_other(rendering: Rendering) -> None:
    texts = await asyncio.gather(*(ready(rendering).text(RAW) for _ in range(5)))
    assert len(set(texts)) == 1


def test_what_is_refused_is_refused_for_the_same_reason(rendering: Rendering) -> None:
    surrogate = orjson.dumps({"messages": [{"role": "assistant", "tool_calls": [CALL]}]})
    for raw, reason in ((b"{}", "messages"), (surrogate, "surrogate")):
        with pytest.raises(Inexact, match=reason):
            text(ready(rendering), raw)


def test_one_that_dies_is_replaced(rendering: Rendering) -> None:
    first = ready(rendering).pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Inexact, match="renderer_died"):
        text(rendering)
    assert not rendering.ready

    ready(rendering)

    assert rendering.pid != first
    assert text(rendering).data


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    slow = Tokenizer(folder(tmp_path, "gpt-2", "plain", ENDLESS))
    with closing(ready(Rendering(slow.chats, seconds=0.2))) as rendering:
        child = rendering._child
        with pytest.raises(Inexact, match="renderer_died"):
            text(rendering)
        assert child is not None
        assert child.returncode is not None


def test_one_that_stands_still_is_ended_and_one_that_is_closed_is_too(tokenizer: Tokenizer) -> None:
    rendering = ready(Rendering(tokenizer.chats, seconds=0.2))
    assert rendering.pid is not None
    os.kill(rendering.pid, signal.SIGSTOP)
    with pytest.raises(Inexact, match="renderer_died"):
        text(rendering)
    child = ready(rendering)._child
    rendering.close()
    assert child is not None
    assert child.returncode is not None
    rendering.start()
    assert rendering.pid is None
