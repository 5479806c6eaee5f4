"""The real model and the real pool, once per run; without them every test here is skipped."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from .stack import Gateway, Pool, missing, start_gateway, start_pool, tiny_model
from .watch import Watch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    reason = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.real)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


TRIES = 3
_asked_again: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test once the engines answer at once, and again if it failed while the machine stood still."""
    watch = pyfuncitem.funcargs.get("watch")
    if not isinstance(watch, Watch) or inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for last in range(TRIES):
        watch.wait_until_well()
        before = watch.troubles()
        try:
            pyfuncitem.obj(**arguments)
        except Exception:
            if last == TRIES - 1 or not watch.grew(before):
                raise
            _asked_again.append(pyfuncitem.name)
        else:
            break
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in _asked_again:
        terminalreporter.write_line(f"{name} was run again: an engine stood still, or its store client gave up")
    skipped = terminalreporter.stats.get("skipped", [])
    if (reason := missing()) and any("real" in report.keywords for report in skipped):
        terminalreporter.write_line(f"tests/real was skipped: {reason}")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return tiny_model()


@pytest.fixture(scope="session")
def pool(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A master and two engines, both serving the model `tiny` and sharing one store."""
    with start_pool(model_folder, tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="session")
def watch(pool: Pool) -> Iterator[Watch]:
    with Watch(pool.engines) as watch:
        yield watch


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> None:
    """Every test on the pool is watched."""
    if "pool" in request.fixturenames or "gateway" in request.fixturenames or "serve" in request.fixturenames:
        request.node.funcargs["watch"] = request.getfixturevalue("watch")


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
        "self_check": {"audit_every": 0, "calibrate": False},  # its prompts would count in the engines' counters
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
