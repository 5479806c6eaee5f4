"""What each engine holds of a prompt, and what it would have to compute and to load."""

from collections.abc import Sequence
from typing import NamedTuple

from policies.interface import Candidate, Job, size
from policies.shared import Part, Shared


class Lacking(NamedTuple):
    """What an engine lacks of a prompt, in tokens."""

    compute: float
    """Neither it nor the pool has them."""
    load: float
    """The pool has them."""
    awaited: int
    """Of its backlog: this very prompt, which is being computed there already."""
    stays: bool
    """It holds something of this conversation's own, beyond what others share."""


def held(job: Job, candidate: Candidate) -> int:
    """Tokens of the prompt that the engine holds, or likely holds when it comes to the request."""
    return min(size(job), max(candidate.own_tokens, candidate.likely_tokens))


def see(remembered: Shared, job: Job, able: Sequence[Candidate]) -> Part:
    """The part of the prompt that other conversations begin with; the prompt is remembered."""
    coming = max(min(c.likely_tokens, c.own_tokens + c.tokens) for c in able)
    return remembered.see(job, size(job), [c.own_tokens for c in able], coming)


def lacking(job: Job, able: Sequence[Candidate], holds: Sequence[int], shared: Part, spared: float) -> list[Lacking]:
    """What each engine lacks that `holds` so much; of what is shared, a share `spared` counts for nothing."""
    tokens = size(job)
    pool = min(tokens, job.pool_tokens or 0)
    found = []
    for candidate, own in zip(able, holds, strict=True):
        reach = pool if candidate.pooled and pool > own else own
        compute, load, awaited = float(tokens - reach), float(reach - own), 0
        if own < shared.tokens:
            lacks = max(0, shared.tokens - reach)
            compute, load = compute - spared * lacks, load - spared * (shared.tokens - own - lacks)
        if own > candidate.own_tokens and job.prompt_tokens is not None:
            awaited = min(candidate.tokens, own - candidate.own_tokens)
        found.append(Lacking(compute, load, awaited, own > shared.tokens))
    return found


def on_disk(job: Job) -> float:
    """The share of what the pool holds of the prompt that it holds on disk only."""
    return min(1.0, job.disk_tokens / job.pool_tokens) if job.pool_tokens else 0.0


def queues(now: Sequence[float], lately: Sequence[float]) -> list[float]:
    """What counts as before a request on each engine: what is there now, or was more lately than elsewhere."""
    least = min(lately)
    return [max(queue, past - least) for queue, past in zip(now, lately, strict=True)]
