"""Keys agree with engines that hash in other ways; one engine for each way, so this takes minutes."""

from pathlib import Path

import pytest

from connector.blocks import Algorithm, HashScheme, hash_prompt
from connector.keys import KeyScheme
from connector.tokens import Tokenizer
from gateway.tenants import Tenant, Tenants

from .ask import CHAT, chat, eventually, metric, post, words
from .conftest import KEYS, SECRET, tenants
from .stack import start_engine, start_gateway, start_master


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "seed", "block_size"),
    [("sha256", None, 32), ("sha256", 7, 64), ("sha256_cbor", 42, 32), ("xxhash", 7, 32), ("xxhash_cbor", 0, 64)],
)
def test_keys_agree(model_folder: Path, tmp_path: Path, algorithm: str, seed: int | None, block_size: int) -> None:
    with (
        start_master(tmp_path) as master,
        start_engine(
            model_folder,
            "engine",
            master,
            folder=tmp_path,
            algorithm=algorithm,
            hash_seed=seed,
            block_size=block_size,
            extra_config={"cache_prefix": "blue"},
        ).ready() as engine,
    ):
        config = settings_for(model_folder, master.admin, engine.url, seed)
        with start_gateway(config, tmp_path) as gateway:
            body = chat(words(500))
            tokens = Tokenizer(model_folder).chat(body)
            post(gateway.url, CHAT, body, KEYS["team-a"])
            scheme = HashScheme(Algorithm(algorithm), block_size, None if seed is None else str(seed))
            salt = Tenants({}, SECRET).salt(Tenant("team-a"))
            wanted = {
                key
                for block in hash_prompt(tokens, scheme, salt=salt).hashes
                for key in KeyScheme.of("blue@tiny").keys(block)
            }
            eventually(lambda: set(master.keys()) == wanted, "the store holds exactly the keys we compute")
            again = post(gateway.url, CHAT, body, KEYS["team-a"])
            assert again.own == again.cached > 0
            assert metric(gateway.url, "moongate_inexact_total") == 0


def settings_for(model: Path, admin: str, url: str, seed: int | None) -> dict[str, object]:
    tiny = {"name": "tiny", "tokenizer": str(model), "pool": "main", "hash_seed": seed, "keys": {"prefix": "blue@tiny"}}
    return {
        "secret": SECRET,
        "pools": {"main": {"admin": [admin], "deadline_ms": 1000}},
        "models": [tiny],
        "engines": {"static": [{"url": url, "model": "tiny"}]},
        "tenants": tenants(),
        "telemetry": {"expose_routing": True},
    }
