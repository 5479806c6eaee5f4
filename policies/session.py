"""session: each session, tenant or beginning of a prompt has an engine of its own, unless that one is full."""

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from typing import Literal

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed

By = Literal["header", "tenant", "prefix"]


class Session:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).

    A key ranks all engines; the first that is not full takes the job. An engine is full at

        max(at_least, ceil(capacity * (all requests + 1) / engines))

    requests, counted as max(requests, waiting + running), this job included; unknown `waiting` and
    `running` count as 0. The key is, by `by`:

        header   what the client calls its session; without one as with prefix
        prefix   the prompt's first `prefix_tokens` tokens, by the last landmark there is up to there;
                 for a prompt without landmarks as with tenant
        tenant   the tenant's name

    Rendezvous hashing, not a ring: there is nothing to remember, an engine that goes gives its keys to
    all others evenly, and two gateways that see the same engines choose the same one. An engine that is
    new or back gets the keys that rank it first and no more, so it is warmed by its own part alone.
    """

    def __init__(self, by: By = "header", capacity: float = 1.25, prefix_tokens: int = 1024, at_least: int = 8) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}: engines could not take all requests")
        self._by = by
        self._capacity = capacity
        self._prefix_tokens = prefix_tokens
        self._at_least = at_least

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        loads = {c.id: max(c.requests, (c.waiting or 0) + (c.running or 0)) for c in able}
        full = max(self._at_least, ceil(self._capacity * (sum(loads.values()) + 1) / len(able)))
        what, key = self._key(job)
        by_rank = sorted(able, key=lambda c: blake2b(c.id.encode(), key=key, digest_size=8).digest())
        ranked = sorted(by_rank, key=lambda c: loads[c.id] + 1 > full)
        return placed(job, ranked, what if ranked[0] is by_rank[0] else f"{what}, but its engine is full")

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""

    def _key(self, job: Job) -> tuple[str, bytes]:
        """What stands for the job, and the hash by which it ranks engines."""
        if self._by == "header" and job.session is not None:
            what, parts = "session", (job.tenant.encode(), job.session.encode())
        elif self._by != "tenant" and job.landmarks:
            last = max(1, min(len(job.landmarks), self._prefix_tokens // job.landmark_tokens))
            what, parts = "prefix", (b"", job.landmarks[last - 1])
        else:
            what, parts = "tenant", (job.tenant.encode(), b"")
        named = b"".join(len(part).to_bytes(4) + part for part in (what.encode(), *parts))
        return what, blake2b(named, digest_size=16).digest()
