"""What leaves the process besides answers: spans, metrics and logs, and what must never be in them."""

import asyncio
import base64
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.tenants import Tenant, Tenants
from gateway.trace import Telemetry
from policies.interface import Candidate, Job, Outcome, Placement
from tests.double import CHAT, DONE, Collector, End, Engine, completed, delta, refused, stream, whole
from tests.gateway.house import House, Street, chat, digest, eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STEPS = {"identify", "parse", "tokenize and hash", "look up", "place", "relay"}


@pytest.fixture
async def collector(street: Street, monkeypatch: pytest.MonkeyPatch) -> Collector:
    """Gets spans soon. It lives in the same loop, so a gateway that closes does not wait long for it."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    return await street.collector()


def telemetry(collector: Collector, **more: Any) -> dict[str, Any]:
    return {"otlp": f"{collector.url}/v1/traces", **more}


def spans(collector: Collector) -> list[Span]:
    found: list[Span] = []
    for body in collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert names["service.name"] == "moongate"
            for scope in resource.scope_spans:
                found.extend(scope.spans)
    return found


async def collected(collector: Collector, roots: int) -> list[Span]:
    """Every span, once so many requests have been exported with their steps."""
    await eventually(lambda: sum(span.name == "moongate.request" for span in spans(collector)) >= roots, 5)
    return spans(collector)


def facts(span: Span) -> dict[str, str | int | float | bool]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes}


async def test_a_request_is_one_root_span_with_its_steps(
    street: Street, collector: Collector, tokenizer_folder: Path
) -> None:
    engine = await street.engine()
    model = {"name": "tiny", "tokenizer": str(tokenizer_folder)}
    house = await street.house(engine, models=[model], telemetry=telemetry(collector))
    answer = await house.client.post(CHAT, json=chat(), headers={"traceparent": TRACEPARENT, "x-request-id": "mine"})
    assert answer.status_code == 200
    root, *steps = sorted(await collected(collector, 1), key=lambda span: span.name != "moongate.request")
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert root.kind == Span.SPAN_KIND_SERVER
    assert {step.name for step in steps} == STEPS
    assert all((step.trace_id, step.parent_span_id) == (root.trace_id, root.span_id) for step in steps)
    steps.sort(key=lambda step: step.start_time_unix_nano)
    assert steps[0].start_time_unix_nano >= root.start_time_unix_nano - 1_000_000
    for one, after in pairwise(steps):
        assert one.start_time_unix_nano <= one.end_time_unix_nano == after.start_time_unix_nano
    told = facts(root)
    assert told["moongate.request_id"] == "mine"
    assert (told["moongate.tenant"], told["moongate.model"], told["moongate.status"]) == ("team-a", "tiny", "200")
    assert told["moongate.engine"] == told["moongate.answered_by"] == f"127.0.0.1:{engine.port}"
    assert told["moongate.actual.cached_tokens"] == 0
    assert told["moongate.completion_tokens"] == 6
    assert int(told["moongate.prompt_tokens"]) > 0


async def test_the_engines_span_is_a_child_of_the_requests(street: Street, collector: Collector) -> None:
    engine = await street.engine()
    house = await street.house(engine, telemetry=telemetry(collector))
    await house.client.post(CHAT, json=chat(), headers={"traceparent": TRACEPARENT, "tracestate": "a=b"})
    await house.chat()
    roots = [span for span in await collected(collector, 2) if span.name == "moongate.request"]
    sent = [call.header("traceparent") for call in engine.asked]
    ids = [f"00-{root.trace_id.hex()}-{root.span_id.hex()}" for root in roots]
    assert [(told or "")[:-3] for told in sent] == ids
    assert roots[0].trace_id.hex() == TRACE
    assert roots[1].trace_id.hex() != TRACE
    assert roots[1].parent_span_id == b""
    assert engine.asked[0].header("tracestate") == "a=b"


async def test_without_a_collector_the_clients_trace_goes_on_to_the_engine(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    await house.client.post(CHAT, json=chat(), headers={"traceparent": TRACEPARENT})
    await house.chat()
    assert [call.header("traceparent") for call in engine.asked] == [TRACEPARENT, None]


async def test_what_the_client_does_not_want_traced_is_not(street: Street, collector: Collector) -> None:
    engine = await street.engine()
    house = await street.house(engine, telemetry=telemetry(collector))
    await house.client.post(CHAT, json=chat(), headers={"traceparent": TRACEPARENT[:-1] + "0"})
    await house.chat()
    assert {span.trace_id.hex() for span in await collected(collector, 1)}.isdisjoint({TRACE})
    told = engine.asked[0].header("traceparent")
    assert told is not None
    assert told.startswith(f"00-{TRACE}-")
    assert told.endswith("-00")


@pytest.mark.parametrize("parent", ["", "x", "00-0-0-01", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"])
async def test_an_ill_formed_parent_is_no_parent(street: Street, collector: Collector, parent: str) -> None:
    engine = await street.engine()
    house = await street.house(engine, telemetry=telemetry(collector))
    assert (await house.client.post(CHAT, json=chat(), headers={"traceparent": parent})).status_code == 200
    root = next(span for span in await collected(collector, 1) if span.name == "moongate.request")
    assert root.parent_span_id == b""


async def test_a_sample_of_nothing_is_nothing(street: Street, collector: Collector) -> None:
    engine = await street.engine()
    house = await street.house(engine, telemetry=telemetry(collector, sample=0))
    for _ in range(10):
        assert (await house.chat()).status_code == 200
    await asyncio.sleep(0.05)
    assert spans(collector) == []


@pytest.mark.parametrize(("script", "status"), [(refused(400, "no"), "400"), ([End.RST], "502")])
async def test_failures_have_their_span(street: Street, collector: Collector, script: list[Any], status: str) -> None:
    engine = await street.engine()
    engine.always(*script)
    house = await street.house(engine, telemetry=telemetry(collector))
    await house.chat()
    await house.client.post(CHAT, json=chat(), headers={"authorization": "Bearer nobody"})
    roots = [facts(span) for span in await collected(collector, 2) if span.name == "moongate.request"]
    assert [root["moongate.status"] for root in roots] == [status, "401"]
    assert roots[1]["moongate.tenant"] == ""


async def test_a_collector_that_is_away_hurts_nobody(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    engine = await street.engine()
    house = await street.house(engine, telemetry={"otlp": "http://127.0.0.1:9/v1/traces"})
    assert (await house.chat()).status_code == 200


# Metrics


def test_every_name_begins_with_moongate() -> None:
    names = [line.split()[2] for line in Telemetry().render().decode().splitlines() if line.startswith("# TYPE")]
    assert names
    assert all(name.startswith("moongate_") for name in names)


def test_two_processes_parts_do_not_share() -> None:
    one, other = Telemetry(), Telemetry()
    one.policy_failures.inc("failed")
    assert b"moongate_policy_failures_total{" in one.render()
    assert b"moongate_policy_failures_total{" not in other.render()


async def test_requests_are_counted_by_what_the_client_got(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    engine.scripts.extend([whole(200, completed()), refused(422, "no"), stream(delta("a")), refused(503, "no")])
    for _ in range(4):
        await house.chat(stream=True)
    await house.chat(model="nothing")
    for status in ("200", "422", "no_done", "503", "404"):
        assert await house.metric("requests_total", status=status) == 1, status
    assert await house.metric("request_seconds_count") == 5
    assert await house.metric("prompt_tokens_total", tenant="team-a", model="tiny") == 29


# Canaries

CANARY_KEY = "sk-CANARY-client"
CANARIES = {
    "key": CANARY_KEY,
    "wrong key": "sk-CANARY-wrong",
    "client salt": "CANARY-client-salt",
    "prompt": "CANARY-prompt",
    "engine key": "CANARY-engine",
    "secret": "CANARY-secret",
    "admin key": "CANARY-admin",
    "salt": Tenants(None, "CANARY-secret").salt(Tenant("team-a")) or "",
    "narrowed salt": Tenants(None, "CANARY-secret").salt(Tenant("team-a"), "CANARY-client-salt") or "",
}


@dataclass
class Crash:
    """A policy that crashes with all that it knows."""

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        raise RuntimeError(f"crash with {job} and {candidates}")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        raise RuntimeError(f"crash with {placement} and {outcome}")


def found(text: str) -> list[str]:
    """The canaries that stand in a text, plainly, hashed or in base64."""
    forms = {
        f"{name} ({form})": value
        for name, canary in CANARIES.items()
        for form, value in {
            "plain": canary,
            "sha256": hashlib.sha256(canary.encode()).hexdigest(),
            "base64": base64.b64encode(canary.encode()).decode().rstrip("="),
        }.items()
    }
    return [name for name, value in forms.items() if value in text]


async def ask(house: House, engine: Engine) -> list[httpx.Response]:
    """Requests for every path that an answer can take."""
    said: list[httpx.Response] = []

    async def send(content: bytes | None = None, key: str = CANARY_KEY, path: str = CHAT, **fields: Any) -> None:
        body = chat("CANARY-prompt", cache_salt="CANARY-client-salt") | fields
        kind: dict[str, Any] = {"json": body} if content is None else {"content": content}
        said.append(await house.client.post(path, headers={"authorization": f"Bearer {key}"}, **kind))

    await send()
    await send(stream=True)
    await send(cache_salt=None)
    await send(key="sk-CANARY-wrong")
    await send(path=f"{CHAT}?key=sk-CANARY-wrong&prompt=CANARY-prompt", key="nobody")
    await send(b'{"model": "tiny", "messages": "CANARY-prompt", ')
    await send(b'"CANARY-prompt"')
    await send(b"CANARY-prompt" * 10_000)
    await send(model="CANARY-prompt")
    await send(cache_salt=["CANARY-client-salt"])
    await send(stream="CANARY-prompt")
    await send(messages="CANARY-prompt")
    await send(path="/v1/CANARY-prompt")
    for script in (
        refused(400, "no"), refused(401, "no"), refused(503, "no"), [End.RST], [End.SILENCE], [b"CANARY\r\n\r\n"],
        stream(delta("a"), End.RST), stream(delta("a"), End.SILENCE), stream(delta("a")), stream(End.FIN),
        stream(delta("", "abort"), DONE),
    ):  # fmt: skip
        engine.always(*script)
        await send(stream=True)
    await house.client.get("/metrics", headers={"authorization": "Bearer CANARY-admin"})
    said.append(await house.client.get("/metrics", headers={"authorization": "Bearer CANARY-admi"}))
    said.append(await house.client.get("/nowhere", headers={"authorization": "Bearer CANARY-admin"}))
    return said


@pytest.mark.parametrize("crash", [False, True])
async def test_no_secret_is_told_anywhere(
    street: Street, collector: Collector, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, crash: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    engine, master = await street.engine(), await street.master()
    house = await street.house(
        {"url": engine.url, "model": "tiny", "api_key": "CANARY-engine"},
        secret="CANARY-secret",
        admin={"key": "CANARY-admin"},
        listen={"port": 0, "max_body_bytes": 100_000},
        models=[{"name": "tiny", "tokenizer": str(tokenizer_folder), "pool": "main"}],
        pools={"main": {"admin": [master.url], "deadline_ms": 500}},
        tenants=[{"name": "team-a", "keys": [{"sha256": digest(CANARY_KEY)}]}],
        timeouts={"head": 0.05, "idle": 0.05},
        telemetry=telemetry(collector, expose_routing=True),
        policy={"use": "tests.gateway.test_trace:Crash" if crash else "cache_aware"},
    )
    said = await ask(house, engine)
    statuses = {answer.status_code for answer in said}
    assert {200, 400, 401, 403, 404, 413, 502, 503, 504} <= statuses
    asked = engine.asked[0]
    assert asked.header("authorization") == "Bearer CANARY-engine"
    assert asked.json()["cache_salt"] == CANARIES["narrowed salt"]
    assert engine.asked[2].json()["cache_salt"] == CANARIES["salt"]

    metrics = (await house.client.get("/metrics", headers={"authorization": "Bearer CANARY-admin"})).text
    assert "moongate_engine_up" in metrics
    assert found(metrics) == []
    await collected(collector, len(said) - 3)
    assert found("".join(map(str, spans(collector)))) == []
    for answer in said:
        assert found(f"{answer.headers.raw!r} {answer.text}") == []
    gateways = [
        record for record in caplog.records if not record.name.startswith("httpcore") and record.name != "httpx"
    ]
    assert found("\n".join(logging.Formatter().format(record) for record in gateways)) == []
    if crash:
        assert "crash with Job(" in caplog.text


async def test_the_canary_test_can_fail() -> None:
    assert found(f"x {CANARY_KEY}") == ["key (plain)"]
    assert found(hashlib.sha256(CANARY_KEY.encode()).hexdigest()) == ["key (sha256)"]
