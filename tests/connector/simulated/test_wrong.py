"""An engine that is not what its fleet believes it to be: another version, root, template or key."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
import pytest
import zmq

from connector.blocks import Adapter, Algorithm, HashScheme, hash_prompt
from connector.simulated.__main__ import _scheme
from connector.tokens import Tokenizer
from tests.real.stack import free_port

from .conftest import ADAPTER, BLOCK, Run
from .test_dev import Told
from .test_pool import Engine

PLAIN = HashScheme(Algorithm.SHA256_CBOR, BLOCK)
PROMPT = list(range(100, 100 + 3 * BLOCK))
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def options(**more: object) -> dict[str, Any]:
    return {"version": "0.32.0", "algorithm": "sha256_cbor", "block_size": BLOCK, "hash_seed": None} | more


@pytest.mark.parametrize(
    ("version", "tagged"), [("0.32.0", True), ("0.31.0rc1", True), ("1.0", True), ("0.30.2", False)]
)
def test_a_version_says_how_extra_keys_are_written(version: str, *, tagged: bool) -> None:
    assert _scheme(options(version=version)) == replace(PLAIN, tagged=tagged)


@pytest.mark.parametrize("more", [{"version": "0.28.0"}, {"algorithm": "xxhash"}, {"algorithm": "xxhash_cbor"}])
def test_a_root_that_vllm_draws_is_drawn(more: dict[str, object]) -> None:
    first, second = _scheme(options(**more)), _scheme(options(**more))
    assert first.root != second.root
    assert _scheme(options(**more, hash_seed="0")).seed == "0"


@pytest.mark.parametrize("version", ["", "0", "main", "0.x"])
def test_a_version_is_one(version: str) -> None:
    with pytest.raises(click.UsageError, match="version"):
        _scheme(options(version=version))


@pytest.mark.parametrize("scheme", [PLAIN, replace(PLAIN, tagged=False), replace(PLAIN, seed="7")])
@pytest.mark.parametrize("adapter", [None, ADAPTER])
async def test_prompts_and_answers_are_hashed_as_the_scheme_says(
    run: Run, scheme: HashScheme, adapter: Adapter | None
) -> None:
    told = Told()
    async with run(scheme=scheme, events=told) as (client, _):
        body = {"model": "tiny" if adapter is None else adapter.name, "prompt": PROMPT, "cache_salt": "s"}
        asked = {**body, "max_tokens": 2 * BLOCK, "ignore_eos": True, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=asked)).json()
    tokens = PROMPT + answer["choices"][0]["token_ids"][:-1]
    hashes = [digest for event in told.events for digest in event["block_hashes"]]
    assert hashes == list(hash_prompt(tokens, scheme, salt="s", adapter=adapter).hashes)
    assert told.events[0]["extra_keys"][0] == (("s",) if adapter is None else (adapter.name, "s"))


@pytest.fixture(scope="module")
def engine(sim_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, int]]:
    """An old engine with another template, and the port of its events."""
    folder = tmp_path_factory.mktemp("wrong")
    template = folder / "other.jinja"
    template.write_text(TEMPLATE)
    port = free_port()
    flags = ("--vllm-version", "0.30.0", "--chat-template", str(template), "--block-size", "32", "--hash-seed", "7")
    with Engine("wrong", folder, sim_folder, *flags, "--kv-events-port", str(port)) as engine:
        engine.wait_for(f"{engine.url}/health", 30)
        yield engine, port


def test_a_process_is_wrong_as_it_is_told(engine: tuple[Engine, int], sim_folder: Path) -> None:
    process, port = engine
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.linger = 0
        events.setsockopt(zmq.RCVTIMEO, 10_000)
        events.subscribe(b"")
        events.connect(f"tcp://127.0.0.1:{port}")
        with httpx.Client(base_url=process.url, trust_env=False) as client:
            assert client.get("/version").json() == {"version": "0.30.0"}
            assert client.get("/kv_event_sources").json()["0"]["endpoint"] == f"tcp://*:{port}"
            content = "the engine loads a block of the prefix from the pool " * 10
            messages = [{"role": "user", "content": content}]
            body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, "cache_salt": "s"}
            heard = False
            while not heard:  # a subscriber that has just connected misses what comes first
                answer = client.post("/v1/chat/completions", json=body | {"cache_salt": f"s{free_port()}"}).json()
                heard = bool(events.poll(100))
            _, _, payload = events.recv_multipart()
    expected = Tokenizer(sim_folder).completion({"prompt": f"user: {content}\n", "add_special_tokens": False})
    assert answer["prompt_token_ids"] == list(expected)
    (stored,) = msgspec.msgpack.decode(payload)[1]
    salt = stored["extra_keys"][0][0]
    scheme = HashScheme(Algorithm.SHA256_CBOR, 32, "7", tagged=False)
    assert stored["block_hashes"] == list(hash_prompt(expected, scheme, salt=salt).hashes)
