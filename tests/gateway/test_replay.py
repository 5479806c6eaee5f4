"""The command: its tables, its JSON, its picture, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.__main__ import main

FEW = ("--engines", "2", "--sessions", "4", "--turns", "3", "--system-tokens", "500", "--first-tokens", "500")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", *arguments])


def cases(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["cases"]
    return found


def test_the_tables_have_a_row_for_each_case() -> None:
    result = run(
        "agent", *FEW, "--policy", "round_robin,cache_aware", "--compare", "pool=0,500", "--compare", "speed=1,2"
    )
    assert result.exit_code == 0, result.output
    seen, done, legend = result.stdout.split("\n\n")
    for table in (seen, done):
        head, *rows = table.splitlines()
        assert head.startswith("policy       pool  speed")
        assert len(rows) == 8
        assert rows[1].split()[:3] == ["cache_aware", "0", "1.0"]
    assert "predicted against found" in legend


def test_the_json_has_all_that_it_rests_on_and_is_the_same_each_time() -> None:
    one, other = (cases("agent", *FEW, "--seed", "3", "--slowed", "5:1:0.5") for _ in range(2))
    assert one == other
    case = one[1]
    assert (case["policy"], case["traffic"], case["scene"]["engines"]) == ("cache_aware", "agent", 2)
    assert case["agents"]["sessions"] == 4
    assert case["scene"]["slowed"] == [{"at": 5.0, "engine": 1, "factor": 0.5}]
    figures = case["figures"]
    assert figures["requests"] == 12
    for found in (figures["tokens"], figures["blocks"]):
        assert sum(found.values()) == pytest.approx(1.0)
    assert figures["saved_seconds"] * 8000 == pytest.approx(figures["tokens"]["own"] * figures["prompt_tokens"])
    for spread in (figures["ttft"], figures["e2e"]):
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"]


def test_a_trace_is_played(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    lines = [
        {"timestamp": at, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]} for at in (0, 5000)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    [case] = cases(str(path), "--policy", "cache_aware")
    assert case["traffic"] == "two"
    assert case["figures"]["tokens"] == {"own": 0.25, "pool": 0.0, "none": 0.75}  # one block of two, once


def test_a_folder_gets_figures_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("agent", *FEW, "--out", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "new" / "replay.json").read_text())["cases"]) == 2
    assert (tmp_path / "new" / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_what_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("agent", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "pip install 'moongate[replay]'" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl cannot be read"),
        (("agent", "--policy", "round_robbin"), "did you mean 'round_robin'"),
        (("agent", "--compare", "colour=1"), "these can: bandwidth"),
        (("agent", "--compare", "engines=two"), "not a valid integer"),
        (("agent", "--compare", "speed=0"), "range"),
        (("agent", "--engines", "0"), "no engine that can answer"),
        (("agent", "--lost", "1:2"), "SECOND:SHARE"),
        (("agent", "--slowed", "1:1"), "SECOND:ENGINE:FACTOR"),
    ],
)
def test_what_cannot_be_is_told(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert says in " ".join(result.output.split())


def test_help_gives_an_example() -> None:
    assert "Example: moongate replay agent" in run("--help").output
