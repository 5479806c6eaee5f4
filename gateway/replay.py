"""`moongate replay`: what policies would do with a traffic, on a fleet of any size, in seconds and without engines.

Each case is a policy with one value of each thing that is compared; each is a run of gateway/simulation.py of its
own. The figures are of all requests, the first ones on cold caches included.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from gateway.simulation import Run, Scene, Simulation
from gateway.traffic import Agents, Traffic, read
from policies.load import load

AGENT = "agent"
"""In place of a trace's path: agents that are made up."""
SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


class NoPicture(Exception):
    """What draws is not installed; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run that is wanted."""

    policy: str
    compared: Mapping[str, Any]
    """The value of each thing that is compared, by its name."""
    scene: Scene
    agents: Agents
    traffic: Traffic

    @property
    def name(self) -> str:
        return ", ".join((self.policy, *(f"{name} {value}" for name, value in self.compared.items())))


@dataclass(frozen=True, slots=True)
class Found:
    """Where prompts came from; shares of all, 0 to 1."""

    own: float
    pool: float
    none: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds within which so many of a hundred were done."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to."""

    requests: int
    prompt_tokens: int
    tokens: Found
    blocks: Found
    ttft: Spread
    e2e: Spread
    prefill_seconds: float
    """Spent on prompts, by all engines."""
    saved_seconds: float
    """That what was found would have taken to compute."""
    load_seconds: float
    load_bytes: int
    evicted: int
    """Blocks of the engines' own caches."""
    pool_evicted: int
    pool_refused: int
    pool_lost: int
    balance: float
    """The busiest engine's seconds, against the mean."""
    balance_requests: float
    """The same of requests."""
    prediction_error: float
    """Mean tokens between what was predicted and what was found."""


def cases_of(
    trace: str, policies: Sequence[str], compared: Mapping[str, Sequence[Any]], given: Mapping[str, Any]
) -> list[Case]:
    """Every policy with every combination of what is compared; `given` are the fields of scene and agents.

    Raises `BadTraffic` and `BadPolicy`.
    """
    recorded = read(Path(trace)) if trace != AGENT else None
    cases: list[Case] = []
    for values in product(*compared.values()):
        varied = dict(zip(compared, values, strict=True))
        scene = Scene(**_of(Scene, {**given, **varied}))
        agents = Agents(**_of(Agents, {**given, **varied}))
        traffic = recorded or agents.traffic(scene.seed)
        cases += [Case(policy, varied, scene, agents, traffic) for policy in policies]
    for case in cases:
        load(case.policy, {})
    return cases


def _of(kind: type[Scene | Agents], given: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def played(case: Case, progress: Callable[[], None]) -> Figures:
    """Play one case; `progress` is called when a request has ended. Raises `CannotReplay`."""
    run = Simulation(case.scene, case.traffic, load(case.policy, {})).play(progress)
    return _figures(run, case)


def _figures(run: Run, case: Case) -> Figures:
    fates, size, scene = run.fates, case.traffic.block_size, case.scene
    tokens = sum(fate.ask.tokens for fate in fates)
    own, loaded = sum(fate.own for fate in fates), sum(fate.loaded for fate in fates)
    blocks = sum(-(-fate.ask.tokens // size) for fate in fates)
    load_tokens = sum(engine.load_tokens for engine in run.engines)
    return Figures(
        requests=len(fates),
        prompt_tokens=tokens,
        tokens=_found(own, loaded, tokens),
        blocks=_found(own // size, loaded // size, blocks),
        ttft=_spread([fate.first - fate.arrived for fate in fates]),
        e2e=_spread([fate.ended - fate.arrived for fate in fates]),
        prefill_seconds=sum(engine.prefill_seconds for engine in run.engines),
        saved_seconds=(own + loaded) / scene.prefill_rate,
        load_seconds=sum(engine.load_seconds for engine in run.engines),
        load_bytes=load_tokens * scene.token_bytes,
        evicted=sum(engine.evicted for engine in run.engines),
        pool_evicted=run.pool_evicted,
        pool_refused=run.pool_refused,
        pool_lost=run.pool_lost,
        balance=_balance([engine.busy_seconds for engine in run.engines]),
        balance_requests=_balance([engine.requests for engine in run.engines]),
        prediction_error=sum(abs(fate.own + fate.loaded - fate.predicted) for fate in fates) / len(fates),
    )


def _found(own: int, pool: int, of: int) -> Found:
    return Found(own / of, pool / of, 1 - (own + pool) / of)


def _spread(seconds: Sequence[float]) -> Spread:
    ranked = sorted(seconds)
    return Spread(*(ranked[min(len(ranked) - 1, int(len(ranked) * share))] for _, share in SHARES))


def _balance(of: Sequence[float]) -> float:
    return max(of) * len(of) / sum(of)


def table(results: Sequence[tuple[Case, Figures]]) -> Iterator[str]:
    """Two tables: what clients see, and what the fleet does for it."""
    names = list(results[0][0].compared)
    seen = [("policy", *names, "own %", "pool %", "none %", "blocks %", *_heads("TTFT"), *_heads("E2E"))]
    done = [
        ("policy", *names, "prefill s", "saved s", "load s", "load GB", "evicted", "by pool", "refused", "lost", "busy",
         "requests", "error")
    ]  # fmt: skip
    for case, figures in results:
        which = (case.policy, *map(str, case.compared.values()))
        found, times = figures.tokens, (figures.ttft, figures.e2e)
        shares = (found.own, found.pool, found.none, figures.blocks.own + figures.blocks.pool)
        seen.append(
            (
                *which,
                *(f"{share:.1%}".rstrip("%") for share in shares),
                *(f"{second:.2f}" for spread in times for second in (spread.p50, spread.p90, spread.p99)),
            )
        )
        done.append(
            (
                *which,
                f"{figures.prefill_seconds:.0f}",
                f"{figures.saved_seconds:.0f}",
                f"{figures.load_seconds:.0f}",
                f"{figures.load_bytes / 1e9:.0f}",
                *(str(n) for n in (figures.evicted, figures.pool_evicted, figures.pool_refused, figures.pool_lost)),
                f"{figures.balance:.2f}",
                f"{figures.balance_requests:.2f}",
                f"{figures.prediction_error:.0f}",
            )
        )
    left = 1 + len(names)
    yield from _table(seen, left)
    yield ""
    yield from _table(done, left)
    yield ""
    yield "own, pool, none: of all prompt tokens; blocks: own and pool, of all blocks. TTFT and E2E in seconds. busy,"
    yield "requests: the engine with most against the mean. error: tokens of a prompt, predicted against found."


def _heads(name: str) -> tuple[str, ...]:
    return tuple(f"{name} {share}" if share == "p50" else share for share, _ in SHARES)


def _table(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """The first `left` columns are names, the others figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in enumerate(cells)
        ).rstrip()


def as_tree(results: Sequence[tuple[Case, Figures]]) -> dict[str, Any]:
    """The same as JSON, with all that it rests on."""
    cases = [
        {
            "policy": case.policy,
            "traffic": case.traffic.name,
            "compared": dict(case.compared),
            "scene": asdict(case.scene),
            "figures": asdict(figures),
        }
        | ({"agents": asdict(case.agents)} if case.traffic.name == AGENT else {})
        for case, figures in results
    ]
    return {"cases": cases}


def artist() -> ModuleType:
    """What draws. Raises `NoPicture`."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise NoPicture("--out draws with matplotlib: pip install 'moongate[replay]'") from error


def write(folder: Path, results: Sequence[tuple[Case, Figures]], drawing: ModuleType) -> None:
    """Write `replay.json` and `replay.png`; `drawing` is `artist`'s."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "replay.json").write_text(json.dumps(as_tree(results), indent=2) + "\n", encoding="utf-8")
    _draw(results, drawing).savefig(folder / "replay.png", dpi=120)


def _draw(results: Sequence[tuple[Case, Figures]], drawing: ModuleType) -> Any:
    """Where prompts came from, and how long first tokens took, one bar for each case."""
    figure = drawing.Figure(figsize=(12, 1.5 + 0.5 * len(results)), layout="constrained")
    hits, times = figure.subplots(1, 2, sharey=True)
    names = [case.name for case, _ in results]
    found = [figures.tokens for _, figures in results]
    own, pool = [100 * f.own for f in found], [100 * f.pool for f in found]
    hits.barh(names, own, label="own")
    hits.barh(names, pool, left=own, label="pool")
    hits.set(xlabel="% of prompt tokens found", xlim=(0, 100))
    hits.invert_yaxis()
    hits.legend()
    for share, _ in reversed(SHARES):
        times.barh(names, [getattr(figures.ttft, share) for _, figures in results], label=share)
    times.set(xlabel="seconds to the first token", xscale="log")
    times.legend()
    return figure
