"""A request's body to what is asked of the engine, or to the refusal that vLLM would answer.

The fields' types are checked by pydantic, as in vLLM, so that the messages about them agree; rules
that go beyond a type stand below in vLLM's order. Sources: vllm/entrypoints/openai/*/protocol.py,
vllm/sampling_params.py and vllm/entrypoints/serve/exception_handling of 0.32.0. Fields that shape
the distribution of tokens are checked and then have no effect: the words come from the prompt, and
where logprobs are asked for they are null.

Which of vLLM's requests take a `cache_salt`: chat and text completions, responses, messages,
embeddings, score and rerank. Which do not: tokenize, detokenize, messages/count_tokens, audio. The
rule for it (128 characters, none of them `@`, a slash, a backslash or NUL) is the same everywhere.
`guided_json` and its kin are gone from vLLM and have no effect; `structured_outputs` took their place.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from connector.simulated.script import Wanted

MAX_SALT = 128
MAX_LOGPROBS = 20
MAX_REPORTED = 10
ANY_OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
"""What is answered where JSON is wanted and no schema is given."""
_KINDS = frozenset({"str", "int", "float", "bool", "list", "dict", "none", "union", "nullable", "function-after"})

Token = Annotated[int, Field(ge=0)]


class Refusal(Exception):
    """An answer that is an error, with what stands in it."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.kind = kind

    @classmethod
    def of(cls, field: str, message: str, value: object = None) -> "Refusal":
        """With the field named behind the message, as vLLM does."""
        shown = f", value={value}" if value is not None else ""
        return cls(f"{message} (parameter={field}{shown})", field)

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


class _Open(BaseModel):
    """Unknown fields are accepted."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(_Open):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(_Open):
    """What chat and completion requests share."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = []
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    user: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


class Function(_Open):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Open):
    type: Literal["function"] = "function"
    function: Function


class Message(_Open):
    role: str
    content: str | list[dict[str, Any]] | None = None


class JsonSchema(_Open):
    name: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(_Open):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class Structured(_Open):
    """vLLM's own way to say what the answer must be; the first of these that is set counts."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    choice: list[str] | None = None
    json_object: bool | None = None


class ChatBody(Sampling):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Sampling):
    prompt: list[Token] | list[list[Token]] | str | list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    n: int = 1


class TokenizePrompt(_Open):
    prompt: str
    add_special_tokens: bool = True


class TokenizeChat(_Open):
    messages: list[Message]


class DetokenizeBody(_Open):
    tokens: list[Token]


Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Ask:
    """How a prompt is to be answered."""

    chat: bool
    model: str | None
    """As it is echoed; None where the request names none."""
    max_tokens: int | None
    min_tokens: int
    n: int
    seed: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    keep_stop: bool
    """Whether a stop string is part of the answer."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    salt: str | None
    wanted: Wanted | None = None
    """The form of the answer; None: words."""
    forced: bool = False
    """Whether the tool was named by the request: then the answer ends as if no tool were called."""
    insisted: bool = False
    """Whether the request named a tool or required one: then there is content beside the call, an empty one."""
    limit_field: str = "max_tokens"
    """What the limit is called where it is refused."""


def checked(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """A body whose fields have the right types. Raises `Refusal`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise malformed(error.errors(include_url=False)) from error


def malformed(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The refusal of a body whose fields have the wrong types."""
    noun = "error" if len(errors) == 1 else "errors"
    lines = [f"  {_told(error)}" for error in errors[:MAX_REPORTED]]
    if len(errors) > MAX_REPORTED:
        lines.append(f"  ...and {len(errors) - MAX_REPORTED} more {noun}")
    message = "\n".join([f"{len(errors)} validation {noun}:", *lines])
    return Refusal(message, _place(errors[0]["loc"]), kind="Bad Request")


def chat_ask(body: dict[str, Any], *, parses_tools: bool) -> Ask:
    """Check a chat body. `parses_tools`: whether the engine has a tool parser. Raises `Refusal`."""
    _before(body)
    _tool_choice(body)
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise Refusal("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise Refusal.of("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
    chat = checked(ChatBody, body)
    if chat.chat_template is not None:
        raise Refusal(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    if not parses_tools:
        _unparsed_tools(body)
    if not chat.messages:
        raise Refusal("Cannot apply chat template to an empty conversation. Provide at least one message.")
    limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    return replace(
        sampled(chat, chat=True, max_tokens=limit, echo=False),
        wanted=tool_due(body) or formed(chat.response_format, chat.structured_outputs),
        forced=isinstance(body.get("tool_choice"), dict),
        insisted=body.get("tool_choice") not in (None, "none", "auto"),
        limit_field="max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens",
    )


def completion_ask(body: dict[str, Any]) -> tuple[CompletionBody, Ask]:
    """Check a completion's body. Raises `Refusal`."""
    _before(body)
    if body.get("prompt") in (None, ""):
        raise Refusal.of("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
    completion = checked(CompletionBody, body)
    if not completion.prompt:
        raise Refusal("You must pass at least one prompt")
    if completion.logprobs is not None and completion.logprobs > MAX_LOGPROBS:
        raise Refusal.of(
            "logprobs",
            f"Requested sample logprobs of {completion.logprobs}, which is greater than max allowed: {MAX_LOGPROBS}",
            completion.logprobs,
        )
    limit = 16 if completion.max_tokens is None else completion.max_tokens
    echo = completion.echo is True
    ask = sampled(completion, chat=False, max_tokens=limit or int(echo), echo=echo)
    return completion, replace(ask, wanted=formed(completion.response_format, completion.structured_outputs))


def formed(form: ResponseFormat | None, structured: Structured | None) -> Wanted | None:
    """The form that is asked for. Raises `Refusal`."""
    if form is not None and form.type == "json_object":
        return Wanted(schema=ANY_OBJECT)
    if form is not None and form.json_schema is not None:
        return Wanted(schema=form.json_schema.schema_ or ANY_OBJECT)
    if structured is None:
        return None
    if structured.json_ is not None:
        return Wanted(schema=_schema(structured.json_))
    if structured.choice:
        return Wanted(text=structured.choice[0])
    return Wanted(schema=ANY_OBJECT) if structured.json_object else None


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise Refusal(f"Invalid JSON schema: {error}") from error
    return schema if isinstance(schema, dict) else {}


def check_limits(ask: Ask, prompt: int, exact: bool, max_model_len: int) -> int:
    """How many tokens may be generated behind a prompt of so many tokens. Raises `Refusal`.

    `exact` where the client sent ids; a text is counted only as far as the limit.
    """
    if ask.max_tokens is not None and ask.max_tokens > max_model_len:
        raise Refusal.of(
            ask.limit_field,
            f"{ask.limit_field}={ask.max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            ask.max_tokens,
        )
    check_room(prompt, exact=exact, max_model_len=max_model_len)
    left = max_model_len - prompt
    limit = left if ask.max_tokens is None else min(left, ask.max_tokens)
    if limit < 1:
        raise Refusal.of("max_tokens", f"max_tokens must be at least 1, got {limit}.", limit)
    if ask.min_tokens > limit:
        raise Refusal(f"min_tokens must be less than or equal to max_tokens={limit}, got {ask.min_tokens}.")
    return limit


def check_room(prompt: int, *, exact: bool, max_model_len: int) -> None:
    """Whether the model takes a prompt of so many tokens. Raises `Refusal`."""
    if prompt > max_model_len:
        counted = prompt if exact else max_model_len + 1
        raise Refusal.of(
            "input_tokens",
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{'' if exact else 'at least '}{counted} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            counted,
        )


def flattened(body: dict[str, Any], model: str) -> dict[str, Any]:
    """A chat body whose messages hold plain text only, as the engine's template gets them. Raises `Refusal`.

    Text in parts is joined by line ends.
    """
    messages = []
    for message in body["messages"]:
        plain = dict(message)
        if isinstance(message.get("content"), list):
            plain["content"] = "\n".join(_part(part, model) for part in message["content"])
        messages.append(plain)
    return {**body, "messages": messages}


def sampled(body: Sampling, *, chat: bool, max_tokens: int | None, echo: bool) -> Ask:
    """What the shared fields ask for. Raises `Refusal`."""
    _sampling(body)
    options = body.stream_options or StreamOptions()
    include = options.include_usage is True
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Ask(
        chat=chat,
        model=body.model,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        n=1 if body.n is None else body.n,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        stop=tuple(one for one in stop if one),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        keep_stop=body.include_stop_str_in_output,
        stream=body.stream is True,
        include_usage=include,
        continuous_usage=include and options.continuous_usage_stats is True,
        return_token_ids=body.return_token_ids is True,
        echo=echo,
        salt=body.cache_salt,
    )


def check_salt(salt: object) -> None:
    """Raises `Refusal`."""
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise Refusal.of("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided.")
    if isinstance(salt, str) and (len(salt) > MAX_SALT or re.search(r"[@/\\\x00]", salt)):
        raise Refusal.of(
            "cache_salt",
            f"Parameter 'cache_salt' must be at most {MAX_SALT} characters and must not contain "
            "'@', '/', '\\\\', or NUL.",
        )


def _before(body: dict[str, Any]) -> None:
    """What vLLM checks before the fields' types."""
    check_salt(body.get("cache_salt"))
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise Refusal.of(
            "response_format",
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
        )
    if body.get("stream_options") and not body.get("stream"):
        raise Refusal.of("stream_options", "Stream options can only be defined when `stream=True`.")


def _tool_choice(body: dict[str, Any]) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice", "none")
    if tools == []:
        raise Refusal.of(
            "tools",
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
        )
    if choice in (None, "none"):
        return
    if not tools:
        raise Refusal.of("tool_choice", "When using `tool_choice`, `tools` must be set.")
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        raise Refusal.of(
            "tool_choice",
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
        )
    if isinstance(choice, dict) and _name(choice) not in [_name(tool) for tool in tools if isinstance(tool, dict)]:
        raise Refusal.of(
            "tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`"
        )


def tool_due(body: dict[str, Any]) -> Wanted | None:
    """The tool to call now: the one that is named, else the first, of own accord once for each user's turn."""
    tools = body.get("tools")
    choice = body.get("tool_choice", "auto" if tools else "none")
    if not tools or choice in (None, "none"):
        return None
    roles = [message["role"] for message in body["messages"]]
    if choice == "auto" and "tool" in roles[_last(roles, "user") :]:
        return None
    if choice == "auto" and "user" not in roles:
        return None
    wanted = _name(choice) if isinstance(choice, dict) else _name(tools[0])
    tool = next(tool["function"] for tool in tools if _name(tool) == wanted)
    return Wanted(schema=tool.get("parameters") or {}, tool=tool["name"])


def _last(roles: Sequence[str], role: str) -> int:
    return len(roles) - 1 - roles[::-1].index(role) if role in roles else 0


def _unparsed_tools(body: dict[str, Any]) -> None:
    """An engine without a tool parser takes tools only with the choice `none`."""
    choice = body.get("tool_choice", "auto" if body.get("tools") else "none")
    if choice == "auto":
        raise Refusal('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if choice == "required":
        raise Refusal('tool_choice="required" requires --tool-call-parser to be set')
    if isinstance(choice, dict):
        raise Refusal(f'tool_choice=function "{_name(choice)}" requires --tool-call-parser to be set')


def _name(tool: Mapping[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("presence_penalty", -2.0, 2.0, "must be in [-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "must be in [-2, 2]"),
    ("min_p", 0.0, 1.0, "must be in [0, 1]"),
)


def _sampling(body: Sampling) -> None:
    """The values that a sampler refuses."""
    if body.n is not None and body.n < 1:
        raise Refusal(f"n must be at least 1, got {body.n}.")
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        rule = "must be non-negative" if body.temperature < 0 else "must be in [0, 2]"
        raise Refusal.of("temperature", f"temperature {rule}, got {body.temperature}.", body.temperature)
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise Refusal.of("top_p", f"top_p must be in (0, 1], got {body.top_p}.", body.top_p)
    for field, low, high, rule in _RANGES:
        value = getattr(body, field)
        if value is not None and not low <= value <= high:
            raise Refusal(f"{field} {rule}, got {value}.")
    if body.repetition_penalty is not None and body.repetition_penalty <= 0.0:
        raise Refusal(f"repetition_penalty must be greater than zero, got {body.repetition_penalty}.")
    if body.top_k is not None and body.top_k < -1:
        raise Refusal(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if body.min_tokens < 0:
        raise Refusal(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.temperature == 0.0 and body.n is not None and body.n > 1:
        raise Refusal(f"n must be 1 when using greedy sampling, got {body.n}.")


def _part(part: Mapping[str, Any], model: str) -> str:
    text = part.get("text")
    if isinstance(text, str):
        return text
    raise Refusal(f"{model} is not a multimodal model")


def _told(error: Mapping[str, Any]) -> dict[str, Any]:
    told = {"type": error["type"], "loc": _place(error["loc"]), "msg": error["msg"], "input": _shown(error["input"])}
    return told | ({"ctx": error["ctx"]} if "ctx" in error else {})


def _place(loc: Sequence[int | str]) -> str:
    """Where a field stands, without the names that pydantic has for the members of a union."""
    inner = [
        str(part) for part in loc if not (isinstance(part, str) and (part in _KINDS or re.search(r"[\[({]", part)))
    ]
    return ".".join(["body", *inner])


def _shown(value: object) -> object:
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "...[truncated]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value)
