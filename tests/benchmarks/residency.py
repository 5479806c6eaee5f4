"""How often the pool's run is said to be longer than it is, and what asking costs, while the store evicts.

Agents work on one pool, some at a time: 20,000 common tokens, 10,000 of their own at first, 2,048 more in each
of 30 turns, in blocks of 16; another one comes when one has ended. Half of their turns come after a pause. The
store is a real Mooncake master's, with one segment that holds a part of what they work on. Before each turn the
gateway's look-up is made, and at once the engine's own: `batch_is_exist` of all keys, which renews their leases, by
a native client in a process of its own. Then the engine puts what it missed. Leases are half as long as Mooncake's
own, and so is the time for which a prefix counts as verified: the fleet is small and works fast for its size.

Over-predicted is a run that is more than 128 blocks longer than what the engine found.

At the end the engine looks the agents' prompts up again and again: alone, right after the gateway has sampled
another one, as where requests come one by one, and at the same moment with it.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvloop

from connector.blocks import Prefix
from connector.keys import KeyScheme, Ranks
from connector.mooncake import Master
from connector.residency import OVER, Residence, Residency
from tests.benchmarks.stage import say, table
from tests.real.stack import inherited, start_master

BLOCK = 16
COMMON, FIRST, TURN = 20_000 // BLOCK, 10_000 // BLOCK, 2_048 // BLOCK
TURNS = 30
LAST = COMMON + FIRST + TURNS * TURN
SEGMENT = 128 * 1024 * 1024
"""Bytes of the store; objects are as large as lets so many in as are wanted."""
PUT = 512
TOGETHER = 200
"""Look-ups of which a p99 is taken, where two ways are compared: the median of many is not moved by other work."""
DEADLINE = 0.25
"""Seconds for a look-up here, where the machine may have other work."""
PATIENCE = 10.0
"""And for those of which the time is measured."""


def blocks(agent: int, count: int) -> tuple[bytes, ...]:
    """The hashes of an agent's prompt of so many blocks."""
    common = (sha256(b"common %d" % place).digest() for place in range(min(COMMON, count)))
    return (*common, *(sha256(b"%d %d" % (agent, place)).digest() for place in range(COMMON, count)))


def scheme_of(ranks: int) -> KeyScheme:
    return KeyScheme.of("Qwen3-8B", Ranks(tp=ranks))


# the engine, in a process of its own


def engine(rpc: str, size: int, ranks: int) -> None:
    """Answer lines `turn AGENT BLOCKS` and `look AGENT BLOCKS`: seconds of the look-up, its run, and failed puts."""
    os.environ |= {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_LOG_LEVEL": "ERROR"}
    # The variables must be set before; the wheel has no types.
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-untyped]  # noqa: PLC0415

    client = MooncakeDistributedStore()
    if code := client.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, 16 * 1024 * 1024, "tcp", "", rpc):
        raise SystemExit(f"the master does not take this client: {code}")
    scheme = scheme_of(ranks)
    value = bytes(size)
    known: dict[int, list[str]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        verb, agent, count = line.split()
        if int(agent) not in known:
            known[int(agent)] = [key for block in blocks(int(agent), LAST) for key in scheme.keys(block)]
        keys = known[int(agent)][: int(count) * ranks]
        started = time.perf_counter()
        there = client.batch_is_exist(keys)
        seconds = time.perf_counter() - started
        first = next((place for place, code in enumerate(there) if code != 1), len(keys))
        print(json.dumps([seconds, first // ranks]), flush=True)
        if verb == "turn":
            missing = [key for key, code in zip(keys, there, strict=True) if code != 1]
            parts = [missing[start : start + PUT] for start in range(0, len(missing), PUT)]
            print(sum(client.put_batch(part, [value] * len(part)) != 0 for part in parts), flush=True)


class Engine:
    """The other end of `engine`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, rpc: str, size: int, ranks: int) -> "Engine":
        arguments = ("-m", "tests.benchmarks.residency", "--engine", rpc, str(size), str(ranks))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=inherited()
        )
        started = cls(process)
        while await started._line() != b"ready\n":
            pass
        return started

    async def look(self, verb: str, agent: int, count: int) -> tuple[float, int]:
        """Seconds of the engine's own look-up, and the run that it found."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {agent} {count}\n".encode())
        seconds, run = json.loads(await self._line())
        return seconds, run

    async def put(self) -> int:
        """Wait for the puts of a turn; how many failed."""
        return int(await self._line())

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine's process is gone")
        return line

    def kill(self) -> None:
        self._process.kill()


# the agents


@dataclass
class Agent:
    number: int
    turn: int = 0
    idle: int = 0
    """Turns of others that it lets pass."""

    @property
    def blocks(self) -> int:
        return COMMON + FIRST + self.turn * TURN

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.blocks * BLOCK + 1, BLOCK, blocks(self.number, self.blocks))


@dataclass
class Figures:
    asked: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    partial: int = 0
    """Turns before which a part of what the agent had was gone."""
    over: int = 0
    under: int = 0
    unknown: int = 0
    failed_puts: int = 0

    def note(self, said: Residency, seconds: float, real: int) -> None:
        self.seconds.append(seconds)
        self.asked.append(said.asked)
        if said.run is None:
            self.unknown += 1
        else:
            self.over += said.run - real > OVER
            self.under += real > said.run


def rank(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def work(residence: Residence, engine: Engine, options: argparse.Namespace, figures: Figures) -> list[Agent]:
    """So many turns, one each `pace` seconds on average; tells which agents are there at the end.

    The first turns fill the store and are not counted.
    """
    chance, scheme = random.Random(options.seed), scheme_of(options.ranks)
    agents = [Agent(number, turn=chance.randrange(TURNS)) for number in range(options.together)]
    coming = itertools.count(options.together)
    due = time.monotonic()
    for done in range(-2 * options.together, options.turns):
        due += chance.expovariate(1 / options.pace)
        await asyncio.sleep(due - time.monotonic())
        awake = [agent for agent in agents if agent.idle <= done] or agents
        agent = chance.choice(awake)
        prefix = agent.prefix
        started = time.perf_counter()
        said = await residence.look_up(prefix, scheme)
        seconds = time.perf_counter() - started
        _, real = await engine.look("turn", agent.number, agent.blocks)
        failed = await engine.put()
        if done >= 0:
            figures.note(said, seconds, min(real, prefix.reusable))
            figures.partial += agent.turn > 0 and COMMON <= real < agent.blocks - TURN
            figures.failed_puts += failed
        agent.turn += 1
        agent.idle = done + (chance.randrange(4 * options.together) if chance.random() < 0.5 else 0)
        if agent.turn == TURNS:
            agents[agents.index(agent)] = Agent(next(coming))
        if done % 100 == 0:
            say(f"turn {done}: {figures.over} over-predicted, {figures.partial} had lost something")
    return agents


async def interference(
    residence: Residence, engine: Engine, agents: Sequence[Agent], scheme: KeyScheme, rounds: int
) -> dict[str, list[float]]:
    """Seconds of the engine's look-ups: alone, right after one of the gateway, and while it makes one."""
    prefixes = [agent.prefix for agent in agents]
    seconds: dict[str, list[float]] = {"alone": [], "after": [], "beside": []}
    for number in range(rounds):
        agent, other = agents[number % len(agents)], prefixes[(number + 1) % len(agents)]
        for way, taken in seconds.items():
            looking = asyncio.create_task(residence.look_up(other, scheme)) if way != "alone" else None
            if looking is not None and way == "after":
                await looking
            took, _ = await engine.look("look", agent.number, agent.blocks)
            taken.append(took)
            if looking is not None:
                await looking
        if number % 500 == 499:
            say(f"{number + 1} of {rounds} rounds of look-ups side by side")
    return seconds


def typical(taken: Sequence[float], share: float) -> float:
    """The median, over blocks of look-ups made one after the other, of such a rank of each."""
    blocks = [taken[start : start + TOGETHER] for start in range(0, len(taken), TOGETHER)]
    return median(rank(block, share) for block in blocks)


async def verified_cost(residence: Residence, agent: Agent, scheme: KeyScheme) -> float:
    """Seconds of CPU of a look-up of a prompt that was seen just now, all of it."""
    known = await residence.look_up(agent.prefix, scheme)
    assert known.run, known
    prefix = Prefix(known.run * BLOCK + 1, BLOCK, blocks(agent.number, known.run))
    await residence.look_up(prefix, scheme)
    rounds = 1000
    started = time.process_time()
    for _ in range(rounds):
        await residence.look_up(prefix, scheme)
    return (time.process_time() - started) / rounds


def evicted(admin: str) -> int:
    lines = httpx.get(f"{admin}/metrics", trust_env=False).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("master_evicted_key_count ")))


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    scheme = scheme_of(options.ranks)
    with start_master(folder, extra_args=(f"--default_kv_lease_ttl={int(options.lease * 1000)}",)) as master:
        engine = await Engine.start(master.rpc, SEGMENT // options.store // options.ranks, options.ranks)
        residence = Residence(Master([master.admin]), DEADLINE, verified=options.lease / 2)
        try:
            await residence.open()
            figures = Figures()
            started = time.monotonic()
            agents = await work(residence, engine, options, figures)
            lasted = time.monotonic() - started
            gone = evicted(master.admin)
            scans = (residence.scans, residence.over_predicted, residence.under_predicted)
            always = Residence(Master([master.admin]), PATIENCE, verified=0.0, scan_every=10**9)
            beside = await interference(always, engine, agents, scheme, options.rounds)
            await always.close()
        finally:
            await residence.close()
            engine.kill()
        calm = Residence(Master([master.admin]), PATIENCE, scan_every=10**9)
        cost = await verified_cost(calm, agents[0], scheme)
        await calm.close()
    turns = len(figures.asked)
    return {
        "ranks": options.ranks,
        "turns": turns,
        "keys_p50": rank(figures.asked, 0.5),
        "keys_p99": rank(figures.asked, 0.99),
        "over_percent": 100 * figures.over / turns,
        "over": figures.over,
        "under_percent": 100 * figures.under / turns,
        "unknown": figures.unknown,
        "lost_something_percent": 100 * figures.partial / turns,
        "seconds": lasted,
        "evicted_keys_a_second": gone / lasted,
        "failed_puts": figures.failed_puts,
        "over_5_ms_percent": 100 * sum(seconds > 0.005 for seconds in figures.seconds) / turns,
        "look_up_ms_p50": 1000 * rank(figures.seconds, 0.5),
        "look_up_ms_p99": 1000 * rank(figures.seconds, 0.99),
        **{
            f"engine_ms_p{round(100 * share)}_{way}": 1000 * typical(taken, share)
            for share in (0.5, 0.99)
            for way, taken in beside.items()
            if taken
        },
        "scans": scans[0],
        "scans_over": scans[1],
        "scans_under": scans[2],
        "verified_us": 1e6 * cost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel ranks, each with an object of a block")
    parser.add_argument("--turns", type=int, default=800)
    parser.add_argument("--pace", type=float, default=0.4, help="seconds from turn to turn, on average")
    parser.add_argument("--lease", type=float, default=5.0, help="seconds of Mooncake's leases")
    parser.add_argument("--together", type=int, default=24, help="agents at work at a time")
    parser.add_argument("--store", type=int, default=72_000, help="blocks that the store holds")
    parser.add_argument("--rounds", type=int, default=4000, help="of the look-ups compared at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        rpc, size, ranks = options.engine
        engine(rpc, int(size), int(ranks))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(measure(options, Path(folder)))
    rows = [[name.replace("_", " "), f"{value:.4g}"] for name, value in figures.items()]
    print(json.dumps(figures) if options.json else table(("", ""), rows))


if __name__ == "__main__":
    main()
