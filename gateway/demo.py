"""`moongate up --demo`: two agents' conversations over the fleet, and what the gateway knew of each turn.

Two tenants work with the same long system prompt. Their turns come in an order that makes each
conversation change engines, so that an engine's own blocks and the pool's both show. What was
predicted stands in the gateway's x-moongate-route header; what really happened is read from the
engines' own counters before and after each turn.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from gateway.up import Running

TURNS = 10
ANSWER_TOKENS = 32
SYSTEM = (
    "You are a careful software agent. Read the task, look at the files you are given, change as little "
    "as will do, and say what you changed and why. "
) * 24
WORK = (
    "Here is the output of the last command. The prefix of the conversation stays as it is, so the blocks "
    "that were computed for it can be used again. Go on with the next step of the plan. "
) * 6

NOTES = {
    "round_robin": "conversations change engines, so that the pool's part shows; try --policy cost",
    "cache_aware": "conversations stay where most of them is held",
    "cost": "conversations stay where most of them is held",
    "disaggregated": "prompts are computed on one engine and answered on another; own and pool are the latter's",
}

Say = Callable[[str], None]

_SOURCES = ("local_cache_hit", "external_kv_transfer", "local_compute")
_ROW = "{:<7} {:>4}  {:<19} {:>7} {:>15} {:>15} {:>9} {:>9}"


class DemoFailed(Exception):
    """The fleet did not answer as it should; the message says how."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn and what was known of it, in tokens and seconds."""

    tenant: str
    number: int
    engine: str
    prompt: int
    predicted_own: int
    predicted_pool: int
    own: int
    """Taken from the engine's own cache."""
    pool: int
    """Loaded from the pool."""
    computed: int
    """Computed, by a prefill engine too."""
    ttft: float

    @property
    def right(self) -> bool:
        return (self.predicted_own, self.predicted_pool) == (self.own, self.pool)


@dataclass
class Conversation:
    """One tenant's talk with its agent."""

    tenant: str
    key: str
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])


def play(fleet: Running, say: Say) -> list[Turn]:
    """Play the conversations, print a row for each turn, and then what was saved."""
    say("")
    say(f"policy {fleet.policy}: {NOTES.get(fleet.policy, 'as it places them')}")
    say("")
    say(_ROW.format("tenant", "turn", "engine", "prompt", "predicted", "actual", "computed", "first"))
    say(_ROW.format("", "", "", "tokens", "own + pool", "own + pool", "tokens", "byte"))
    conversations = [Conversation(tenant, key) for tenant, key in fleet.keys.items()]
    turns = []
    with httpx.Client(trust_env=False, timeout=120) as client:
        for number in range(1, TURNS + 1):
            for conversation in conversations if number % 2 else reversed(conversations):
                turn = _turn(fleet, client, conversation, number)
                turns.append(turn)
                say(_line(turn))
    for line in _summary(turns):
        say(line)
    return turns


def _line(turn: Turn) -> str:
    mark = "" if turn.right else "  predicted otherwise"
    return (
        _ROW.format(
            turn.tenant,
            turn.number,
            turn.engine,
            turn.prompt,
            f"{turn.predicted_own} + {turn.predicted_pool}",
            f"{turn.own} + {turn.pool}",
            turn.computed,
            f"{turn.ttft * 1000:.0f} ms",
        )
        + mark
    )


def _turn(fleet: Running, client: httpx.Client, conversation: Conversation, number: int) -> Turn:
    """One turn: ask, read the answer as it comes, compare."""
    conversation.messages.append({"role": "user", "content": f"{conversation.tenant}, step {number}. {WORK}"})
    before = {engine: _counters(client, url) for engine, url in fleet.engines.items()}
    body = {
        "model": fleet.model,
        "messages": conversation.messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first: float | None = None
    text = ""
    usage: dict[str, int] = {}
    headers = {"authorization": f"Bearer {conversation.key}"}
    with client.stream("POST", f"{fleet.url}/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise DemoFailed(f"the gateway answered {answer.status_code}: {answer.read().decode()}")
        route = _route(answer.headers["x-moongate-route"])
        for data in _events(answer.iter_lines()):
            first = first or time.perf_counter() - sent
            text += "".join(choice["delta"].get("content") or "" for choice in data["choices"])
            usage = data.get("usage") or usage
    conversation.messages.append({"role": "assistant", "content": text})
    grown = {engine: _grown(before[engine], _counters(client, url)) for engine, url in fleet.engines.items()}
    engine = route["engine"]
    return Turn(
        tenant=conversation.tenant,
        number=number,
        engine=" > ".join(
            fleet.names[engine_id] for engine_id in (route.get("prefill"), engine) if engine_id is not None
        ),
        prompt=usage["prompt_tokens"],
        predicted_own=int(route["own"]),
        predicted_pool=int(route["pool"]),
        own=grown[engine]["local_cache_hit"],
        pool=grown[engine]["external_kv_transfer"],
        computed=sum(one["local_compute"] for one in grown.values()),
        ttft=first or 0.0,
    )


def _summary(turns: Sequence[Turn]) -> Iterator[str]:
    """What was saved, and whether the tenants stayed apart."""
    prompt, computed = sum(turn.prompt for turn in turns), sum(turn.computed for turn in turns)
    own, pool = sum(turn.own for turn in turns), sum(turn.pool for turn in turns)
    right = sum(turn.right for turn in turns)
    yield ""
    yield f"{prompt} prompt tokens: {computed} computed, {own} from engines' own caches, {pool} from the pool"
    yield f"saved {1 - computed / prompt:.0%} of the prefill; {right} of {len(turns)} turns exactly as predicted"
    first, second = (turn for turn in turns if turn.number == 1)
    found = max(0, second.prompt - second.computed)
    yield f"{second.tenant}'s first turn, with the same system prompt, found {found} tokens of {first.tenant}'s"


def _route(header: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in header.split("; "))


def _events(lines: Iterator[str]) -> Iterator[Any]:
    """The JSON of each event of a stream."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            data = orjson.loads(line[6:])
            if "error" in data:
                raise DemoFailed(f"the answer broke off: {data['error']['message']}")
            yield data


def _counters(client: httpx.Client, engine: str) -> dict[str, int]:
    """An engine's prompt tokens by where they came from."""
    text = client.get(f"{engine}/metrics").text
    found = re.findall(r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {source: int(float(value)) for source, value in found}


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {source: after.get(source, 0) - before.get(source, 0) for source in _SOURCES}
