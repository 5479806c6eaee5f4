"""The real model and the real pool, once per run; without them every test here is skipped.

The model is made once and kept in `.model`, until make_model.py changes.
"""

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from .stack import ENGINE_PYTHON, Gateway, Pool, missing, start_gateway, start_pool

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "make_model.py"
MODEL = HERE / ".model" / "tiny"


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


KEYS = {"team-a": "key-of-team-a", "team-b": "key-of-team-b"}
SECRET = "a secret for tests"

Serve = Callable[..., Gateway]


def tenants() -> list[dict[str, object]]:
    """The tenants of a configuration, with the keys of KEYS."""
    return [
        {"name": name, "keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]} for name, key in KEYS.items()
    ]


def settings(
    pool: Pool,
    model: Path,
    *,
    policy: str = "cache_aware",
    roles: Sequence[str] = ("both", "both"),
    **sections: object,
) -> dict[str, object]:
    """A gateway's configuration over the pool; `sections` replace whole sections of it."""
    engines = [{"url": url, "model": "tiny", "role": role} for url, role in zip(pool.urls, roles, strict=False)]
    return {
        "secret": SECRET,
        "pools": {"main": {"admin": [pool.master.admin], "deadline_ms": 1000}},
        "models": [{"name": "tiny", "tokenizer": str(model), "pool": "main"}],
        "engines": {"static": engines},
        "policy": {"use": policy},
        "tenants": tenants(),
        "telemetry": {"expose_routing": True},
    } | sections


@pytest.fixture(scope="module")
def serve(pool: Pool, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start gateways over the pool; they end with the module."""
    with ExitStack() as stop:

        def start(**changes: object) -> Gateway:
            config = settings(pool, model_folder, **changes)  # type: ignore[arg-type]
            return stop.enter_context(start_gateway(config, tmp_path_factory.mktemp("gateway")))

        yield start


@pytest.fixture(scope="module")
def gateway(serve: Serve) -> Gateway:
    """A gateway with two tenants, the policy cache_aware, and both engines for everything."""
    return serve()
