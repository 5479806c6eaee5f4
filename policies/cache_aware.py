"""cache_aware: where most of the prompt is held already, unless that engine is far busier."""

from collections.abc import Sequence
from copy import deepcopy

from msgspec import Struct

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed, size, uncached
from policies.least_loaded import by_load
from policies.pressure import Pressure
from policies.shared import Part, Shared


class _Weighed(Struct, frozen=True):
    """The terms of an engine's work, as they add up."""

    compute: float
    load: float
    queue: float
    stay: float

    @property
    def work(self) -> float:
        return self.compute + self.load + self.queue - self.stay


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
        held = [_held(job, candidate) for candidate in able]
        now, lately = self._pressure.now(able), self._pressure.lately(able)
        shared = _see(self._shared, job, able)
        longest = max(held)
        if min(held) == longest and len({c.pooled for c in able}) == 1:
            ranked = by_load(able, now, lately)
            reason = "all hold the same, least loaded" if longest else "nothing cached, least loaded"
        else:
            weighed = self._weighed(job, able, held, shared, _queues(now, lately))
            work = [terms.work for terms in weighed]
            order = sorted(range(len(able)), key=lambda i: (work[i], -held[i], lately[i]))
            ranked = [able[i] for i in order]
            reason = "longest prefix" if held[order[0]] == longest else "longest prefix is busy"
        self._pressure.chose(ranked[0], uncached(job, ranked[0]))
        return placed(job, ranked, reason)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""

    def explain(self, job: Job, candidates: Sequence[Candidate]) -> dict[str, dict[str, float]]:
        """`work` on each engine that can answer. Nothing is remembered."""
        able = able_to_answer(candidates)
        held = [_held(job, candidate) for candidate in able]
        shared = _see(deepcopy(self._shared), job, able)
        queues = _queues(self._pressure.now(able), self._pressure.lately(able))
        weighed = self._weighed(job, able, held, shared, queues)
        return {candidate.id: {"work_tokens": terms.work} for candidate, terms in zip(able, weighed, strict=True)}

    def _price(self, job: Job) -> float:
        """What a token costs that the pool gives, a computed one being 1."""
        on_disk = min(1.0, job.disk_tokens / job.pool_tokens) if job.pool_tokens else 0.0
        return self._load_share + (self._disk_share - self._load_share) * on_disk

    def _weighed(
        self, job: Job, able: Sequence[Candidate], held: Sequence[int], shared: Part, queues: Sequence[float]
    ) -> list[_Weighed]:
        tokens, price, spared = size(job), self._price(job), 1 - 1 / shared.ways
        pool = min(tokens, job.pool_tokens or 0)
        found = []
        for candidate, own, queue in zip(able, held, queues, strict=True):
            reach = pool if candidate.pooled and pool > own else own
            compute, load, awaited = float(tokens - reach), float(reach - own), 0
            if own < shared.tokens:
                lacks = max(0, shared.tokens - reach)
                compute, load = compute - spared * lacks, load - spared * (shared.tokens - own - lacks)
            if own > candidate.own_tokens and job.prompt_tokens is not None:
                awaited = min(candidate.tokens, own - candidate.own_tokens)
            stay = self._stay_tokens if own > shared.tokens else 0
            found.append(_Weighed(compute, price * load, self._queue_share * (queue - awaited), stay))
        return found


def _held(job: Job, candidate: Candidate) -> int:
    """Tokens of the prompt that the engine holds, or likely holds when it comes to the request."""
    return min(size(job), max(candidate.own_tokens, candidate.likely_tokens))


def _see(remembered: Shared, job: Job, able: Sequence[Candidate]) -> Part:
    """The part of the prompt that other conversations begin with; the prompt is remembered."""
    coming = max(min(c.likely_tokens, c.own_tokens + c.tokens) for c in able)
    return remembered.see(job, size(job), [c.own_tokens for c in able], coming)


def _queues(now: Sequence[float], lately: Sequence[float]) -> list[float]:
    """What counts as before a request on each engine: what is there now, or was more lately than elsewhere."""
    least = min(lately)
    return [max(queue, past - least) for queue, past in zip(now, lately, strict=True)]
