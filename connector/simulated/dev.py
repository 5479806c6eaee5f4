"""The endpoints of VLLM_SERVER_DEV_MODE=1, as far as they endanger a fleet or tell of an engine's settings.

Sources: vllm/entrypoints/serve/dev of 0.32.0. `POST /reset_prefix_cache?reset_external=true` empties the
whole pool, every tenant's part of it. Of /server_info there is here what hashing and the pool depend on.
Without dev mode the routes do not exist.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from connector.simulated.ask import Refusal
from connector.simulated.engine import Engine
from connector.simulated.serving import Flags, Model, as_json

_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})


class Dev:
    """The routes over one engine."""

    def __init__(self, model: Model, engine: Engine, sources: Mapping[str, object] | None, flags: Flags) -> None:
        """`sources` are its event publisher's settings."""
        self._model = model
        self._engine = engine
        self._sources = sources
        self._flags = flags

    async def reset_prefix_cache(self, request: Request) -> Response:
        external = request.query_params.get("reset_external", "").lower() in _TRUE
        return as_json({"success": await self._engine.reset(external=external)})

    async def is_sleeping(self, _: Request) -> Response:
        return as_json({"is_sleeping": False})

    async def server_info(self, request: Request) -> Response:
        form = request.query_params.get("config_format", "text")
        if form not in ("text", "json"):
            message = "1 validation error:\n  Input should be 'text' or 'json'"
            raise Refusal(message, "query.config_format", kind="Bad Request")
        config = self._config()
        text = ", ".join(f"{name}={value!r}" for name, value in config.items())
        events = self._engine.events
        info = {
            "vllm_config": text if form == "text" else config,
            "vllm_env": {
                "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": events is None or not events.numbers.whole,
                "VLLM_SERVER_DEV_MODE": True,
            },
            "system_env": {"vllm_version": self._flags.version},
        }
        return as_json(info)

    def _config(self) -> dict[str, Any]:
        settings = self._engine.settings
        names = list(self._model.names)
        pooled = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": settings.role,
            "kv_connector_extra_config": {"lookup_async": True},
            "kv_load_failure_policy": "recompute",
        }
        return {
            "model_config": {
                "model": str(self._model.folder),
                "tokenizer": str(self._model.folder),
                "served_model_name": names[0] if len(names) == 1 else names,
                "max_model_len": self._model.max_model_len,
            },
            "cache_config": {
                "block_size": settings.scheme.block_size,
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": settings.scheme.algorithm.value,
                "num_gpu_blocks": settings.blocks,
            },
            "kv_transfer_config": None if self._engine.pool is None else pooled,
            "kv_events_config": self._sources,
        }
