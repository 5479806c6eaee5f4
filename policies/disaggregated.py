"""disaggregated: decode first, and prefill elsewhere where that is worth a second engine."""

from collections.abc import Sequence

from msgspec.structs import replace

from policies.cache_aware import CacheAware
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, uncached
from policies.least_loaded import LeastLoaded


class Disaggregated:
    """First an engine is chosen that would do the whole, as cache_aware does. A prefill engine is added
    where the tokens that neither that engine nor the pool holds, or that engine likely holds when it comes
    to the request, are at least `min_prefill_tokens`; which one, cache_aware chooses among those that can.
    The hand over goes through the pool, so an unknown pool means no second engine, and so does an
    uncounted prompt. Who decodes is chosen once the prompt is computed, by the load at that moment.
    Engines of role both can take either part.
    """

    def __init__(self, min_prefill_tokens: int = 256) -> None:
        self._min_prefill_tokens = min_prefill_tokens
        self._whole = CacheAware()
        self._prefill = CacheAware()
        self._decode = LeastLoaded()

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        if job.prefilled:
            return self._decode.place(job, candidates)
        whole = self._whole.place(job, candidates)
        chosen = next(c for c in candidates if c.id == whole.engine)
        if job.prompt_tokens is None:
            return replace(whole, reason="prompt not counted")
        if uncached(job, chosen) < self._min_prefill_tokens:
            return replace(whole, reason="too little to prefill elsewhere")
        if job.pool_tokens is None:
            return replace(whole, reason="pool unknown, prefill where it decodes")
        able = [replace(c, role="both") for c in candidates if c.role != "decode" and c.id != whole.engine]
        try:
            prefill = self._prefill.place(job, able)
        except NoCapacity:
            return replace(whole, reason="no prefill engine")
        return Placement(
            engine=whole.engine,
            prefill=prefill.engine,
            spares=whole.spares,
            own_tokens=prefill.own_tokens,
            pool_tokens=prefill.pool_tokens,
            reason="prefill elsewhere",
        )

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Nothing is learned."""
