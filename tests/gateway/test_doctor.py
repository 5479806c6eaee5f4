"""`moongate doctor` against simulated engines over a real Mooncake master: what is wrong on purpose is named."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from connector.simulated.model import NAME, make
from gateway import commands
from gateway.__main__ import main
from gateway.commands import EngineFlags, NotInstalled
from gateway.processes import Child, free_port

SECRET, KEY, ENGINE_KEY = "canary-secret", "canary-key", "canary-engine-key"


def installed() -> bool:
    try:
        commands.master(1, 2)
    except NotInstalled:
        return False
    return True


pytestmark = pytest.mark.skipif(not installed(), reason="mooncake_master is not installed (the extra `pool`)")


@dataclass(frozen=True)
class Pool:
    """A master, and the model folder that everybody has."""

    folder: Path
    model: Path
    rpc: str
    admin: str
    stack: ExitStack

    def engine(self, *more: str, model: Path | None = None, wait: bool = True, **changes: Any) -> "Engine":
        """A simulated engine, with these flags more."""
        flags = EngineFlags(
            **{
                "model": model or self.model,
                "name": NAME,
                "port": free_port(),
                "master": self.rpc,
                "events_port": free_port(),
                "more": ("--time-scale", "0", *more),
                **changes,
            }
        )
        folder = self.folder / f"engine-{flags.port}"
        folder.mkdir()
        child = Child("engine", commands.simulated(flags), folder, dict(os.environ))
        self.stack.callback(child.kill)
        engine = Engine(child, f"127.0.0.1:{flags.port}", f"tcp://127.0.0.1:{flags.events_port}")
        return engine.ready() if wait else engine


@dataclass(frozen=True)
class Engine:
    child: Child
    id: str
    events: str

    def ready(self) -> "Engine":
        self.child.wait_for(f"http://{self.id}/health", 60)
        return self

    def setting(self, **changes: Any) -> dict[str, Any]:
        return {"url": f"http://{self.id}", "model": NAME, "kv_events": {"connect": self.events}} | changes


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("doctor")
    rpc, admin = free_port(), free_port()
    with ExitStack() as stack:
        master = Child("master", commands.master(rpc, admin), folder, dict(os.environ))
        stack.callback(master.kill)
        master.wait_for(f"http://127.0.0.1:{admin}/health", 30)
        yield Pool(folder, make(folder / NAME), f"127.0.0.1:{rpc}", f"http://127.0.0.1:{admin}", stack)


@dataclass(frozen=True)
class Fleet:
    """Engines that differ, started side by side, since each takes seconds."""

    pool: Pool
    right: Engine
    seed: Engine
    algorithm: Engine
    blocks: Engine
    prefix: Engine
    template: Engine
    numbers: Engine
    untagged: Engine
    random: Engine
    unknown: Engine
    decodes: Engine
    finds_nothing: Engine


@pytest.fixture(scope="module")
def fleet(pool: Pool) -> Fleet:
    template = (pool.model / "chat_template.jinja").read_text()
    changed = template.replace("'<|im_start|>' + message.role", "'<|im_start|>' + 'the ' + message.role")
    assert changed != template
    (pool.folder / "other.jinja").write_text(changed)
    engines = [
        pool.engine("--lora", "chef=/adapters/chef", wait=False),
        pool.engine("--hash-seed", "42", "--lora", "chef=/elsewhere/chef", wait=False),
        pool.engine("--prefix-caching-hash-algo", "sha256", wait=False),
        pool.engine(block_size=64, wait=False),
        pool.engine("--cache-prefix", "blue", wait=False),
        pool.engine("--chat-template", str(pool.folder / "other.jinja"), "--enable-scale-out", wait=False),
        pool.engine("--int-block-hashes", "--enable-scale-out", wait=False),
        pool.engine("--vllm-version", "0.30.0", "--dev-mode", wait=False),
        pool.engine("--vllm-version", "0.28.0", wait=False),
        pool.engine("--vllm-version", "0.99.0", wait=False),
        pool.engine(role="decode", wait=False),
        pool.engine("--hash-seed", "42", role="decode", wait=False),
    ]
    with ThreadPoolExecutor() as threads:
        return Fleet(pool, *threads.map(Engine.ready, engines))


def written(folder: Path, pool: Pool, engines: Sequence[dict[str, Any]], /, **model: Any) -> str:
    tree = {
        "secret": SECRET,
        "pools": {"main": {"admin": [pool.admin]}},
        "models": [{"name": NAME, "tokenizer": str(pool.model), "pool": "main"} | model],
        "engines": {"static": [{"api_key": ENGINE_KEY} | engine for engine in engines]},
        "tenants": [{"name": "a", "keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}],
    }
    path = folder / "moongate.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def doctor(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["doctor", "--timeout", "2", *arguments])
    assert "canary" not in result.output + result.stderr
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def wrong(result: Result) -> dict[tuple[str, str], dict[str, str]]:
    """What is wrong, by subject and topic, out of the JSON."""
    tree = json.loads(result.stdout)
    found = {(one["subject"], one["topic"]): one for one in tree["checks"] if one["level"] == "wrong"}
    assert tree["healthy"] == (not found)
    assert result.exit_code == (1 if found else 0)
    assert all(one["says"] and one["fix"] for one in found.values())
    return found


def test_engines_that_do_as_believed(fleet: Fleet, tmp_path: Path) -> None:
    path = written(tmp_path, fleet.pool, [fleet.right.setting(), fleet.numbers.setting()])
    result = doctor(path)
    assert result.exit_code == 0, result.output
    assert "everything agrees" in result.output
    row = next(line for line in result.output.splitlines() if line.startswith(fleet.right.id))
    assert "sha256_cbor 32" in row
    assert "whole" in row
    assert f"{fleet.numbers.id} answers render and generate requests" in result.output
    assert "warnings: 1" in result.output
    assert f"{fleet.numbers.id} writes 64 bits of each hash" in result.output
    assert "cannot be seen from here" in result.output
    assert not wrong(doctor(path, "--json"))


@pytest.mark.parametrize(
    ("name", "topic", "word", "says", "fix"),
    [
        ("seed", "hashes", "seed", "has PYTHONHASHSEED=42", 'set models[].hash_seed to "42"'),
        ("algorithm", "hashes", "algorithm", "hashes with sha256, not sha256_cbor", "--prefix-caching-hash-algo"),
        ("blocks", "hashes", "block size", "has blocks of 64 tokens, not 32", "--block-size 32"),
        ("prefix", "keys", "key prefix", f"names its blocks blue@{NAME}@...", f"models[].keys.prefix to blue@{NAME}"),
        ("template", "tokens", "template", "renders chats with another template", "models[].chat"),
    ],
)
def test_one_engine_of_two_does_otherwise(
    fleet: Fleet, tmp_path: Path, name: str, topic: str, word: str, says: str, fix: str
) -> None:
    engine: Engine = getattr(fleet, name)
    config = {"hash": "sha256_cbor", "block_size": 32, "keys": {"prefix": NAME}}
    found = wrong(doctor(written(tmp_path, fleet.pool, [fleet.right.setting(), engine.setting()], **config), "--json"))
    check = found.pop((engine.id, topic))
    assert check["word"] == word
    assert says in check["says"]
    assert fix in check["fix"]
    assert set(found) <= {(f"model {NAME}", "fleet")}, "nothing is said of the other engine"
    assert bool(found) == (topic != "tokens")


@pytest.mark.parametrize(
    ("believed", "word"),
    [
        ({"hash_seed": "7"}, "seed"),
        ({"hash": "xxhash", "hash_seed": "7"}, "algorithm"),
        ({"hash": "xxhash"}, "algorithm"),
        ({"block_size": 16}, "block size"),
        ({"block_size": 128}, "block size"),
    ],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_a_configuration_that_is_wrong(
    fleet: Fleet, tmp_path: Path, believed: dict[str, Any], word: str, pooled: bool
) -> None:
    """With a pool its keys show it, without one the engine's events and its own words do."""
    alone = {} if pooled else {"pool": None}
    found = wrong(doctor(written(tmp_path, fleet.pool, [fleet.right.setting()], **believed, **alone), "--json"))
    assert found.keys() == {(fleet.right.id, "hashes")}
    assert found[fleet.right.id, "hashes"]["word"] == word


def test_an_engine_of_an_unknown_release_that_hashes_as_known_ones_do(fleet: Fleet, tmp_path: Path) -> None:
    path = written(tmp_path, fleet.pool, [fleet.unknown.setting()])
    assert not wrong(doctor(path, "--json"))
    assert "is vLLM 0.99.0, whose way of hashing is not known here" in doctor(path).output


def test_another_key_prefix_is_learned_where_none_is_configured(fleet: Fleet, tmp_path: Path) -> None:
    path = written(tmp_path, fleet.pool, [fleet.prefix.setting()])
    assert not wrong(doctor(path, "--json"))
    assert f"names its blocks blue@{NAME}@..., which the gateway learns by itself" in doctor(path).output


@pytest.mark.parametrize(
    ("name", "word", "fix"),
    [("numbers", None, ""), ("right", "no", "--enable-scale-out"), ("template", "differs", "the model and the flags")],
)
def test_a_server_that_renders(fleet: Fleet, tmp_path: Path, name: str, word: str | None, fix: str) -> None:
    render = {"url": f"http://{getattr(fleet, name).id}", "deadline_ms": 2000}
    found = wrong(doctor(written(tmp_path, fleet.pool, [fleet.right.setting()], render=render), "--json"))
    assert [(one["topic"], one["word"]) for one in found.values()] == ([("render", word)] if word else [])
    assert all(fix in one["fix"] for one in found.values())


def test_an_adapter_at_two_paths(fleet: Fleet, tmp_path: Path) -> None:
    path = written(tmp_path, fleet.pool, [fleet.right.setting(), fleet.seed.setting()])
    tree = json.loads(doctor(path, "--json").stdout)
    says = next(check["says"] for check in tree["checks"] if check["word"] == "adapter paths")
    assert "chef at different paths" in says
    assert f"/elsewhere/chef on {fleet.seed.id}" in says


def test_an_engine_from_before_tags(fleet: Fleet, tmp_path: Path) -> None:
    """Alone it is believed to hash as it does; beside a newer one it shares nothing."""
    alone = wrong(doctor(written(tmp_path, fleet.pool, [fleet.untagged.setting()]), "--json"))
    assert alone.keys() == {(fleet.untagged.id, "safety")}
    assert "erase the whole pool" in alone[fleet.untagged.id, "safety"]["says"]
    taken = wrong(doctor(written(tmp_path, fleet.pool, [fleet.untagged.setting()], vllm="0.32"), "--json"))
    assert taken[fleet.untagged.id, "hashes"]["word"] == "tagging"
    assert "untagged, as vLLM before 0.31 does" in taken[fleet.untagged.id, "hashes"]["says"]
    both = wrong(doctor(written(tmp_path, fleet.pool, [fleet.right.setting(), fleet.untagged.setting()]), "--json"))
    assert both[f"model {NAME}", "fleet"]["word"] == "ways to hash salts"
    assert f"untagged on {fleet.untagged.id}" in both[f"model {NAME}", "fleet"]["says"]


def test_an_engine_that_draws_its_root(fleet: Fleet, tmp_path: Path) -> None:
    found = wrong(doctor(written(tmp_path, fleet.pool, [fleet.random.setting()]), "--json"))
    assert found.keys() == {(fleet.random.id, "hashes")}
    assert found[fleet.random.id, "hashes"]["word"] == "random seed"


def test_engines_that_only_decode_must_find_what_others_store(fleet: Fleet, tmp_path: Path) -> None:
    engines = [
        fleet.right.setting(),
        fleet.decodes.setting(role="decode", kv_events=None),
        fleet.finds_nothing.setting(role="decode", kv_events=None),
    ]
    found = wrong(doctor(written(tmp_path, fleet.pool, engines), "--json"))
    assert found.keys() == {(fleet.finds_nothing.id, "keys")}
    assert found[fleet.finds_nothing.id, "keys"]["word"] == "loads none"
    stores_nothing = wrong(doctor(written(tmp_path, fleet.pool, [fleet.decodes.setting()]), "--json"))
    assert stores_nothing[fleet.decodes.id, "keys"]["word"] == "not stored"


def test_events_alone_show_an_engines_seed(fleet: Fleet, tmp_path: Path) -> None:
    found = wrong(doctor(written(tmp_path, fleet.pool, [fleet.seed.setting()], pool=None), "--json"))
    assert "PYTHONHASHSEED=42" in found[fleet.seed.id, "hashes"]["says"]


def test_nothing_where_it_should_be(fleet: Fleet, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nobody = {"url": f"http://127.0.0.1:{port}", "model": NAME}
    deaf = fleet.right.setting(kv_events={"connect": f"tcp://127.0.0.1:{port}"})
    bound = fleet.numbers.setting(kv_events={"bind": f"tcp://127.0.0.1:{free_port()}"})
    path = written(tmp_path, fleet.pool, [nobody, deaf, bound])
    tree = yaml.safe_load(Path(path).read_text())
    tree["pools"]["main"]["admin"] = [f"http://{fleet.pool.rpc}"]
    Path(path).write_text(yaml.safe_dump(tree))
    found = wrong(doctor(path, "--json"))
    assert "cannot be reached" in found[f"127.0.0.1:{port}", "reachable"]["says"]
    assert "publishes its events at port" in found[fleet.right.id, "events"]["says"]
    assert "waits for it to connect" in found[fleet.numbers.id, "events"]["says"]
    assert "--metrics_port" in found["pool main", "reachable"]["fix"]
    assert found[fleet.right.id, "keys"]["word"] == "pool unreachable"


def test_a_configuration_that_cannot_be_used_is_2(tmp_path: Path, pool: Pool) -> None:
    for path in (str(tmp_path / "nowhere.yaml"), written(tmp_path, pool, [], tokenizer="/nowhere")):
        result = doctor(path)
        assert result.exit_code == 2
        assert "Error: " in result.output
        assert "Traceback" not in result.output


def test_help_gives_an_example() -> None:
    assert "Example: moongate doctor" in CliRunner().invoke(main, ["doctor", "--help"]).output
