"""`moongate doctor`: does everything that a configuration names do what the gateway believes of it?

    examine     asks masters, engines (gateway/examination.py) and their event endpoints, and answers with a Report
    Report      checks, each of one subject and topic; gateway/diagnosis.py writes them for people

What is dangerous is told as far as it shows from outside; `UNSEEN` says what does not.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson

from connector.blocks import hashing_of
from connector.errors import Inexact, WireError
from connector.mooncake import Master
from connector.parity import PLAIN, compare_ids
from connector.residency import Residence
from gateway import config
from gateway.app import authorities, model_of
from gateway.examination import Check, Examination, Level, Say, words_of
from gateway.models import Model, Pool

AT_ONCE = 4
"""Engines that are examined side by side."""
UNSEEN = (
    "kv_load_failure_policy (set it to recompute), lookup_async and lookup_rpc_port (one for each engine of a host)",
    "PYTHONHASHSEED: it is found by trying, once a block is seen",
    "who reaches the ports of engines, masters and events: none asks for a key, so try from where clients are",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    engines: Mapping[str, str]
    """Engines by host:port, with the model that each serves."""
    checks: tuple[Check, ...]
    unseen: tuple[str, ...] = UNSEEN

    @property
    def healthy(self) -> bool:
        return not any(check.level == "wrong" for check in self.checks)


async def examine(settings: config.Config, *, patience: float, say: Say = lambda _: None) -> Report:
    """Ask everything that the configuration names. `say` is told of the progress.

    `patience` in seconds is for each answer, and for blocks to come up in the pool. Raises `NoTokenizer`,
    `BadTemplate` and `BadAuthority` for what is named and not there.
    """
    tls = authorities(settings.engines.ca)
    pools = {name: Pool(name, Residence(Master(pool.admin), patience)) for name, pool in settings.pools.items()}
    models = {model.name: model_of(model, pools, tls) for model in settings.models}
    words = {model.name: words_of(model) for model in settings.models}
    examinations = [
        Examination(engine, models[engine.model], words[engine.model], tls, patience, say)
        for engine in settings.engines.static
    ]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(examination: Examination) -> None:
        async with gate:
            await examination.run()

    try:
        pool_checks = await asyncio.gather(*(_pool(pool, settings.pools[name].admin) for name, pool in pools.items()))
        async with asyncio.TaskGroup() as group:
            for examination in examinations:
                group.create_task(one(examination))
        await _loads(examinations)
        renders = [check for model in settings.models async for check in _render(model, models[model.name])]
    finally:
        for model in models.values():
            model.close()
        for pool in pools.values():
            await pool.residence.close()
    for examination in examinations:
        examination.conclude()
    checks = [*pool_checks, *renders, *(check for one in examinations for check in one.checks)]
    for name in models:
        checks += _alike(name, [one for one in examinations if one.model.name == name])
    checks += _shared_sockets(examinations)
    return Report({one.id: one.model.name for one in examinations}, tuple(checks))


async def _loads(examinations: Sequence[Examination]) -> None:
    """Engines that store nothing must find what others store."""
    stored = {one.model.name: one for one in examinations if one.finding is not None and one.finding.agrees}
    for one in examinations:
        if one.finding is not None and one.finding.kind == "not_stored" and one.model.name in stored:
            await one.load(stored[one.model.name])


async def _pool(pool: Pool, urls: Sequence[str]) -> Check:
    subject = f"pool {pool.name}"
    try:
        await pool.master.resident(["moongate-doctor"])
    except WireError as error:
        return Check(
            subject,
            "reachable",
            "wrong",
            "no",
            f"no master answers at {' or '.join(urls)}: {error.detail}",
            f"set pools.{pool.name}.admin to the Mooncake master's HTTP side (--metrics_port, not --rpc_port)",
        )
    return Check(subject, "reachable", "agrees", "yes")


async def _render(settings: config.Model, model: Model) -> AsyncIterator[Check]:
    """Whether the server that renders does, and as is rendered here."""
    if settings.render is None or model.render is None:
        return
    subject, url = f"model {model.name}", settings.render.url
    body = {**PLAIN.body, "model": model.name, "max_tokens": 1}
    reason = ""
    for _ in range(2):  # the first render of a server takes long
        try:
            rendered = await model.render.render(PLAIN.path, [orjson.dumps(body)])
            break
        except Inexact as error:
            reason = error.reason
    else:
        fix = {
            "render_forbidden": "start it with --enable-scale-out, or see models[].render.api_key",
            "render_timeout": "give it more time with models[].render.deadline_ms",
        }
        says = f"has a server that renders, {url}, which does not ({reason.replace('_', ' ')})"
        yield Check(subject, "render", "wrong", "no", says, fix.get(reason, "see models[].render.url, and its log"))
        return
    with suppress(Inexact):
        if model.prompts is not None and compare_ids(model.prompts.full(PLAIN.kind, body), rendered.token_ids):
            says = f"has a server that renders, {url}, with other token ids than are computed here"
            yield Check(subject, "render", "wrong", "differs", says, "give it the model and the flags of the engines")
            return
    yield Check(subject, "render", "agrees", "yes")


def _alike(model: str, engines: Sequence[Examination]) -> Iterator[Check]:
    """Whether the engines of a model are alike where they share blocks."""
    reached = [one for one in engines if one.card is not None]
    subject = f"model {model}"
    if not engines:
        yield Check(subject, "fleet", "warning", "no engine", "has no engine", "add one under engines.static")
    asked: tuple[tuple[str, Level, Callable[[Examination], object], str], ...] = (
        ("block sizes", "wrong", lambda one: one.facts.block_size, "start all with one --block-size"),
        ("hash algorithms", "wrong", lambda one: one.facts.algorithm, "start all with one --prefix-caching-hash-algo"),
        ("ways to hash salts", "wrong", _tagging, "run all on vLLM 0.31 or newer"),
        ("PYTHONHASHSEED", "wrong", _found_seed, "start all with one PYTHONHASHSEED, or all without"),
        ("key prefixes", "wrong", _learned, "start all from one model folder name and with one cache_prefix"),
        ("versions of vLLM", "warning", lambda one: one.facts.version, "run all on one version"),
        ("lengths (max_model_len)", "warning", _length, "start all with one --max-model-len"),
    )
    for what, level, value, fix in asked:
        if told := _different((one.id, value(one)) for one in reached):
            yield Check(subject, "fleet", level, what, f"has engines of different {what}: {told}", fix)
    paths: dict[str, list[tuple[str, object]]] = defaultdict(list)
    for one in reached:
        for adapter in one.adapters:
            paths[adapter.name].append((one.id, adapter.path))
    for name, values in paths.items():
        if told := _different(values):
            says = f"has the adapter {name} at different paths, which are hashed: {told}"
            yield Check(subject, "fleet", "wrong", "adapter paths", says, "mount it at one path on all engines")


def _different(values: Iterable[tuple[str, object]]) -> str:
    """Who has which value, where they are not all alike; those without one count for nothing."""
    by_value: dict[object, list[str]] = defaultdict(list)
    for engine, value in values:
        if value is not None:
            by_value[value].append(engine)
    return "; ".join(f"{value} on {', '.join(ids)}" for value, ids in by_value.items()) if len(by_value) > 1 else ""


def _shared_sockets(engines: Sequence[Examination]) -> Iterator[Check]:
    """Engines of one host whose look-ups run over one socket, as far as dev mode tells."""
    by_socket: dict[object, list[str]] = defaultdict(list)
    for one in engines:
        if one.lookup_port is not None:
            by_socket[one.host, one.lookup_port].append(one.id)
    for ids in by_socket.values():
        if len(ids) > 1:
            yield Check(
                ids[0],
                "safety",
                "wrong",
                "socket",
                f"shares the socket of its look-ups with {', '.join(ids[1:])}, on the same host",
                "set another lookup_rpc_port in kv_connector_extra_config of each",
            )


def _length(one: Examination) -> object:
    return one.card.max_tokens if one.card is not None else None


def _learned(one: Examination) -> object:
    prefixes = one.finding.prefixes if one.finding is not None else ()
    return " or ".join(sorted({prefix.partition("@tp_rank:")[0] for prefix in prefixes})) or None


def _tagging(one: Examination) -> object:
    """As a block showed it, else as its version does."""
    shown = one.finding.scheme if one.finding is not None and one.finding.kind != "random_seed" else None
    hashing = shown or (hashing_of(one.facts.version) if one.facts.version else None)
    return None if hashing is None else "tagged" if hashing.tagged else "untagged"


def _found_seed(one: Examination) -> object:
    scheme = one.finding.scheme if one.finding is not None else None
    return None if scheme is None else scheme.seed or "none"
