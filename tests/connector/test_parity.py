"""Token ids that differ from an engine's are told, with the likely reason."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from connector.errors import Inexact, TimedOut
from connector.parity import COMPLETION, SHAPES, Difference, TextFinding, calibrate_text, compare_ids, likely
from connector.tokens import Tokenizer

Tokens = Callable[[str, Mapping[str, Any]], Sequence[int]]


def ids(tokenizer: Tokenizer) -> Tokens:
    return lambda kind, body: tokenizer.chat(body) if kind == "chat" else tokenizer.completion(body)


@dataclass
class Engine:
    """Answers with the prompt's ids, as vLLM does with return_token_ids."""

    tokens: Tokens
    status: int = 200
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        if self.status == 0:
            raise TimedOut("engine:1", "head", 5)
        if self.status != 200:
            return self.status, {}
        assert body["return_token_ids"]
        try:
            if path == "/v1/chat/completions":
                return 200, {"prompt_token_ids": list(self.tokens("chat", body)), "choices": [{}]}
            return 200, {"choices": [{"prompt_token_ids": list(self.tokens("completion", body))}]}
        except Inexact:
            return 400, {}


def changed(folder: Path, to: Path, old: str = "", new: str = "", bos: str | None = "<|begin|>") -> Tokenizer:
    """The folder's tokenizer with another template, or without its first token."""
    shutil.copytree(folder, to)
    template = (to / "chat_template.jinja").read_text()
    assert old in template
    (to / "chat_template.jinja").write_text(template.replace(old, new))
    if bos is None:
        tree = json.loads((to / "tokenizer.json").read_text())
        (to / "tokenizer.json").write_text(json.dumps({**tree, "post_processor": None}))
    return Tokenizer(to)


async def finding(folder: Path, engine: Engine) -> TextFinding:
    backend = Backend.from_file(str(folder / "tokenizer.json"))

    def text(some: Sequence[int]) -> str:
        return backend.decode(list(some), skip_special_tokens=False)

    return await calibrate_text(engine, "tiny", ids(Tokenizer(folder)), text)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 4, 3], Difference(1, 2, 4, "text")),
        ([1, 2, 3], [2, 3], Difference(0, 1, 2, "bos")),
        ([2, 3], [1, 2, 3], Difference(0, 2, 1, "bos")),
        ([1, 2, 3], [9, 2, 3], Difference(0, 1, 9, "bos")),
        ([1, 2], [1, 2, 3], Difference(2, None, 3, "tail")),
        ([1, 2, 3], [1, 2], Difference(2, 3, None, "tail")),
        ([1], [2], Difference(0, 1, 2, "text")),
    ],
)
def test_where_ids_part(ours: list[int], theirs: list[int], difference: Difference | None) -> None:
    assert compare_ids(ours, theirs) == difference


def test_what_one_prompt_alone_makes_likely() -> None:
    pairs = [
        ([1, 2], [2], "bos", "bos"),
        ([1, 2], [1], "generation_prompt", "tokenizer"),
        ([1], [2], "template", "tokenizer"),
    ]
    for ours, theirs, chat, completion in pairs:
        difference = compare_ids(ours, theirs)
        assert difference is not None
        assert (likely(difference, "chat"), likely(difference, "completion")) == (chat, completion)


async def test_an_engine_that_agrees(model_folder: Path) -> None:
    engine = Engine(ids(Tokenizer(model_folder)))
    found = await finding(model_folder, engine)
    assert found.agrees
    assert not found.differ
    assert set(found.agree) | set(found.refused) == {COMPLETION, *(shape.name for shape in SHAPES)}
    assert all(body["max_tokens"] == 1 for body in engine.asked)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("'<|im_start|>' + message.role", "'<|im_start|>the ' + message.role", "template"),
        ("'# Tools'", "'# Your tools'", "tools"),
        ("'<think>'", "'<thought>'", "thinking"),
        (
            "'<|im_start|>assistant\\n' }}{%- endif %}",
            "'<|im_start|>assistant\\n**' }}{%- endif %}",
            "generation_prompt",
        ),
        (
            "'<|im_start|>assistant\\n' }}{%- endif %}",
            "'<|im_start|>assistant\\n<think>' }}{%- endif %}",
            "thinking",
        ),
        ("{{- bos_token }}", "", "bos"),
    ],
)
async def test_another_template_is_named(model_folder: Path, tmp_path: Path, old: str, new: str, kind: str) -> None:
    engine = Engine(ids(changed(model_folder, tmp_path / "theirs", old, new)))
    found = await finding(model_folder, engine)
    assert found.kind == kind
    assert found.differ
    assert found.fix


async def test_another_first_token_is_named(model_folder: Path, tmp_path: Path) -> None:
    engine = Engine(ids(changed(model_folder, tmp_path / "theirs", bos=None)))
    found = await finding(model_folder, engine)
    assert (found.kind, found.differ) == ("bos", (COMPLETION,))


async def test_another_tokenizer_is_named(model_folder: Path, tokenizer_folder: Path) -> None:
    found = await finding(model_folder, Engine(ids(Tokenizer(tokenizer_folder))))
    assert found.kind == "tokenizer"
    assert COMPLETION in found.differ


async def test_an_engine_that_does_not_answer(model_folder: Path) -> None:
    tokens = ids(Tokenizer(model_folder))
    assert (await finding(model_folder, Engine(tokens, 0))).kind == "unreachable"
    assert (await finding(model_folder, Engine(tokens, 401))).kind == "refused"
