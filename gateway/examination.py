"""One engine, examined from the outside in: what it is, what it leaves open, what its prompts, keys and events show.

Each engine gets a few prompts of a token's answer: chats of every kind, whose ids are compared with ours
(connector/parity.py), and random ids, whose blocks must come up in the pool under the names that we
compute (connector/calibrate.py) and in the engine's KV events. They are made here, with a salt of their own.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from tokenizers import Tokenizer as Backend

from connector.blocks import HASHING, Adapter, Algorithm, HashScheme, hashing_of
from connector.calibrate import (
    DEADLINE,
    Finding,
    Suspect,
    Verdict,
    calibrate,
    diagnose_event,
    more_seeds,
    random_root,
    send,
    suspects,
)
from connector.errors import Inexact, WireError
from connector.events import Inbox, NoEvents, Subscription
from connector.held import Reported
from connector.keys import KeyScheme
from connector.parity import calibrate_text
from connector.vllm import CacheFacts, Card, EngineControl
from gateway import config
from gateway.models import Model, Pool

NEWEST = next(reversed(HASHING))
"""The newest release of vLLM whose way of hashing is known."""
EVENTS_WAIT = 3.0
"""Seconds after a prompt for its events to arrive."""
ADAPTERS = 2
"""Adapters of an engine that are asked for."""
MAX_EVENTS = 200
"""Events of an engine that are looked at."""

SEE_LOG = "see the engine's log"

Level = Literal["agrees", "note", "warning", "wrong"]
Topic = Literal[
    "reachable", "render", "version", "model", "tokens", "hashes", "keys", "events", "usage", "safety", "fleet"
]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    subject: str
    """An engine's host:port, `pool NAME` or `model NAME`."""
    topic: Topic
    level: Level
    """wrong: disagrees or is dangerous. warning: works, and should be otherwise."""
    word: str
    """For a table."""
    says: str = ""
    fix: str = ""


def words_of(model: config.Model) -> Callable[[Sequence[int]], str]:
    """What token ids stand for, for people."""
    if model.tokenizer is None:
        return lambda _: ""
    backend = Backend.from_file(str(model.tokenizer / "tokenizer.json"))
    return lambda ids: str(backend.decode(list(ids), skip_special_tokens=False))


class _Heard:
    """The events of one engine, as they came."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.bad = False
        self.something = asyncio.Event()
        self._decoder = msgspec.msgpack.Decoder()

    def receive(self, frames: list[bytes]) -> None:
        try:
            _, events, *_ = self._decoder.decode(frames[-1])
            room = MAX_EVENTS - len(self.events)
            self.events += [event for event in events if isinstance(event, dict)][:room]
        except (ValueError, TypeError, IndexError, msgspec.DecodeError):
            self.bad = True
        self.something.set()


class _Probe:
    """An engine's control that notes whether its answers say what was cached."""

    def __init__(self, control: EngineControl, patience: float) -> None:
        self._control = control
        self._patience = patience
        self.tells_cached: bool | None = None

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        status, answer = await self._control.ask(path, body, self._patience)
        usage = answer.get("usage") if status == 200 and isinstance(answer, dict) else None
        if isinstance(usage, dict):
            self.tells_cached = bool(self.tells_cached) or usage.get("prompt_tokens_details") is not None
        return status, answer


@dataclass
class Examination:
    """One engine, from the outside in. What is found is added to `checks`."""

    spec: config.Engine
    model: Model
    words: Callable[[Sequence[int]], str]
    tls: ssl.SSLContext | None
    patience: float
    say: Say
    checks: list[Check] = field(default_factory=list)
    facts: CacheFacts = field(default_factory=lambda: CacheFacts(block_size=None, algorithm=None, blocks=None))
    card: Card | None = None
    cards: tuple[Card, ...] = ()
    believed: HashScheme | None = None
    """How the gateway believes that it hashes; None where it cannot know, or the engine does not answer."""
    finding: Finding | None = None
    """What the pool's keys showed."""
    lookup_port: int | None = None
    """What its connector's look-up socket is named by, where it is in dev mode and tells."""
    _heard: _Heard = field(default_factory=_Heard)

    @property
    def id(self) -> str:
        return urlsplit(self.spec.url).netloc

    @property
    def host(self) -> str:
        return urlsplit(self.spec.url).hostname or ""

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those of its model."""
        mine = (card for card in self.cards if card.parent == self.model.name)
        return tuple(Adapter(card.id, card.root) for card in mine if card.root is not None)

    async def run(self) -> None:
        """All that can be seen of this engine alone. Never raises for what the engine does."""
        async with self._control() as control:
            if await self._reachable(control):
                await self._safety(control)
                await self._behaviour(control)

    async def load(self, other: "Examination") -> None:
        """Whether it, which stores nothing, finds what another engine has just stored. Never raises."""
        sample = other.finding.sample if other.finding is not None else None
        if sample is None:
            return
        async with self._control() as control:
            _, answer = await control.ask("/v1/completions", sample.body(self.model.name), self.patience)
            cached = _cached(answer)
            if cached:
                self.finding = other.finding
                self._add("keys", "agrees", "loads")
            elif cached == 0:
                self._add(
                    "keys",
                    "wrong",
                    "loads none",
                    f"finds nothing of a prompt that {other.id} has put into the pool",
                    "start it as that one is: version, block size, hash algorithm, PYTHONHASHSEED, cache_prefix, model "
                    "folder name, MooncakeStoreConnector and master",
                )

    def conclude(self) -> None:
        """Put together what keys, events and the engine's own words say of its hashes."""
        if self.believed is not None:
            self._hashes(self.believed)

    @asynccontextmanager
    async def _control(self) -> AsyncIterator[EngineControl]:
        """Its control side; where it fails within the block, that is a check."""
        key = self.spec.api_key.get_secret_value() if self.spec.api_key is not None else None
        control = EngineControl(self.spec.url, api_key=key, timeout=self.patience, tls=self.tls)
        try:
            yield control
        except WireError as error:
            self._add("reachable", "wrong", "failed", f"does not answer as it should: {error.detail}", SEE_LOG)
        finally:
            await control.close()

    def _add(self, topic: Topic, level: Level, word: str, says: str = "", fix: str = "") -> None:
        self.checks.append(Check(self.id, topic, level, word, says, fix))

    async def _reachable(self, control: EngineControl) -> bool:
        """Whether it is worth going on."""
        self.say(f"{self.id}: asking what it is")
        try:
            healthy = await control.healthy()
        except WireError as error:
            self._add(
                "reachable",
                "wrong",
                "no",
                f"cannot be reached: {error.detail}",
                f"see that an engine listens at {self.spec.url}, or change engines.static[].url",
            )
            return False
        if not healthy:
            self._add("reachable", "wrong", "ill", "says that it is not well (/health)", SEE_LOG)
            return False
        self._add("reachable", "agrees", "yes")
        self.facts, _ = await control.metrics()
        await self._version(control)
        self.cards = await control.models()
        self.card = next((card for card in self.cards if card.id == self.model.name), None)
        if self.card is None:
            served = ", ".join(card.id for card in self.cards) or "nothing"
            self._add(
                "model",
                "wrong",
                "no",
                f"serves {served}, not {self.model.name}",
                f"start it with --served-model-name {self.model.name}, or change models[].name",
            )
            return False
        self._add("model", "agrees", "yes")
        return True

    async def _version(self, control: EngineControl) -> None:
        version = await control.version()
        if version is None:
            self._add("version", "warning", "?", "does not tell its version", "see that it is vLLM")
            return
        self.facts = replace(self.facts, version=version)
        hashing = hashing_of(version)
        if hashing is None and self.model.hashing is None:
            self._add(
                "version",
                "warning",
                version,
                f"is vLLM {version}, whose way of hashing is not known here; it is believed to hash as {NEWEST}",
                f'where its hashes agree below, set models[].vllm to "{NEWEST}"',
            )
        elif hashing is not None and not hashing.tagged:
            self._add(
                "version",
                "warning",
                version,
                f"is vLLM {version}, whose hashes do not tell an adapter from a salt of the same name",
                "upgrade to vLLM 0.31 or newer",
            )
        else:
            self._add("version", "agrees", version)

    async def _safety(self, control: EngineControl) -> None:
        """Doors that stand open, and what can be seen through them."""
        with suppress(WireError, ValueError, TypeError, AttributeError):
            if await control.dev_mode():
                self._add(
                    "safety",
                    "wrong",
                    "dev mode",
                    "answers dev-mode requests without any key: /reset_prefix_cache can erase the whole pool",
                    "start it without VLLM_SERVER_DEV_MODE",
                )
                self._connector(await control.server_info())
        with suppress(WireError):
            if await control.scale_out():
                self._add(
                    "safety",
                    "warning",
                    "scale-out",
                    "answers render and generate requests (--enable-scale-out)",
                    "keep it on a network that clients do not reach",
                )

    def _connector(self, info: Mapping[str, Any]) -> None:
        """What dev mode tells of the store connector's settings (KVTransferConfig of vLLM 0.32.0)."""
        settings = (info.get("vllm_config") or {}).get("kv_transfer_config") or {}
        extra = settings.get("kv_connector_extra_config") or {}
        if settings.get("kv_load_failure_policy") == "fail":
            self._add(
                "safety",
                "wrong",
                "load failure",
                "answers 500 where a block of the pool cannot be loaded (kv_load_failure_policy is fail)",
                "set kv_load_failure_policy to recompute in its --kv-transfer-config",
            )
        if settings and not extra.get("lookup_async"):
            self._add(
                "safety",
                "warning",
                "look-ups",
                "waits for the pool's look-ups in its scheduler: a slow master holds up every request",
                "set lookup_async to true in kv_connector_extra_config",
            )
        if settings:
            self.lookup_port = int(extra.get("lookup_rpc_port") or 0)

    async def _behaviour(self, control: EngineControl) -> None:
        """Prompts, and what comes of them."""
        inbox = Inbox(asyncio.get_running_loop())
        subscription = self._subscription(inbox)
        try:
            await self._prompted(control, listening=subscription is not None)
        finally:
            if subscription is not None:
                subscription.close()
            inbox.close()

    def _subscription(self, inbox: Inbox) -> Subscription | None:
        source = self.spec.kv_events
        if source is None:
            return None
        try:
            subscription = Subscription(
                inbox,
                source.connect or source.bind or "",
                bind=source.bind is not None,
                replay=None,
                held=Reported(),
                tap=self._heard.receive,
            )
            subscription.open()
        except NoEvents as error:
            self._add(
                "events",
                "wrong" if source.connect else "warning",
                "?",
                str(error),
                "a gateway that runs on this machine has the address; stop it to have the events checked",
            )
            return None
        return subscription

    async def _prompted(self, control: EngineControl, *, listening: bool) -> None:
        probe = _Probe(control, self.patience)
        if not await self._tokens(probe):
            return
        self.believed = self._belief()
        if self.believed is not None:
            await self._keys(probe, self.believed)
        if listening:
            await self._events(control)
        if probe.tells_cached is False:
            self._add(
                "usage",
                "warning",
                "no",
                "does not say how much of a prompt was cached, so predictions cannot be compared with it",
                "start it with --enable-prompt-tokens-details",
            )

    async def _tokens(self, probe: _Probe) -> bool:
        """Compare token ids. Whether the engine answers prompts."""
        prompts = self.model.prompts
        if prompts is None:
            self._add(
                "tokens", "note", "-", "has no tokenizer here (models[].tokenizer): its requests are placed by load"
            )
            return True
        self.say(f"{self.id}: comparing the token ids of chats")
        found = await calibrate_text(probe, self.model.name, prompts.full, self.words)
        tried = len(found.agree) + len(found.differ) + len(found.unknown)
        count = f"{len(found.agree)} of {tried}"
        if found.kind in ("unreachable", "refused"):
            self._add("reachable", "wrong", "no answer", found.detail, found.fix or SEE_LOG)
            return False
        if found.agrees:
            self._add("tokens", "agrees" if found.agree else "note", count)
        else:
            shapes = ", ".join(found.differ)
            self._add("tokens", "wrong", found.kind, f"{found.detail}; {count} agree, not: {shapes}", found.fix)
        if found.unknown:
            shapes = ", ".join(found.unknown)
            how = "placed by load" if self.model.render is None else "rendered by models[].render"
            self._add("tokens", "note", "", f"gets chats whose ids are not computed here, and {how}: {shapes}")
        return True

    def _belief(self) -> HashScheme | None:
        """How the gateway believes that it hashes, a random root included."""
        try:
            return self.model.scheme(self.facts)
        except Inexact as error:
            reason = error.reason
        if reason == "random_seed":
            return replace(replace(self.model, seed="0").scheme(self.facts), seed=None)
        setting = {"block_size_unknown": "block_size", "algorithm_unknown": "hash"}.get(reason, "block_size and hash")
        self._add(
            "hashes",
            "wrong",
            "?",
            f"does not tell how it hashes ({reason.replace('_', ' ')})",
            f"set models[].{setting}, or let the engine serve /metrics",
        )
        return None

    async def _keys(self, probe: _Probe, believed: HashScheme) -> None:
        """Look for a prompt's blocks in the pool."""
        keys = self.model.keys(lambda _: self.card.root if self.card is not None else None)
        if self.model.pool is None:
            self._add("keys", "note", "-", "shares no pool (models[].pool)")
            await send(probe, self.model.name, 2 * believed.block_size + 1)  # for its events
            return
        if keys is None:
            self._add("keys", "wrong", "?", "does not tell its model's folder", "set models[].keys.prefix")
            return
        self.say(f"{self.id}: looking for a prompt's blocks in pool {self.model.pool.name}")
        found = self.finding = await self._found(probe, believed, self.model.pool, keys)
        if found.kind == "not_stored" and self.spec.role == "decode":
            self._add("keys", "note", "none", "puts nothing into the pool, as is usual where it only decodes")
        elif found.kind == "key_prefix" and found.scheme == believed and self.model.key_prefix is None:
            name = " or ".join(sorted(_names(found.prefixes)))
            self._add("keys", "note", name, f"names its blocks {name}@..., which the gateway learns by itself")
        elif found.kind in ("key_prefix", "ranks", "not_stored", "unknown", "pool_unreachable"):
            self._add("keys", "wrong", found.kind.replace("_", " "), found.detail, found.fix)
        elif found.kind in ("unreachable", "refused"):
            self._add("reachable", "wrong", "no answer", found.detail, found.fix)
        elif found.kind != "random_seed":
            self._add("keys", "agrees", ", ".join(sorted(_names(keys.prefixes))))
        if found.agrees:
            for adapter in self.adapters[:ADAPTERS]:
                await self._adapter(probe, believed, self.model.pool, keys, adapter)

    async def _adapter(
        self, probe: _Probe, believed: HashScheme, pool: Pool, keys: KeyScheme, adapter: Adapter
    ) -> None:
        found = await self._found(probe, believed, pool, keys, adapter)
        if not found.agrees:
            self._add(
                "hashes",
                "wrong",
                "adapter",
                f"has shown no block of the adapter {adapter.name} under the name believed: it {found.detail}",
                found.fix,
            )

    async def _found(
        self, probe: _Probe, believed: HashScheme, pool: Pool, keys: KeyScheme, adapter: Adapter | None = None
    ) -> Finding:
        length = self.card.max_tokens if self.card is not None else None
        return await calibrate(
            probe,
            self.model.name,
            believed,
            pool.master,
            keys,
            block_sizes=self._sizes(),
            max_tokens=length,
            adapter=adapter,
            deadline=min(DEADLINE, self.patience),
        )

    def _sizes(self) -> Collection[int]:
        return {size for size in (self.facts.block_size, self.model.block_size) if size}

    def _hashes(self, believed: HashScheme) -> None:
        found = self.finding
        if found is not None and found.scheme is not None and found.kind not in ("key_prefix", "ranks"):
            if found.agrees:
                self._add("hashes", "agrees", _scheme(believed))
            else:
                self._add("hashes", "wrong", found.kind.replace("_", " "), found.detail, found.fix)
            return
        if found is not None and found.scheme == believed:
            self._add("hashes", "agrees", _scheme(believed))
            return
        told = self._told(believed) or self._judged(believed)
        if told is not None and told.kinds:
            self._add("hashes", "wrong", told.kinds[0].replace("_", " "), told.detail, told.fix)
        elif told is not None:
            self._add("hashes", "agrees", _scheme(believed))
        elif not believed.exact:
            root = random_root(believed)
            self._add("hashes", "wrong", "random seed", root.detail, root.fix)
        else:
            self._add("hashes", "warning", "not seen", "has shown no block, so how it hashes could not be checked")

    def _told(self, believed: HashScheme) -> Suspect | None:
        """A difference that the engine's metrics tell."""
        size, name = self.facts.block_size, self.facts.algorithm
        algorithm = Algorithm(name) if name in set(Algorithm) else believed.algorithm
        told = replace(believed, block_size=size or believed.block_size, algorithm=algorithm)
        if told == believed:
            return None
        ways = suspects(replace(believed, seed=believed.seed or ""), block_sizes=self._sizes())
        return next((way for way in ways[1:] if replace(way.scheme, seed=believed.seed) == told), None)

    def _judged(self, believed: HashScheme) -> Suspect | None:
        """What the engine's events tell: the first way that is not the believed one, else the believed one."""
        ways = suspects(believed, block_sizes=self._sizes())
        verdicts = list(filter(None, (self._verdict(event, ways) for event in self._heard.events)))
        if any(verdict.suspect is None for verdict in verdicts):
            seeds = tuple(more_seeds(believed))
            first = [event for event in self._heard.events if event.get("parent_block_hash") is None]
            verdicts += filter(None, (self._verdict(event, seeds) for event in first[:8]))
            if not any(verdict.suspect and verdict.suspect.kinds for verdict in verdicts):
                return Suspect(
                    believed,
                    ("seed",),
                    "hashes in none of the ways that were tried: most likely its PYTHONHASHSEED is another",
                    "set models[].hash_seed to the engine's PYTHONHASHSEED, or start it without one",
                )
        named = [verdict.suspect for verdict in verdicts if verdict.suspect is not None]
        return next((way for way in named if way.kinds), next(iter(named), None))

    def _verdict(self, event: Mapping[str, Any], ways: Sequence[Suspect]) -> Verdict | None:
        adapter = next((one for one in self.adapters if one.name == event.get("lora_name")), None)
        try:
            return diagnose_event(event, ways, adapter=adapter)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    async def _events(self, control: EngineControl) -> None:
        """Whether anything arrives, and what it is."""
        heard = self._heard
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.something.wait(), min(EVENTS_WAIT, self.patience))
        source = self.spec.kv_events
        assert source is not None
        if heard.bad:
            self._add("events", "wrong", "unreadable", "publishes what is not vLLM's events", "see kv_events")
            return
        if not heard.events:
            says, fix = await self._silence(control, source)
            self._add("events", "wrong", "none", says, fix)
            return
        hashes = [one for event in heard.events for one in event.get("block_hashes") or ()]
        if any(isinstance(one, int) for one in hashes):
            self._add("events", "agrees", "64-bit")
            self._add(
                "events",
                "note",
                "",
                "writes 64 bits of each hash in its events: enough to know its blocks by, not to check later ones",
                "start it with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0",
            )
        else:
            self._add("events", "agrees", "whole")

    async def _silence(self, control: EngineControl, source: config.KvEvents) -> tuple[str, str]:
        """Why nothing arrives, and what to do."""
        ours = source.connect or source.bind or ""
        try:
            sources = list((await control.event_sources()).values())
        except WireError:
            sources = []
        endpoints = [one.endpoint for one in sources if one.enabled]
        if not endpoints:
            flag = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{ours.rpartition(':')[2]}",
            }
            return (
                "publishes no KV events",
                f"start it with --kv-events-config '{json.dumps(flag)}', or remove kv_events",
            )
        endpoint = endpoints[0]
        binds = "*" in endpoint or "::" in endpoint
        port = endpoint.rpartition(":")[2]
        if source.connect and not binds:
            return (
                f"connects to {endpoint} with its events, where kv_events.connect waits for it to listen: neither does",
                f"start it with the endpoint tcp://*:{port}, or set kv_events to {{bind: {endpoint}}}",
            )
        if source.bind and binds:
            return (
                f"listens at {endpoint} for those who want its events, where kv_events.bind waits for it to connect",
                f"set kv_events to {{connect: tcp://{self.host}:{port}}}",
            )
        if port != ours.rpartition(":")[2]:
            return f"publishes its events at port {port}, not {ours}", "set kv_events to that port"
        return (
            f"publishes its events at {endpoint}, but none arrives at {ours}",
            "see that no firewall lies between, and that the engine's KV cache events are enabled",
        )


def _cached(answer: Any) -> int | None:
    """The cached tokens of a prompt, where an answer tells them."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details.get("cached_tokens") if isinstance(details, dict) else None


def _names(prefixes: Collection[str]) -> frozenset[str]:
    return frozenset(prefix.partition("@tp_rank:")[0] for prefix in prefixes)


def _scheme(scheme: HashScheme) -> str:
    return f"{scheme.algorithm} {scheme.block_size}"
