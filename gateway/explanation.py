"""`moongate explain`: asks a running gateway where a request would go, and writes its answer for people."""

import asyncio
from collections.abc import Iterator, Sequence
from textwrap import wrap

import httpx
import msgspec
import orjson

from gateway.explain import EngineTold, Explanation, PoolTold, PromptTold, Question

SECONDS = 60.0
"""For the whole answer."""

_WIDTH = 118
_LEGEND = (
    "own: leading tokens of this prompt that the engine holds, known by its KV events or an estimate; from pool: what "
    "it would load beyond them; likely: what of the prompt it is computing for others now; backlog: tokens sent from "
    "here and not computed yet; queue, cache: the engine's own word. A - is not known."
)
_LEFT = 3
"""Columns of words, which stand to the left; numbers stand to the right."""


class CannotAsk(Exception):
    """There is no explanation; the message says why and what to do."""


def question(body: bytes, name: str, *, path: str, tenant: str | None, session: str | None, ids: bool) -> Question:
    """A request's body, from a file of this name, as a question. Raises `CannotAsk`."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CannotAsk(f"{name} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(told, dict):
        raise CannotAsk(f"{name} must hold a JSON object: the request's body, as a client would send it")
    return Question(msgspec.Raw(body), path, tenant, session, ids)


def ask(gateway: str, asked: Question, key: str | None) -> bytes:
    """The gateway's answer, as JSON. Raises `CannotAsk`."""
    return asyncio.run(_ask(gateway.rstrip("/"), asked, key))


async def _ask(gateway: str, asked: Question, key: str | None) -> bytes:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        async with asyncio.timeout(SECONDS), httpx.AsyncClient(trust_env=False, timeout=SECONDS) as client:
            answer = await client.post(f"{gateway}/admin/explain", content=msgspec.json.encode(asked), headers=headers)
    except (TimeoutError, httpx.TimeoutException):
        raise CannotAsk(f"{gateway} did not answer within {SECONDS:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise CannotAsk(f"no gateway answers at {gateway} ({error}); --gateway names another") from None
    if answer.status_code == httpx.codes.OK:
        return answer.content
    hint = ""
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        hint = " (--admin-key-env names the variable that the key is in)"
    raise CannotAsk(f"{gateway} answered {answer.status_code}: {_message(answer)}{hint}")


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "what answers there is no gateway that explains"


def read(answer: bytes) -> Explanation:
    """Raises `CannotAsk` where another release answered."""
    try:
        return msgspec.json.decode(answer, type=Explanation)
    except msgspec.MsgspecError as error:
        raise CannotAsk(f"the gateway explains in another way than this release reads ({error}); try --json") from None


def lines(told: Explanation) -> Iterator[str]:
    """What is known of the prompt, a table of the engines, and why it goes where it goes."""
    adapter = f" with the adapter {told.adapter}" if told.adapter is not None else ""
    session = ", in a session" if told.session else ""
    yield f"request   {told.path} for {told.model}{adapter}, from {told.tenant}{session}"
    yield f"prompt    {_prompt(told.prompt)}"
    yield f"pool      {_pool(told.pool)}"
    settings = ", ".join(f"{name} {value}" for name, value in told.policy.settings.items())
    yield f"policy    {told.policy.name}, {settings or 'default settings'}"
    yield ""
    yield from _table(told)
    yield ""
    yield from wrap(told.why, _WIDTH)


def _prompt(prompt: PromptTold) -> str:
    tokens = f"{prompt.tokens} tokens" if prompt.tokens is not None else "not counted"
    if prompt.blocks is None:
        return f"{tokens}; its blocks are not known: {prompt.inexact}"
    blocks = prompt.blocks
    hashes = f", hashes {blocks.first}... to {blocks.last}..." if blocks.full else ""
    return f"{tokens}, {blocks.full} whole blocks of {blocks.size}, {blocks.reusable} reusable{hashes}"


def _pool(pool: PoolTold) -> str:
    if pool.state == "not_asked":
        return f"not asked: {pool.why}"
    if pool.state == "unknown":
        return f"{pool.name}: not known ({pool.why}), {pool.keys_asked} keys asked in {pool.ms or 0:.1f} ms"
    disk = f", {pool.disk_tokens} on disk" if pool.disk_tokens else ""
    return (
        f"{pool.name} holds the first {pool.blocks} blocks, {pool.tokens} tokens{disk}; "
        f"{pool.keys_asked} keys asked in {pool.ms or 0:.1f} ms"
    )


def _table(told: Explanation) -> Iterator[str]:
    """A row for each engine that could take it, then those that could not, and why."""
    engines = [engine for engine in told.engines if engine.out is None]
    columns = list(_columns(told, engines))
    widths = [max(len(cell) for cell in column) for column in columns]
    for row in zip(*columns, strict=True) if engines else ():
        words = (cell.ljust(width) for cell, width in zip(row[:_LEFT], widths, strict=False))
        numbers = (cell.rjust(width) for cell, width in zip(row[_LEFT:], widths[_LEFT:], strict=True))
        yield "  ".join((*words, *numbers)).rstrip()
    for engine in told.engines:
        if engine.out is not None:
            yield f"    {engine.id} ({engine.role}) is out: {engine.out}"
    if engines:
        yield ""
        yield from wrap(_LEGEND, _WIDTH)


def _columns(told: Explanation, engines: Sequence[EngineTold]) -> Iterator[tuple[str, ...]]:
    """Two words of head, then a cell for each engine."""
    placement = told.placement
    marks = {placement.engine: "->"} if placement is not None else {}
    if placement is not None and placement.prefill is not None:
        marks = {placement.prefill: "1.", placement.engine: "2."}
    yield "", "", *(marks.get(e.id, "") for e in engines)
    yield "", "engine", *(e.id for e in engines)
    yield "", "role", *(e.role for e in engines)
    yield "own", "tokens", *(_number(e.own_tokens) for e in engines)
    yield "from pool", "tokens", *(_number(e.from_pool_tokens) for e in engines)
    yield "to compute", "tokens", *(_number(e.to_compute_tokens) for e in engines)
    yield "likely", "tokens", *(_number(e.likely_tokens) for e in engines)
    for term in dict.fromkeys(name for e in engines for name in e.terms):
        name, _, unit = term.rpartition("_")
        yield name, unit, *(_number(e.terms.get(term)) for e in engines)
    yield "backlog", "tokens", *(_number(e.backlog_tokens) for e in engines)
    yield "requests", "from here", *(_number(e.requests) for e in engines)
    yield "queue", "wait+run", *(_pair(e.waiting, e.running) for e in engines)
    yield "cache", "in use", *(f"{e.cache_usage:.0%}" if e.cache_usage is not None else "-" for e in engines)
    yield "as of", "s ago", *(_seconds(e.signal_age_seconds) for e in engines)
    if any(e.newcomer_seconds is not None for e in engines):
        yield "came in", "s ago", *(_seconds(e.newcomer_seconds) for e in engines)
    yield "known", "by", *(e.known_by for e in engines)


def _number(value: float | None) -> str:
    """A whole number where it is one."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _pair(waiting: float | None, running: float | None) -> str:
    return "-" if waiting is None and running is None else f"{_number(waiting)} + {_number(running)}"


def _seconds(value: float | None) -> str:
    return f"{value:.1f}" if value is not None else "-"
