"""An adapter's blocks have names of their own: they agree with a real engine's, salted and not, and so do predictions.

The engine hashes with its default algorithm and a PYTHONHASHSEED, so that both are checked in every run.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from connector.blocks import Adapter, Algorithm, HashScheme, hash_prompt, hashing_of
from connector.keys import KeyScheme
from connector.mooncake import Master as PoolMaster
from connector.tokens import Tokenizer
from gateway.tenants import Tenant, Tenants

from .ask import CHAT, Answered, chat, eventually, metric, post, words
from .conftest import KEYS, SECRET, tenants
from .stack import Engine, Gateway, Master, start_engine, start_gateway, start_master

NAME = "sql"
RANK = 8
SEED = 42
SCHEME = HashScheme(Algorithm.SHA256, 32, str(SEED))
KEY_NAMES = KeyScheme.of("tiny")


@dataclass(frozen=True)
class Adapted:
    """A master, and an engine that serves `tiny` and an adapter of it."""

    master: Master
    engine: Engine
    adapter: Adapter
    tokenizer: Tokenizer
    folder: Path

    def keys(self, body: dict[str, object], salt: str | None, adapter: Adapter | None) -> set[str]:
        """What the store should hold of a prompt."""
        prefix = hash_prompt(self.tokenizer.chat(body), SCHEME, salt=salt, adapter=adapter)
        assert prefix.hashes
        return {key for block in prefix.hashes for key in KEY_NAMES.keys(block)}

    def holds(self, keys: set[str]) -> bool:
        return keys <= set(self.master.keys())

    def gateway(self, model: Path) -> Gateway:
        config = {
            "secret": SECRET,
            "pools": {"main": {"admin": [self.master.admin], "deadline_ms": 1000}},
            "models": [{"name": "tiny", "tokenizer": str(model), "pool": "main", "hash_seed": SEED}],
            "engines": {"static": [{"url": self.engine.url, "model": "tiny"}]},
            "tenants": tenants(),
            "telemetry": {"expose_routing": True},
        }
        return start_gateway(config, self.folder)


def make_adapter(folder: Path, model: Path) -> Path:
    """A LoRA adapter of the tiny model, in the form of peft: random, and strong enough to change answers."""
    shape = json.loads((model / "config.json").read_text())
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    chance = np.random.default_rng(0)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{part}.lora_{side}.weight": chance.normal(
            size=(RANK, width) if side == "A" else (width, RANK)
        ).astype(np.float32)
        for layer in range(layers)
        for part in ("q_proj", "v_proj")
        for side in "AB"
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapted(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("lora")
    path = make_adapter(folder / "adapter", model_folder)
    with ExitStack() as stop:
        master = stop.enter_context(start_master(folder))
        engine = stop.enter_context(
            start_engine(
                model_folder,
                "engine",
                master,
                folder=folder,
                algorithm=SCHEME.algorithm,
                hash_seed=SEED,
                extra_args=("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{NAME}={path}"),
            )
        )
        engine.ready()
        yield Adapted(master, engine, Adapter(NAME, str(path)), Tokenizer(model_folder), folder)


@pytest.mark.parametrize("salt", [None, "a-salt-of-the-client"])
def test_keys_in_the_store_are_those_of_the_adapter(adapted: Adapted, salt: str | None) -> None:
    body = chat(words(300), model=NAME) | ({} if salt is None else {"cache_salt": salt})
    assert post(adapted.engine.url, CHAT, body).status == httpx.codes.OK

    eventually(lambda: adapted.holds(adapted.keys(body, salt, adapted.adapter)), "every full block is in the store")
    stored = set(adapted.master.keys())
    moved = Adapter(NAME, adapted.adapter.path + "-elsewhere")
    for other in (None, Adapter("other", adapted.adapter.path), moved):
        assert stored.isdisjoint(adapted.keys(body, salt, other))
    assert stored.isdisjoint(adapted.keys(body, "another-salt", adapted.adapter))


async def test_names_are_learnt_from_a_block_that_must_be_there(adapted: Adapted) -> None:
    body = chat(words(100), model=NAME, cache_salt="asked-for-its-names")
    assert post(adapted.engine.url, CHAT, body).status == httpx.codes.OK
    keys = adapted.keys(body, "asked-for-its-names", adapted.adapter)
    eventually(lambda: adapted.holds(keys), "every full block is in the store")

    hashes = {bytes.fromhex(key.rpartition("@")[2]) for key in keys}
    pool = PoolMaster([adapted.master.admin])
    try:
        assert {key.rpartition("@")[0] + "@" for key in await pool.keys_of(hashes)} == set(KEY_NAMES.prefixes)
        assert await pool.resident([*keys, "nobody's"]) == keys
    finally:
        pool.close()


def test_the_gateway_predicts_what_an_adapters_prompt_finds(adapted: Adapted, model_folder: Path) -> None:
    body = chat(words(300), model=NAME)
    salt = Tenants({}, SECRET).salt(Tenant("team-a"))
    with adapted.gateway(model_folder) as gateway:
        first = ask(gateway, body)
        assert first.own == first.pool == first.cached == 0
        eventually(lambda: adapted.holds(adapted.keys(body, salt, adapted.adapter)), "every block is in the store")
        again = ask(gateway, body)
        assert again.own == again.cached > 0
        assert again.text == first.text
        plain = ask(gateway, body | {"model": "tiny"})
        assert plain.own == plain.pool == plain.cached == 0, "the base model shares no block with its adapter"
        assert plain.text != first.text
        assert metric(gateway.url, "moongate_inexact_total") == 0
    with adapted.gateway(model_folder) as gateway:
        pooled = ask(gateway, body)
        assert pooled.own == 0, "a gateway that is new knows of the pool only"
        assert pooled.pool == pooled.cached == again.cached


def test_the_engine_is_of_a_release_that_is_known(adapted: Adapted) -> None:
    version = httpx.get(f"{adapted.engine.url}/version", trust_env=False).json()["version"]
    assert hashing_of(version) is not None


def ask(gateway: Gateway, body: dict[str, object]) -> Answered:
    answer = post(gateway.url, CHAT, body, KEYS["team-a"])
    assert answer.status == httpx.codes.OK
    return answer
