"""`moongate doctor` and a real engine: all agrees, and what is believed wrongly is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import SECRET, tenants
from .stack import Engine, Master, start_engine, start_master


@dataclass(frozen=True)
class Place:
    """An engine, its master, and the model's folder."""

    engine: Engine
    master: Master
    model: Path


@pytest.fixture(scope="module")
def place(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("doctor")
    with (
        start_master(folder) as master,
        start_engine(model_folder, "engine", master, folder=folder, events=True).ready() as engine,
    ):
        yield Place(engine, master, model_folder)


def doctor(place: Place, folder: Path, **model: object) -> tuple[int, list[dict[str, Any]], str]:
    """Its exit status, its checks that are not plain agreement, and all that it said."""
    tree = {
        "secret": SECRET,
        "pools": {"main": {"admin": [place.master.admin]}},
        "models": [{"name": "tiny", "tokenizer": str(place.model), "pool": "main"} | model],
        "engines": {
            "static": [{"url": place.engine.url, "model": "tiny", "kv_events": {"connect": place.engine.events}}]
        },
        "tenants": tenants(),
    }
    path = folder / "moongate.yaml"
    path.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "gateway", "doctor", str(path), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout, ended.stderr
    checks = json.loads(ended.stdout)["checks"]
    return ended.returncode, [check for check in checks if check["level"] != "agrees"], ended.stdout + ended.stderr


def test_all_agrees(place: Place, tmp_path: Path) -> None:
    status, checks, said = doctor(place, tmp_path)
    assert status == 0, said
    assert {check["level"] for check in checks} <= {"note"}, said
    assert SECRET not in said


def test_a_wrong_template_and_a_wrong_seed_are_named(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place.model, other)
    files = [path for path in other.iterdir() if path.name in ("chat_template.jinja", "tokenizer_config.json")]
    for path in files:
        path.write_text(path.read_text().replace("add_generation_prompt", "not messages"))
    status, checks, said = doctor(place, tmp_path, tokenizer=str(other), hash_seed="42")
    assert status == 1, said
    wrong = {check["topic"]: check for check in checks if check["level"] == "wrong"}
    assert wrong.keys() == {"tokens", "hashes"}, said
    assert wrong["tokens"]["word"] == "generation_prompt", said
    assert wrong["hashes"]["word"] == "seed", said
    assert "has no PYTHONHASHSEED" in wrong["hashes"]["says"]
