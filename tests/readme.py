"""The README's tables, made from the code that they describe.

python -m tests.readme     writes them into README.md; a test sees to it that this was done
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from connector.blocks import HASHING
from connector.wire import Timeouts
from gateway.config import Config
from gateway.fleet import Fleet
from gateway.gauges import engine_gauges, model_gauges, pool_gauges
from gateway.trace import Counts, Spread, Telemetry

README = Path(__file__).resolve().parents[1] / "README.md"


def settings() -> str:
    """A row for each setting, its default, and its docstring."""
    return "".join(f"| {name} | {default} | {meaning} |\n" for name, default, meaning in _settings(Config, ""))


def _settings(section: type[BaseModel], path: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            mark = "[]" if "list" in str(field.annotation) else ".NAME" if "dict" in str(field.annotation) else ""
            yield from _settings(inner, f"{path}{name}{mark}.")
        else:
            yield f"{path}{name}", _default(field), (field.description or "").replace("\n", " ").replace("|", "\\|")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone, in a list or by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section(part) for part in get_args(annotation))
    return next((section for section in inner if section is not None), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, list | dict):
        return "empty"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def metrics() -> str:
    """A row for each metric: those that a request moves, then the gauges of the engines."""
    moved = [metric for metric in vars(Telemetry()).values() if isinstance(metric, Counts | Spread)]
    rows = [
        f"| {m.name}{'_total' if isinstance(m, Counts) else ''} | {', '.join(m.labels)} | {m.text} |" for m in moved
    ]
    fleet = Fleet([], timeouts=Timeouts(), poll=1, clock=lambda: 0.0)
    rows += [f"| moongate_{name} | engine | {text} |" for name, (text, _) in engine_gauges(fleet).items()]
    rows += [f"| moongate_{name} | model | {text} |" for name, (text, _) in model_gauges({}, {}).items()]
    rows += [f"| moongate_{name} | pool | {text} |" for name, (text, _) in pool_gauges({}).items()]
    return "\n".join(rows) + "\n"


def releases() -> str:
    """A row for each release of vLLM whose hashes were checked."""
    return "".join(
        f"| {release} | {'name and path' if way.tagged else 'name'} | {'yes' if way.tagged else 'no'} "
        f"| {'sha256, sha256_cbor' if way.fixed_root else 'none'} |\n"
        for release, way in HASHING.items()
    )


def with_tables(text: str) -> str:
    """The README's text with its tables as the code has them."""
    for mark, rows in (("settings", settings()), ("releases", releases()), ("metrics", metrics())):
        begin, head, line, *_ = re.split(rf"(?<=<!-- {mark} -->\n)(.*\n)(.*\n)", text, maxsplit=1)
        _, end = text.split(f"<!-- /{mark} -->")
        text = f"{begin}{head}{line}{rows}<!-- /{mark} -->{end}"
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
