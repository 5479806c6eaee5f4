"""cache_aware: where most of the prompt is held already, unless that engine is far busier."""

from collections.abc import Sequence
from copy import deepcopy

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed, uncached
from policies.lacking import held, lacking, on_disk, queues, see
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
        holds = [held(job, candidate) for candidate in able]
        now, lately = self._pressure.now(able), self._pressure.lately(able)
        shared = see(self._shared, job, able)
        longest = max(holds)
        if min(holds) == longest and len({c.pooled for c in able}) == 1:
            ranked = by_load(able, now, lately)
            reason = "all hold the same, least loaded" if longest else "nothing cached, least loaded"
        else:
            work = self._work(job, able, holds, shared, queues(now, lately))
            order = sorted(range(len(able)), key=lambda i: (work[i], -holds[i], lately[i]))
            ranked = [able[i] for i in order]
            reason = "longest prefix" if holds[order[0]] == longest else "longest prefix is busy"
        self._pressure.chose(ranked[0], uncached(job, ranked[0]))
        return placed(job, ranked, reason)

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""

    def explain(self, job: Job, candidates: Sequence[Candidate]) -> dict[str, dict[str, float]]:
        """`work` on each engine that can answer. Nothing is remembered."""
        able = able_to_answer(candidates)
        holds = [held(job, candidate) for candidate in able]
        shared = see(deepcopy(self._shared), job, able)
        before = queues(self._pressure.now(able), self._pressure.lately(able))
        work = self._work(job, able, holds, shared, before)
        return {candidate.id: {"work_tokens": tokens} for candidate, tokens in zip(able, work, strict=True)}

    def _work(
        self, job: Job, able: Sequence[Candidate], holds: Sequence[int], shared: Part, before: Sequence[float]
    ) -> list[float]:
        price = self._load_share + (self._disk_share - self._load_share) * on_disk(job)
        return [
            lacks.compute
            + price * lacks.load
            + self._queue_share * (queue - lacks.awaited)
            - (self._stay_tokens if lacks.stays else 0)
            for lacks, queue in zip(lacking(job, able, holds, shared, 1 - 1 / shared.ways), before, strict=True)
        ]
