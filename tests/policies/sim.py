"""A fleet in a few lines: engines that prefill one prompt after another and decode beside it, and time that only jumps.

Nothing here waits, and the same script gives the same figures. An engine holds the blocks of what it
computed and answered, for ever unless it is told how many.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from policies.interface import Candidate, Job, Outcome, Placement, Policy

BLOCK = 16
LANDMARK = 512


@dataclass(frozen=True)
class Text:
    """A prompt: pieces, each a name and so many tokens. Equal leading pieces are equal tokens."""

    pieces: tuple[tuple[int, int], ...]

    def then(self, name: int, tokens: int) -> "Text":
        return Text((*self.pieces, (name, tokens)))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)

    def blocks(self) -> list[bytes]:
        """The names of its whole blocks, each of which stands for all that is before it, too."""
        names: list[bytes] = []
        end, path = 0, 0
        for name, tokens in self.pieces:
            end, path = end + tokens, hash((path, name))
            names += [
                hash((path, number)).to_bytes(8, signed=True) for number in range(len(names) + 1, end // BLOCK + 1)
            ]
        return names


@dataclass
class Engine:
    """One engine. `rate` is prefill tokens a second, `slots` how many requests it works on at once."""

    id: str
    rate: float = 20_000
    slots: int = 64
    capacity: int = 10**6
    """Blocks that it holds at most."""
    since: float | None = None
    foreign: float = 0
    """Requests of others that run there all the time."""
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    computing: Counter[bytes] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    free: float = 0
    """When its prefills so far will be done."""
    slot_free: list[float] = field(default_factory=list)

    def holds(self, blocks: Sequence[bytes]) -> int:
        return BLOCK * leading(blocks, self.blocks)

    def keep(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


def leading(names: Sequence[bytes], known: "OrderedDict[bytes, None] | Counter[bytes]") -> int:
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if names[middle] in known else (low, middle)
    return low


class Fleet:
    """Engines, the time, and who was sent where."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = {engine.id: engine for engine in engines}
        self.time = 0.0
        self.sent: list[str] = []
        """The engine of each request, in the order in which they were placed."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def run(self) -> None:
        while self._events:
            self.time, _, event = heapq.heappop(self._events)
            event()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def candidates(self, blocks: Sequence[bytes], marks: Sequence[bytes]) -> list[Candidate]:
        return [
            Candidate(
                id=engine.id,
                role="both",
                requests=engine.requests,
                tokens=engine.tokens,
                waiting=0.0,
                running=engine.foreign,
                own_tokens=engine.holds(blocks),
                likely_tokens=len(blocks) * BLOCK
                if blocks and engine.computing[blocks[-1]]
                else leading(marks, engine.computing) * LANDMARK,
                since=engine.since,
            )
            for engine in self.engines.values()
        ]

    def send(
        self,
        policy: Policy,
        prompt: Text,
        *,
        answer: tuple[int, int] = (0, 0),
        decode: float = 0.5,
        then: Callable[[], None] = lambda: None,
    ) -> str:
        """Place a prompt, and let it be served; the engine holds its `answer`, a piece as in Text, afterwards."""
        blocks = prompt.blocks()
        reusable = blocks[: (prompt.tokens - 1) // BLOCK]
        marks = tuple(reusable[LANDMARK // BLOCK - 1 :: LANDMARK // BLOCK])
        job = Job(
            model="m",
            tenant="t",
            prompt_tokens=prompt.tokens,
            pool_tokens=None,
            landmarks=marks,
            whole=reusable[-1] if reusable else b"",
            landmark_tokens=LANDMARK,
            block_tokens=BLOCK,
        )
        candidates = self.candidates(reusable, marks)
        placement = policy.place(job, candidates)
        chosen = next(candidate for candidate in candidates if candidate.id == placement.engine)
        engine = self.engines[placement.engine]
        backlog = max(0, prompt.tokens - max(chosen.own_tokens, chosen.likely_tokens))
        engine.requests += 1
        engine.tokens += backlog
        engine.computing.update({*marks, *reusable[-1:]})
        self.sent.append(engine.id)

        begin = self.time
        if len(engine.slot_free) >= engine.slots:
            begin = max(begin, heapq.heappop(engine.slot_free))
        begin = max(begin, engine.free)
        computed = begin + backlog / engine.rate
        engine.free = computed
        heapq.heappush(engine.slot_free, computed + decode)

        def prefilled() -> None:
            engine.tokens -= backlog
            engine.computing.subtract({*marks, *reusable[-1:]})
            engine.computing += Counter()
            engine.keep(blocks)

        def done() -> None:
            engine.requests -= 1
            engine.keep(prompt.then(*answer).blocks())
            self._observe(policy, placement)
            then()

        self.at(computed, prefilled)
        self.at(computed + decode, done)
        return engine.id

    @staticmethod
    def _observe(policy: Policy, placement: Placement) -> None:
        policy.observe(placement, Outcome(ok=True, engine=placement.engine, ttft=None, cached_tokens=None))


def fleet(number: int, *, rate: float = 20_000, slots: int = 64) -> Fleet:
    return Fleet([Engine(f"engine-{name}", rate=rate, slots=slots) for name in range(number)])


def busiest(sent: Sequence[str]) -> float:
    """The share of the engine that got most."""
    return max(Counter(sent).values()) / len(sent)
