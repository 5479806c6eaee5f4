"""What an engine answers, field by field in vLLM 0.32's order. Pure.

Compared with a running engine: which fields there are, their order, which are null, and where the
usage and the fingerprint stand in a stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from connector.simulated.ask import Ask
from connector.simulated.engine import Generation, Output

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What every piece of one answer bears."""

    request_id: str
    """Without the prefix that says what kind of answer it is."""
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """One choice of an answer, whole."""

    generation: Generation
    text: str
    token_ids: Sequence[int]


def event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(data)


def whole_chat(heading: Heading, ask: Ask, choices: Sequence[Chosen]) -> dict[str, Any]:
    """A chat's answer in one piece."""
    first = choices[0].generation
    return {
        "id": f"chatcmpl-{heading.request_id}",
        "object": "chat.completion",
        "created": heading.created,
        "model": heading.model,
        "choices": [_chat_choice(index, choice, ask) for index, choice in enumerate(choices)],
        "service_tier": None,
        "system_fingerprint": heading.fingerprint,
        "usage": _usage(choices, first.created),
        "prompt_logprobs": None,
        "prompt_token_ids": list(first.prompt.tokens) if ask.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def whole_completion(heading: Heading, ask: Ask, choices: Sequence[Chosen], prompts: Sequence[str]) -> dict[str, Any]:
    """A completion's answer in one piece; `prompts` are the texts that an echo repeats."""
    return {
        "id": f"cmpl-{heading.request_id}",
        "object": "text_completion",
        "created": heading.created,
        "model": heading.model,
        "choices": [
            {
                "index": index,
                "text": _echoed(ask, prompts, index) + choice.text,
                "logprobs": None,
                "finish_reason": choice.generation.finish,
                "stop_reason": choice.generation.stop_reason,
                "token_ids": _echoed_ids(ask, choice) if ask.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": list(choice.generation.prompt.tokens) if ask.return_token_ids else None,
                "routed_experts": None,
            }
            for index, choice in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": heading.fingerprint,
        "usage": _usage(choices, None),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


class Stream:
    """The events of a streamed answer."""

    def __init__(self, heading: Heading, ask: Ask, generations: Sequence[Generation], prompts: Sequence[str]) -> None:
        self._heading = heading
        self._ask = ask
        self._generations = generations
        self._prompts = prompts
        self._begun: set[int] = set()
        self._tokens = [0] * len(generations)

    def events(self, output: Output) -> list[bytes]:
        """What one token brings; the first one of a chat brings the roles too."""
        begin = self._roles() if self._ask.chat and not self._begun else []
        self._tokens[output.choice] += output.token is not None
        choice = self._chat_choice(output) if self._ask.chat else self._completion_choice(output)
        self._begun.add(output.choice)
        piece = self._piece([choice])
        if self._ask.continuous_usage:
            piece["usage"] = self._so_far(output.choice)
        if output.finish is not None and not self._ask.include_usage:
            piece["system_fingerprint"] = self._heading.fingerprint
        return [*begin, event(piece)]

    def end(self) -> list[bytes]:
        """What follows the last token."""
        return [event(self._final()), DONE] if self._ask.include_usage else [DONE]

    def _roles(self) -> list[bytes]:
        return [self._role(index) for index in range(len(self._generations))]

    def _role(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        piece = self._piece([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        if self._ask.continuous_usage:
            piece["usage"] = self._so_far(index)
        tokens = self._generations[index].prompt.tokens
        return event(
            {**piece, "prompt_token_ids": list(tokens) if self._ask.return_token_ids else None, "prompt_text": None}
        )

    def _chat_choice(self, output: Output) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output.choice,
            "delta": {"content": output.text},
            "logprobs": None,
            "finish_reason": output.finish,
        }
        if output.finish is not None:
            choice["stop_reason"] = output.stop_reason
        return {**choice, "token_ids": self._ids(output)}

    def _completion_choice(self, output: Output) -> dict[str, Any]:
        first = output.choice not in self._begun
        echo = _echoed(self._ask, self._prompts, output.choice) if first else ""
        shown = first and (self._ask.echo or self._ask.return_token_ids)
        return {
            "index": output.choice,
            "text": echo + output.text,
            "logprobs": None,
            "finish_reason": output.finish,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": list(self._generations[output.choice].prompt.tokens) if shown else None,
            "token_ids": self._ids(output),
        }

    def _ids(self, output: Output) -> list[int] | None:
        if not self._ask.return_token_ids:
            return None
        return [] if output.token is None else [output.token]

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind, prefix = ("chat.completion.chunk", "chatcmpl") if self._ask.chat else ("text_completion", "cmpl")
        return {
            "id": f"{prefix}-{self._heading.request_id}",
            "object": kind,
            "created": self._heading.created,
            "model": self._heading.model,
            "choices": choices,
        }

    def _so_far(self, index: int) -> dict[str, Any]:
        prompt, generated = len(self._generations[index].prompt.tokens), self._tokens[index]
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
        }
        return {**usage, "completion_tokens_details": None} if self._ask.chat else usage

    def _final(self) -> dict[str, Any]:
        first = self._generations[0]
        prompt, generated = _prompt_tokens(self._ask.n, self._generations), sum(self._tokens)
        details: dict[str, Any] = {"cached_tokens": first.cached}
        if self._ask.chat:
            details["created_cache_tokens"] = first.created
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
            "prompt_tokens_details": details,
        }
        return {**self._piece([]), "usage": usage, "system_fingerprint": self._heading.fingerprint}


def _chat_choice(index: int, choice: Chosen, ask: Ask) -> dict[str, Any]:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": choice.generation.finish,
        "stop_reason": choice.generation.stop_reason,
        "token_ids": list(choice.token_ids) if ask.return_token_ids else None,
        "routed_experts": None,
    }


def _usage(choices: Sequence[Chosen], created: int | None) -> dict[str, Any]:
    distinct = {id(choice.generation.prompt.tokens): choice.generation for choice in choices}
    prompt = sum(len(generation.prompt.tokens) for generation in distinct.values())
    generated = sum(len(choice.token_ids) for choice in choices)
    last = list(distinct.values())[-1]
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": {
            "cached_tokens": last.cached,
            "created_cache_tokens": created,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def _prompt_tokens(n: int, generations: Sequence[Generation]) -> int:
    """Each prompt counts once, however often it is answered."""
    return sum(len(generation.prompt.tokens) for generation in generations[::n])


def _echoed(ask: Ask, prompts: Sequence[str], index: int) -> str:
    return prompts[index // ask.n] if ask.echo and not ask.return_token_ids else ""


def _echoed_ids(ask: Ask, choice: Chosen) -> list[int]:
    prompt = choice.generation.prompt.tokens if ask.echo else ()
    return [*prompt, *choice.token_ids]
