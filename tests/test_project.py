"""The project about itself: the README's map and tables, the policies, the dependencies."""

import re
import tomllib
from pathlib import Path

import pytest

from policies.conformance import conform
from policies.load import BUILT_IN
from tests.readme import README, with_tables

ROOT = README.parent
ROOMS = ("gateway", "policies", "connector")


def modules() -> set[str]:
    found = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    return {name for name in found if not name.endswith("__init__.py")}


def test_the_map_names_every_module_and_no_other() -> None:
    text = README.read_text().split("## The map")[1].split("\n## ")[0].replace("\\_", "_")
    assert set(re.findall(r"(?:gateway|policies|connector)/[\w/]+\.py", text)) == modules()


def test_the_tables_are_as_the_code_has_them() -> None:
    assert README.read_text() == with_tables(README.read_text()), "run: python -m tests.readme"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_policy_conforms_and_is_told_of(name: str) -> None:
    conform(BUILT_IN[name])
    assert f"\n| {name} |" in README.read_text()


def test_every_dependency_has_a_lower_bound_and_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    for requirement in project["dependencies"]:
        assert ">=" in requirement
        assert re.search(rf'"{re.escape(requirement)}",\s+# \w', text), f"{requirement} gives no reason"
    for requirements in project["optional-dependencies"].values():
        assert all(">=" in requirement for requirement in requirements)


def test_every_script_says_what_it_does() -> None:
    for script in (ROOT / "deploy").iterdir():
        assert script.stat().st_mode & 0o111, f"{script.name} cannot be run"
        assert script.read_text().splitlines()[1].startswith("# ")


def test_the_top_level_holds_what_it_should() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {name for name in names if not name.endswith(".egg-info")} <= {
        "gateway",
        "policies",
        "connector",
        "tests",
        "deploy",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert Path(ROOT / ".ci" / "run").exists()
