"""The real model and the real pool, once per run; without them every test here is skipped.

The model is made once and kept in `.model`, until make_model.py changes.
"""

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .stack import ENGINE_PYTHON, Pool, missing, start_pool

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "make_model.py"
MODEL = HERE / ".model" / "tiny"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real: needs real vLLM engines and a Mooncake master")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    reason = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.real)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if (reason := missing()) and any("real" in report.keywords for report in skipped):
        terminalreporter.write_line(f"tests/real was skipped: {reason}")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """A tiny model that vLLM can serve."""
    stamp = MODEL.with_suffix(".recipe")
    recipe = hashlib.sha256(RECIPE.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != recipe:
        shutil.rmtree(MODEL, ignore_errors=True)
        subprocess.run([ENGINE_PYTHON, RECIPE, MODEL], check=True)
        stamp.write_text(recipe)
    return MODEL


@pytest.fixture(scope="session")
def pool(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A master and two engines, both serving the model `tiny` and sharing one store."""
    with start_pool(model_folder, tmp_path_factory.mktemp("pool")) as pool:
        yield pool
