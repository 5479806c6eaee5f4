"""Explaining where a request would go: the same numbers as the request itself gets, and nothing moves."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from click.testing import CliRunner, Result

from gateway import explain
from gateway.__main__ import main
from gateway.app import build
from gateway.bodies import Call
from gateway.breaker import FAILURES
from gateway.config import Config
from gateway.placing import Placing, Prompt
from policies.guard import Guarded
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, able_to_answer, placed
from policies.round_robin import RoundRobin
from tests.double import CHAT, Engine, Master, completed, refused, whole
from tests.gateway.house import KEY, House, Street, chat, digest, eventually, serving, settings
from tests.gateway.simfleet import Fleet, simulated_fleet
from tests.real.stack import MASTER

LONG = "the engine loads a block of the prefix from the pool " * 12
PICTURE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]
LORA = {"id": "lora-a", "object": "model", "root": "/adapters/a", "parent": "tiny"}
ADMIN = "/admin/explain"
HERE = "tests.gateway.test_explain"


async def told(house: House, text: str = LONG, *, tenant: str | None = "team-a", **question: Any) -> dict[str, Any]:
    """The explanation of a chat."""
    answer = await house.client.post(ADMIN, json={"body": chat(text), "tenant": tenant, **question})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refusal(house: House, question: Any, status: int = 400) -> str:
    content = question if isinstance(question, bytes) else orjson.dumps(question)
    answer = await house.client.post(ADMIN, content=content)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def pooled(master: Master, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "models": [{"name": "tiny", "tokenizer": str(folder), "pool": "main"}],
        "pools": {"main": {"admin": [master.url], "deadline_ms": 1000}},
        "telemetry": {"expose_routing": True},
        "policy": {"use": "cache_aware"},
        **sections,
    }


def route_of(answer: httpx.Response) -> dict[str, str]:
    return dict(part.split("=", 1) for part in answer.headers["x-moongate-route"].split("; "))


def as_route(explanation: dict[str, Any]) -> dict[str, str]:
    """The header that a request so explained gets."""
    placement = explanation["placement"]
    legs = {"engine": placement["engine"]} | ({"prefill": placement["prefill"]} if placement["prefill"] else {})
    own, pool = placement["own_tokens"], placement["pool_tokens"]
    return legs | {"reason": placement["reason"], "own": str(own), "pool": str(pool)}


# The same as the request's own


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if not MASTER.exists():
        pytest.skip("mooncake_master is not installed")
    with simulated_fleet(tmp_path_factory.mktemp("explain")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> list[dict[str, Any]]:
    return [fleet.engine(events=True), fleet.engine(events=True)]


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "session", "cache_aware"])
async def test_the_next_turn_is_placed_as_it_was_explained(
    fleet: Fleet, engines: list[dict[str, Any]], policy: str
) -> None:
    tree = fleet.tree(*engines) | {
        "policy": {"use": policy},
        "self_check": {"audit_every": 0, "calibrate": False},
    }
    async with serving(tree) as house:
        messages = [{"role": "user", "content": f"{policy} {LONG}"}]
        held = 0

        async def explained() -> dict[str, Any]:
            answer = await house.client.post(
                ADMIN, json={"tenant": "team-a", "body": {"model": "tiny", "messages": messages}}
            )
            return dict(answer.json())

        async def settled() -> bool:
            """What the turn before left is with its engine and in the pool."""
            found = await explained()
            own = max(engine["own_tokens"] for engine in found["engines"])
            return bool(own >= held and found["pool"]["tokens"] >= held)

        for turn in range(4):
            await eventually(settled)
            before = await explained()
            answer = await house.client.post(CHAT, json={"model": "tiny", "messages": messages, "max_tokens": 1})
            assert route_of(answer) == as_route(before)
            usage = answer.json()["usage"]
            assert before["prompt"]["tokens"] == usage["prompt_tokens"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            assert cached == before["placement"]["own_tokens"] + before["placement"]["pool_tokens"]
            chosen = next(e for e in before["engines"] if e["id"] == before["placement"]["engine"])
            assert chosen["to_compute_tokens"] == usage["prompt_tokens"] - cached
            assert {e["known_by"] for e in before["engines"]} == {"events"}
            held = usage["prompt_tokens"] // 16 * 16
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"{turn} {LONG}"}]


@pytest.mark.parametrize("tokenizer", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(("policy", "names"), [("round_robin", False), ("least_loaded", True), ("cost", True)])
async def test_beginnings_are_named_for_policies_that_care(
    fleet: Fleet, engines: list[dict[str, Any]], policy: str, names: bool, tokenizer: bool
) -> None:
    tree = fleet.tree(*engines) | {"policy": {"use": policy}}
    if not tokenizer:
        tree["models"] = [{"name": "tiny", "block_size": 16}]
    async with serving(tree) as house:
        body = {"model": "tiny", "messages": [{"role": "user", "content": LONG * 20}]}
        answer = await house.client.post(ADMIN, json={"tenant": "team-a", "body": body})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["prompt"]["landmarks"] > 0) is names


async def test_one_tenant_does_not_see_what_is_held_for_another(fleet: Fleet, engines: list[dict[str, Any]]) -> None:
    async with serving(fleet.tree(*engines)) as house:
        await house.chat(LONG, max_tokens=1)

        async def stored() -> bool:
            return bool((await told(house))["pool"]["tokens"])

        await eventually(stored)
        other = await told(house, tenant="team-b")
        assert other["pool"] | {"ms": None} == {
            "name": "main", "state": "known", "why": None, "blocks": 0, "tokens": 0, "disk_tokens": 0,
            "keys_asked": other["pool"]["keys_asked"], "ms": None,
        }  # fmt: skip
        assert {engine["own_tokens"] for engine in other["engines"]} == {0}


async def test_a_prefill_elsewhere_is_explained(street: Street, tokenizer_folder: Path) -> None:
    master = await street.master()
    first, second = await street.engines(2)
    static = [
        {"url": first.url, "model": "tiny", "role": "prefill"},
        {"url": second.url, "model": "tiny", "role": "decode"},
    ]
    sections = pooled(master, tokenizer_folder, policy={"use": "disaggregated", "settings": {"min_prefill_tokens": 16}})
    house = await street.house(*static, **sections)
    found = await told(house)
    assert (found["placement"]["prefill"], found["placement"]["engine"]) == (
        f"127.0.0.1:{first.port}",
        f"127.0.0.1:{second.port}",
    )
    assert found["policy"] == {"name": "disaggregated", "settings": {"min_prefill_tokens": 16}}
    assert f"127.0.0.1:{first.port} would compute it and 127.0.0.1:{second.port}" in found["why"]
    result = await command(house, chat(LONG), "--tenant", "team-a")
    assert f"1.  127.0.0.1:{first.port}" in result.stdout
    assert f"2.  127.0.0.1:{second.port}" in result.stdout


# Nothing moves


async def counted(house: House) -> list[str]:
    """The metrics, but for those that move with time."""
    return [line for line in (await house.metrics()).splitlines() if "signal_age" not in line]


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "session", "cache_aware"])
async def test_twenty_explanations_move_nothing(street: Street, tokenizer_folder: Path, policy: str) -> None:
    master = await street.master()
    engines = await street.engines(3)
    house = await street.house(
        *engines,
        **pooled(master, tokenizer_folder, policy={"use": policy}),
        tenants=[{"name": "team-a", "keys": [{"sha256": digest(KEY)}], "requests_per_minute": 2}],
    )
    assert (await house.chat(LONG)).status_code == 200
    await house.idle()
    first, before = await told(house), await counted(house)
    for _ in range(20):
        found = await told(house)
        assert found["placement"] == first["placement"]
    assert await counted(house) == before
    assert sum(len(engine.asked) for engine in engines) == 1
    assert route_of(await house.chat(LONG)) == as_route(first)


# What is not known


async def test_a_prompt_that_is_not_known_is_not_zero(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    house = await street.house(engine, **pooled(master, tokenizer_folder))
    body = {"model": "tiny", "messages": [{"role": "user", "content": [*PICTURE, {"type": "text", "text": LONG}]}]}
    found = await told(house, body=body)
    assert found["prompt"]["inexact"]
    assert found["prompt"]["tokens"] is found["prompt"]["blocks"] is None
    assert found["prompt"]["ids"] == []
    assert found["pool"]["state"] == "not_asked"
    assert found["prompt"]["inexact"] in found["pool"]["why"]
    assert found["pool"]["tokens"] is None
    (told_of,) = found["engines"]
    assert told_of["own_tokens"] is told_of["from_pool_tokens"] is told_of["to_compute_tokens"] is None
    assert found["placement"]["engine"] == told_of["id"]
    assert found["prompt"]["inexact"] in found["why"]
    assert not master.keys
    scored = await told(house, body=chat(LONG, prompt_logprobs=1))
    assert (scored["prompt"]["inexact"], scored["engines"][0]["own_tokens"]) == ("prompt_logprobs", None)
    assert scored["prompt"]["tokens"] == scored["engines"][0]["to_compute_tokens"] > 0


async def test_a_pool_that_does_not_answer_is_not_empty(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    house = await street.house(engine, **pooled(master, tokenizer_folder))
    empty = await told(house)
    assert (empty["pool"]["state"], empty["pool"]["tokens"], empty["engines"][0]["from_pool_tokens"]) == ("known", 0, 0)
    master.everything = True
    full = await told(house)
    assert full["pool"]["blocks"] == full["prompt"]["blocks"]["reusable"] > 0
    assert full["pool"]["keys_asked"] == len(master.keys[-1])
    await master.stop()
    async with asyncio.timeout(10):
        while (unknown := await told(house))["pool"]["state"] == "known":  # noqa: ASYNC110 -- until the watch sees it
            await asyncio.sleep(0.05)
    assert (unknown["pool"]["state"], unknown["pool"]["why"]) == ("unknown", "open")
    assert unknown["pool"]["tokens"] is unknown["engines"][0]["from_pool_tokens"] is None
    assert unknown["engines"][0]["to_compute_tokens"] == unknown["prompt"]["tokens"]
    assert "could not tell" in unknown["why"]


async def test_why_a_pool_was_not_asked(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    house = await street.house(engine, **pooled(master, tokenizer_folder))
    assert "fills no block" in (await told(house, "Hi."))["pool"]["why"]
    alone = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    found = (await told(alone))["pool"]
    assert (found["name"], found["why"], found["keys_asked"]) == (None, "the model has no pool", 0)
    rootless = await street.engine()
    rootless.cards = [{**rootless.cards[0], "root": None}]
    house = await street.house(rootless, **pooled(master, tokenizer_folder))
    assert "how the pool names its blocks" in (await told(house))["pool"]["why"]


# Engines


async def test_engines_that_are_out_say_why(street: Street, tokenizer_folder: Path) -> None:
    good, gone, failing = await street.engines(3)
    failing.always(*refused(503, "no"))
    tree = settings(good, gone, failing)
    house = await street.house(
        engines={"static": tree["engines"]["static"], "poll_seconds": 0.05},
        models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}],
        retries={"attempts": 2, "budget": 1.0},
    )
    for _ in range(3 * FAILURES):
        await house.chat()
    await gone.stop()

    async def out() -> bool:
        return sum(engine["out"] is not None for engine in (await told(house))["engines"]) == 2

    await eventually(out)
    found = await told(house)
    ids = {engine["id"]: engine for engine in found["engines"]}
    assert ids.keys() == {f"127.0.0.1:{engine.port}" for engine in (good, gone, failing)}
    assert ids[f"127.0.0.1:{good.port}"]["out"] is None
    assert "again and again" in ids[f"127.0.0.1:{failing.port}"]["out"]
    away = ids[f"127.0.0.1:{gone.port}"]
    assert away["own_tokens"] is away["waiting"] is away["to_compute_tokens"] is None
    result = await command(house, chat(LONG), "--tenant", "team-a")
    assert f"127.0.0.1:{gone.port} (both) is out: {away['out']}" in result.stdout


async def test_nobody_can_take_it(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    engine.health = 503
    house = await street.house(engine, **pooled(master, tokenizer_folder))
    found = await told(house)
    assert found["placement"] is None
    assert "No engine for tiny" in found["unplaced"]
    assert found["pool"]["why"] == "no engine could take the request"
    assert found["engines"][0]["out"] == "its /health is not 200"
    result = await command(house, chat(LONG), "--tenant", "team-a")
    assert result.exit_code == 1
    assert "It would go nowhere" in result.stdout
    decode = await street.engine()
    house = await street.house({"url": decode.url, "model": "tiny", "role": "prefill"})
    found = await told(house)
    assert (found["placement"], found["engines"][0]["out"]) == (None, None)
    assert "no engine of role both or decode" in found["unplaced"]


async def test_an_adapter(street: Street, tokenizer_folder: Path) -> None:
    with_it, without = await street.engines(2)
    with_it.cards = [*with_it.cards, LORA]
    house = await street.house(with_it, without, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    found = await told(house, body=chat(LONG) | {"model": "lora-a"})
    assert (found["model"], found["adapter"]) == ("tiny", "lora-a")
    assert [engine["out"] for engine in found["engines"]] == [None, "it does not have the adapter lora-a"]
    plain = await told(house)
    assert plain["adapter"] is None
    assert plain["prompt"]["blocks"]["first"] != found["prompt"]["blocks"]["first"]
    assert plain["prompt"]["ids"] == found["prompt"]["ids"]


async def test_a_newcomer_and_a_load(street: Street, tokenizer_folder: Path) -> None:
    engine = await street.engine()
    engine.waiting = 3.0
    engine.health = 503
    tree = settings(engine)
    house = await street.house(
        engines={"static": tree["engines"]["static"], "poll_seconds": 0.05},
        models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}],
    )
    engine.health = 200
    await house.until("engine_up", 1)
    (found,) = (await told(house))["engines"]
    assert found["newcomer_seconds"] >= 0
    assert found["signal_age_seconds"] >= 0
    assert (found["waiting"], found["running"], found["cache_usage"], found["known_by"]) == (3, 0, 0, "estimate")
    assert "came in" in (await command(house, chat(LONG), "--tenant", "team-a")).stdout


# Policies


@dataclass
class Telling(RoundRobin):
    """Tells what it weighs."""

    def __post_init__(self) -> None:
        super().__init__()

    def explain(self, job: Job, candidates: Sequence[Candidate]) -> dict[str, dict[str, float]]:
        return {c.id: {"work_tokens": 7.5, "named_sessions": float(job.session is not None)} for c in candidates}


class Mute(Telling):
    """Fails to."""

    def explain(self, job: Job, candidates: Sequence[Candidate]) -> dict[str, dict[str, float]]:
        raise RuntimeError("not today")


class Crash(RoundRobin):
    """Fails to place."""

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        raise RuntimeError("not today")


class Meddling(RoundRobin):
    """Changes what it chooses among."""

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        candidates.clear()  # type: ignore[attr-defined]
        return super().place(job, candidates)


class Full(RoundRobin):
    """Has no room."""

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        raise NoCapacity("all are full")


@dataclass
class Locked:
    """Keeps what cannot be copied."""

    lock: Any = field(default_factory=threading.Lock)

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        return placed(job, able_to_answer(candidates), "first")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        pass


async def under(street: Street, policy: type) -> House:
    return await street.house(*await street.engines(2), policy={"use": f"{HERE}:{policy.__name__}"})


async def test_a_policy_tells_what_it_weighs(street: Street) -> None:
    house = await under(street, Telling)
    found = await told(house, session="a")
    assert found["session"] is True
    assert [engine["terms"] for engine in found["engines"]] == [{"work_tokens": 7.5, "named_sessions": 1.0}] * 2
    assert (await told(house))["engines"][0]["terms"]["named_sessions"] == 0.0
    odd = await house.client.post(
        ADMIN, content=b'{"body": %b, "tenant": "team-a", "session": "\\ud800"}' % orjson.dumps(chat())
    )
    assert odd.status_code in (200, 400)
    shown = (await command(house, chat(LONG), "--tenant", "team-a")).stdout
    assert "work" in shown
    assert "7.5" in shown
    mute = await told(await under(street, Mute))
    assert mute["engines"][0]["terms"] == {}
    assert mute["placement"]


async def test_a_policy_that_fails(street: Street) -> None:
    house = await under(street, Crash)
    found = await told(house)
    assert found["placement"]["by"] == "least_loaded, since the policy failed"
    assert await house.metric("policy_failures_total") == 0
    full = await told(await under(street, Full))
    assert (full["placement"], full["unplaced"]) == (None, "all are full")


async def test_a_policy_that_is_out_of_service(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    house = await under(street, Crash)
    monkeypatch.setattr(Guarded, "policy", property(lambda guarded: guarded._fallback))
    assert (await told(house))["placement"]["by"] == "least_loaded, since the policy is out of service"


async def test_a_policy_that_changes_the_candidates(street: Street) -> None:
    found = await told(await under(street, Meddling))
    assert [engine["out"] for engine in found["engines"]] == [None, None]
    assert found["placement"]["by"] == "least_loaded, since the policy failed"


async def test_a_policy_that_cannot_be_copied_is_left_alone(street: Street) -> None:
    found = await told(await under(street, Locked))
    assert found["placement"] is None
    assert "cannot be copied (TypeError)" in found["unplaced"]
    assert len(found["engines"]) == 2


# What is asked


async def test_whose_request_it_is(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    question = {"body": chat(LONG)}
    assert await refusal(house, question) == "tenant: name one of the tenants; there are: team-a, team-b."
    assert "there is no such tenant" in await refusal(house, question | {"tenant": "team-x"})
    assert (await told(house, tenant="team-b"))["tenant"] == "team-b"
    many = [{"name": f"t{n:02}", "keys": [{"sha256": digest(str(n))}]} for n in range(30)]
    assert "t19 and 10 more" in await refusal(await street.house(engine, tenants=many), question)
    alone = await street.house(engine, tenants=[{"name": "team-c", "keys": [{"sha256": digest(KEY)}]}])
    assert (await told(alone, tenant=None))["tenant"] == "team-c"
    nobody = await street.house(engine, auth={"mode": "none"}, tenants=[])
    assert (await told(nobody, tenant=None))["tenant"] == "anonymous"


async def test_a_tenants_models(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(
        engine,
        models=[{"name": "tiny"}, {"name": "big"}],
        tenants=[{"name": "team-a", "keys": [{"sha256": digest(KEY)}], "models": ["big"]}],
    )
    assert "not served here" in await refusal(house, {"body": chat(LONG)}, 404)


async def test_all_ids_and_hashes_are_told_where_they_are_asked_for(street: Street, tokenizer_folder: Path) -> None:
    engine = await street.engine()
    house = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    short, whole_ = await told(house), await told(house, ids=True)
    assert len(short["prompt"]["ids"]) == 16
    assert len(whole_["prompt"]["ids"]) == whole_["prompt"]["tokens"]
    assert whole_["prompt"]["ids"][:16] == short["prompt"]["ids"]
    blocks = whole_["prompt"]["blocks"]
    assert (short["prompt"]["blocks"]["hashes"], len(blocks["hashes"])) == (None, blocks["full"])
    assert blocks["full"] == whole_["prompt"]["tokens"] // blocks["size"]
    assert blocks["hashes"][0].startswith(blocks["first"])
    assert blocks["hashes"][-1].startswith(blocks["last"])
    assert len(blocks["first"]) == len(blocks["last"]) == 16
    assert short["prompt"]["blocks"] | {"hashes": None} == blocks | {"hashes": None}


async def test_other_endpoints(street: Street, tokenizer_folder: Path) -> None:
    engine = await street.engine()
    house = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    completion = await told(house, path="/v1/completions", body={"model": "tiny", "prompt": LONG})
    assert completion["prompt"]["tokens"]
    response = await told(house, path="/v1/responses", body={"model": "tiny", "input": LONG})
    assert response["prompt"]["inexact"] == "endpoint"
    kept = {"path": "/v1/responses", "tenant": "team-a", "body": {"model": "tiny", "previous_response_id": "resp_1"}}
    assert "the engine that keeps it" in await refusal(house, kept)
    for path in ("/v1/audio/transcriptions", "/metrics", "nowhere"):
        assert "path must be one of" in await refusal(house, {"path": path, "tenant": "team-a", "body": chat()})


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (b"{", "JSON"),
        (b"[]", "Expected `object`"),
        (b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"{}", "missing required field `body`"),
        ({"body": chat(), "tennant": "team-a"}, "unknown field `tennant`"),
        ({"body": chat(), "tenant": 1}, "Expected `str | null`"),
        ({"body": [], "tenant": "team-a"}, "must be a JSON object"),
        ({"body": {"messages": []}, "tenant": "team-a"}, "model must be the name"),
        ({"body": chat(stream="yes"), "tenant": "team-a"}, "stream must be"),
    ],
    ids=str,
)
async def test_what_is_no_question(street: Street, question: Any, words: str) -> None:
    assert words in await refusal(await street.house(await street.engine()), question)


async def test_bounds(street: Street, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, master = await street.engine(), await street.master()
    sections = pooled(master, tokenizer_folder, timeouts={"body": 0.2}, listen={"port": 0, "max_body_bytes": 5000})
    sections["pools"]["main"]["deadline_ms"] = 30_000
    house = await street.house(engine, **sections)
    await refusal(house, {"tenant": "team-a", "body": chat("x" * 6000)}, 413)
    slow = await street.raw(house)
    slow.send(b"POST /admin/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert b"408" in await slow.until(b"\r\n")
    answer = await house.client.get(ADMIN)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    monkeypatch.setattr(explain, "SECONDS", 0.1)
    gate = asyncio.Event()
    master.everywhere = [gate]
    assert "took longer" in await refusal(house, {"tenant": "team-a", "body": chat(LONG)}, 503)
    gate.set()


async def test_few_are_looked_into_at_once(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    house, know = await street.house(await street.engine()), Placing.know
    seen = [0]

    async def counted(placing: Placing, call: Call) -> Prompt:
        seen.append(seen[-1] + 1)
        await asyncio.sleep(0.01)
        seen.append(seen[-1] - 1)
        return await know(placing, call)

    monkeypatch.setattr(Placing, "know", counted)
    await asyncio.gather(*(told(house) for _ in range(8)))
    assert (max(seen), len(seen)) == (explain.AT_ONCE, 17)


# Who may ask


async def test_without_an_admin_key_loopback_alone_may_ask(street: Street) -> None:
    surface = build(Config(**settings(await street.engine()))).surface
    question = {"tenant": "team-a", "body": chat(LONG)}
    transport = httpx.ASGITransport(app=surface, client=("10.0.0.7", 4000))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for headers in ({}, {"authorization": f"Bearer {KEY}"}, {"x-forwarded-for": "127.0.0.1"}):
            answer = await client.post(ADMIN, json=question, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")


async def test_with_an_admin_key_that_alone_opens(street: Street) -> None:
    house = await street.house(await street.engine(), admin={"key": "operator"})
    question = {"tenant": "team-a", "body": chat(LONG)}
    for wrong in ("", f"Bearer {KEY}", "Bearer operato"):
        answer = await house.client.post(ADMIN, json=question, headers={"authorization": wrong})
        assert answer.status_code == 403
    right = await house.client.post(ADMIN, json=question, headers={"authorization": "Bearer operator"})
    assert right.status_code == 200


async def test_no_text_and_no_secret_is_told(
    street: Street, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine, master = await street.engine(), await street.master()
    house = await street.house(
        {"url": engine.url, "model": "tiny", "api_key": "CANARY-engine"},
        **pooled(master, tokenizer_folder, policy={"use": f"{HERE}:Crash"}),
        secret="CANARY-secret",
        admin={"key": "CANARY-admin"},
    )
    headers = {"authorization": "Bearer CANARY-admin"}
    said = []
    for body in (
        chat(f"CANARY-prompt {LONG}", cache_salt="CANARY-client-salt"),
        chat([{"type": "text", "text": "CANARY-prompt"}, *PICTURE]),  # type: ignore[arg-type]
        chat(model="CANARY-model"),
        "CANARY-prompt",
    ):
        for ids in (False, True):
            question = {"tenant": "team-a", "body": body, "session": "CANARY-session", "ids": ids}
            said.append(await house.client.post(ADMIN, json=question, headers=headers))
    said.append(await house.client.post(ADMIN, content=b'{"body": CANARY-prompt', headers=headers))
    assert [answer.status_code for answer in said] == [200] * 4 + [404] * 2 + [400] * 3
    assert not any("CANARY" in answer.text for answer in said)
    records = [record for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    assert any("the policy failed" in record.getMessage() for record in records)
    assert "CANARY" not in "\n".join(logging.Formatter().format(record) for record in records)


# The command


async def command(house: House, body: Any, *arguments: str, key: str | None = None) -> Result:
    """`moongate explain -`, with the body on standard input."""
    text = body if isinstance(body, str) else json.dumps(body)
    return await asyncio.to_thread(run, "-", "--gateway", house.url, *arguments, text=text, key=key)


def run(*arguments: str, text: str | None = None, key: str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], input=text, env={"MOONGATE_ADMIN_KEY": key})


@pytest.fixture
async def house(street: Street, tokenizer_folder: Path) -> House:
    engines, master = await street.engines(2), await street.master()
    return await street.house(*engines, **pooled(master, tokenizer_folder, admin={"key": "operator"}))


async def test_the_command_says_it_for_people(house: House, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(chat(LONG)))
    arguments = (str(path), "--gateway", house.url, "--tenant", "team-a")
    result = await asyncio.to_thread(run, *arguments, key="operator")
    assert result.exit_code == 0, result.output
    request, prompt, pool, policy, *_ = result.stdout.splitlines()
    assert request == "request   /v1/chat/completions for tiny, from team-a"
    assert "reusable, hashes" in prompt
    assert "main holds the first 0 blocks, 0 tokens" in pool
    assert policy == "policy    cache_aware, default settings"
    assert "->  127.0.0.1:" in result.stdout
    assert "would get it (cache_aware: nothing cached, least loaded)" in " ".join(result.stdout.split())
    assert all(len(line) <= 130 for line in result.stdout.splitlines())
    as_json = await asyncio.to_thread(run, *arguments, "--json", "--ids", key="operator")
    found = json.loads(as_json.stdout)
    assert len(found["prompt"]["ids"]) == found["prompt"]["tokens"]


async def test_the_command_when_it_cannot_ask(house: House, street: Street) -> None:
    for result, words in (
        (await command(house, '{\n  "model": }'), "is not JSON: line 2, column 12"),
        (await command(house, "[]"), "must hold a JSON object"),
        (await command(house, chat(), key="wrong"), "--admin-key-env names the variable"),
        (await command(house, chat(), key="operator"), "there are: team-a, team-b"),
        (await command(house, chat(), "--tenant", "x", key="operator"), "there is no such tenant"),
        (await command(house, chat(model="x"), "--tenant", "team-a", key="operator"), "answered 404"),
        (await asyncio.to_thread(run, "-", "--gateway", "http://127.0.0.1:1", text="{}"), "no gateway answers at"),
        (await asyncio.to_thread(run, "-", "--gateway", "nonsense", text="{}"), "no gateway answers at"),
        (await asyncio.to_thread(run, "-", "--gateway", (await street.engine()).url, text="{}"), "no gateway that"),
    ):
        assert words in result.stderr
        assert result.stderr.startswith("Error: ")
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)


async def test_the_command_and_another_release(street: Street) -> None:
    other: Engine = await street.engine()
    other.everywhere = whole(200, completed())
    result = await asyncio.to_thread(run, "-", "--gateway", other.url, text="{}")
    assert "in another way than this release reads" in result.stderr
    assert result.exit_code == 2


def test_the_commands_usage() -> None:
    assert run("/nowhere.json").exit_code == 2
    assert run().exit_code == 2
    assert "Example: moongate explain" in run("--help").output
