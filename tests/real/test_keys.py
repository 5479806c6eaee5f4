"""Every object key that the gateway computes is one that a real engine has stored, and no other."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector.blocks import Algorithm, HashScheme, Prefix, hash_prompt
from connector.keys import KeyScheme
from connector.tokens import Tokenizer
from gateway.tenants import Tenant, Tenants

from .ask import CHAT, COMPLETIONS, chat, completion, eventually, post, words
from .conftest import KEYS, SECRET, Serve
from .stack import Gateway, Pool

SCHEME = HashScheme(Algorithm.SHA256_CBOR, 32)
KEY_NAMES = KeyScheme.of("tiny")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find a word in the dictionary",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Prompts of several shapes, long enough for a few blocks each."""
    call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "pool"}'}}
    conversation = [
        {"role": "system", "content": words(60)},
        {"role": "user", "content": "What is a pool?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "a small body of water"},
    ]
    return [
        (CHAT, chat(words(150))),
        (CHAT, chat("", messages=conversation, tools=TOOLS, tool_choice="none")),
        (CHAT, chat("", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": words(90)}])),
        (COMPLETIONS, completion(words(150))),
        (COMPLETIONS, completion([8 + byte for byte in uuid.uuid4().bytes] + [300 + n for n in range(81)])),
        (COMPLETIONS, completion([words(70)])),
    ]


def salt_of(tenant: str) -> str:
    salt = Tenants({}, SECRET).salt(Tenant(tenant))
    assert salt is not None
    return salt


def prefix(tokens: Sequence[int], salt: str | None) -> Prefix:
    return hash_prompt(tokens, SCHEME, salt=salt)


def resident(pool: Pool, tokens: Sequence[int], salt: str | None) -> tuple[int, int]:
    """How many of a prompt's full blocks are in the store, and how many there are."""
    stored = set(pool.master.keys())
    hashes = prefix(tokens, salt).hashes
    return sum(stored.issuperset(KEY_NAMES.keys(block)) for block in hashes), len(hashes)


@pytest.mark.parametrize(("path", "body"), bodies())
def test_salted_keys_are_in_the_store_and_a_wrong_salt_finds_none(
    pool: Pool, model_folder: Path, gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    tokens = ids(model_folder, path, body)
    answer = post(gateway.url, path, body, KEYS["team-a"])
    assert answer.status == httpx.codes.OK
    assert answer.usage["prompt_tokens"] == len(tokens)

    eventually(lambda: all_there(pool, tokens, salt_of("team-a")), "every full block is in the store")
    for wrong in (None, salt_of("team-b"), "0" * 64):
        assert resident(pool, tokens, wrong)[0] == 0


def test_plain_keys_are_in_the_store(pool: Pool, model_folder: Path, serve: Serve) -> None:
    gateway = serve(auth={"mode": "none"}, secret=None, tenants=[])
    asked = bodies()
    prompts = [ids(model_folder, path, body) for path, body in asked]
    for (path, body), tokens in zip(asked, prompts, strict=True):
        answer = post(gateway.url, path, body)
        assert answer.status == httpx.codes.OK
        assert answer.usage["prompt_tokens"] == len(tokens)
    eventually(lambda: all(all_there(pool, tokens, None) for tokens in prompts), "every full block is in the store")
    assert not any(resident(pool, tokens, salt_of("team-a"))[0] for tokens in prompts)


def test_a_clients_own_salt_narrows_its_domain_and_is_never_passed_on(
    pool: Pool, model_folder: Path, gateway: Gateway
) -> None:
    body = chat(words(120), cache_salt="mine")
    tokens = ids(model_folder, CHAT, body)
    assert post(gateway.url, CHAT, body, KEYS["team-a"]).status == httpx.codes.OK

    narrowed = Tenants({}, SECRET).salt(Tenant("team-a"), "mine")
    eventually(lambda: all_there(pool, tokens, narrowed), "every full block is in the store")
    assert resident(pool, tokens, "mine")[0] == 0
    assert resident(pool, tokens, salt_of("team-a"))[0] == 0


def ids(model: Path, path: str, body: dict[str, Any]) -> Sequence[int]:
    tokenizer = Tokenizer(model)
    return tokenizer.chat(body) if path == CHAT else tokenizer.completion(body)


def all_there(pool: Pool, tokens: Sequence[int], salt: str | None) -> bool:
    there, blocks = resident(pool, tokens, salt)
    assert blocks
    return there == blocks
