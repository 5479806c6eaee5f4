"""A chat request to the prompt text: each rule of connector/render.py, and each refusal."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from connector.errors import Inexact
from connector.render import NO_FLAGS, Rules, Template, chat_text, renderer_of_its_own

USER = {"role": "user", "content": "hi"}
DUMP = """\
{{ {"messages": messages, "tools": tools, "documents": documents, "generate": add_generation_prompt} | tojson }}"""
PARTS = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}" + DUMP
DEVELOPER = "{# 'developer' #}" + DUMP


class Folder:
    """A model's templates: one, or several by their names."""

    special_tokens_map: Mapping[str, Any] = {"bos_token": "<s>"}

    def __init__(self, source: str = DUMP, **named: str) -> None:
        self._named = {"default": source, **named}

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        if chat_template is None:
            chat_template = "tool_use" if tools is not None and "tool_use" in self._named else "default"
        return self._named.get(chat_template, chat_template)


def body(*messages: object, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def rendered(*messages: object, source: str = DUMP, rules: Rules = NO_FLAGS, **fields: Any) -> dict[str, Any]:
    """What the template was given."""
    text = chat_text(body(*messages, **fields), Folder(source), rules)
    return cast("dict[str, Any]", json.loads(text))


def message(message: object, source: str = DUMP) -> dict[str, Any]:
    """What becomes of one message."""
    [only] = rendered(message, source=source)["messages"]
    return cast("dict[str, Any]", only)


def refused(sent: Mapping[str, Any], template: Template | None = None, rules: Rules = NO_FLAGS) -> str:
    with pytest.raises(Inexact) as caught:
        chat_text(sent, template or Folder(), rules)
    return caught.value.reason


@pytest.fixture(scope="module")
def template(model_folder: Path) -> Template:
    return cast("Template", AutoTokenizer.from_pretrained(model_folder, local_files_only=True))


# as a whole


def test_a_conversation(template: Template) -> None:
    sent = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?", "name": "Ada"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "2"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }

    assert chat_text(sent, template) == (
        "<|begin|># Tools\n"
        '{"type": "function", "function": {"name": "add", "description": null, "parameters": {"type": "object"}}}\n'
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user name=Ada\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think><same>hm</same><call>add a=2 b=2</call><|im_end|>\n"
        "<|im_start|>tool id=c1\n4<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_goes_on(template: Template) -> None:
    sent = {
        "messages": [USER, {"role": "assistant", "content": "The answer is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }

    assert chat_text(sent, template).endswith("<|im_start|>assistant\nThe answer is")


def test_no_generation_prompt(template: Template) -> None:
    assert chat_text({"messages": [USER], "add_generation_prompt": False}, template).endswith("hi<|im_end|>\n")


def test_the_body_is_left_as_it_is(template: Template) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = {
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header"},
            {"role": "developer", "content": "x"},
            {"role": "assistant", "content": "x", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    before = repr(sent)
    chat_text(sent, template)
    assert repr(sent) == before


# messages


def test_only_what_a_message_may_have_survives() -> None:
    sent = {"role": "user", "content": "hi", "name": "Ada", "task": "t", "weight": 1, "tool_calls": [{}], "tools": []}

    assert message(sent) == {"role": "user", "content": "hi", "name": "Ada", "task": "t"}


def test_what_a_message_has_stands_in_a_fixed_order() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"name": "n", "reasoning": "r", "tool_calls": [call], "task": "t", "content": "x", "role": "assistant"}
    assert list(message(turn)) == [
        *("role", "content", "tool_calls", "reasoning", "reasoning_content", "name", "task")
    ], "a template may write the whole message down"
    tool = {"name": "n", "tool_call_id": None, "content": "x", "role": "tool"}
    assert list(message(tool)) == ["role", "content", "tool_call_id", "name"]


@pytest.mark.parametrize("sent", [{"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": ""}])
def test_absent_content_is_empty(sent: dict[str, Any]) -> None:
    assert message(sent) == {"role": "user", "content": ""}


@pytest.mark.parametrize("name", [None, 5, ["Ada"]])
def test_a_name_that_is_none(name: object) -> None:
    assert message(USER | {"name": name, "task": name}) == USER


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_tool_call_id_is_a_tools(role: str) -> None:
    assert message({"role": role, "content": "x", "tool_call_id": "c1"}) == {"role": role, "content": "x"}
    tool = {"role": "tool", "content": "x", "tool_call_id": "c1"}
    assert message(tool) == tool


@pytest.mark.parametrize(
    ("given_fields", "reasoning"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning": None, "reasoning_content": "b"}, "b"),
        ({"reasoning": "", "reasoning_content": "b"}, ""),
        ({"reasoning_content": ""}, ""),
        ({"reasoning": None, "reasoning_content": None}, None),
        ({}, None),
    ],
)
def test_reasoning_has_two_names(given_fields: dict[str, Any], reasoning: str | None) -> None:
    """An empty one is there all the same: Qwen3's template looks for it in the content only where it is not."""
    turn = message({"role": "assistant", "content": "x"} | given_fields)

    assert turn.get("reasoning") == turn.get("reasoning_content") == reasoning
    assert ("reasoning" in turn) == ("reasoning_content" in turn) == (reasoning is not None)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_reasoning_is_an_assistants(role: str) -> None:
    assert message({"role": role, "content": "x", "reasoning": "a"}) == {"role": role, "content": "x"}


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("x-anthropic-billing-header: cch=1\nBe brief.\nx", ["Be brief.\nx"]),
        ("x-anthropic-billing-header: cch=1", []),
        ("x-anthropic-billing-header: cch=1\n", []),
        (" x-anthropic-billing-header: cch=1", [" x-anthropic-billing-header: cch=1"]),
        ("a\nx-anthropic-billing-header", ["a\nx-anthropic-billing-header"]),
        (["x-anthropic-billing-header\nb", {"type": "text", "text": "x-anthropic-billing-header\nc"}], ["b", "c"]),
        ([{"type": "refusal", "refusal": "x-anthropic-billing-header"}], ["x-anthropic-billing-header"]),
    ],
)
def test_a_billing_header_is_no_part_of_a_system_message(content: object, left: list[str]) -> None:
    assert message({"role": "system", "content": content})["content"] == "\n".join(left)
    parts = message({"role": "system", "content": content}, PARTS)["content"]
    assert [part["text"] for part in parts] == left


@pytest.mark.parametrize("role", ["user", "developer"])
def test_a_billing_header_elsewhere_is_text(role: str) -> None:
    text = "x-anthropic-billing-header: cch=1\nBe brief."
    assert message({"role": role, "content": text})["content"] == text


# developers


def system(content: str, **more: str) -> dict[str, str]:
    return {"role": "system", "content": content, **more}


def developer(content: object, **more: object) -> dict[str, object]:
    return {"role": "developer", "content": content, **more}


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ([developer("a", name="n"), USER], [system("a", name="n"), USER]),
        ([USER, developer("a", name="n")], [system("a"), USER]),
        ([system("a", name="n"), developer("b"), USER], [system("a\n\nb"), USER]),
        ([developer("a"), USER, system("b"), system("")], [system("a\n\nb"), USER]),
        ([developer(""), system("")], [system("")]),
        ([developer("a", tools=[{"type": "function"}]), USER], [system("a"), USER]),
        ([system("a"), USER, system("b")], [system("a"), USER, system("b")]),
    ],
)
def test_developers_become_one_system_message_if_the_template_does_not_know_them(
    sent: list[Any], got: list[Any]
) -> None:
    assert rendered(*sent)["messages"] == got


def test_merged_system_messages_are_text_even_where_the_template_takes_parts() -> None:
    text = {"type": "text", "text": "a"}
    two = [text, {"type": "tool_reference", "name": "t"}, text]
    assert rendered(developer(two), USER, source=PARTS)["messages"][0]["content"] == two
    assert rendered(developer(two), system("b"), source=PARTS)["messages"] == [system("a\na\n\nb")]


def test_a_template_that_knows_developers_gets_them() -> None:
    assert rendered(system("a"), developer("b"), USER, source=DEVELOPER)["messages"] == [
        system("a"),
        developer("b", tools=None),
        USER,
    ]
    sent = body(developer("b", tools=[]), USER)
    assert refused(sent, Folder(DEVELOPER)) == "developer_tools"


# tool calls


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (' {"a": {"b": [null]}} ', '{"a": {"b": [null]}}'),
        ('{"a": 1, "b": 2, "a": 3}', '{"a": 3, "b": 2}'),
        ('{"big": 100000000000000000000}', '{"big": 100000000000000000000}'),
        ('{"x": NaN, "y": 1e400}', '{"x": NaN, "y": Infinity}'),
        ("", "{}"),
        ("{", "{}"),
        ("[]", "{}"),
        ("42", "{}"),
        ("null", "{}"),
        ('"text"', "{}"),
    ],
)
def test_arguments_become_an_object(sent: str, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"

    assert chat_text(body({"role": "assistant", "tool_calls": [call]}), Folder(source)) == arguments


def test_a_calls_members_are_in_the_order_of_the_types() -> None:
    call = {"type": "function", "index": 0, "function": {"x": 1, "name": "f", "arguments": "{}"}, "id": "c"}
    source = "{{ messages[0].tool_calls | tojson }}"

    assert chat_text(body({"role": "assistant", "tool_calls": [call]}), Folder(source)) == (
        '[{"id": "c", "function": {"arguments": {}, "name": "f", "x": 1}, "type": "function", "index": 0}]'
    )


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_dropped(calls: object) -> None:
    assert "tool_calls" not in message({"role": "assistant", "content": "x", "tool_calls": calls})


CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "calls",
    [
        *([1], [None], ["f"], [{}], {"function": {}}, 5, "calls", True),
        *([CALL | {"function": function}] for function in (None, "f", {}, {"name": "f"}, {"arguments": "{}"})),
        [CALL | {"function": {"name": "f", "arguments": None}}],
        [CALL | {"function": {"name": "f", "arguments": {"a": 1}}}],
        [CALL | {"type": "custom"}],
        [{"id": "c", "function": CALL["function"]}],
        [{"type": "function", "function": CALL["function"]}],
    ],
)
def test_tool_calls_that_the_engine_refuses(calls: object) -> None:
    assert refused({"messages": [{"role": "assistant", "tool_calls": calls}]}) == "tool_calls"


@pytest.mark.parametrize("arguments", ['{"a":' + "1" * 5000 + "}", "[" * 100_000])
def test_arguments_that_python_cannot_read(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert refused({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}) == "tool_calls"


# tools


def test_tools_are_written_out_anew() -> None:
    sent = [
        {"function": {"name": "f"}},
        {
            "function": {"strict": True, "parameters": {"b": 1}, "description": "d", "name": "g", "x": 1},
            "x": 1,
            "type": "function",
        },
        {"type": "function", "function": {"name": "h", "strict": None, "description": None}, "defer_loading": True},
        {"type": "function", "function": {"name": "i", "strict": False, "defer_loading": False}},
        {"type": "function", "function": {"name": "j", "defer_loading": True}, "defer_loading": False},
    ]

    assert "\n".join(map(repr, rendered(USER, tools=sent)["tools"])) == (
        "{'type': 'function', 'function': {'name': 'f', 'description': None, 'parameters': None}}\n"
        "{'type': 'function', 'function': {'name': 'g', 'description': 'd', 'parameters': {'b': 1}, 'strict': True}}\n"
        "{'type': 'function', 'function': {'name': 'h', 'description': None, 'parameters': None, "
        "'defer_loading': True}, 'defer_loading': True}\n"
        "{'type': 'function', 'function': {'name': 'i', 'description': None, 'parameters': None, "
        "'strict': False, 'defer_loading': False}}\n"
        "{'type': 'function', 'function': {'name': 'j', 'description': None, 'parameters': None, "
        "'defer_loading': True}, 'defer_loading': False}"
    ), "the order is part of the text"


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tools: object) -> None:
    assert rendered(USER, tools=tools)["tools"] is None
    assert rendered(USER)["tools"] is None


@pytest.mark.parametrize(
    "tools",
    [
        "f",
        {"function": {}},
        7,
        [1],
        [None],
        [{}],
        [{"function": "f"}],
        [{"type": "web_search", "function": {"name": "f"}}],
        [{"function": {"name": "f"}, "defer_loading": 1}],
        [{"function": {"name": "f", "strict": "true"}}],
    ],
)
def test_tools_that_are_none(tools: object) -> None:
    assert refused({"messages": [USER], "tools": tools}) == "tools"


def test_tools_go_with_tool_choice_none_only_if_the_engines_say_so() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rules = Rules(exclude_tools_when_none=True)
    assert rendered(USER, tools=tools, tool_choice="none")["tools"] is not None
    assert rendered(USER, tools=tools, tool_choice="none", rules=rules)["tools"] is None
    assert rendered(USER, tools=tools, tool_choice="auto", rules=rules)["tools"] is not None
    assert rendered(USER, tools=tools, rules=rules)["tools"] is not None


@pytest.mark.parametrize("number", [2.0**64, -1e300])
def test_numbers_that_may_have_been_integers(number: float) -> None:
    """orjson, which reads the body, makes a float of an integer beyond 64 bits; the engine does not."""
    tool = {"function": {"name": "f", "parameters": {"maximum": [{"x": number}]}}}
    assert refused(body(USER, tools=[tool])) == "number"
    assert rendered(USER | {"content": "1e+20"}, tools=[{"function": {"name": "f", "parameters": {"x": 1e17}}}])


# variables

SEES = (
    '{{ {"a": a|default("-"), "effort": reasoning_effort|default("-"), "think": enable_thinking|default("-"), '
    '"documents": documents, "tools": tools, "generate": add_generation_prompt, "bos": bos_token} | tojson }}'
)
NOTHING = {
    "a": "-",
    "effort": "-",
    "think": "-",
    "documents": None,
    "tools": None,
    "generate": True,
    "bos": "<s>",
}


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, {}),
        ({"chat_template_kwargs": None}, {}),
        ({"chat_template_kwargs": {"a": 1, "unread": 1, "bos_token": "B"}}, {"a": 1, "bos": "B"}),
        ({"chat_template_kwargs": {"a": None}}, {}),
        ({"chat_template_kwargs": {"a": "auto"}}, {}),
        ({"chat_template_kwargs": {"a": 0}}, {"a": 0}),
        ({"reasoning_effort": None}, {}),
        ({"reasoning_effort": "low"}, {"effort": "low", "think": True}),
        ({"reasoning_effort": "none"}, {"effort": "none", "think": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"effort": "low", "think": False},
        ),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": None}}, {"effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"effort": "low", "think": True},
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {"effort": "high"}),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, {}),
        ({"add_generation_prompt": False}, {"generate": False}),
        ({"documents": [{"text": "x"}]}, {"documents": [{"text": "x"}]}),
        ({"documents": []}, {"documents": []}),
        ({"chat_template_kwargs": {"documents": [{"n": 1}]}}, {"documents": [{"n": 1}]}),
        ({"documents": [], "chat_template_kwargs": {"documents": [{"n": 1}]}}, {"documents": []}),
        ({"chat_template_kwargs": {"tools": [{"n": 1}]}}, {"tools": [{"n": 1}]}),
        (
            {"tools": [{"function": {"name": "f"}}], "chat_template_kwargs": {"tools": [{"n": 1}]}},
            {"tools": [{"n": 1}]},
        ),
        ({"chat_template_kwargs": {"padding": True, "max_length": 1, "tokenize": False, "return_dict": True}}, {}),
    ],
)
def test_variables(fields: dict[str, Any], seen: dict[str, Any]) -> None:
    assert rendered(USER, source=SEES, **fields) == NOTHING | seen


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, {"a": 1, "think": False}),
        ({"chat_template_kwargs": {"a": 2}}, {"a": 2, "think": False}),
        ({"chat_template_kwargs": {"a": None, "enable_thinking": "auto"}}, {"a": 1, "think": False}),
        ({"reasoning_effort": "low"}, {"a": 1, "effort": "low", "think": True}),
    ],
)
def test_the_engines_own_variables_stand_under_the_requests(fields: dict[str, Any], seen: dict[str, Any]) -> None:
    rules = Rules(kwargs={"a": 1, "enable_thinking": False, "add_generation_prompt": False})
    assert rendered(USER, source=SEES, rules=rules, **fields) == NOTHING | seen


@pytest.mark.parametrize(
    "name", ["padding", "truncation", "return_tensors", "tokenizer_kwargs", "continue_final_message"]
)
def test_transformers_own_parameters_are_no_variables(name: str) -> None:
    source = "{{ " + name + " is defined }}"
    assert chat_text(body(USER, chat_template_kwargs={name: 1}), Folder(source)) == "False"


@pytest.mark.parametrize(
    "kwargs",
    ["x", [1], 7, *({name: 1} for name in ("self", "messages", "conversation", "conversations", "model_config",
                                           "tokenizer", "tokenize", "return_assistant_tokens_mask"))],
)  # fmt: skip
def test_variables_that_are_not_the_clients_to_set(kwargs: object) -> None:
    assert refused({"messages": [USER], "chat_template_kwargs": kwargs}) == "chat_template_kwargs"


@pytest.mark.parametrize("value", ["x", 7, {}, [1], ["x"]])
@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_are_lists_of_objects(name: str, value: object) -> None:
    assert refused(body(USER, chat_template_kwargs={name: value})) == name
    assert refused(body(USER, **{name: value})) == name


def test_documents_hold_texts() -> None:
    assert refused(body(USER, documents=[{"text": 1}])) == "documents"


@pytest.mark.parametrize("effort", ["huge", 3, [], True])
def test_an_effort_that_there_is_not(effort: object) -> None:
    assert refused(body(USER, reasoning_effort=effort)) == "reasoning_effort"


# templates of others


def test_the_engines_template_goes_before_the_models() -> None:
    assert chat_text(body(USER), Folder("model"), Rules(template="flag")) == "flag"


def test_a_requests_template_goes_before_all_if_it_is_trusted() -> None:
    rules = Rules(template="flag", trust_request_template=True)
    assert chat_text(body(USER, chat_template="request"), Folder(), rules) == "request"
    assert chat_text(body(USER, chat_template=""), Folder(), rules) == "flag"
    assert refused(body(USER, chat_template="request")) == "chat_template"
    assert refused(body(USER, chat_template="")) == "chat_template"
    assert refused(body(USER, chat_template=7), rules=rules) == "chat_template"


def test_a_template_among_the_variables_comes_last_and_gets_the_models_form() -> None:
    trust = Rules(trust_request_template=True)
    sent = body(USER, chat_template_kwargs={"chat_template": DUMP})
    assert json.loads(chat_text(sent, Folder(PARTS), trust))["messages"][0]["content"] == [
        {"type": "text", "text": "hi"}
    ]
    assert chat_text(sent | {"chat_template": "request"}, Folder(), trust) == "request"
    assert chat_text(sent, Folder(), Rules(template="flag", trust_request_template=True)) == "flag"
    assert refused(sent) == "chat_template"


def test_templates_by_name() -> None:
    folder = Folder("plain", tool_use="with tools", rag="with documents")
    tools = [{"function": {"name": "f"}}]
    assert chat_text(body(USER), folder) == "plain"
    assert chat_text(body(USER, tools=tools), folder) == "with tools"
    assert chat_text(body(USER, chat_template="rag"), folder, Rules(trust_request_template=True)) == "with documents"
    assert chat_text(body(USER, tools=tools), folder, Rules(template="rag")) == "with documents"


def test_a_model_without_a_template() -> None:
    class Nothing(Folder):
        def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str:
            raise ValueError

    assert refused(body(USER), Nothing()) == "template"


# content


LOOPS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "as_text", "as_parts", "of_a_tool"),
    [
        ("hi", "hi", ["hi"], "hi"),
        ("", "", [""], ""),
        (None, "", [], ""),
        ([], "", [], ""),
        (["a", {"type": "text", "text": ""}, {"type": "text", "text": "b"}], "a\nb", ["a", "", "b"], "a\n\nb"),
        ([{"type": "text", "text": None}, {"type": "refusal"}, {"type": "text"}], "", [], ""),
        (
            [
                {"type": "input_text", "text": "i"},
                {"type": "output_text", "text": "o"},
                {"type": "refusal", "refusal": "r"},
                {"type": "thinking", "thinking": "t", "closed": True},
            ],
            "i\no\nr\nt",
            ["i", "o", "r", "t"],
            "i\no\nr\nt",
        ),
    ],
)
def test_content_takes_the_form_that_the_template_wants(
    content: object, as_text: str, as_parts: list[str], of_a_tool: str
) -> None:
    sent = ({"role": "user", "content": content}, {"role": "tool", "content": content})
    assert [got["content"] for got in rendered(*sent)["messages"]] == [as_text, as_text]
    parted = [got["content"] for got in rendered(*sent, source=PARTS)["messages"]]
    assert parted == [[{"type": "text", "text": text} for text in as_parts], of_a_tool]


def test_the_form_may_be_set() -> None:
    for wanted in (DUMP, PARTS):
        assert rendered(USER, source=wanted, rules=Rules(content_format="string"))["messages"] == [USER]
        [parted] = rendered(USER, source=wanted, rules=Rules(content_format="openai"))["messages"]
        assert parted["content"] == [{"type": "text", "text": "hi"}]


def test_what_else_a_text_has_goes_to_a_template_that_takes_parts() -> None:
    part = {"cache_control": {"type": "ephemeral"}, "type": "text", "name": "n", "text": "a", "x": 1, "uuid": None}
    sent = {"role": "user", "content": [part]}
    assert message(sent, PARTS)["content"] == [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "x": 1}
    ]
    assert message(sent)["content"] == "a"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_reference_to_a_tool(role: str) -> None:
    reference = {"type": "tool_reference", "name": "weather"}
    sent = {"role": role, "content": [reference | {"x": 1}, "b", {"type": "tool_reference"}]}
    assert message(sent)["content"] == "weather\nb"
    assert message(sent, PARTS)["content"] == [
        reference,
        {"type": "text", "text": "b"},
        {"type": "tool_reference", "name": None},
    ]


MEDIA = [
    {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "input_image", "image_url": "x"},
    {"type": "input_audio", "input_audio": {}},
    {"type": "video_url", "video_url": {"url": "x"}},
    {"type": "prompt_embeds", "data": "x"},
    {"image_url": "x"},
    {"type": "text", "text": "x", "uuid": "1", "image_embeds": None},
]


@pytest.mark.parametrize("part", MEDIA)
def test_media(part: object) -> None:
    assert refused(body({"role": "user", "content": ["x", part]})) == "media"


@pytest.mark.parametrize(
    "content",
    [
        *([{"type": "thinking"}], [{"type": "text", "text": 7}], [7], [None], {"type": "text"}, 7, True),
        *([{"type": "file", "file": {}}], [{"type": "smell"}], [{"text": "x"}], [{"type": ["text"]}]),
        [{"type": "text", "text": "x", "uuid": "1"}],
        [{"type": "tool_reference", "name": 7}],
    ],
)
def test_content_that_is_no_text(content: object) -> None:
    assert refused({"messages": [{"role": "user", "content": content}]}) == "content_parts"


# turns that go on


def goes_on(source: str, *messages: object) -> dict[str, Any]:
    return body(*messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "So the ", "<hi><So the "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", " So the ", "<hi><So the"),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "", "<hi><"),
        (
            "{% for m in messages %}<{% for c in m.content %}{{ c.text }},{% endfor %}>{% endfor %}",
            ["a", "b ", {"type": "tool_reference", "name": "t"}],
            "<hi,><a,b ",
        ),
    ],
)
def test_a_turn_ends_where_its_text_does(source: str, content: object, text: str) -> None:
    assert chat_text(goes_on(source, USER, {"role": "assistant", "content": content}), Folder(source)) == text


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "x"),
        ("{{ messages[0].content }}", "x"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "x"),
        (LOOPS, None),
        (LOOPS, [{"type": "tool_reference", "name": "t"}]),
    ],
)
def test_turns_that_cannot_go_on(source: str, content: object) -> None:
    sent = goes_on(source, USER, {"role": "assistant", "content": content})
    assert refused(sent, Folder(source)) == "template"


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"add_generation_prompt": None},
        {"add_generation_prompt": 1},
        {"continue_final_message": "no"},
    ],
)
def test_generation_prompts_that_the_engine_refuses(fields: dict[str, Any]) -> None:
    assert refused({"messages": [USER], **fields}) == "generation_prompt"


# what cannot be known


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "truncate_prompt_tokens", "media_io_kwargs"])
def test_fields_that_change_the_prompt_in_ways_unknown_here(field: str) -> None:
    assert refused({"messages": [USER], field: 0}) == field
    assert chat_text({"messages": [USER], field: None}, Folder("x")) == "x"
    assert chat_text({"messages": [USER], field: {}}, Folder("x")) == "x"


@pytest.mark.parametrize(
    "messages", [None, [], {}, "hi", 7, [1], [None], ["hi"], [{}], [{"role": None}], [{"role": 1}]]
)
def test_messages_that_are_none(messages: object) -> None:
    assert refused({"messages": messages}) == "messages"


def test_no_messages() -> None:
    assert refused({}) == "messages"


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages.__class__.x }}", "{{ messages[0].x.y }}"],
)
def test_a_template_may_raise_anything(source: str) -> None:
    assert refused({"messages": [USER]}, Folder(source)) == "template"


def test_a_template_that_refuses_a_role(template: Template) -> None:
    assert refused({"messages": [{"role": "wizard", "content": "x"}]}, template) == "template"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
fields = ("content", "name", "task", "tool_calls", "tool_call_id", "reasoning", "tools")
anything = st.fixed_dictionaries(
    {
        "messages": json_values
        | st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
                optional=dict.fromkeys(fields, json_values),
            ),
            min_size=1,
            max_size=3,
        )
    },
    optional=dict.fromkeys(
        ("tools", "chat_template_kwargs", "chat_template", "reasoning_effort", "documents"), json_values
    ),
)


@given(anything, st.sampled_from([DUMP, PARTS, DEVELOPER]), st.booleans())
def test_whatever_comes_is_text_or_inexact(body: dict[str, Any], source: str, trust: bool) -> None:
    """And no other error: these bodies come from anybody."""
    with suppress(Inexact):
        chat_text(body, Folder(source), Rules(trust_request_template=trust))


# models with renderers of their own


def folder(where: Path, config: object = None, **files: object) -> Path:
    (where / "config.json").write_text(json.dumps(config if config is not None else {}))
    for name, content in files.items():
        (where / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return where


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "gpt_oss"}, "Harmony"),
        ({"architectures": ["GptOssForCausalLM"]}, "Harmony"),
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV32ForCausalLM"]}, r"V3\.2"),
        ({"model_type": "deepseek_v32"}, r"V3\.2"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "V4"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, r"V4\.1"),
        ({"architectures": ["KimiK3ForConditionalGeneration"]}, "Kimi K3"),
        ({"architectures": ["MoonshotKimiaForCausalLM"]}, "Kimi Audio"),
        ({"architectures": ["InklingForConditionalGeneration"]}, "Inkling"),
        ({"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]}, "Cohere"),
    ],
)
def test_models_that_the_engine_renders_in_python(tmp_path: Path, config: object, names: str) -> None:
    reason = renderer_of_its_own(folder(tmp_path, config))
    assert reason is not None
    assert names.replace("\\", "") in reason


@pytest.mark.parametrize(
    "config",
    [{}, [], {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, {"model_type": 7, "architectures": 7},
     {"model_type": ["gpt_oss"], "architectures": [None]}, {"architectures": ["DeepseekV3ForCausalLM"]}],
)  # fmt: skip
def test_models_that_are_rendered_by_their_template(tmp_path: Path, config: object) -> None:
    assert renderer_of_its_own(folder(tmp_path, config)) is None


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert renderer_of_its_own(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert renderer_of_its_own(tmp_path) is None


def test_mistrals_tokenizer(tmp_path: Path) -> None:
    """VLLM takes it where Mistral's own weights lie beside it; a folder of tokenizer files does not say."""
    folder(tmp_path, {"model_type": "mistral"}, tekken__json="{}")
    assert renderer_of_its_own(tmp_path) is not None
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert renderer_of_its_own(tmp_path) is None
    (tmp_path / "consolidated.safetensors").touch()
    assert renderer_of_its_own(tmp_path) is not None
    (tmp_path / "tekken.json").unlink()
    assert renderer_of_its_own(tmp_path) is None
    (tmp_path / "tokenizer.model.v3").touch()
    assert renderer_of_its_own(tmp_path) is not None


def test_a_processor_with_another_template_than_the_tokenizer(tmp_path: Path) -> None:
    folder(tmp_path, {"model_type": "llava"}, chat_template__json={"chat_template": "a"})
    assert renderer_of_its_own(tmp_path) is not None
    folder(tmp_path, tokenizer_config__json={"chat_template": "a"})
    assert renderer_of_its_own(tmp_path) is None
    folder(tmp_path, chat_template__jinja="b")
    assert renderer_of_its_own(tmp_path) is not None
