"""What is read when somebody asks for /metrics: how engines, models and pools stand."""

from collections.abc import Callable, Mapping

from connector.held import Reported
from connector.residency import Residence
from gateway.agreement import Agreement
from gateway.fleet import Fleet
from gateway.models import Model

_EVENTS: dict[str, tuple[str, Callable[[Reported], int]]] = {
    "kv_events_total": ("KV events taken in.", lambda held: held.events),
    "kv_event_messages_total": ("Messages of KV events that came.", lambda held: held.received),
    "kv_event_gaps_total": ("Times that messages were missing.", lambda held: held.gaps),
    "kv_event_replays_total": ("Times that an engine told again what was missed.", lambda held: held.replays),
    "kv_event_replays_failed_total": ("Times that it could not.", lambda held: held.failed),
    "kv_event_bad_total": ("KV events and messages of them that could not be read.", lambda held: held.bad),
    "kv_event_forgotten_total": (
        "Times that all was forgotten that an engine was thought to hold, since some of it may be gone.",
        lambda held: held.forgotten,
    ),
}


_POOLS: dict[str, tuple[str, Callable[[Residence], float]]] = {
    "pool_asks": ("1 where the pool is asked: a master serves, and look-ups do not all fail.", lambda pool: pool.asks),
    "pool_segments": (
        "Segments that make up the pool; one less after an engine's loss.",
        lambda pool: pool.master.segments,
    ),
    "pool_seen": ("Prefixes of prompts that are remembered to have been looked up.", lambda pool: pool.remembered),
    "pool_scans_total": ("Look-ups that were compared with every key.", lambda pool: pool.scans),
    "pool_over_predicted_total": (
        "Such look-ups that had said more than was there, by more than 128 blocks.",
        lambda pool: pool.over_predicted,
    ),
    "pool_under_predicted_total": ("Such look-ups that had said less.", lambda pool: pool.under_predicted),
}


def engine_gauges(fleet: Fleet) -> Mapping[str, tuple[str, list[tuple[str, float]]]]:
    """Name to its text and its value for each engine."""
    return {
        "engine_up": ("1 where the engine is given work.", [(e.id, float(e.alive)) for e in fleet.engines]),
        "engine_requests": ("Requests of this gateway under way.", [(e.id, e.requests) for e in fleet.engines]),
        "engine_backlog_tokens": ("Prompt tokens not yet computed.", [(e.id, e.backlog) for e in fleet.engines]),
        "engine_held_blocks": ("Blocks the engine is thought to hold.", [(e.id, len(e.held)) for e in fleet.engines]),
        "engine_held_bytes": (
            "Bytes of memory that knowing those blocks takes.",
            [(e.id, e.held.held_bytes) for e in fleet.engines],
        ),
        "engine_blocks_evicted_total": (
            "Blocks forgotten since the engine cannot have room for so many.",
            [(e.id, e.held.evicted) for e in fleet.engines],
        ),
        "engine_signal_age_seconds": (
            "Since the engine last told how busy it is.",
            [(e.id, age) for e in fleet.engines if (age := fleet.signal_age(e)) is not None],
        ),
        **{
            name: (text, [(e.id, read(e.held)) for e in fleet.engines if isinstance(e.held, Reported)])
            for name, (text, read) in _EVENTS.items()
        },
        "engine_breaker": (
            "Circuit breaker: 0 closed, 1 half open (one request tries the engine), 2 open (it gets none).",
            [(e.id, float(e.breaker.state)) for e in fleet.engines],
        ),
        "engine_agrees": (
            "0 where it is known to hash or name blocks otherwise: nothing of the pool is expected there.",
            [(e.id, float(e.pooled)) for e in fleet.engines],
        ),
        "engine_connections": ("Connections with an exchange under way.", [(e.id, e.wire.busy) for e in fleet.engines]),
    }


def model_gauges(
    models: Mapping[str, Model], agreements: Mapping[str, Agreement]
) -> Mapping[str, tuple[str, list[tuple[str, float]]]]:
    """Name to its text and its value for each model."""
    return {
        "shapes_off": (
            "Shapes of requests about whose token ids an engine disagrees; they are placed by load.",
            [(name, agreement.shapes_off) for name, agreement in agreements.items()],
        ),
        "prompt_cache_bytes": (
            "Bytes of memory that earlier prompts take, so that only what is new of a prompt is encoded.",
            [(name, model.prompts.held_bytes) for name, model in models.items() if model.prompts is not None],
        ),
    }


def pool_gauges(models: Mapping[str, Model]) -> Mapping[str, tuple[str, list[tuple[str, float]]]]:
    """Name to its text and its value for each pool."""
    pools = {model.pool.name: model.pool.residence for model in models.values() if model.pool is not None}
    return {
        name: (text, [(pool, float(read(residence))) for pool, residence in pools.items()])
        for name, (text, read) in _POOLS.items()
    }
