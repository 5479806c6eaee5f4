"""The path of a request through the whole gateway: what is known, where it goes, what is settled."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gateway.bodies import INLINE_BYTES
from gateway.tenants import Tenant, Tenants
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement
from tests.double import (
    CHAT,
    COMPLETIONS,
    DONE,
    Call,
    End,
    Engine,
    Master,
    Script,
    completed,
    delta,
    event,
    refused,
    stream,
    uncounted,
    whole,
)
from tests.gateway.house import (
    KEY,
    OTHER_KEY,
    SECRET,
    House,
    Street,
    chat,
    digest,
    events,
    eventually,
    serving,
    settings,
)

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
LONG = "the engine loads a block of the prefix from the pool " * 20


def salt(name: str, client: str | None = None) -> str:
    made = Tenants(None, SECRET).salt(Tenant(name), client)
    assert made is not None
    return made


# The salt


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [True, False])
async def test_every_request_carries_its_tenants_salt(street: Street, path: str, streamed: bool) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": streamed}
    for key in (KEY, OTHER_KEY):
        await house.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    assert [call.json()["cache_salt"] for call in engine.asked] == [salt("team-a"), salt("team-b")]


@pytest.mark.parametrize(
    "given_",
    [
        b'"%s"' % salt("team-b").encode(),
        b'""',
        b"null",
        b'"mine"',
        b'"a", "cache_salt": "b"',
        b'"a", "cache\\u005fsalt": "b"',
    ],
)
async def test_a_client_never_sets_its_salt(street: Street, given_: bytes) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    body = orjson.dumps(chat())[:-1] + b', "cache_salt": ' + given_ + b"}"
    assert (await house.client.post(CHAT, content=body)).status_code == 200
    (call,) = engine.asked
    assert call.body.count(b'"cache_salt"') == 1
    sent = call.json()["cache_salt"]
    assert len(sent) == 64
    assert sent not in {salt("team-b"), "mine", "a", "b", ""}
    assert (sent == salt("team-a")) == (given_ in {b'""', b"null"})


@pytest.mark.parametrize("value", [1, True, ["x"], {"a": 1}, "x" * 2000])
async def test_a_salt_that_cannot_be_is_refused(street: Street, value: object) -> None:
    engine = await street.engine()
    answer = await (await street.house(engine)).chat(cache_salt=value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
    assert not engine.asked


async def test_headers_choose_no_tenant(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    spoof = [("X-Tenant-Id", "team-b"), ("X-Tenant-Id", "team-b"), ("X-Cache-Salt", "canary"), ("X_Tenant_Id", "b")]
    await house.client.post(CHAT, json=chat(), headers=spoof)
    (call,) = engine.asked
    assert call.json()["cache_salt"] == salt("team-a")
    assert b"team-b" not in call.head
    assert b"canary" not in call.head


async def test_transfer_parameters_of_a_client_never_pass(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    params = {"do_remote_prefill": True, "remote_host": "169.254.169.254"}
    answer = await house.chat(kv_transfer_params=params, vllm_xargs={"kv_transfer_params": "169.254.169.254", "x": 1})
    assert answer.status_code == 200
    assert b"169.254" not in engine.asked[0].body
    assert engine.asked[0].json()["vllm_xargs"] == {"x": 1}


# What reaches the engine


async def test_everything_else_reaches_the_engine_byte_for_byte(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine)
    body = (
        b' {"zz_new": 1e2, "model": "tiny", "tools": [{"b": 1.0, "a": 12345678901234567890}],'
        b' "temperature": 0.1000000000000000055, "messages": [{"role": "user", "content": "\\u00e9\xf0\x9f\xa6\x80"}],'
        b' "logit_bias": {"1": 1}, "stream": null, "stream_options": null}'
    )
    assert (await house.client.post(CHAT, content=body)).status_code == 200
    (call,) = engine.asked
    assert call.body == body.replace(b" {", b' {"cache_salt":"%s",' % salt("team-a").encode(), 1)
    assert call.header("content-type") == "application/json"


SHAPES: list[dict[str, Any]] = [
    {"role": role, "content": content}
    for role in ("system", "developer", "user", "assistant", "tool", "strange")
    for content in ("", "x", None, [], [{"type": "text", "text": "x"}], [{"type": "image_url", "image_url": {}}], 5)
] + [
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": a}}]}
    for a in ("{}", "{", "5", None, {"a": 1})
]


async def test_message_shapes_are_the_engines_to_judge(street: Street, tokenizer_folder: Path) -> None:
    engine = await street.engine()
    house = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    for number, shape in enumerate(SHAPES):
        fields = {"messages": [shape], "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
        answer = await house.client.post(CHAT, json=chat() | fields)
        assert answer.status_code == 200, shape
        assert engine.asked[number].json()["messages"] == [shape]
        assert engine.asked[number].json()["tools"] == fields["tools"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    ["messages", "tools", "prompt", "stream_options", "vllm_xargs", "chat_template_kwargs", "reasoning_effort",
     "max_tokens", "logprobs", "echo", "prompt_logprobs", "add_generation_prompt", "continue_final_message",
     "chat_template", "kv_transfer_params", "n", "stop", "cache_salt", "stream", "prompt_embeds"]
)  # fmt: skip


async def test_no_body_is_a_defect(tokenizer_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a client sends, the gateway or the engine judges it: 500 is neither's word."""
    model = {"name": "tiny", "tokenizer": str(tokenizer_folder)}
    async with Engine() as engine, serving(settings(engine, models=[model])) as house:
        loop = asyncio.get_running_loop()

        @examples(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from([CHAT, COMPLETIONS]), st.dictionaries(fields, json_values, max_size=4))
        def ask(path: str, sent: dict[str, Any]) -> None:
            coroutine = house.client.post(path, json=chat() | {"prompt": "x"} | sent)
            answer = asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)
            assert answer.status_code in (200, 400), answer.text

        await asyncio.to_thread(ask)
        await house.idle()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("depth", [100, 300, 900])
@pytest.mark.parametrize("more", [{}, {"cache_salt": "x"}, {"stream": True, "stream_options": {}}])
async def test_deep_bodies(street: Street, tokenizer_folder: Path, path: str, depth: int, more: dict[str, Any]) -> None:
    engine = await street.engine()
    house = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = orjson.dumps(chat() | {"prompt": "x"} | more)[:-1]
    body += b', "tools": [{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}]}"
    answer = await house.client.post(path, content=body)
    assert answer.status_code in (200, 400)
    assert answer.status_code == 200 or not engine.asked


# What is known of a prompt


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, chat(), None),
        (CHAT, chat(LONG * 50), None),
        (CHAT, chat(prompt_logprobs=1), "prompt_logprobs"),
        (CHAT, chat() | {"messages": [{"role": "user", "content": [IMAGE]}]}, "media"),
        (CHAT, chat() | {"messages": 5}, "messages"),
        (COMPLETIONS, {"model": "tiny", "prompt": "x"}, None),
        (COMPLETIONS, {"model": "tiny", "prompt": [1, 2, 3]}, None),
        (COMPLETIONS, {"model": "tiny", "prompt": ["a", "b"]}, "several_prompts"),
        (COMPLETIONS, {"model": "tiny", "prompt": []}, "prompt_form"),
        (COMPLETIONS, {"model": "tiny", "prompt": "x", "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_known_is_counted_and_goes_on(
    street: Street, tokenizer_folder: Path, path: str, body: dict[str, Any], reason: str | None
) -> None:
    engine = await street.engine()
    house = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    assert (await house.client.post(path, json=body)).status_code == 200
    assert await house.metric("inexact_total") == (0 if reason is None else 1)
    if reason is not None:
        assert await house.metric("inexact_total", reason=reason) == 1


def test_the_long_prompt_is_hashed_in_a_thread() -> None:
    assert len(LONG * 50) > INLINE_BYTES


async def test_a_conversation_stays_where_it_is_held(street: Street, tokenizer_folder: Path) -> None:
    engines = await street.engines(3)
    model = {"name": "tiny", "tokenizer": str(tokenizer_folder)}
    for engine in engines:
        engine.always(*whole(200, completed(prompt=None)))
    house = await street.house(*engines, models=[model], policy={"use": "cache_aware"})
    for _ in range(5):
        assert (await house.chat(LONG)).status_code == 200
    assert sorted(len(engine.asked) for engine in engines) == [0, 0, 5]
    # another tenant holds nothing there
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    await house.client.post(CHAT, json=chat(LONG), headers=other)
    assert sorted(len(engine.asked) for engine in engines) == [0, 1, 5]


@pytest.mark.parametrize(("status", "held"), [(200, True), (400, False), (500, False)])
async def test_only_what_was_computed_counts_as_held(
    street: Street, tokenizer_folder: Path, status: int, held: bool
) -> None:
    engine = await street.engine()
    engine.always(*whole(status, completed()))
    house = await street.house(engine, models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}])
    assert (await house.chat(LONG)).status_code == status
    assert (await house.metric("engine_held_blocks") > 0) is held


async def test_predicted_and_actual_are_told(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    engine.script = lambda _: whole(200, completed(cached=96, prompt=None))
    house = await street.house(engine, **pooled(master, tokenizer_folder))
    await house.chat(LONG)
    (keys,) = master.keys
    master.holds = set(keys[:3])
    held = 32 * (len(keys))
    await house.chat(LONG + "another")
    assert await house.metric("predicted_cached_tokens_total", source="own") >= held - 32
    assert await house.metric("actual_cached_tokens_total", tenant="team-a") == 192
    assert await house.metric("lookups_total", pool="main", result="known") == 1, "who has all asks the pool nothing"


def pooled(master: Master, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "models": [{"name": "tiny", "tokenizer": str(folder), "pool": "main"}],
        "pools": {"main": {"admin": [master.url], "deadline_ms": 500}},
        **sections,
    }


async def test_pool_tokens_are_a_leading_run(street: Street, tokenizer_folder: Path) -> None:
    engine, master = await street.engine(), await street.master()
    house = await street.house(engine, **pooled(master, tokenizer_folder, telemetry={"expose_routing": True}))
    first = await house.chat(LONG)
    assert "pool=0" in first.headers["x-moongate-route"]
    (keys,) = master.keys
    assert all(key.startswith("tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@") for key in keys)
    master.holds = {*keys[:2], *keys[3:]}
    second = await street.house(engine, **pooled(master, tokenizer_folder, telemetry={"expose_routing": True}))
    assert "own=0; pool=64" in (await second.chat(LONG)).headers["x-moongate-route"]


@pytest.mark.parametrize(("fault", "result"), [("silent", "timeout"), ("gone", "error"), ("nonsense", "answer")])
async def test_a_sick_pool_stops_nobody(street: Street, tokenizer_folder: Path, fault: str, result: str) -> None:
    """The first look-up finds it out, unless the pool's watch was first."""
    engine, master = await street.engine(), await street.master()
    sections = pooled(master, tokenizer_folder)
    if fault == "silent":
        sections["pools"] = {"main": {"admin": [master.url], "deadline_ms": 20}}
    house = await street.house(engine, **sections)
    if fault == "silent":
        master.everywhere = [End.SILENCE]
    elif fault == "nonsense":
        master.everywhere = whole(200, [1])
    else:
        await master.stop()
    assert (await house.chat(LONG)).status_code == 200
    found = [await house.metric("lookups_total", result=name) for name in (result, "open")]
    assert sum(found) == 1
    assert await house.metric("predicted_cached_tokens_total") == 0


async def test_routing_is_told_only_where_it_is_asked_for(street: Street) -> None:
    engine = await street.engine()
    silent, open_ = await street.house(engine), await street.house(engine, telemetry={"expose_routing": True})
    assert "x-moongate-route" not in (await silent.chat()).headers
    for streamed in (True, False):
        told = (await open_.chat(stream=streamed)).headers["x-moongate-route"]
        assert told == f"engine=127.0.0.1:{engine.port}; reason=turn; own=0; pool=0"


async def test_the_route_names_the_spare_that_answered(street: Street) -> None:
    first, second = await street.engines(2)
    first.always(End.RST)
    house = await street.house(first, second, telemetry={"expose_routing": True})
    for _ in range(2):
        assert f"engine=127.0.0.1:{second.port};" in (await house.chat()).headers["x-moongate-route"]


# Limits


async def test_limits_answer_429(street: Street) -> None:
    engine = await street.engine()
    tenant = {"name": "a", "keys": [{"sha256": digest(KEY)}]}
    house = await street.house(engine, tenants=[tenant | {"requests_per_minute": 2}])
    statuses = [(await house.chat()).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    answer = await house.chat()
    assert int(answer.headers["retry-after"]) in range(1, 61)
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert len(engine.asked) == 2


@pytest.mark.parametrize("counted", [True, False])
async def test_tokens_are_charged_once(street: Street, tokenizer_folder: Path, counted: bool) -> None:
    """Counted here, or as the engine counted: 29 for the prompt and 6 for the answer."""
    engine = await street.engine()
    tenant = {"name": "a", "keys": [{"sha256": digest(KEY)}], "tokens_per_minute": 36}
    model = {"name": "tiny"} | ({"tokenizer": str(tokenizer_folder)} if counted else {})
    house = await street.house(engine, tenants=[tenant], models=[model])
    prompt = {"model": "tiny", "prompt": list(range(29))}
    statuses = [(await house.client.post(COMPLETIONS, json=prompt)).status_code for _ in range(2)]
    assert statuses == ([200, 429] if counted else [200, 200])
    assert (await house.client.post(COMPLETIONS, json=prompt)).status_code == 429


async def test_slots_come_back(street: Street) -> None:
    engine, gate = await street.engine(), asyncio.Event()
    engine.always(gate, *whole(200, completed()))
    tenant = {"name": "a", "keys": [{"sha256": digest(KEY)}], "concurrent": 1}
    house = await street.house(engine, tenants=[tenant])
    first = asyncio.create_task(house.chat())
    await engine.arrival(CHAT)
    assert (await house.chat()).json()["error"]["code"] == "concurrency_limit"
    gate.set()
    assert (await first).status_code == 200
    assert (await house.chat()).status_code == 200


# Policies that fail


@dataclass
class Bad:
    """A policy that does what it was told, or raises it."""

    mode: str = "raise"

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        placement = Placement(candidates[0].id, None, (), 0, 0, "bad")
        match self.mode:
            case "nobody":
                return replace(placement, engine="10.0.0.1:1")
            case "strange spare":
                return replace(placement, spares=("10.0.0.1:1",))
            case "strange prefill":
                return replace(placement, prefill="10.0.0.1:1")
            case "none":
                return None  # type: ignore[return-value]
            case "no capacity":
                raise NoCapacity("nobody is good enough")
            case "observe":
                return placement
        raise RuntimeError("the policy's own defect")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        if self.mode == "observe":
            raise RuntimeError("the policy's own defect")


BAD = "tests.gateway.test_serve:Bad"


@pytest.mark.parametrize("mode", ["raise", "nobody", "strange spare", "strange prefill", "none", "observe"])
async def test_a_policy_that_fails_is_replaced_and_counted(
    street: Street, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = await street.engines(2)
    house = await street.house(*engines, policy={"use": BAD, "settings": {"mode": mode}})
    for _ in range(4):
        assert (await house.chat()).status_code == 200
    assert await house.metric("policy_failures_total") == 4
    reason = "bad" if mode == "observe" else "least loaded"
    assert await house.metric("placements_total", reason=reason) == 4
    assert "policy failed" in caplog.text


async def test_a_policy_may_say_no(street: Street) -> None:
    engine = await street.engine()
    house = await street.house(engine, policy={"use": BAD, "settings": {"mode": "no capacity"}})
    answer = await house.chat()
    assert answer.status_code == 503
    assert "nobody is good enough" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert await house.metric("policy_failures_total") == 0


class Echo:
    """A policy that gives for a reason what it was told last."""

    def __init__(self) -> None:
        self._told = "nothing"

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        return Placement(candidates[0].id, None, (), 0, 0, self._told)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        soon = outcome.ttft is not None and 0 < outcome.ttft < 60
        known = [outcome.cached_tokens, outcome.computed_tokens, outcome.queued_tokens]
        self._told = f"{soon} {outcome.ok} {known}"


async def test_a_policy_is_told_what_became_of_its_placement(street: Street, tokenizer_folder: Path) -> None:
    engine = await street.engine()
    house = await street.house(
        engine,
        models=[{"name": "tiny", "tokenizer": str(tokenizer_folder)}],
        policy={"use": "tests.gateway.test_serve:Echo"},
        telemetry={"expose_routing": True},
    )

    async def told(**fields: Any) -> str:
        answer = await house.chat(LONG, **fields)
        return answer.headers["x-moongate-route"].split("reason=")[1].split(";")[0]

    assert await told(stream=True) == "nothing"
    assert re.fullmatch(r"True True \[0, \d{3}, 0\]", await told())
    assert await told() == "False True [0, None, 0]"  # it came whole, and our count is doubted by now


# Who is there


@pytest.mark.parametrize("role", ["prefill", None])
async def test_nobody_can_answer(street: Street, role: str | None) -> None:
    engine = await street.engine()
    if role is None:
        engine.health = 503
    house = await street.house({"url": engine.url, "model": "tiny", "role": role or "both"})
    answer = await house.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert not engine.asked


async def test_adapters_are_models_of_their_own(street: Street) -> None:
    first, second = await street.engines(2)
    first.cards.append({"id": "lora-a", "object": "model", "root": "/adapters/a", "parent": "tiny"})
    house = await street.house(first, second)
    for _ in range(4):
        assert (await house.chat(model="lora-a")).status_code == 200
    assert (len(first.asked), len(second.asked)) == (4, 0)
    assert first.asked[0].json()["model"] == "lora-a"
    assert await house.metric("requests_total", model="tiny") == 4


async def test_a_defect_is_500_and_logged_without_the_body(
    street: Street, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await street.engine()
    house = await street.house(engine)

    def defect(*_: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr("gateway.bodies.engine_body", defect)
    answer = await house.chat("canary")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "defect" not in answer.text.replace("defect of", "")
    assert "canary" not in caplog.text
    await house.idle()
    assert await house.metric("requests_total", status="500") == 1


# Prefill and decode through the pool


@dataclass
class Pair:
    """Engines of two kinds, their pool and a gateway before them."""

    prefills: list[Engine]
    decodes: list[Engine]
    master: Master
    house: House

    @property
    def prefill(self) -> Engine:
        return self.prefills[0]

    @property
    def decode(self) -> Engine:
        return self.decodes[0]

    @property
    def prefilled(self) -> list[Call]:
        return [call for engine in self.prefills for call in engine.asked]

    @property
    def decoded(self) -> list[Call]:
        return [call for engine in self.decodes for call in engine.asked]


async def pair(
    street: Street, folder: Path, *, prefills: int = 1, decodes: int = 1, everything: bool = True, **sections: Any
) -> Pair:
    """With `everything` the pool has each prompt's last block as soon as its prefill has answered."""
    p, d, master = await street.engines(prefills), await street.engines(decodes), await street.master()
    if everything:

        def prefill(call: Call) -> Script:
            master.everything = True
            return whole(200, completed("P", "length", completion=1, cached=0))

        for engine in p:
            engine.script = prefill
    for engine in d:
        engine.script = uncounted
    static = [{"url": e.url, "model": "tiny", "role": "prefill"} for e in p]
    static += [{"url": e.url, "model": "tiny", "role": "decode"} for e in d]
    house = await street.house(
        *static,
        **pooled(master, folder, policy={"use": "disaggregated", "settings": {"min_prefill_tokens": 1}}, **sections),
    )
    return Pair(p, d, master, house)


@pytest.mark.parametrize("streamed", [True, False])
async def test_two_legs_are_one_answer(street: Street, tokenizer_folder: Path, streamed: bool) -> None:
    p = await pair(street, tokenizer_folder)
    answer = await p.house.chat(LONG, stream=streamed, max_tokens=50, min_tokens=5, stop=["x"])
    assert answer.status_code == 200
    said = (
        "".join(e["choices"][0]["delta"]["content"] for e in events(answer.content) if e != "[DONE]")
        if streamed
        else answer.json()["choices"][0]["message"]["content"]
    )
    assert said == "LYRA"
    (first,), (second,) = p.prefilled, p.decoded
    body = first.json()
    assert (body["max_tokens"], body["n"], body["stream"], body["ignore_eos"]) == (1, 1, False, True)
    assert not {"min_tokens", "stop", "stream_options", "max_completion_tokens"} & body.keys()
    assert body["messages"] == second.json()["messages"]
    assert (second.json()["max_tokens"], second.json()["min_tokens"], second.json()["stop"]) == (50, 5, ["x"])
    assert body["cache_salt"] == second.json()["cache_salt"] == salt("team-a")
    assert "kv_transfer_params" not in body.keys() | second.json().keys()
    assert first.header("x-request-id") == second.header("x-request-id")
    assert await p.house.metric("handoffs_total", result="seen") == 1
    await p.house.idle()


async def test_decode_waits_for_the_last_block(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, everything=False)
    asked = asyncio.create_task(p.house.chat(LONG))
    await p.prefill.arrival(CHAT)
    await eventually(lambda: len(p.master.keys) >= 4)
    assert not p.decoded
    looked_up, *waited = p.master.keys
    assert {tuple(keys) for keys in waited} == {(looked_up[-1],)}
    p.master.holds = {looked_up[-1]}
    assert (await asked).status_code == 200
    assert len(p.decoded) == 1
    assert await p.house.metric("handoff_seconds_count") == 1


async def test_a_block_that_never_comes_is_late_and_decode_computes(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, everything=False, timeouts={"handoff": 0.05})
    assert (await p.house.chat(LONG)).status_code == 200
    assert len(p.decoded) == 1
    assert await p.house.metric("handoffs_total", result="late") == 1


async def test_little_to_prefill_stays_in_one_place(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder)
    p.master.everything = True
    assert (await p.house.chat(LONG)).status_code == 200  # one token is not enough for the last block
    await p.house.chat(LONG)
    assert len(p.decoded) == 2
    assert len(p.prefilled) <= 2


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_a_prefills_refusal_is_the_clients(street: Street, tokenizer_folder: Path, status: int) -> None:
    p = await pair(street, tokenizer_folder, prefills=2)
    for engine in p.prefills:
        engine.always(*refused(status, "no"))
    answer = await p.house.chat(LONG, stream=True)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "no"
    assert len(p.prefilled) == 1
    assert not p.decoded
    await p.house.idle()


FAULTS: dict[str, Script] = {
    "503": refused(503, "full"),
    "500": refused(500, "dead"),
    "rst": [End.RST],
    "stopped": whole(200, completed(finish="stop")),
    "aborted": whole(200, completed(finish="abort")),
    "no reason": whole(200, {"choices": []}),
    "no json": whole(200, b"x"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_another_prefill_takes_what_one_failed(street: Street, tokenizer_folder: Path, fault: str) -> None:
    p = await pair(street, tokenizer_folder, prefills=2)
    good = p.prefill.script
    failed: list[Call] = []

    def once(call: Call) -> Script:
        if failed:
            return good(call)
        failed.append(call)
        return FAULTS[fault]

    for engine in p.prefills:
        engine.script = once
    assert (await p.house.chat(LONG)).status_code == 200
    assert sorted(len(engine.asked) for engine in p.prefills) == [1, 1]
    assert len(p.decoded) == 1
    assert await p.house.metric("handoffs_total", result="prefill_failed") == 1
    assert await p.house.metric("engine_failures_total") == 1
    await p.house.idle()


@pytest.mark.parametrize("fault", FAULTS)
async def test_without_a_prefill_it_is_an_error(street: Street, tokenizer_folder: Path, fault: str) -> None:
    p = await pair(street, tokenizer_folder, prefills=3)
    for engine in p.prefills:
        engine.always(*FAULTS[fault])
    answer = await p.house.chat(LONG)
    assert answer.status_code == 502
    assert len(p.prefilled) == 2
    assert not p.decoded
    assert await p.house.metric("handoffs_total", result="local_prefill") == 0
    await p.house.idle()


@pytest.mark.parametrize("fault", FAULTS)
async def test_or_decode_prefills_where_that_is_configured(street: Street, tokenizer_folder: Path, fault: str) -> None:
    p = await pair(street, tokenizer_folder, prefills=1, retries={"local_prefill": True})
    p.prefill.always(*FAULTS[fault])
    assert (await p.house.chat(LONG)).status_code == 200
    assert (len(p.prefilled), len(p.decoded)) == (1, 1)
    assert await p.house.metric("handoffs_total", result="local_prefill") == 1
    await p.house.idle()


async def test_a_prefill_that_says_nothing_is_504(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, timeouts={"head": 0.1})
    p.prefill.always(End.SILENCE)
    answer = await p.house.chat(LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "head_timeout")
    await p.house.idle()


@pytest.mark.parametrize(("fault", "status"), [("400", 400), ("404", 404), ("503", 503), ("rst", 502)])
async def test_decode_refuses_after_the_prefill(
    street: Street, tokenizer_folder: Path, fault: str, status: int
) -> None:
    p = await pair(street, tokenizer_folder)
    p.decode.always(*([End.RST] if fault == "rst" else refused(status, "no")))
    answer = await p.house.chat(LONG, stream=True)
    assert answer.status_code == status
    assert (len(p.prefilled), len(p.decoded)) == (1, 1)
    assert await p.house.metric("handoffs_total", result="decode_failed") == 1
    await p.house.idle()


async def test_a_spare_decodes(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, decodes=2)
    good = p.decode.script
    failed: list[Call] = []

    def once(call: Call) -> Script:
        if failed:
            return good(call)
        failed.append(call)
        return [End.RST]

    for engine in p.decodes:
        engine.script = once
    assert (await p.house.chat(LONG)).status_code == 200
    assert [len(engine.asked) for engine in p.decodes] == [1, 1]
    assert len(p.prefilled) == 1
    await p.house.idle()


async def test_idle_decodes_take_turns(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, decodes=2)
    for number in range(4):
        p.master.everything = False
        assert (await p.house.chat(f"{number} {LONG}")).status_code == 200
    assert len(p.prefilled) == 4
    assert [len(engine.asked) for engine in p.decodes] == [2, 2]


async def test_a_decode_that_breaks_off(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder)
    p.decode.always(*stream(delta("a")))
    answer = await p.house.chat(LONG, stream=True)
    error, done = events(answer.content)[-2:]
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    assert await p.house.metric("handoffs_total", result="decode_failed") == 1
    await p.house.idle()


@pytest.mark.parametrize("streamed", [True, False])
async def test_nothing_of_the_hand_over_reaches_the_client(
    street: Street, tokenizer_folder: Path, streamed: bool
) -> None:
    p = await pair(street, tokenizer_folder)
    params = {"kv_transfer_params": {"remote_host": "canary"}}

    def prefill(call: Call) -> Script:
        p.master.everything = True
        return whole(200, completed("P", "length") | params)

    p.prefill.script = prefill
    chunk = event({"choices": [{"index": 0, "delta": {"content": "D"}, "finish_reason": "stop"}]} | params)
    p.decode.always(*(stream(chunk, DONE) if streamed else whole(200, completed("D") | params)))
    answer = await p.house.chat(LONG, stream=streamed)
    assert answer.status_code == 200
    assert "canary" not in answer.text
    assert "kv_transfer" not in answer.text
    assert '"P"' not in answer.text


@pytest.mark.parametrize("stage", ["prefill", "hand over", "decode", "mid-stream"])
async def test_a_client_that_leaves_at_each_stage(street: Street, tokenizer_folder: Path, stage: str) -> None:
    p = await pair(street, tokenizer_folder, everything=stage != "hand over")
    if stage == "prefill":
        p.prefill.always(End.SILENCE)
    p.decode.always(*(stream(delta("a"), End.SILENCE) if stage == "mid-stream" else [End.SILENCE]))
    client = await street.raw(p.house)
    client.ask(orjson.dumps(chat(LONG, stream=True)))
    call = await (p.prefill if stage in ("prefill", "hand over") else p.decode).arrival(CHAT)
    if stage == "hand over":
        await eventually(lambda: len(p.master.keys) >= 3)
    elif stage == "mid-stream":
        await client.until(delta("a"))
    client.leave()
    if stage != "hand over":
        await asyncio.wait_for(call.closed.wait(), 1)
    await p.house.idle()
    await p.house.until("requests_total", 1, status="client_left")
    assert len(p.decoded) == (0 if stage in ("prefill", "hand over") else 1)
    polls = len(p.master.keys)
    await asyncio.sleep(0.05)
    assert len(p.master.keys) == polls


async def test_prefill_connections_are_kept(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder)
    for number in range(5):
        assert (await p.house.chat(f"{number} {LONG}")).status_code == 200
        p.master.everything = False
    assert len({call.connection for call in p.prefilled}) == 1


async def test_no_decode_engine_means_no_leg_at_all(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, decodes=0)
    answer = await p.house.chat(LONG)
    assert answer.status_code == 503
    assert not p.prefilled


async def test_no_prefill_engine_means_decode_does_it_all(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder, prefills=0)
    assert (await p.house.chat(LONG)).status_code == 200
    assert await p.house.metric("placements_total", reason="no prefill engine") == 1


async def test_n_answers_are_decoded_after_one_prefill(street: Street, tokenizer_folder: Path) -> None:
    p = await pair(street, tokenizer_folder)
    constraint = {"n": 3, "response_format": {"type": "json_object"}, "tool_choice": "required", "tools": []}
    assert (await p.house.chat(LONG, **constraint)).status_code == 200
    assert p.prefilled[0].json()["n"] == 1
    assert "response_format" not in p.prefilled[0].json()
    assert {name: p.decoded[0].json()[name] for name in constraint} == constraint
