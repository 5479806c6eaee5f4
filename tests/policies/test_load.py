"""A name and settings to a policy, or to an error that says what would be right."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from policies import load as module
from policies.cache_aware import CacheAware
from policies.conformance import conform
from policies.cost import Cost
from policies.disaggregated import Disaggregated
from policies.interface import Policy
from policies.least_loaded import LeastLoaded
from policies.load import BUILT_IN, BadPolicy, load
from policies.round_robin import RoundRobin
from policies.session import Session
from tests.policies.scenes import chosen, engine, job


def refused(use: str, settings: Mapping[str, object] | None = None) -> str:
    with pytest.raises(BadPolicy) as caught:
        load(use, settings or {})
    return str(caught.value)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of somebody else's, `shop`."""
    found = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", found)
    return found


# names


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        ("round_robin", RoundRobin),
        ("least_loaded", LeastLoaded),
        ("session", Session),
        ("cache_aware", CacheAware),
        ("cost", Cost),
        ("disaggregated", Disaggregated),
    ],
)
def test_ours_by_name(use: str, kind: type) -> None:
    assert type(load(use, {})) is kind
    assert len(BUILT_IN) == 6, "a new one is named above"


def test_each_load_makes_a_fresh_one() -> None:
    assert load("round_robin", {}) is not load("round_robin", {})


@pytest.mark.parametrize(
    ("use", "near"),
    [
        ("roundrobin", "round_robin"),
        ("least_load", "least_loaded"),
        ("cache-aware", "cache_aware"),
        ("disagg", "disaggregated"),
    ],
)
def test_a_name_that_is_nearly_right(use: str, near: str) -> None:
    assert refused(use) == f"there is no policy {use!r}; did you mean {near!r}?"


@pytest.mark.parametrize("use", ["", "zzz"])
def test_a_name_that_is_nothing_like_it(use: str) -> None:
    assert refused(use).endswith("known: cache_aware, cost, disaggregated, least_loaded, round_robin, session")


# a class of any module


def test_a_class_of_a_module() -> None:
    policy = load("policies.least_loaded:LeastLoaded", {"request_tokens": 7})

    assert isinstance(policy, LeastLoaded)
    assert chosen(policy, 1, [engine("a", requests=2), engine("b", tokens=15)]) == "a"


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("no_such_module:Policy", "No module named 'no_such_module'"),
        ("policies.least_loaded:MostLoaded", "has no attribute 'MostLoaded'"),
        ("policies.least_loaded:", "has no attribute"),
        (":LeastLoaded", "Empty module name"),
        (".least_loaded:LeastLoaded", "relative import"),
        (":", "Empty module name"),
        ("a:b:c", "No module named 'a'"),
    ],
)
def test_what_cannot_be_imported(use: str, says: str) -> None:
    message = refused(use)

    assert message.startswith(f"policy {use!r} cannot be imported: ")
    assert says in message


@pytest.mark.parametrize("use", ["sys:path", "sys:maxsize", "policies:__doc__"])
def test_what_cannot_be_called(use: str) -> None:
    assert "is not a callable object" in refused(use)


class NoObserve:
    def place(self) -> None: ...


class NoPlace:
    place = None

    def observe(self) -> None: ...


@pytest.mark.parametrize(("kind", "method"), [(NoObserve, "observe"), (NoPlace, "place")])
def test_what_is_no_policy(shop: ModuleType, kind: type, method: str) -> None:
    vars(shop)["Kind"] = kind

    assert refused("shop:Kind") == f"policy 'shop:Kind' has no method {method}()"


# installed policies


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(**points: str) -> None:
        found = [importlib.metadata.EntryPoint(name, value, module.GROUP) for name, value in points.items()]

        def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
            assert group == "moongate.policies"
            return found

        monkeypatch.setattr(module, "entry_points", entry_points)

    return put


def test_an_installed_policy(install: Callable[..., None]) -> None:
    install(mine="policies.least_loaded:LeastLoaded")

    assert isinstance(load("mine", {"request_tokens": 1}), LeastLoaded)


def test_an_installed_policy_is_among_the_known(install: Callable[..., None]) -> None:
    install(moonshot="policies.least_loaded:LeastLoaded")

    assert "did you mean 'moonshot'?" in refused("moonshots")
    assert "moonshot" in refused("zzz")


def test_an_installed_policy_does_not_take_the_place_of_ours(install: Callable[..., None]) -> None:
    install(round_robin="policies.least_loaded:LeastLoaded")

    assert isinstance(load("round_robin", {}), RoundRobin)


@pytest.mark.parametrize("value", ["no_such_module:Policy", "policies.least_loaded:MostLoaded"])
def test_an_installed_policy_that_is_broken(install: Callable[..., None], value: str) -> None:
    install(mine=value)

    assert refused("mine").startswith(f"policy 'mine' of {value} cannot be imported: ")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a policy of a package of somebody else's, really installed, in a place of its own."""
    package, target = tmp_path / "package", tmp_path / "site-packages"
    shutil.copytree(Path(__file__).parent / "example_package", package)
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    command = (sys.executable, "-m", "pip", "install", *quiet, *offline, "--target", target, package)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(target)
    monkeypatch.setitem(sys.modules, "moongate_fewest_requests", None)  # so that it is forgotten afterwards
    del sys.modules["moongate_fewest_requests"]
    return "fewest_requests"


def test_an_installed_package_offers_its_policy(example: str) -> None:
    fleet = [engine("a", requests=3), engine("b", requests=2), engine("c", requests=3, own=64)]

    assert chosen(load(example, {}), 1, fleet) == "b"
    assert chosen(load(example, {"slack": 1}), 1, fleet) == "c"
    assert "slack: Input should be a valid integer" in refused(example, {"slack": "1"})
    assert "did you mean 'fewest_requests'?" in refused("fewest_request")
    conform(lambda: load(example, {"slack": 2}))


# settings


@pytest.mark.parametrize(
    ("use", "settings", "says"),
    [
        ("disaggregated", {"min_prefill": 3}, "unexpected keyword argument 'min_prefill'"),
        ("round_robin", {"turns": 3}, "unexpected keyword argument 'turns'"),
        ("least_loaded", {"request_tokens": "256"}, "request_tokens: Input should be a valid integer, not '256'"),
        ("least_loaded", {"request_tokens": 2.5}, "request_tokens: Input should be a valid integer, not 2.5"),
        ("least_loaded", {"request_tokens": True}, "request_tokens: Input should be a valid integer, not True"),
        ("least_loaded", {"request_tokens": None}, "request_tokens: Input should be a valid integer, not None"),
        ("cache_aware", {"queue_share": "0.5"}, "queue_share: Input should be a valid number, not '0.5'"),
        ("cache_aware", {"load_share": [1]}, "load_share: Input should be a valid number, not [1]"),
        ("session", {"by": "cookie"}, "by: Input should be 'header', 'tenant' or 'prefix', not 'cookie'"),
        ("session", {"capacity": 0.9}, "capacity must be at least 1"),
    ],
)
def test_settings_that_do_not_fit(use: str, settings: dict[str, object], says: str) -> None:
    message = refused(use, settings)

    assert message.startswith(f"policy {use!r} does not take these settings: ")
    assert says in message


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        ("least_loaded", {"request_tokens": 1}),
        ("least_loaded", {"warm": 5}),
        ("session", {"by": "prefix", "capacity": 2, "prefix_tokens": 4096, "at_least": 1}),
        ("cache_aware", {"load_share": 1, "queue_share": 0.25, "request_tokens": 2, "stay_tokens": 0, "warm": 0}),
        ("disaggregated", {"min_prefill_tokens": 0}),
    ],
)
def test_settings_that_fit(use: str, settings: dict[str, object]) -> None:
    assert load(use, settings).place(job(), [engine("a")]).engine == "a"


class Plain(RoundRobin):
    def __init__(self, beta, *, gamma: "int" = 1) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 -- as others may
        super().__init__()
        if beta == "bad":
            raise ValueError("beta must be good")
        self.beta, self.gamma = beta, gamma


class Unreadable(RoundRobin):
    def __init__(self, beta: "OnlyATypeCheckerKnows") -> None:  # type: ignore[name-defined]  # noqa: F821
        super().__init__()
        self.beta = beta


def make(beta: int, **others: Any) -> Policy:
    return Plain(beta, **others)


@pytest.mark.parametrize(
    ("maker", "settings", "says"),
    [
        (Plain, {}, "missing a required argument: 'beta'"),
        (Plain, {"beta": "bad"}, "beta must be good"),
        (Plain, {"beta": 1, "gamma": "2"}, "gamma: Input should be a valid integer"),
        (make, {"beta": "1"}, "beta: Input should be a valid integer"),
        (partial(make, gamma=2), {"beta": "1"}, "beta: Input should be a valid integer"),
        (make, {"beta": 1, "delta": 2}, "unexpected keyword argument 'delta'"),
    ],
)
def test_settings_that_do_not_fit_somebody_elses(
    shop: ModuleType, maker: object, settings: dict[str, object], says: str
) -> None:
    vars(shop)["Mine"] = maker

    assert says in refused("shop:Mine", settings)


@pytest.mark.parametrize(
    ("maker", "settings"),
    [
        (Plain, {"beta": object()}),
        (Plain, {"beta": 1, "gamma": 2}),
        (Unreadable, {"beta": "anything"}),
        (make, {"beta": 1, "gamma": 2}),
        (partial(make, 1), {}),
        (partial(make, gamma=2), {"beta": 1}),
    ],
)
def test_settings_that_fit_somebody_elses(shop: ModuleType, maker: object, settings: dict[str, object]) -> None:
    vars(shop)["Mine"] = maker

    assert isinstance(load("shop:Mine", settings), RoundRobin)
