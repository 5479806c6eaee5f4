"""The whole vocabulary of placement: Job, Candidate, Placement, Outcome, Policy, NoCapacity.

A policy is synchronous and does no I/O. It reads no clock and no unseeded randomness: where it
needs either, its constructor takes it. It may keep state of its own (whose turn it is, what it
learned). This file imports nothing of the house, so that a policy of yours needs only this.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

Role = Literal["both", "prefill", "decode"]


class NoCapacity(Exception):
    """No candidate can take this job; the message says why and is shown to the client."""


class Job(Struct, frozen=True):
    """What is to be placed."""

    model: str
    tenant: str
    prompt_tokens: int | None
    """Tokens of the prompt; None where they could not be counted exactly."""
    pool_tokens: int | None
    """Leading tokens that the pool holds, in whole blocks; None where the pool could not be asked."""
    disk_tokens: int = 0
    """How many of `pool_tokens` it holds on disk only."""
    prefilled: bool = False
    """Another engine has computed the prompt: only who decodes is to be chosen."""
    session: str | None = None
    """What the client calls its session, as an opaque key of its tenant; None where it names none."""
    landmarks: tuple[bytes, ...] = ()
    """Names for the prompt's leading `landmark_tokens`, twice as many, and so on: what begins alike shares them.

    Of a prompt that could not be counted they stand for its text, about four bytes to a token.
    """
    whole: bytes = b""
    """A name, as a landmark is, for all of the prompt that can be cached; empty where there is none."""
    landmark_tokens: int = 512
    """Tokens from one landmark to the next."""
    block_tokens: int = 16
    """Tokens of a block: what engines and the pool hold is told in whole ones."""


class Candidate(Struct, frozen=True):
    """One engine that serves the job's model and is alive, as it stood when the job was placed."""

    id: str
    role: Role
    requests: int
    """Requests of this gateway that are under way there."""
    tokens: int
    """Prompt tokens of those requests that nobody held when they were sent: its prefill backlog."""
    waiting: float | None
    """Requests in the engine's own queue, from every source; None where it is not known, or no longer."""
    own_tokens: int
    """Leading tokens of this prompt that the engine holds itself, in whole blocks."""
    running: float | None = None
    """Requests that the engine works on, from every source; None as with `waiting`."""
    cache_usage: float | None = None
    """Share of the engine's KV blocks that are in use, 0 to 1; None as with `waiting`."""
    signal_age: float | None = None
    """Seconds since the engine told `waiting`, `running` and `cache_usage`; None where it has not."""
    likely_tokens: int = 0
    """Leading tokens of this prompt, by its landmarks, that the engine likely holds when it comes to this request.

    A request that begins so is under way there; or, where what it holds cannot be known, they were sent there lately.
    """
    since: float | None = None
    """Seconds since it came in or came back: a newcomer, that is cold. None: it was there from the start."""
    pooled: bool = True
    """False: it names blocks otherwise than was looked up, so that nothing of the pool can be expected there."""


class Placement(Struct, frozen=True):
    """Where a job goes."""

    engine: str
    """Runs the request; with `prefill` set it decodes."""
    prefill: str | None
    """Computes the prompt first, on another engine, and hands over through the pool."""
    spares: tuple[str, ...]
    """Who takes the whole request, best first, should `engine` fail before its first byte."""
    own_tokens: int
    """Prompt tokens that the engine which prefills is predicted to take from its own cache."""
    pool_tokens: int
    """Prompt tokens that it is predicted to load from the pool, beyond its own."""
    reason: str
    """A few words from a fixed set, for people who read traces."""


class Outcome(Struct, frozen=True):
    """What became of a placement."""

    ok: bool
    engine: str
    """Who answered in the end."""
    ttft: float | None
    """Seconds from sending the request to its first token; None of an answer that came whole."""
    cached_tokens: int | None
    """What the engine says it did not compute; None where it does not say."""
    computed_tokens: int | None = None
    """The rest of the prompt; None where that is not known."""
    queued_tokens: int | None = None
    """`Candidate.tokens` of this engine when the request was placed."""


@runtime_checkable
class Policy(Protocol):
    """Chooses. `policies.conformance.conform` holds what every policy must keep.

    One that does not care how a prompt begins may say so by a true attribute `blind`: it is told no landmarks and no
    likely tokens, and the gateway is spared naming them.
    """

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        """Choose among `candidates`. Raises `NoCapacity` where none can take the job."""
        ...

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Learn from what happened. Called once for each placement that was tried."""
        ...


def expected(job: Job, candidate: Candidate) -> tuple[int, int]:
    """Tokens that this engine would take from its own cache, and load from the pool.

    vLLM asks the pool only for what lies beyond its own blocks: cached = max(own, pool), loaded =
    max(0, pool - own), never the sum.
    """
    pool = job.pool_tokens or 0 if candidate.pooled else 0
    return candidate.own_tokens, max(0, pool - candidate.own_tokens)


def size(job: Job) -> int:
    """Tokens of the prompt; of one that was not counted, those that its landmarks stand for."""
    return len(job.landmarks) * job.landmark_tokens if job.prompt_tokens is None else job.prompt_tokens


def uncached(job: Job, candidate: Candidate) -> int:
    """Tokens that this engine would have to compute when it comes to the request: what it does not hold,
    will not likely hold by then, and cannot load from the pool.
    """
    return max(0, size(job) - max(candidate.likely_tokens, sum(expected(job, candidate))))


def able_to_answer(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that can run a whole request, in a stable order. Raises `NoCapacity` if there is none."""
    able = sorted((c for c in candidates if c.role != "prefill"), key=lambda c: c.id)
    if not able:
        raise NoCapacity("no engine of role both or decode is available" if candidates else "no engine is available")
    return able


def placed(job: Job, ranked: Sequence[Candidate], reason: str) -> Placement:
    """The placement on the first of `ranked`, with the others as spares."""
    own, pool = expected(job, ranked[0])
    return Placement(
        engine=ranked[0].id,
        prefill=None,
        spares=tuple(c.id for c in ranked[1:]),
        own_tokens=own,
        pool_tokens=pool,
        reason=reason,
    )
