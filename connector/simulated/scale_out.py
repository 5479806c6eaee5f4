"""The endpoints behind --enable-scale-out: what the engine would compute on, without computing it.

Sources: vllm/entrypoints/scale_out of 0.32.0 (factories.py, render/serving.py). Without the flag every one
of these routes answers 403; with it only the four renders are served here: vLLM also derenders, and
generates from ids. Of the sampling parameters a render tells what the request said, but no grammar.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from connector.simulated.ask import Ask, Refusal
from connector.simulated.engine import Prompt

ROUTES = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
)
_DEFAULTS = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0}
_GREEDY = 1e-5
"""Temperatures below this are 0, and nothing is drawn."""


async def closed(_: Request) -> Response:
    """What any of the routes answers without the flag."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    raise Refusal(message, status=403, kind="PermissionDeniedError")


def generate_body(
    name: str, body: Mapping[str, Any], ask: Ask, prompt: Prompt, *, response: bool = False
) -> dict[str, object]:
    """What /inference/v1/generate would take for this prompt; of a `response` it is said what is transferred."""
    given = body.get("kv_transfer_params")
    left = {field: value for field, value in (given or {}).items() if field != "prompt_token_ids"}
    extra = {"kv_transfer_params": left} if left else {}
    options = {"include_usage": ask.include_usage, "continuous_usage_stats": ask.continuous_usage}
    return {
        "request_id": name,
        "token_ids": list(prompt.tokens),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling(body, ask, prompt.max_tokens, {"extra_args": extra} if extra or response else {}),
        "model": ask.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": ask.stream,
        "stream_options": options if ask.stream and body.get("stream_options") else None,
        "cache_salt": ask.salt,
        "priority": body.get("priority") or 0,
        "kv_transfer_params": left if response and given is not None else None,
        "ec_transfer_params": None,
    }


def _sampling(body: Mapping[str, Any], ask: Ask, limit: int, more: Mapping[str, object]) -> dict[str, object]:
    """Fields at their defaults are left out, but for some."""

    def given(name: str, default: float) -> float:
        value = body.get(name)
        return default if value is None else float(value)

    params: dict[str, object] = {name: given(name, default) for name, default in _DEFAULTS.items()}
    if given("temperature", 1.0) >= _GREEDY:
        params |= {"top_p": given("top_p", 1.0), "top_k": int(given("top_k", 0)), "min_p": given("min_p", 0.0)}
    params |= {"seed": ask.seed, "stop": list(ask.stop), "stop_token_ids": sorted(ask.stop_token_ids)}
    params |= {"ignore_eos": ask.ignore_eos, "max_tokens": limit, "min_tokens": ask.min_tokens}
    params |= {"output_kind": 1 if ask.stream else 2, "skip_clone": True, **more}
    params |= {"bad_words": [], "skip_reading_prefix_cache": False}
    omitted = {"top_k": 0, "seed": None, "ignore_eos": False, "min_tokens": 0}
    told = {name: value for name, value in params.items() if name not in omitted or value != omitted[name]}
    return told if ask.n == 1 else {"n": ask.n, **told}
