"""The simulated engine beside a real one: the same refusals, and answers of the same shape."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector.vllm import EngineControl
from gateway.processes import Child
from tests.connector.simulated.exchanges import ANSWERED, REFUSED, STREAMED, Refused, prompt_tokens, shape, stream_shape

from .ask import post
from .stack import Pool, free_port, inherited


@pytest.fixture(scope="module")
def simulated(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a simulated engine that serves the real ones' model."""
    port = free_port()
    command: list[str | Path] = [
        *(sys.executable, "-m", "connector.simulated", "--model", model_folder, "--served-model-name", "tiny"),
        "--no-tool-parser",
        *("--port", str(port), "--block-size", "32", "--max-model-len", "8192", "--time-scale", "0"),
    ]
    with Child("simulated", command, tmp_path_factory.mktemp("simulated"), inherited()) as engine:
        engine.wait_for(f"http://127.0.0.1:{port}/health", 30)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_refusals_are_alike(pool: Pool, simulated: str, refused: Refused) -> None:
    answers = []
    for url in (pool.urls[0], simulated):
        answer = httpx.post(
            url + refused.path, content=refused.content, headers=dict(refused.headers), timeout=60, trust_env=False
        )
        error = answer.json()["error"]
        answers.append((answer.status_code, list(error), error["type"], error["code"]))
        assert refused.param in ("any", error["param"])
    assert answers[0] == answers[1]
    assert answers[0][0] == refused.status


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in ANSWERED], ids=[case[0] for case in ANSWERED])
def test_answers_have_the_same_shape(pool: Pool, simulated: str, path: str, body: dict[str, Any]) -> None:
    real, ours = (post(url, path, body) for url in (pool.urls[0], simulated))
    assert (real.status, ours.status) == (200, 200)
    assert shape(ours.data) == shape(real.data)
    if "usage" in real.data:
        assert prompt_tokens(ours.usage) == prompt_tokens(real.usage)


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in STREAMED], ids=[case[0] for case in STREAMED])
def test_streams_have_the_same_shape(pool: Pool, simulated: str, path: str, body: dict[str, Any]) -> None:
    contents = [
        httpx.post(url + path, json={**body, "stream": True}, timeout=60, trust_env=False).content
        for url in (pool.urls[0], simulated)
    ]
    assert stream_shape(contents[1]) == stream_shape(contents[0])


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load", "/kv_event_sources"])
def test_what_is_read_has_the_same_shape(pool: Pool, simulated: str, path: str) -> None:
    real, ours = (httpx.get(url + path, trust_env=False).json() for url in (pool.urls[0], simulated))
    assert shape(ours) == shape(real)


@pytest.mark.parametrize("path", ["/server_info", "/is_sleeping", "/reset_prefix_cache"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_dev_mode_would_serve_is_not_there(pool: Pool, simulated: str, method: str, path: str) -> None:
    real, ours = (httpx.request(method, url + path, trust_env=False) for url in (pool.urls[0], simulated))
    assert (ours.status_code, ours.json()) == (real.status_code, real.json()) == (404, {"detail": "Not Found"})


async def test_what_is_asked_of_an_engine_is_answered_alike(pool: Pool, simulated: str) -> None:
    for url in (pool.urls[0], simulated):
        control = EngineControl(url)
        try:
            assert await control.version() == "0.32.0"
            assert await control.event_sources() == {}
            assert not await control.dev_mode()
            assert not await control.scale_out()
            status, answer = await control.ask(
                "/v1/completions", {"prompt": [10, 11], "max_tokens": 1, "return_token_ids": True}
            )
            assert (status, answer["choices"][0]["prompt_token_ids"]) == (200, [10, 11])
        finally:
            await control.close()


def test_what_is_measured_has_the_same_names_and_labels(pool: Pool, simulated: str) -> None:
    post(simulated, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    real, ours = (samples(url) for url in (pool.urls[0], simulated))
    real_names = {name for name, _ in real}
    for name, labels in ours:
        if name.startswith("vllm:cache_config_info"):
            assert any(other == name and labels <= others for other, others in real)
        elif not name.endswith("_created"):
            assert (name, labels) in real or name not in real_names, name
            assert name in real_names, name


def samples(url: str) -> set[tuple[str, frozenset[str]]]:
    found = set()
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("vllm:"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.add((name, frozenset(label.partition("=")[0] for label in labels.rstrip("}").split('",') if label)))
    return found
