import hashlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gateway.__main__ import main

KEY = "sk-canary"
TREE: dict[str, Any] = {
    "secret": "canary-secret",
    "models": [{"name": "tiny"}],
    "tenants": [{"name": "a", "keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def written(folder: Path, tree: object) -> str:
    path = folder / "moongate.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("arguments", [["-h"], ["serve", "--help"], ["check", "-h"], ["--version"]])
def test_help_needs_nothing(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.output


def test_help_gives_an_example() -> None:
    for command in ("serve", "check"):
        assert f"Example: moongate {command}" in run(command, "--help").output


def test_check_prints_the_tree_without_secrets(tmp_path: Path) -> None:
    path = written(tmp_path, TREE)
    as_yaml, as_json = run("check", path), run("check", path, "--json")
    assert as_yaml.exit_code == as_json.exit_code == 0
    assert yaml.safe_load(as_yaml.stdout) == json.loads(as_json.stdout)
    assert json.loads(as_json.stdout)["listen"]["port"] == 8000
    for text in (as_yaml.output, as_json.output):
        assert "canary" not in text
        assert TREE["tenants"][0]["keys"][0]["sha256"] not in text


@pytest.mark.parametrize("command", [["check"], ["serve", "--config"]])
@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (TREE | {"listn": {}}, "did you mean 'listen'?"),
        ({}, "models: Field required"),
        ("a: [", "not YAML"),
        ("", "must hold a mapping"),
    ],
)
def test_a_fault_is_one_clear_message(tmp_path: Path, command: list[str], tree: object, words: str) -> None:
    result = run(*command, written(tmp_path, tree))
    assert result.exit_code == 1
    assert words in result.output
    assert result.output.startswith("Error: ")
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_file_that_is_not_there() -> None:
    result = run("check", "/nowhere/moongate.yaml")
    assert result.exit_code == 1
    assert "cannot be read" in result.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": {"use": "least_loadd"}}, "did you mean 'least_loaded'?"),
        ({"policy": {"use": "least_loaded", "settings": {"x": 1}}}, "does not take these settings"),
        ({"policy": {"use": "nowhere:Policy"}}, "cannot be imported"),
        ({"models": [{"name": "tiny", "tokenizer": "/nowhere"}]}, "/nowhere"),
    ],
)
def test_what_serve_cannot_build(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    result = run("serve", "--config", written(tmp_path, TREE | changes))
    assert result.exit_code == 1
    assert words in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("arguments", [["serve"], ["check"], ["nothing"], ["check", "a", "b"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_serve_on_a_port_that_is_taken_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = written(tmp_path, TREE | {"listen": {"port": port}})
        ended = subprocess.run(
            [sys.executable, "-m", "gateway", "serve", "--config", path],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert ended.returncode not in (0, None)
    assert str(port) in ended.stderr
    assert "Address already in use" in ended.stderr
    assert "Traceback" not in ended.stderr
