"""A name, an entry point or "module:Class", plus settings, to a policy or a clear error.

Settings are checked against the annotations of the policy's constructor, so that "64" for an int is
refused here and not met by the first request.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points

from pydantic import ConfigDict, TypeAdapter, ValidationError

from policies.cache_aware import CacheAware
from policies.cost import Cost
from policies.disaggregated import Disaggregated
from policies.interface import Policy
from policies.least_loaded import LeastLoaded
from policies.round_robin import RoundRobin
from policies.session import Session

BUILT_IN: dict[str, Callable[..., Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": Session,
    "cache_aware": CacheAware,
    "cost": Cost,
    "disaggregated": Disaggregated,
}
GROUP = "moongate.policies"
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


class BadPolicy(Exception):
    """The policy's name or settings are wrong; the message says what would be right."""


def load(use: str, settings: Mapping[str, object]) -> Policy:
    """Make the policy called `use`. Raises `BadPolicy`."""
    maker = _find(use)
    try:
        inspect.signature(maker).bind(**settings)
        _check(maker, settings)
        policy = maker(**settings)
    except (TypeError, ValueError) as error:
        raise BadPolicy(f"policy {use!r} does not take these settings: {error}") from error
    for method in ("place", "observe"):
        if not callable(getattr(policy, method, None)):
            raise BadPolicy(f"policy {use!r} has no method {method}()")
    return policy


def _check(maker: Callable[..., Policy], settings: Mapping[str, object]) -> None:
    try:
        parameters = inspect.signature(maker, eval_str=True).parameters
    except NameError:  # an annotation that only a type checker can read
        return
    for name, value in settings.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.annotation is parameter.empty:
            continue
        try:
            TypeAdapter[object](parameter.annotation, config=_STRICT).validate_python(value)
        except ValidationError as error:
            raise TypeError(f"{name}: {error.errors()[0]['msg']}, not {value!r}") from error


def _find(use: str) -> Callable[..., Policy]:
    if use in BUILT_IN:
        return BUILT_IN[use]
    if ":" in use:
        module, _, name = use.partition(":")
        try:
            found: Callable[..., Policy] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise BadPolicy(f"policy {use!r} cannot be imported: {error}") from error
        return found
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if use in installed:
        try:
            plugin: Callable[..., Policy] = installed[use].load()
        except (ImportError, AttributeError) as error:
            raise BadPolicy(f"policy {use!r} of {installed[use].value} cannot be imported: {error}") from error
        return plugin
    known = sorted({*BUILT_IN, *installed})
    near = get_close_matches(use, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise BadPolicy(f"there is no policy {use!r}; {hint}")
