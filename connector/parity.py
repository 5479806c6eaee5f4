"""A prompt's token ids, as computed here and as an engine has them.

    compare_ids      where two lists of ids part. Pure
    SHAPES           chats of every kind that a template treats in a way of its own
    calibrate_text   these and a plain text to one engine, its ids against ours, and the likely reason

The prompts stand here, so that what a finding quotes is no tenant's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from connector.calibrate import Asked
from connector.errors import Inexact, WireError

Kind = Literal["chat", "completion"]
About = Literal["plain", "tools", "thinking", "open"]

PLAIN_TEXT = "The pool holds 12 blocks, Größe 3.5 GB; each engine computes what is left (about 40 %)."


@dataclass(frozen=True, slots=True)
class Shape:
    """One request body, without model and sampling; `name` says what is special about it."""

    name: str
    body: Mapping[str, Any]
    kind: Kind = "chat"
    about: About = "plain"
    """What it puts to the test. open: it has no generation prompt."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"


_ASK = {"role": "user", "content": "Which engine holds the longest prefix?"}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "residency",
        "description": "How many blocks of a prompt the pool holds",
        "parameters": {
            "type": "object",
            "properties": {"prompt": {"type": "string"}, "limit": {"type": "integer", "minimum": 0}},
            "required": ["prompt"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "residency", "arguments": '{"prompt": "Größe", "limit": 3}'},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"blocks": 12}'}
_TOOLS = {"tools": [_TOOL], "tool_choice": "none"}

PLAIN = Shape("plain", {"messages": [_ASK]})
SHAPES = (
    PLAIN,
    Shape("system", {"messages": [_SYSTEM, _ASK]}),
    Shape("developer", {"messages": [{**_SYSTEM, "role": "developer"}, _ASK]}),
    Shape("turns", {"messages": [_SYSTEM, _ASK, {"role": "assistant", "content": "engine-2"}, _ASK]}),
    Shape(
        "parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("One.", "Two.")]}]}
    ),
    Shape("unicode", {"messages": [{"role": "user", "content": "Grüße, 你好, مرحبا, 👩‍🚀 e\u0301\u00a0x"}]}),
    Shape("whitespace", {"messages": [{"role": "user", "content": "\n  def f(x):\n\treturn  x \n\n"}]}),
    Shape("tools", {"messages": [_ASK], **_TOOLS}, about="tools"),
    Shape("tool call", {"messages": [_ASK, _CALL, _RESULT, _ASK], **_TOOLS}, about="tools"),
    Shape(
        "reasoning",
        {"messages": [_ASK, {"role": "assistant", "content": "engine-2", "reasoning": "It holds most."}, _ASK]},
        about="thinking",
    ),
    Shape("no thinking", {"messages": [_ASK], "chat_template_kwargs": {"enable_thinking": False}}, about="thinking"),
    Shape("open turn", {"messages": [_ASK], "add_generation_prompt": False}, about="open"),
    Shape(
        "continued",
        {
            "messages": [_ASK, {"role": "assistant", "content": "It is engine"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        about="open",
    ),
)

COMPLETION = "completion"
"""The name of the shape that is no chat."""
SHOWN = 6
"""Tokens of a difference that are told."""

Part = Literal["bos", "tail", "text"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two lists of ids part."""

    at: int
    """The first position at which they differ."""
    ours: int | None
    """Our id there; None where ours ends before."""
    theirs: int | None
    part: Part
    """bos: one has an id more at its start, or another one, and all else is equal. tail: one ends where the
    other goes on. text: anything else."""


def compare_ids(ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """Where a prompt's ids, as computed here and as the engine has them, part; None where they are equal."""
    ours, theirs = list(ours), list(theirs)
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    at = next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)
    if ours[1:] == theirs or ours == theirs[1:] or (ours[1:] == theirs[1:] and shorter > 1):
        part: Part = "bos"
    else:
        part = "tail" if at == shorter else "text"
    return Difference(
        at,
        ours[at] if at < len(ours) else None,
        theirs[at] if at < len(theirs) else None,
        part,
    )


TextKind = Literal[
    "agrees",
    "tokenizer",
    "bos",
    "template",
    "tools",
    "thinking",
    "generation_prompt",
    "refused",
    "unreachable",
]


def likely(difference: Difference, kind: Kind) -> TextKind:
    """Why ids are likely to differ, from one prompt alone; `calibrate_text` knows better."""
    if difference.part == "bos":
        return "bos"
    if kind == "completion":
        return "tokenizer"
    return "generation_prompt" if difference.part == "tail" else "template"


@dataclass(frozen=True, slots=True)
class TextFinding:
    """What was found of an engine's token ids."""

    kind: TextKind
    agree: tuple[str, ...] = ()
    """The shapes whose ids are equal."""
    differ: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """The shapes whose ids are not computed here: such requests are placed by load."""
    refused: tuple[str, ...] = ()
    """The shapes that the engine does not take."""
    detail: str = ""
    fix: str = ""

    @property
    def agrees(self) -> bool:
        return self.kind == "agrees"


Ours = Callable[[Kind, Mapping[str, Any]], Sequence[int]]
"""A body's ids as computed here; raises `Inexact`."""


async def calibrate_text(
    engine: Asked,
    model: str,
    ours: Ours,
    text: Callable[[Sequence[int]], str],
    *,
    shapes: Sequence[Shape] = SHAPES,
) -> TextFinding:
    """Send one engine a plain text and chats of every shape, and compare their ids with ours. Never raises.

    `text` is what ids stand for, for people. The answers cost the engine a token each.
    """
    agree: list[str] = []
    unknown: list[str] = []
    refused: list[str] = []
    parted: dict[str, tuple[Difference, Sequence[int], Sequence[int]]] = {}
    plain = Shape(COMPLETION, {"prompt": PLAIN_TEXT}, kind="completion")
    for shape in (plain, *shapes):
        body = {**shape.body, "model": model, "max_tokens": 1, "temperature": 0}
        try:
            status, answer = await engine.ask(shape.path, {**body, "return_token_ids": True})
        except WireError as error:
            return TextFinding("unreachable", detail=f"does not answer a prompt: {error.detail}")
        theirs = prompt_ids(answer) if status == 200 else None
        if theirs is None:
            refused.append(shape.name)
            continue
        try:
            mine = ours(shape.kind, body)
        except Inexact:
            unknown.append(shape.name)
            continue
        difference = compare_ids(mine, theirs)
        if difference is None:
            agree.append(shape.name)
        else:
            parted[shape.name] = difference, mine, theirs
    outcome = tuple(agree), tuple(parted), tuple(unknown), tuple(refused)
    if not parted:
        if not agree and not unknown:
            return TextFinding(
                "refused", *outcome, "refuses every prompt", "see the engine's log, and engines[].api_key"
            )
        return TextFinding("agrees", *outcome)
    name, (difference, mine, told) = next(iter(parted.items()))
    here, there = (text(ids[difference.at : difference.at + SHOWN]) for ids in (mine, told))
    kind = _reason(
        {name: found for name, (found, _, _) in parted.items()},
        {shape.name: shape.about for shape in shapes},
        agree,
        thinks="think" in here + there,
    )
    words, fix = _TOLD[kind]
    detail = f"{words} ({name}, token {difference.at}: the engine has {_shown(there)}, here it is {_shown(here)})"
    return TextFinding(kind, *outcome, detail, fix)


def prompt_ids(answer: Any) -> list[int] | None:
    """The prompt's ids in an answer: on top in a chat's, with the choice in a completion's."""
    if not isinstance(answer, dict):
        return None
    ids = answer.get("prompt_token_ids")
    choices = answer.get("choices")
    if ids is None and isinstance(choices, list) and choices and isinstance(choices[0], dict):
        ids = choices[0].get("prompt_token_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in ids):
        return None
    return ids


def _reason(
    parted: Mapping[str, Difference], about: Mapping[str, About], agree: Sequence[str], *, thinks: bool
) -> TextKind:
    """Why ids are likely to differ, from which shapes do."""
    parts = {found.part for found in parted.values()}
    if parts == {"bos"}:
        return "bos"
    if COMPLETION in parted and parted[COMPLETION].part != "bos":
        return "tokenizer"
    chats = [name for name in parted if name != COMPLETION]
    kinds = {about[name] for name in chats}
    if kinds in ({"tools"}, {"thinking"}) and any(about.get(name) == "plain" for name in agree):
        return "tools" if kinds == {"tools"} else "thinking"
    if any(about.get(name) == "open" for name in agree) and "open" not in kinds:
        return "thinking" if thinks else "generation_prompt"
    return "template"


def _shown(text: str) -> str:
    return repr(text) if text else "nothing"


_RENDERING = "set models[].chat as the engine's flags are, or start the engine with the template of models[].tokenizer"
_TOLD: dict[TextKind, tuple[str, str]] = {
    "tokenizer": (
        "turns plain text into other tokens: it has another tokenizer",
        "set models[].tokenizer to the folder of the model that the engine serves",
    ),
    "bos": (
        "begins its prompts otherwise",
        "set models[].tokenizer to the folder that the engine has: its files say whether a token is put first",
    ),
    "template": ("renders chats with another template", _RENDERING),
    "tools": (
        "renders tools otherwise",
        "see that --chat-template and --exclude-tools-when-tool-choice-none of the engine are as models[].chat says",
    ),
    "thinking": (
        "renders reasoning otherwise",
        "set models[].chat.kwargs to the engine's --default-chat-template-kwargs",
    ),
    "generation_prompt": ("opens the assistant's turn otherwise", _RENDERING),
}
