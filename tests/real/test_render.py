"""Chats rendered here against the same rendered by a real vLLM, without an engine: equal, inexact, or refused there.

Two of vLLM's render servers: one that takes a template with each request, so that many templates meet
every shape of request, and one whose flags say how chats are rendered.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from connector.errors import Inexact
from connector.render import Rules
from connector.tokens import Tokenizer
from gateway import commands

from .shapes import ANSWER, SHAPES, SYSTEM, USER, WEATHER, Json, body, call, parts, text
from .stack import CPU_ENVIRONMENT, ENGINE_PYTHON, ROOT, Engine, free_port

OURS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
SHIPPED = {
    path.stem: path.read_text()
    for path in sorted((ROOT / ".venv-vllm").glob("lib/*/site-packages/vllm/transformers_utils/chat_templates/*.jinja"))
}
TEMPLATES = OURS | SHIPPED

INEXACT = {
    "developer tools": "developer_tools",
    "tools odd": "number",
    "nan arguments": "number",
    "kwargs tokenize": "chat_template_kwargs",
    "generation as number": "generation_prompt",
}
"""The shapes that an engine takes and that are not known exactly here, with the reason."""


@dataclass(frozen=True)
class Server:
    """A real vLLM that renders, and our tokenizer of the same folder, told of the same flags."""

    engine: Engine
    tokenizer: Tokenizer
    http: httpx.Client

    def outcome(self, sent: Mapping[str, Any]) -> str:
        """equal, different, refused by the engine, or why it is inexact here."""
        raw = json.dumps({"model": "tiny", **sent}).encode()
        headers = {"content-type": "application/json"}
        answer = self.http.post(f"{self.engine.url}/v1/chat/completions/render", content=raw, headers=headers)
        if answer.status_code == 400:
            return "refused"
        theirs = answer.raise_for_status().json()["token_ids"]
        try:
            ours = self.tokenizer.chat(orjson.loads(raw))
        except Inexact as inexact:
            return inexact.reason
        return "equal" if list(ours) == theirs else "different"


def server(model: Path, folder: Path, rules: Rules, *flags: str) -> Server:
    port = free_port()
    command: list[str | Path] = [
        *(ENGINE_PYTHON, "-m", "vllm.entrypoints.launchers.render.entry", "--model", model),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192"),
        *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags),
    ]
    environment = {**commands.VLLM_ENVIRONMENT, **CPU_ENVIRONMENT}
    engine = Engine("renderer", port, command, folder, environment)
    return Server(engine, Tokenizer(model, rules), httpx.Client(timeout=60, trust_env=False))


def named(model: Path, folder: Path) -> Path:
    """The model's tokenizer with templates by name."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "chat_template.jinja"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"default": "chatml_tools", "tool_use": "headers", "rag": "command"}
    config["chat_template"] = [{"name": name, "template": OURS[file]} for name, file in names.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


KWARGS = {"enable_thinking": False, "bos_token": "B", "documents": [{"text": "the engine's"}]}


@dataclass(frozen=True)
class Servers:
    trusting: Server
    flagged: Server


@pytest.fixture(scope="module")
def servers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    scratch = tmp_path_factory.mktemp("render")
    file = scratch / "chat.jinja"
    file.write_text(OURS["alias_parts"])
    trusting = server(
        named(model_folder, scratch / "tiny"),
        scratch / "trusting",
        Rules(trust_request_template=True),
        "--trust-request-chat-template",
    )
    with ExitStack() as stop:
        stop.enter_context(trusting.engine)
        stop.enter_context(trusting.http)
        flagged = server(
            model_folder,
            scratch / "flagged",
            Rules(file.read_text(), "string", KWARGS, exclude_tools_when_none=True),
            *("--chat-template", str(file), "--chat-template-content-format", "string"),
            *("--default-chat-template-kwargs", json.dumps(KWARGS), "--exclude-tools-when-tool-choice-none"),
        )
        stop.enter_context(flagged.engine)
        stop.enter_context(flagged.http)
        trusting.engine.ready()
        flagged.engine.ready()
        yield Servers(trusting, flagged)


def held(outcomes: Mapping[str, str]) -> None:
    """Every shape came out as it may."""
    allowed = {name: {"equal", "refused", INEXACT.get(name, "equal")} for name in outcomes}
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in allowed[name]} == {}
    assert list(outcomes.values()).count("equal") >= len(outcomes) / 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_the_engines_prompt_for_every_shape(servers: Servers, name: str) -> None:
    if name == "template_kimi_audio":
        pytest.skip("an empty template: the engine refuses the prompt")
    source = TEMPLATES[name]
    held({shape: servers.trusting.outcome({**sent, "chat_template": source}) for shape, sent in SHAPES.items()})


def test_the_engines_flags(servers: Servers) -> None:
    outcomes = {shape: servers.flagged.outcome(sent) for shape, sent in SHAPES.items()}
    outcomes["untrusted"] = servers.flagged.outcome(body(USER, chat_template="x"))
    outcomes["untrusted kwargs"] = servers.flagged.outcome(body(USER, chat_template_kwargs={"chat_template": "x"}))
    assert outcomes["untrusted"] == outcomes["untrusted kwargs"] == "refused"
    held(outcomes)


def test_templates_by_name(servers: Servers) -> None:
    held({shape: servers.trusting.outcome(sent) for shape, sent in SHAPES.items()})
    for name in ("rag", "tool_use", "default"):
        assert servers.trusting.outcome(body(USER, chat_template=name)) == "equal"
        assert servers.trusting.outcome(body(USER, tools=[WEATHER], chat_template_kwargs={"chat_template": name})) == (
            "equal"
        )


def test_a_template_among_the_variables(servers: Servers) -> None:
    for form in ("alias_parts", "developer", "parts_written"):
        kwargs = {"chat_template": OURS[form]}
        for messages in ([SYSTEM, USER], [{"role": "developer", "content": "x"}, parts(text("a"), text("b"))]):
            for fields in ({}, {"chat_template": OURS["chatml_tools"]}, {"tools": [WEATHER]}):
                sent = body(*messages, chat_template_kwargs=kwargs, **fields)
                assert servers.trusting.outcome(sent) == "equal"


# requests at random

words = st.sampled_from(
    [
        "",
        "hi",
        " a\nb ",
        "{{ x }}",
        "<|im_end|>",
        "\u00e9\u2028\U0001f642",
        "x-anthropic-billing-header: a\nrest",
        "C++e+1",
    ]
)
odd: st.SearchStrategy[Any] = st.sampled_from([None, "", 0, 5, True, False, 1.5, [], {}, ["a"], {"a": 1}, "auto"])


def mostly(usual: st.SearchStrategy[Any], one_in: int = 12) -> st.SearchStrategy[Any]:
    return st.integers(1, one_in).flatmap(lambda n: odd if n == 1 else usual)


def shuffled(members: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return members.flatmap(lambda m: st.permutations(list(m.items())).map(dict))


def part(kind: str, member: str) -> st.SearchStrategy[Json]:
    more = dict.fromkeys(("cache_control", "name", "x", "uuid"), odd)
    return shuffled(st.fixed_dictionaries({"type": st.just(kind), member: mostly(words)}, optional=more))


any_part = st.one_of(
    part("text", "text"),
    part("text", "text"),
    words,
    part("input_text", "text"),
    part("refusal", "refusal"),
    part("thinking", "thinking"),
    st.fixed_dictionaries({"type": st.just("tool_reference"), "name": mostly(words)}),
)
content = mostly(words | st.lists(any_part, max_size=3), 12)
arguments = st.sampled_from(
    ['{"a": 1}', '{"z": {"c": [1.0, "\u00e9"]}, "a": null, "z": 2}', "", "{", "[]", '{"x": NaN}']
)
calls = st.lists(
    shuffled(
        st.builds(lambda arguments, more: call(arguments, **more), arguments, st.dictionaries(st.just("index"), odd))
    ),
    max_size=2,
)


message = st.one_of(
    shuffled(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "wizard"]),
                "content": content,
            },
            optional={
                "name": mostly(words),
                "task": odd,
                "tool_calls": mostly(calls),
                "tool_call_id": mostly(words),
                "reasoning": mostly(words),
                "reasoning_content": mostly(words),
                "tools": odd,
                "weight": odd,
            },
        )
    ),
    st.sampled_from([USER, SYSTEM, ANSWER]),
)
function = st.fixed_dictionaries(
    {"name": st.just("f")},
    optional={
        "description": mostly(words),
        "parameters": mostly(
            st.sampled_from([{"type": "object", "properties": {"z": {}, "a": {"maximum": 1e16}}}, {}])
        ),
        "strict": mostly(st.booleans()),
        "defer_loading": mostly(st.booleans()),
        "x": odd,
    },
)
tool = shuffled(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": shuffled(function)},
        optional={"defer_loading": mostly(st.booleans()), "x": odd},
    )
)
kwargs = st.dictionaries(
    st.sampled_from(
        ["enable_thinking", "thinking", "reasoning_effort", "documents", "tools", "add_generation_prompt", "bos_token",
         "padding", "continue_final_message", "controls", "date_string", "unknown"]
    ),
    odd,
    max_size=3,
)  # fmt: skip
lenient = st.sampled_from([OURS[name] for name in OURS if name not in ("command", "gemma_parts", "gemma_text", "inst")])
ending = st.sampled_from(
    [{}, {}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True}]
)
request = st.fixed_dictionaries(
    {"messages": st.lists(message, min_size=1, max_size=4), "chat_template": lenient},
    optional={
        "tools": mostly(st.lists(tool, min_size=1, max_size=2)),
        "tool_choice": st.sampled_from(["none", "auto", None]),
        "reasoning_effort": st.sampled_from(["none", "low", "high", None]),
        "documents": mostly(st.just([{"title": "a", "text": "b"}])),
        "chat_template_kwargs": mostly(kwargs),
        "add_special_tokens": st.booleans(),
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=request, ending=ending)
def test_no_request_is_silently_different(servers: Servers, asked: Json, ending: Json) -> None:
    outcome = servers.trusting.outcome(asked | ending)
    event(outcome)
    assert outcome != "different"
