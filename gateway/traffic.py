"""What a replay sends: a recorded trace in Mooncake's format, or agents at work that are made up from a seed.

A line of a trace is a JSON object (the release of the FAST'25 paper, kvcache-ai/Mooncake, FAST25-release/traces):

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one for each 512 tokens]}

Equal ids stand for blocks that are equal with all that is before them; the last one may be of a block that is
not full, which vLLM does not cache. A trace does not say what was answered. Where a later prompt is the first to
go on from one, is as long as that one and its answer, and the last full block of that one was its own, the
answer's blocks bear the ids that the later prompt has there. Other answers are found by nobody.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

TRACE_BLOCK = 512
"""Tokens that an id of a trace stands for."""
ANSWERS = 1 << 48
"""Where the numbers begin of blocks that no trace has."""


def setting(default: Any, says: str, *, positive: bool = False) -> Any:
    """A field that the command has an option for; 0 is its least value unless it must be `positive`."""
    return field(default=default, metadata={"says": says, "positive": positive})


class BadTraffic(Exception):
    """The trace cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a replay."""

    at: float
    """Seconds from the start, or after the end of the one that it follows."""
    tokens: int
    """Of its prompt."""
    output: int
    """Tokens that it generates."""
    chain: Sequence[bytes]
    """Names of the blocks of prompt and answer, in this order, and perhaps of what follows."""
    follows: int | None = None
    """Which request must have ended first, by its place."""
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in their order, and how large the blocks are that they name."""

    name: str
    block_size: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents that work side by side: each prompt is the one before, its answer, and what a tool brought.

    Lengths and pauses but the system prompt's are drawn from an exponential distribution between a quarter
    of their mean and four times it, lengths to whole tokens.
    """

    sessions: int = setting(75, "Agents at work.", positive=True)
    turns: int = setting(20, "Turns of each.", positive=True)
    system_tokens: int = setting(4000, "Tokens of the system prompt, the same for all.")
    first_tokens: int = setting(4000, "Mean tokens of an agent's first prompt, beyond that.")
    turn_tokens: int = setting(2000, "Mean tokens that each later turn adds to prompt and answer.")
    output_tokens: int = setting(300, "Mean tokens of an answer.")
    think: float = setting(5.0, "Mean seconds from an answer's end to the next turn.")
    ramp: float = setting(60.0, "Seconds over which the agents begin.")
    block_size: int = setting(64, "Tokens in a block.", positive=True)

    def traffic(self, seed: int) -> Traffic:
        """The same for the same seed."""
        chance = random.Random(seed)  # noqa: S311 - seeded, not secret
        asks: list[Ask] = []
        for session in range(self.sessions):
            begins = chance.uniform(0.0, self.ramp)
            asks += self._session(session, begins, chance, len(asks))
        return Traffic("agent", self.block_size, tuple(asks))

    def _session(self, session: int, begins: float, chance: random.Random, place: int) -> list[Ask]:
        tokens = self.system_tokens
        lengths: list[tuple[int, int]] = []
        for turn in range(self.turns):
            tokens += _length(chance, self.turn_tokens if turn else self.first_tokens)
            output = _length(chance, self.output_tokens)
            lengths.append((tokens, output))
            tokens += output
        shared = self.system_tokens // self.block_size
        chain = tuple(
            _name(number if number < shared else (session + 1 << 32) + number)
            for number in range(tokens // self.block_size)
        )
        return [
            Ask(
                at=_drawn(chance, self.think) if turn else begins,
                tokens=prompt,
                output=output,
                chain=chain,
                follows=place + turn - 1 if turn else None,
                session=f"session-{session}",
            )
            for turn, (prompt, output) in enumerate(lengths)
        ]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> Traffic:
    """A trace in Mooncake's format. Raises `BadTraffic`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadTraffic(f"{path} cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(_Line)
    lines: list[_Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadTraffic(f"{path}, line {number}: {error}") from error
        if trouble := _trouble(line):
            raise BadTraffic(f"{path}, line {number}: {trouble}")
        lines.append(line)
    if not lines:
        raise BadTraffic(f"{path} has no requests")
    lines.sort(key=lambda line: line.timestamp)
    chains = _chains(lines)
    asks = tuple(
        Ask(line.timestamp / 1000, line.input_length, line.output_length, chain)
        for line, chain in zip(lines, chains, strict=True)
    )
    return Traffic(path.stem, TRACE_BLOCK, asks)


def _trouble(line: _Line) -> str | None:
    if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0:
        return "input_length and output_length must be 1 or more, timestamp 0 or more"
    if len(line.hash_ids) != -(-line.input_length // TRACE_BLOCK):
        return f"{line.input_length} tokens need {-(-line.input_length // TRACE_BLOCK)} hash_ids of {TRACE_BLOCK} each"
    if any(not 0 <= block < ANSWERS for block in line.hash_ids):
        return f"hash_ids must be 0 to {ANSWERS - 1}"
    return None


def _chains(lines: Sequence[_Line]) -> list[tuple[bytes, ...]]:
    """Names for each line's full blocks, its answer's included."""
    prompts = [[_name(block) for block in line.hash_ids[: line.input_length // TRACE_BLOCK]] for line in lines]
    totals = [(line.input_length + line.output_length) // TRACE_BLOCK for line in lines]
    goes_on = _goes_on(lines, prompts)
    counts = [total - len(prompt) for total, prompt in zip(totals, prompts, strict=True)]
    offsets = list(accumulate(counts, initial=ANSWERS))
    chains: list[tuple[bytes, ...]] = []
    for place, (prompt, total) in enumerate(zip(prompts, totals, strict=True)):
        later = goes_on.get(place)
        answer = (
            prompts[later][len(prompt) : total]
            if later is not None
            else [_name(number) for number in range(offsets[place], offsets[place + 1])]
        )
        chains.append((*prompt, *answer))
    return chains


def _goes_on(lines: Sequence[_Line], prompts: Sequence[Sequence[bytes]]) -> dict[int, int]:
    """The place of the request that goes on from the one at each place, where there is one."""
    goes_on: dict[int, int] = {}
    seen: set[bytes] = set()
    open_ends: dict[bytes, int] = {}
    for place, prompt in enumerate(prompts):
        for end in reversed(prompt):
            earlier = open_ends.get(end)
            if earlier is not None:
                if lines[earlier].input_length + lines[earlier].output_length <= lines[place].input_length:
                    goes_on[earlier] = place
                    del open_ends[end]
                break
        if prompt and prompt[-1] not in seen:
            open_ends[prompt[-1]] = place
        seen.update(prompt)
    return goes_on


def _name(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _drawn(chance: random.Random, mean: float) -> float:
    return min(4 * mean, max(mean / 4, chance.expovariate(1 / mean))) if mean else 0.0


def _length(chance: random.Random, mean: int) -> int:
    return max(1, round(_drawn(chance, mean)))
