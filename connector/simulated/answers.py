"""What an engine answers, field by field in vLLM 0.32's order. Pure.

Compared with a running engine: which fields there are, their order, which are null, and where the
usage and the fingerprint stand in a stream.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from connector.simulated.ask import Ask
from connector.simulated.engine import Generation, Output
from connector.simulated.script import Call

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


class Events(Protocol):
    """The events of a streamed answer, as bytes."""

    def begin(self) -> list[bytes]:
        """What is told before there is a token."""

    def events(self, output: Output) -> list[bytes]:
        """What one token brings."""

    def end(self) -> list[bytes]:
        """What follows the last token."""


class Form(Protocol):
    """One endpoint's way to tell what was generated."""

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]: ...

    def stream(self, generations: Sequence[Generation]) -> Events: ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """/v1/chat/completions."""

    heading: Heading
    ask: Ask

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        return whole_chat(self.heading, self.ask, choices)

    def stream(self, generations: Sequence[Generation]) -> Events:
        return Stream(self.heading, self.ask, generations, [""])


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """/v1/completions; `texts` are the prompts that an echo repeats."""

    heading: Heading
    ask: Ask
    texts: Sequence[str]

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        return whole_completion(self.heading, self.ask, choices, self.texts)

    def stream(self, generations: Sequence[Generation]) -> Events:
        return Stream(self.heading, self.ask, generations, self.texts)


def call_id() -> str:
    """A new name for a tool's call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def called(choice: Chosen) -> Call | None:
    """The tool's call that an answer is; one that was cut short is text."""
    call = choice.generation.prompt.call
    return call if call is not None and len(choice.text) >= call.ends else None


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
        "usage": usage_of(choices, first.created),
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
        "usage": usage_of(choices, None),
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
        self._said = [0] * len(generations)

    def begin(self) -> list[bytes]:
        return []

    def events(self, output: Output) -> list[bytes]:
        """What one token brings; the first one of a chat brings the roles too."""
        begin = self._roles() if self._ask.chat and not self._begun else []
        self._tokens[output.choice] += output.token is not None
        choice = self._chat_choice(output) if self._ask.chat else self._completion_choice(output)
        self._begun.add(output.choice)
        if choice is None:
            return begin
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

    def _chat_choice(self, output: Output) -> dict[str, Any] | None:
        """None: this token only brings on a tool's call, there is nothing to tell yet."""
        call = self._generations[output.choice].prompt.call
        delta = {"content": output.text} if call is None else self._call_delta(call, output)
        if not delta and output.finish is None and not self._ask.return_token_ids:
            return None
        over = call is not None and self._said[output.choice] >= call.ends and output.finish == "stop"
        choice: dict[str, Any] = {
            "index": output.choice,
            "delta": delta,
            "logprobs": None,
            "finish_reason": "tool_calls" if over and not self._ask.forced else output.finish,
        }
        if output.finish is not None:
            choice["stop_reason"] = output.stop_reason
        return {**choice, "token_ids": self._ids(output)}

    def _call_delta(self, call: Call, output: Output) -> dict[str, Any]:
        """The name comes first, the arguments as they are said."""
        before = self._said[output.choice]
        after = self._said[output.choice] = before + len(output.text)
        calls: list[dict[str, Any]] = []
        if before < call.named <= after:
            calls.append({"id": call_id(), "type": "function", "index": 0, "function": {"name": call.name}})
        if piece := call.piece(before, after):
            calls.append({"index": 0, "function": {"arguments": piece}})
        return {"tool_calls": calls} if calls else {}

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
    call = called(choice)
    content = choice.text if call is None else "" if ask.insisted else None
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({} if call is None else {"tool_calls": [_tool_call(call)]}),
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": choice.generation.finish if call is None or ask.forced else "tool_calls",
        "stop_reason": choice.generation.stop_reason,
        "token_ids": list(choice.token_ids) if ask.return_token_ids else None,
        "routed_experts": None,
    }


def _tool_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def usage_of(choices: Sequence[Chosen], created: int | None) -> dict[str, Any]:
    """The usage of an answer in one piece; `created` where the endpoint tells what was brought into the cache."""
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
