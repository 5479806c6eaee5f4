"""The house as it is put together: what is opened, what is closed, what cannot be built."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from connector.tokens import NoTokenizer
from gateway.app import BadTemplate, build
from gateway.config import Config
from policies.load import BadPolicy
from tests.double import Engine, Master, whole
from tests.gateway.house import Street, eventually, serving, settings


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"policy": {"use": "leest_loaded"}}, BadPolicy),
        ({"policy": {"use": "least_loaded", "settings": {"nothing": 1}}}, BadPolicy),
        ({"models": [{"name": "tiny", "tokenizer": "/nowhere"}]}, NoTokenizer),
    ],
)
def test_what_is_not_there_is_told_before_anything_opens(sections: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build(Config(**settings(**sections)))


@pytest.mark.parametrize("source", [None, "{% for %}", "{{"])
def test_a_chat_template_that_is_none(source: str | None, tokenizer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    if source is not None:
        file.write_text(source)
    model = {"name": "tiny", "tokenizer": str(tokenizer_folder), "chat": {"template": str(file)}}
    with pytest.raises(BadTemplate, match=r"chat\.jinja"):
        build(Config(**settings(models=[model])))


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "cache_aware", "disaggregated"])
async def test_every_policy_serves(street: Street, policy: str) -> None:
    engines = await street.engines(2)
    house = await street.house(*engines, policy={"use": policy})
    for _ in range(4):
        assert (await house.chat()).status_code == 200
    assert [len(engine.asked) for engine in engines] == [2, 2]


async def test_auth_none_is_loud_and_lets_everybody_in(street: Street, caplog: pytest.LogCaptureFixture) -> None:
    engine = await street.engine()
    house = await street.house(engine, auth={"mode": "none"}, tenants=[], secret=None)
    assert "AUTH IS OFF" in caplog.text
    assert (await house.client.get("/v1/models", headers={"authorization": ""})).status_code == 200
    assert (await house.chat()).status_code == 200
    assert "cache_salt" not in engine.asked[0].json()
    assert (await house.chat(cache_salt="mine")).status_code == 200
    assert len(engine.asked[1].json()["cache_salt"]) == 64
    assert await house.metric("requests_total", tenant="anonymous") == 2


async def test_auth_keys_is_silent(street: Street, caplog: pytest.LogCaptureFixture) -> None:
    await street.house(await street.engine())
    assert "AUTH" not in caplog.text


async def test_a_house_opens_without_its_engines(street: Street) -> None:
    engine = await street.engine()
    await engine.stop()
    house = await street.house(
        engines={"static": [{"url": engine.url, "model": "tiny"}], "poll_seconds": 0.02},
    )
    assert (await house.client.get("/ready")).status_code == 503
    await engine.start()
    await house.until("engine_up", 1)
    assert (await house.chat()).status_code == 200


async def test_closing_leaves_no_task_no_connection_and_no_thread(tokenizer_folder: Path) -> None:
    async with Engine() as engine, Master() as master:
        before = asyncio.all_tasks()
        threads = threading.active_count()
        model = {"name": "tiny", "tokenizer": str(tokenizer_folder), "pool": "main"}
        tree = settings(engine, models=[model], pools={"main": {"admin": [master.url], "deadline_ms": 500}})
        async with serving(tree) as house:
            for _ in range(3):
                assert (await house.chat("the engine loads a block of the prefix " * 30)).status_code == 200
            assert master.calls
        await eventually(lambda: not (engine.open or master.open or asyncio.all_tasks() - before))
        assert threading.active_count() <= threads


async def test_an_engine_is_asked_with_its_own_key(street: Street) -> None:
    first, second = await street.engines(2)
    house = await street.house(
        {"url": first.url, "model": "tiny", "api_key": "one"}, {"url": second.url, "model": "tiny"}
    )
    for _ in range(2):
        assert (await house.chat()).status_code == 200
    assert {call.header("authorization") for call in first.calls} == {"Bearer one"}
    assert {call.header("authorization") for call in second.calls} == {None}


async def test_configured_hashing_wins_over_the_engines(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    model = {
        "name": "tiny",
        "tokenizer": str(tokenizer_folder),
        "pool": "main",
        "block_size": 16,
        "keys": {"prefix": "cache@M", "tp": 2},
    }
    house = await street.house(engine, models=[model], pools={"main": {"admin": [master.url], "deadline_ms": 500}})
    await house.client.post("/v1/completions", json={"model": "tiny", "prompt": list(range(33))})
    (keys,) = master.keys
    assert len(keys) == 4
    assert all(key.startswith("cache@M@tp_rank:") for key in keys)


async def test_proxies_of_the_environment_change_nothing(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine = await street.engine()
    assert (await (await street.house(engine)).chat()).status_code == 200


async def test_redirects_are_not_followed(street: Street, caplog: pytest.LogCaptureFixture) -> None:
    engine, inner = await street.engine(), await street.engine()
    caplog.set_level(logging.WARNING)
    engine.everywhere = whole(302, b"", headers=[("location", inner.url)])
    house = await street.house(engine)
    assert (await house.chat()).status_code == 503
    assert not inner.calls
