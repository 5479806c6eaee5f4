"""Ask a gateway or an engine, and read what the gateway says of its placements."""

import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SETTLED = 60.0
"""Seconds after which a block of an answered request must have reached the pool."""


def words(tokens: int) -> str:
    """Text of roughly so many tokens that nobody has sent before."""
    return f"{uuid.uuid4()} " + "the engine loads a block of the prefix from the pool " * (tokens // 12)


def chat(text: str, **fields: object) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
    } | fields


def completion(prompt: object, **fields: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields


@dataclass(frozen=True)
class Answered:
    """An answer in one piece."""

    status: int
    headers: Mapping[str, str]
    data: Any

    @property
    def text(self) -> str:
        choice = self.data["choices"][0]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    @property
    def usage(self) -> Any:
        return self.data["usage"]

    @property
    def cached(self) -> int:
        tokens: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    @property
    def route(self) -> dict[str, str]:
        """What x-moongate-route says."""
        return dict(part.split("=", 1) for part in self.headers["x-moongate-route"].split("; "))

    @property
    def own(self) -> int:
        return int(self.route["own"])

    @property
    def pool(self) -> int:
        return int(self.route["pool"])


def post(url: str, path: str, body: Mapping[str, object], key: str | None = None) -> Answered:
    answer = httpx.post(url + path, json=body, headers=bearer(key), timeout=120, trust_env=False)
    return Answered(answer.status_code, answer.headers, orjson.loads(answer.content))


def stream(url: str, path: str, body: Mapping[str, object], key: str | None = None) -> tuple[str, list[bytes]]:
    """The text of a streamed answer, choice after choice, and its events."""
    request = {**body, "stream": True}
    answer = httpx.post(url + path, json=request, headers=bearer(key), timeout=120, trust_env=False).raise_for_status()
    events = [line[6:] for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in orjson.loads(event)["choices"]:
            piece = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return "\n".join(texts[index] for index in sorted(texts)), events


def bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key is not None else {}


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a gateway's samples of that name which bear these labels."""
    total = 0.0
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', sample)).items():
            total += float(value)
    return total


def eventually(holds: Callable[[], bool], what: str, seconds: float = SETTLED) -> None:
    """Wait until something holds that takes a moment; fail if it never does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)
