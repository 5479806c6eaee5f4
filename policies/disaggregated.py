"""disaggregated: decode first, and prefill elsewhere where that is worth a second engine."""

from collections.abc import Sequence
from dataclasses import replace

from policies.cache_aware import CacheAware
from policies.interface import Candidate, Job, NoCapacity, Outcome, Placement, Policy, uncached
from policies.least_loaded import LeastLoaded


class Disaggregated:
    """Two policies: one chooses who decodes, the other who prefills.

    The decode engine is chosen first. A prefill engine is added where the tokens that neither the
    decode engine nor the pool holds are at least `min_prefill_tokens`. The hand over goes through
    the pool, so an unknown pool means no second engine, and so does an uncounted prompt. Engines
    of role both can take either part; one chosen for both does the whole.
    """

    def __init__(
        self,
        min_prefill_tokens: int = 256,
        prefill: Policy | None = None,
        decode: Policy | None = None,
    ) -> None:
        self._min_prefill_tokens = min_prefill_tokens
        self._prefill = prefill or CacheAware()
        self._decode = decode or LeastLoaded()

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        decode = self._decode.place(job, candidates)
        chosen = next(c for c in candidates if c.id == decode.engine)
        if job.prompt_tokens is None:
            return replace(decode, reason="prompt not counted")
        if uncached(job, chosen) < self._min_prefill_tokens:
            return replace(decode, reason="too little to prefill elsewhere")
        if job.pool_tokens is None:
            return replace(decode, reason="pool unknown, prefill where it decodes")
        able = [replace(c, role="both") for c in candidates if c.role != "decode" and c.id != decode.engine]
        try:
            prefill = self._prefill.place(job, able)
        except NoCapacity:
            return replace(decode, reason="no prefill engine")
        return Placement(
            engine=decode.engine,
            prefill=prefill.engine,
            spares=decode.spares,
            own_tokens=prefill.own_tokens,
            pool_tokens=prefill.pool_tokens,
            reason="prefill elsewhere",
        )

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        self._decode.observe(placement, outcome)
