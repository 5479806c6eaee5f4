"""Jobs and candidates, spelled briefly."""

from collections.abc import Sequence

from policies.interface import Candidate, Job, Outcome, Placement, Policy, Role


def job(
    prompt: int | None = 5000,
    pool: int | None = 0,
    *,
    model: str = "m",
    tenant: str = "t",
    session: str | None = None,
    marks: str = "",
    whole: bytes = b"",
    disk: int = 0,
) -> Job:
    """A job; `marks` are its landmarks, a letter each, as they would be chained: a prompt "ab" begins as "abc" does."""
    return Job(
        model=model,
        tenant=tenant,
        prompt_tokens=prompt,
        pool_tokens=pool,
        disk_tokens=disk,
        session=session,
        landmarks=tuple(marks[: number + 1].encode() for number in range(len(marks))),
        whole=whole,
    )


def engine(
    name: str,
    *,
    role: Role = "both",
    requests: int = 0,
    tokens: int = 0,
    waiting: float | None = 0.0,
    running: float | None = None,
    own: int = 0,
    likely: int = 0,
    since: float | None = None,
    pooled: bool = True,
) -> Candidate:
    return Candidate(
        id=name,
        role=role,
        requests=requests,
        tokens=tokens,
        waiting=waiting,
        running=running,
        own_tokens=own,
        likely_tokens=likely,
        since=since,
        pooled=pooled,
    )


def engines(names: str) -> list[Candidate]:
    return [engine(name) for name in names]


def chosen(policy: Policy, times: int, candidates: Sequence[Candidate], what: Job | None = None) -> str:
    """The engines chosen for so many equal jobs, one letter each."""
    return "".join(policy.place(what or job(), candidates).engine for _ in range(times))


class Scripted:
    """A policy that places as it is told, and remembers what it was asked and what it observed."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.asked: list[tuple[Job, list[Candidate]]] = []
        self.observed: list[tuple[Placement, Outcome]] = []

    def place(self, job: Job, candidates: Sequence[Candidate]) -> Placement:
        self.asked.append((job, list(candidates)))
        return self.placement

    def observe(self, placement: Placement, outcome: Outcome) -> None:
        self.observed.append((placement, outcome))


def placement(name: str, *, spares: tuple[str, ...] = (), own: int = 0, pool: int = 0) -> Placement:
    return Placement(engine=name, prefill=None, spares=spares, own_tokens=own, pool_tokens=pool, reason="told")
