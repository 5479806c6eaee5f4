"""cache_aware: where most of the prompt is held already, unless that engine is far busier."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed, size, uncached
from policies.least_loaded import by_load
from policies.pressure import Pressure
from policies.shared import Part, Shared


class CacheAware:
    """The least of `work`, in tokens:

        work = compute + price * load + queue_share * (max(now, lately) - awaited) - stay

    `compute` is what the engine would compute: the prompt beyond what it holds, or likely holds when it
    comes to this request, and beyond what the pool holds. `load` is what it would load from the pool
    beyond its own. Of the leading part that k conversations share (policies/shared.py) both count for
    1 / k: done once there, it serves all of them. `price` is load_share, and disk_share for the part
    that the pool holds on disk.

    `now` and `lately` are policies/pressure.py's, slow start included, `lately` counted from the least
    of all engines. `awaited` is the part of `now` that is this very prompt being computed: elsewhere it
    would take as long. `stay` is stay_tokens where the engine holds something of this conversation's
    own, beyond the shared part, so that small differences of load move nobody.

    Where all engines hold the same of a prompt, which is nothing for a cold one, load alone decides, as
    in least_loaded. An unknown pool counts as holding nothing, for everybody. A prompt that was not
    counted counts as its landmarks' tokens, and goes by what was sent where lately; without landmarks,
    by load.
    """

    def __init__(
        self,
        *,
        load_share: float = 0.1,
        disk_share: float = 0.3,
        queue_share: float = 0.5,
        request_tokens: int = 256,
        stay_tokens: int = 2048,
        warm: float = 30.0,
    ) -> None:
        self._load_share = load_share
        self._disk_share = disk_share
        self._queue_share = queue_share
        self._stay_tokens = stay_tokens
        self._pressure = Pressure(request_tokens, warm)
        self._shared = Shared()

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        tokens = size(job)
        held = [min(tokens, max(c.own_tokens, c.likely_tokens)) for c in able]
        coming = max(min(c.likely_tokens, c.own_tokens + c.tokens) for c in able)
        shared = self._shared.see(job, tokens, [c.own_tokens for c in able], coming)
        now, lately = self._pressure.now(able), self._pressure.lately(able)
        longest = max(held)
        if min(held) == longest and len({c.pooled for c in able}) == 1:
            ranked = by_load(able, now, lately)
            reason = "all hold the same, least loaded" if longest else "nothing cached, least loaded"
        else:
            price, least = self._price(job), min(lately)
            work = [
                self._work(job, candidate, own, shared, price) + self._queue_share * max(queue, past - least)
                for candidate, own, queue, past in zip(able, held, now, lately, strict=True)
            ]
            order = sorted(range(len(able)), key=lambda i: (work[i], -held[i], lately[i]))
            ranked = [able[i] for i in order]
            reason = "longest prefix" if held[order[0]] == longest else "longest prefix is busy"
        self._pressure.chose(ranked[0], uncached(job, ranked[0]))
        return placed(job, ranked, reason)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""

    def _price(self, job: Job) -> float:
        """What a token costs that the pool gives, a computed one being 1."""
        on_disk = min(1.0, job.disk_tokens / job.pool_tokens) if job.pool_tokens else 0.0
        return self._load_share + (self._disk_share - self._load_share) * on_disk

    def _work(self, job: Job, candidate: Candidate, own: int, shared: Part, price: float) -> float:
        """What the prompt itself is worth in tokens on an engine that holds `own` of it by then."""
        tokens = size(job)
        reach = max(own, min(tokens, job.pool_tokens or 0)) if candidate.pooled else own
        spared = 1 - 1 / shared.ways
        compute = tokens - reach - spared * max(0, shared.tokens - reach)
        load = reach - own - spared * max(0, min(shared.tokens, reach) - own)
        awaited = 0
        if own > candidate.own_tokens and job.prompt_tokens is not None:
            awaited = min(candidate.tokens, own - candidate.own_tokens)
        stay = self._stay_tokens if own > shared.tokens else 0
        return compute + price * load - self._queue_share * awaited - stay
