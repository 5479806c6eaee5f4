"""cost: where the first token comes soonest, for the least that it costs others."""

from collections.abc import Sequence
from copy import deepcopy

from msgspec import Struct

from policies.interface import Candidate, Job, Outcome, Placement, able_to_answer, placed, uncached
from policies.lacking import held, lacking, on_disk, queues, see
from policies.pressure import Pressure
from policies.rates import Rate, Rates
from policies.shared import Part, Shared


class _Weighed(Struct, frozen=True):
    """The terms of an engine's cost, as they add up, in seconds."""

    wait: float
    load: float
    prefill: float
    others: float
    later: float
    stay: float

    @property
    def ttft(self) -> float:
        return self.wait + self.load + self.prefill

    @property
    def cost(self) -> float:
        return self.ttft + self.others + self.later - self.stay


class Cost:
    """The least of `cost`, in seconds:

        cost    = wait + load + prefill + others + later - stay
        wait    = (max(now, lately) - awaited) * rate.prefill
        load    = tokens that the pool has beyond the engine's own * rate.load, disk_factor times that from disk
        prefill = tokens that neither has * rate.prefill
        others  = prefill * others_share * requests that are under way there
        later   = prefill * (later_share + waiting_share * requests that wait there)
        stay    = stay_tokens * rate.prefill where the engine holds something of this conversation's own

    The first three are the time to the first token. `others` is what a prefill does to the requests that run
    there: it holds up each of them for as long, and a second of theirs counts others_share of one before a first
    token. `later` is what it does to those that are yet to come, of whom there are as many more as wait there
    already: the engine is taken for so long, and as many held tokens make room for the new ones. Both grow with
    what is computed and not with what is found, so a conversation leaves the engine that holds it only for a wait
    that is several times its prefill, and for a longer one the busier the fleet is. `stay` is the hysteresis for
    short ones.

    What keeps a hot prefix from pinning the fleet: of the part that k conversations share (policies/shared.py),
    what an engine lacks counts n / k**2 times among n engines, once at most. Few conversations stay together;
    as there are more, the part is computed on more engines, and load decides among them.

    `rate`, in seconds for a token, is learned for each engine from its answers (policies/rates.py); the priors
    are 1 / prefill_rate and 1 / load_rate. Rates of decoding are not learned: no term rests on them. `now` and
    `lately` are tokens (policies/pressure.py): the queue with request_tokens for each request, and what was
    placed there before, by which ties go round; an engine that is new or back is warmed for `warm` seconds.
    `awaited` is the part of `now` that is this very prompt being computed.

    Signals that are missing: without the engine's own figures nobody is taken to wait there, and our counts stand
    alone; an unknown pool counts as holding nothing, for everybody; a prompt that was not counted counts as its
    landmarks' tokens, and goes by what was sent where lately. Answers that tell no cached tokens, or come whole,
    teach nothing.
    """

    def __init__(
        self,
        *,
        prefill_rate: float = 10_000.0,
        load_rate: float = 40_000.0,
        disk_factor: float = 3.0,
        others_share: float = 0.03,
        later_share: float = 3.5,
        waiting_share: float = 0.2,
        request_tokens: int = 256,
        stay_tokens: int = 2816,
        warm: float = 30.0,
    ) -> None:
        if prefill_rate <= 0 or load_rate <= 0:
            raise ValueError("rates are more than 0 tokens a second")
        self._rates = Rates(Rate(1 / prefill_rate, 1 / load_rate))
        self._disk_factor = disk_factor
        self._others_share = others_share
        self._later_share = later_share
        self._waiting_share = waiting_share
        self._stay_tokens = stay_tokens
        self._pressure = Pressure(request_tokens, warm)
        self._shared = Shared()

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        able = able_to_answer(candidates)
        holds = [held(job, candidate) for candidate in able]
        now, lately = self._pressure.now(able), self._pressure.lately(able)
        weighed = self._weighed(job, able, holds, see(self._shared, job, able), queues(now, lately))
        cost = [terms.cost for terms in weighed]
        order = sorted(range(len(able)), key=lambda i: (cost[i], -holds[i], lately[i]))
        ranked = [able[i] for i in order]
        self._pressure.chose(ranked[0], uncached(job, ranked[0]))
        return placed(job, ranked, _reason(holds, holds[order[0]]))

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        """Learn the rates of who answered."""
        self._rates.observe(placement, outcome)

    def explain(self, job: Job, candidates: Sequence[Candidate]) -> dict[str, dict[str, float]]:
        """`cost` on each engine that can answer, and its time to the first token. Nothing is remembered."""
        able = able_to_answer(candidates)
        holds = [held(job, candidate) for candidate in able]
        shared = see(deepcopy(self._shared), job, able)
        before = queues(self._pressure.now(able), self._pressure.lately(able))
        weighed = self._weighed(job, able, holds, shared, before)
        return {
            candidate.id: {"cost_ms": 1000 * terms.cost, "ttft_ms": 1000 * terms.ttft}
            for candidate, terms in zip(able, weighed, strict=True)
        }

    def rate(self, engine: str) -> Rate:
        """What was learned of an engine, or is believed of it."""
        return self._rates.of(engine)

    def _weighed(
        self, job: Job, able: Sequence[Candidate], holds: Sequence[int], shared: Part, before: Sequence[float]
    ) -> list[_Weighed]:
        spared = 1 - min(1.0, len(able) / shared.ways**2)
        slower = 1 + (self._disk_factor - 1) * on_disk(job)
        found = []
        for candidate, lacks, queue in zip(able, lacking(job, able, holds, shared, spared), before, strict=True):
            rate = self._rates.of(candidate.id)
            prefill, waiting = lacks.compute * rate.prefill, candidate.waiting or 0
            requests = max(candidate.requests, waiting + (candidate.running or 0))
            found.append(
                _Weighed(
                    wait=(queue - lacks.awaited) * rate.prefill,
                    load=lacks.load * rate.load * slower,
                    prefill=prefill,
                    others=prefill * self._others_share * requests,
                    later=prefill * (self._later_share + self._waiting_share * waiting),
                    stay=self._stay_tokens * rate.prefill if lacks.stays else 0.0,
                )
            )
        return found


def _reason(holds: Sequence[int], here: int) -> str:
    longest = max(holds)
    if min(holds) == longest:
        return "all hold the same, least cost" if longest else "nothing cached, least cost"
    return "longest prefix" if here == longest else "longest prefix costs more"
