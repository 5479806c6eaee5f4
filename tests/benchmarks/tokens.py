"""What it takes to know a prompt: rendering, token ids, block hashes.

Conversations of messages of 1,000 tokens get a new turn of 2,000 tokens; what is timed for a turn is all
but rendering, as for a completion with the same text, and rendering apart. The tokenizer is a byte-level
BPE of 32,000 tokens with Qwen's expression, trained on the standard library's sources in ten seconds or
so; the messages are pieces of these sources.

Times are of one process on a machine that may have other work: CPU beside them is user and system time
of all its threads. A gap is how late a task of the event loop runs that wants to run every millisecond,
beside what it is when nothing else happens; `held` is the longest gap without the time in which the
loop's thread waited for a processor (/proc/thread-self/schedstat), most of which this process can help.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from connector.blocks import Algorithm, HashScheme
from connector.prompts import Known, Prompts
from connector.tokens import Text
from connector.tokens import Tokenizer as Model
from tests.benchmarks.stage import say, table

VOCABULARY = 32_000
MESSAGE, TURN = 1_000, 2_000
CONTEXTS = (8_000, 32_000, 128_000, 512_000)
ALGORITHMS = (Algorithm.SHA256_CBOR, Algorithm.SHA256)
BLOCK = 16
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOUND = 256 * 1024 * 1024


def sources() -> str:
    """The standard library, but for what is installed beside it."""
    root = Path(os.__file__).parent
    paths = sorted(path for path in (*root.glob("*.py"), *root.glob("*/*.py")) if "site-packages" not in path.parts)
    return "\n".join(path.read_text(errors="ignore") for path in paths)


def make(folder: Path, text: str) -> Model:
    """The tokenizer, trained and loaded."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(text.split("\n\n"), trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Model(folder)


class Author:
    """Writes messages of so many tokens."""

    def __init__(self, model: Model, text: str, seed: int) -> None:
        self._text = text
        self._chance = random.Random(seed)
        sample = text[: 2**20].encode()
        self._letters = 2**20 / len(model.encode(Text(sample, special=False)))

    def write(self, tokens: int) -> str:
        length = int(tokens * self._letters)
        begin = self._chance.randrange(len(self._text) - length)
        return self._text[begin : begin + length]

    def conversation(self, tokens: int, message: int = MESSAGE) -> dict[str, Any]:
        roles = ("user", "assistant")
        count = max(1, tokens // message)
        return {"messages": [{"role": roles[at % 2], "content": self.write(message)} for at in range(count)]}


def said(body: dict[str, Any], content: str) -> None:
    body["messages"].append({"role": "user", "content": content})


def as_completion(model: Model, body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, rendered."""
    text = model.prompt("chat", body)
    assert isinstance(text, Text)
    return {"prompt": text.data.decode(), "add_special_tokens": text.special}


async def know(prompts: Prompts, body: dict[str, Any], scheme: HashScheme) -> Known:
    kind: Any = "chat" if "messages" in body else "completion"
    raw = orjson.dumps(body) if kind == "chat" else b""
    return await prompts.know(kind, raw, body, domain="a", scheme=scheme, salt="salt", adapter=None)


def ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1000, 3)


async def turns(model: Model, author: Author, context: int, algorithm: Algorithm, count: int) -> dict[str, Any]:
    """A conversation of so many tokens, and what each of some new turns takes."""
    scheme = HashScheme(algorithm, BLOCK)
    with closing(Prompts(model, max_bytes=BOUND)) as prompts:
        body = author.conversation(context - MESSAGE)
        cold = await timed(prompts, as_completion(model, body), scheme)
        wall, cpu, encoded = [], [], []
        for _ in range(count):
            grown = {"messages": list(body["messages"])}
            said(grown, author.write(TURN))  # a turn of its own each time, from the same context
            ready = as_completion(model, grown)
            seconds, work, known = await timed(prompts, ready, scheme)
            wall.append(seconds)
            cpu.append(work)
            encoded.append(known.encoded)
        return {
            "tokens": known.tokens,
            "algorithm": algorithm.value,
            "first_ms": round(cold[0] * 1000, 1),
            "p50_ms": ms(wall),
            "best_ms": round(min(wall) * 1000, 3),
            "cpu_ms": ms(cpu),
            "encoded": int(statistics.median(encoded)),
            "held_mb": round(prompts.held_bytes / 1e6, 1),
        }


async def timed(prompts: Prompts, body: dict[str, Any], scheme: HashScheme) -> tuple[float, float, Known]:
    await asyncio.sleep(0.02)
    began, worked = time.perf_counter(), time.process_time()
    known = await know(prompts, body, scheme)
    return time.perf_counter() - began, time.process_time() - worked, known


async def rendering(model: Model, author: Author, tokens: int, message: int, count: int) -> dict[str, Any]:
    """What a template takes here, and in the other process with the way there and back."""
    body = author.conversation(tokens, message)
    raw = orjson.dumps(body)
    here, there = [], []
    with closing(Prompts(model, max_bytes=0)) as prompts:
        prompts._rendering.start()
        while not prompts._rendering.ready:  # noqa: ASYNC110 - it is another process that is waited for
            await asyncio.sleep(0.02)
        for _ in range(count):
            began = time.perf_counter()
            model.prompt("chat", body)
            here.append(time.perf_counter() - began)
            began = time.perf_counter()
            await prompts._rendering.text(raw)
            there.append(time.perf_counter() - began)
        resident = rss(prompts._rendering.pid)
    return {
        "messages": len(body["messages"]),
        "tokens": message,
        "kb": len(raw) // 1000,
        "here_ms": ms(here),
        "there_ms": ms(there),
        "process_mb": resident,
    }


def rss(pid: int | None) -> int:
    """Resident MB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) // 1024


async def small(model: Model, author: Author, tokens: int) -> dict[str, Any]:
    """CPU time of a small prompt that is known."""
    scheme = HashScheme(ALGORITHMS[0], BLOCK)
    with closing(Prompts(model, max_bytes=BOUND)) as prompts:
        body = author.conversation(tokens, tokens)
        known = await know(prompts, body, scheme)
        raw = orjson.dumps(body)
        times = 2_000
        worked = time.process_time()
        for _ in range(times):
            await prompts.know("chat", raw, body, domain="a", scheme=scheme, salt="salt", adapter=None)
        taken = time.process_time() - worked
        worked = time.process_time()
        for _ in range(times):
            model.prompt("chat", body)
        rendered = time.process_time() - worked
    return {
        "tokens": known.tokens,
        "cpu_us": round(taken / times * 1e6, 1),
        "render_us": round(rendered / times * 1e6, 1),
    }


async def stall(model: Model, author: Author, tokens: int, count: int) -> dict[str, Any]:
    """The longest that the loop is held up by a prompt that is new, against none at all."""
    scheme = HashScheme(ALGORITHMS[0], BLOCK)
    gaps: list[tuple[float, float]] = []

    async def tick() -> None:
        last, waited = time.perf_counter(), waiting()
        while True:
            await asyncio.sleep(0.001)
            now, queued = time.perf_counter(), waiting()
            gap = now - last - 0.001
            gaps.append((gap, gap - (queued - waited)))
            last, waited = now, queued

    took, worst, held, idle, idle_held = [], [], [], [], []
    with closing(Prompts(model, max_bytes=BOUND)) as prompts:
        prompts._rendering.start()
        while not prompts._rendering.ready:  # noqa: ASYNC110 - it is another process that is waited for
            await asyncio.sleep(0.02)
        ticking = asyncio.create_task(tick())
        for _ in range(count):
            body = author.conversation(tokens)
            raw = orjson.dumps(body)
            await asyncio.sleep(0.1)
            gaps.clear()
            began = time.perf_counter()
            await prompts.know("chat", raw, body, domain="a", scheme=scheme, salt="salt", adapter=None)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)
            worst.append(max(gap for gap, _ in gaps))
            held.append(max(own for _, own in gaps))
            gaps.clear()
            await asyncio.sleep(took[-1])
            idle.append(max(gap for gap, _ in gaps))
            idle_held.append(max(own for _, own in gaps))
        ticking.cancel()
    return {
        "tokens": tokens,
        "took_ms": ms(took),
        "gap_ms": ms(worst),
        "idle_gap_ms": ms(idle),
        "held_ms": ms(held),
        "idle_held_ms": ms(idle_held),
        "worst_held_ms": round(max(held) * 1000, 3),
    }


def waiting() -> float:
    """Seconds in which this thread could have run and had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def measure(count: int) -> dict[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        text = sources()
        say("training a tokenizer")
        model = make(Path(folder), text)
        author = Author(model, text, 0)
        found: dict[str, list[dict[str, Any]]] = {"turn": [], "rendering": [], "small": [], "stall": []}
        for context in CONTEXTS:
            for algorithm in ALGORITHMS:
                found["turn"].append(await turns(model, author, context, algorithm, count))
                say(f"{context} tokens, {algorithm}")
        for tokens, message in ((8_000, 1_000), (128_000, 1_000), (128_000, 100), (128_000, 16_000)):
            found["rendering"].append(await rendering(model, author, tokens, message, count))
        found["small"] = [await small(model, author, tokens) for tokens in (20, 200, 1_000)]
        found["stall"].append(await stall(model, author, 128_000, count))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tokens",
        description=__doc__,
        epilog="example: python -m tests.benchmarks.tokens --turns 50",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--turns", type=int, default=15, help="of each conversation, of which the median counts; default 15"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error("at least one turn")
    found = uvloop.run(measure(options.turns))
    if options.json:
        json.dump(found, sys.stdout, indent=2)
        return
    for name, rows in found.items():
        print(table([name, *rows[0]], [["", *map(str, row.values())] for row in rows]), end="\n\n")


if __name__ == "__main__":
    main()
