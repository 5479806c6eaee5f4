"""What an engine does is named, whichever way it departs from what is believed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from connector.blocks import Adapter, Algorithm, HashScheme, hash_prompt
from connector.calibrate import BLOCK_SIZES, Kind, Sample, Verdict, calibrate, diagnose_event, suspects
from connector.errors import Unreachable
from connector.keys import KeyScheme, Ranks
from connector.simulated.events import Chain, Numbers, put, stored

BELIEVED = HashScheme(Algorithm.SHA256_CBOR, 32)
KEYS = KeyScheme.of("tiny")
OTHERWISE: list[tuple[dict[str, Any], tuple[Kind, ...]]] = [
    ({}, ()),
    ({"algorithm": Algorithm.SHA256}, ("algorithm",)),
    ({"seed": "42"}, ("seed",)),
    ({"tagged": False}, ("tagging",)),
    ({"block_size": 64}, ("block_size",)),
    ({"algorithm": Algorithm.XXHASH, "seed": "0"}, ("algorithm", "seed")),
]


@dataclass
class Engine:
    """Puts a prompt's blocks into a set, as vLLM with this scheme and these keys would."""

    scheme: HashScheme = BELIEVED
    keys: KeyScheme = KEYS
    stores: bool = True
    vocabulary: int = 4096
    status: int = 200
    adapter: Adapter | None = None
    pool: set[str] = field(default_factory=set)
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        if self.status == 0:
            raise Unreachable("engine:1", "no connection")
        if max(body["prompt"]) >= self.vocabulary:
            return 400, {}
        if self.status == 200 and self.stores:
            adapter = self.adapter if body["model"] != "tiny" else None
            hashes = hash_prompt(body["prompt"], self.scheme, salt=body["cache_salt"], adapter=adapter).hashes
            self.pool.update(key for block in hashes for key in self.keys.keys(block))
        return self.status, {}

    async def resident(self, keys: Sequence[str]) -> Collection[str]:
        return self.pool.intersection(keys)

    async def keys_of(self, hashes: Collection[bytes]) -> Collection[str]:
        wanted = {block.hex() for block in hashes}
        return {key for key in self.pool if key.rpartition("@")[2] in wanted}


async def finding(engine: Engine, believed: HashScheme = BELIEVED, **more: Any) -> Any:
    return await calibrate(engine, "tiny", believed, engine, KEYS, deadline=0.05, **more)


def test_the_belief_comes_first_and_then_what_differs_least() -> None:
    ways = suspects(BELIEVED, block_sizes=[48])
    assert ways[0].scheme == BELIEVED
    assert not ways[0].kinds
    assert [len(way.kinds) for way in ways] == sorted(len(way.kinds) for way in ways)
    assert len({way.scheme for way in ways}) == len(ways)
    assert {way.scheme.block_size for way in ways} == {48, *BLOCK_SIZES}
    assert all(way.scheme.exact and way.detail and way.fix for way in ways[1:])


@pytest.mark.parametrize(("changes", "kinds"), OTHERWISE)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("adapter", [None, Adapter("chef", "/adapters/chef")])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_an_event_names_the_way(
    changes: dict[str, Any], kinds: tuple[Kind, ...], whole: bool, adapter: Adapter | None, salt: str | None
) -> None:
    scheme = replace(BELIEVED, **changes)
    if not scheme.tagged and adapter is None and salt is None:
        kinds = ()  # there is nothing to tag
    tokens = list(range(100, 100 + 3 * scheme.block_size))
    hashes = hash_prompt(tokens, scheme, salt=salt, adapter=adapter).hashes
    everywhere = (adapter.name,) if adapter else ()
    extra = [everywhere + ((salt,) if salt else ()) or None, everywhere or None, everywhere or None]
    chain = Chain(
        hashes, None, tokens, scheme.block_size, extra, 1 if adapter else None, adapter.name if adapter else None
    )
    verdict = diagnose_event(stored(chain, Numbers(whole)), suspects(BELIEVED), adapter=adapter)
    assert verdict is not None
    assert verdict.suspect is not None
    assert verdict.suspect.kinds == kinds
    assert verdict.hashes == hashes
    assert verdict.agrees == (not kinds)


def test_an_event_of_a_later_block_needs_its_parents_full_hash() -> None:
    tokens = list(range(100, 228))
    hashes = hash_prompt(tokens, BELIEVED, salt="salt").hashes
    later = Chain(hashes[2:], hashes[1], tokens[64:], 32, [None, None])
    ways = suspects(BELIEVED)
    agrees = Verdict(ways[0], hashes[2:])
    assert diagnose_event(stored(later, Numbers(whole=True)), ways) == agrees
    assert diagnose_event(stored(later, Numbers(whole=False)), ways) is None
    assert diagnose_event(stored(later, Numbers(whole=False)), ways, parent=hashes[1]) == agrees


def test_an_event_that_no_known_way_explains() -> None:
    tokens = list(range(100, 132))
    hashes = hash_prompt(tokens, replace(BELIEVED, seed="a seed of theirs")).hashes
    event = stored(Chain(hashes, None, tokens, 32, [None]), Numbers())
    assert diagnose_event(event, suspects(BELIEVED)) == Verdict(None)


def test_an_event_that_says_too_little_is_not_judged() -> None:
    tokens = list(range(100, 132))
    chain = Chain(hash_prompt(tokens, BELIEVED).hashes, None, tokens, 32, [("chef",)], 1, "chef")
    ways = suspects(BELIEVED)
    assert diagnose_event(stored(chain, Numbers()), ways) is None, "the adapter's path is not known"
    assert diagnose_event(put(chain, Numbers())[0], ways) is None, "the salt is not told"
    assert diagnose_event({**stored(chain, Numbers()), "group_idx": 1}, ways, adapter=Adapter("chef", "/x")) is None


@pytest.mark.parametrize(("changes", "kinds"), OTHERWISE)
async def test_a_prompts_keys_name_the_way(changes: dict[str, Any], kinds: tuple[Kind, ...]) -> None:
    engine = Engine(replace(BELIEVED, **changes))
    found = await finding(engine)
    assert found.kind == (kinds[0] if kinds else "agrees")
    assert found.scheme == engine.scheme
    assert found.prefixes == KEYS.prefixes
    assert bool(found.fix) == bool(kinds)
    salt = engine.asked[-1]["cache_salt"]
    assert salt not in found.detail + found.fix


async def test_an_unusual_seed_is_found() -> None:
    found = await finding(Engine(replace(BELIEVED, seed="75310")))
    assert (found.kind, found.scheme.seed) == ("seed", "75310")
    assert 'set models[].hash_seed to "75310"' in found.fix


async def test_an_unusual_block_size_that_something_speaks_for_is_found() -> None:
    found = await finding(Engine(replace(BELIEVED, block_size=48)), block_sizes=[48])
    assert (found.kind, found.scheme.block_size) == ("block_size", 48)


async def test_a_random_root_is_told_and_a_seed_behind_it_found() -> None:
    believed = replace(BELIEVED, algorithm=Algorithm.XXHASH)
    assert (await finding(Engine(replace(believed, seed="a seed of theirs")), believed)).kind == "random_seed"
    assert (await finding(Engine(replace(believed, seed="42")), believed)).kind == "seed"
    assert (await finding(Engine(replace(BELIEVED, fixed_root=False, seed="0")))).kind == "seed"


@pytest.mark.parametrize(
    ("scheme", "path", "kind"),
    [
        (BELIEVED, "/adapters/chef", "agrees"),
        (replace(BELIEVED, tagged=False), "/adapters/chef", "tagging"),
        (BELIEVED, "", "adapter"),
        (BELIEVED, "/elsewhere/chef", "not_stored"),
    ],
)
async def test_an_adapters_blocks(scheme: HashScheme, path: str, kind: Kind) -> None:
    engine = Engine(scheme, adapter=Adapter("chef", path))
    found = await finding(engine, adapter=Adapter("chef", "/adapters/chef"))
    assert found.kind == kind
    assert engine.asked[-1]["model"] == "chef"


async def test_another_key_prefix_is_learned() -> None:
    found = await finding(Engine(keys=KeyScheme.of("blue@tiny")))
    assert found.kind == "key_prefix"
    assert found.prefixes == KeyScheme.of("blue@tiny").prefixes
    assert found.fix == "set models[].keys.prefix to blue@tiny"


async def test_another_key_prefix_and_another_seed_at_once() -> None:
    found = await finding(Engine(replace(BELIEVED, seed="42"), KeyScheme.of("blue@tiny")))
    assert found.kind == "key_prefix"
    assert "PYTHONHASHSEED=42" in found.detail
    assert found.scheme == replace(BELIEVED, seed="42")


@pytest.mark.parametrize("ranks", [Ranks(tp=2), Ranks(pp=2), Ranks(tp=4, dcp=2), Ranks(pcp=2)])
async def test_more_ranks_than_believed(ranks: Ranks) -> None:
    engine = Engine(keys=KeyScheme.of("tiny", ranks))
    assert (await finding(engine)).kind == "ranks"


async def test_fewer_ranks_than_believed() -> None:
    engine = Engine()
    found = await calibrate(engine, "tiny", BELIEVED, engine, KeyScheme.of("tiny", Ranks(tp=2)), deadline=0.05)
    assert found.kind == "ranks"
    assert found.prefixes == KEYS.prefixes


async def test_an_engine_that_stores_nothing() -> None:
    assert (await finding(Engine(stores=False))).kind == "not_stored"


async def test_an_engine_that_does_not_answer() -> None:
    assert (await finding(Engine(status=0))).kind == "unreachable"
    assert (await finding(Engine(status=500))).kind == "refused"


async def test_a_small_vocabulary_and_a_short_model() -> None:
    engine = Engine(vocabulary=300)
    assert (await finding(engine, max_tokens=100)).kind == "agrees"
    assert len(engine.asked[-1]["prompt"]) <= 98
    assert (await finding(engine, max_tokens=20)).kind == "refused"


def test_samples_never_repeat() -> None:
    one, other = Sample.draw(64), Sample.draw(64)
    assert one.salt != other.salt
    assert one.tokens != other.tokens
