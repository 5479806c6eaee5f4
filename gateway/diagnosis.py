"""A doctor's report, for people and for machines."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gateway.doctor import Report
from gateway.examination import Check, Topic

_COLUMNS: tuple[Topic, ...] = ("reachable", "version", "model", "tokens", "hashes", "keys", "events")


def lines(report: Report) -> Iterator[str]:
    """A table of the engines, then what is to be done, and what could not be seen."""
    rows = [("engine", "model's name", *_COLUMNS[:2], "serves it", *_COLUMNS[3:])]
    rows += [
        (engine, model, *(_cell(report, engine, topic) for topic in _COLUMNS))
        for engine, model in report.engines.items()
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for title, level in (("wrong", "wrong"), ("better otherwise", "warning"), ("to know", "note")):
        checks = [check for check in report.checks if check.level == level and check.says]
        if checks:
            yield ""
            yield f"{title}:"
        for check in checks:
            yield f"- {check.subject} {check.says}"
            if check.fix:
                yield f"    {check.fix}"
    yield ""
    yield "cannot be seen from here:"
    yield from (f"- {line}" for line in report.unseen)
    yield ""
    yield _summary(report)


def _cell(report: Report, engine: str, topic: Topic) -> str:
    """The gravest word that was found of an engine and a topic."""
    found = [check for check in report.checks if (check.subject, check.topic) == (engine, topic) and check.word]
    return max(found, key=_gravity).word if found else "-"


def _gravity(check: Check) -> int:
    return ("agrees", "note", "warning", "wrong").index(check.level)


def _summary(report: Report) -> str:
    wrong, warnings = (sum(check.level == level for check in report.checks) for level in ("wrong", "warning"))
    told = "everything agrees" if report.healthy else f"wrong: {wrong}"
    return f"{told}; warnings: {warnings}" if warnings else told


def tree(report: Report) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "healthy": report.healthy,
        "engines": dict(report.engines),
        "checks": [asdict(check) for check in report.checks],
        "unseen": list(report.unseen),
    }
