"""A chat request to the prompt text: each rule of connector/render.py, and each refusal."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from connector.errors import Inexact
from connector.render import Template, chat_text, content_format

USER = {"role": "user", "content": "hi"}


class Notes:
    """A template that writes down what it was given."""

    def __init__(self, text: object = "", source: str = "{{ messages }}") -> None:
        self.text = text
        self.source = source
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self.variables: dict[str, Any] = {}

    def get_chat_template(self, chat_template: None = None, tools: object = None) -> str:
        return self.source

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        self.messages, self.tools, self.variables = conversation, tools, variables
        return self.text


class Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def get_chat_template(self, chat_template: None = None, tools: object = None) -> str:
        return ""

    def apply_chat_template(self, *_: Any, **__: Any) -> Any:
        raise self._error


def rendered(*messages: object, **fields: Any) -> Notes:
    notes = Notes()
    chat_text({"model": "m", "messages": list(messages), **fields}, notes)
    return notes


def refused(body: Mapping[str, Any], template: Template | None = None) -> str:
    with pytest.raises(Inexact) as caught:
        chat_text(body, template or Notes())
    return caught.value.reason


@pytest.fixture(scope="module")
def template(model_folder: Path) -> Template:
    return cast("Template", AutoTokenizer.from_pretrained(model_folder, local_files_only=True))


# as a whole


def test_a_conversation(template: Template) -> None:
    body = {
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

    assert chat_text(body, template) == (
        "<|begin|># Tools\n"
        '{"type": "function", "function": {"name": "add", "description": null, "parameters": {"type": "object"}}}\n'
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user name=Ada\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think><same>hm</same><call>add a=2 b=2</call><|im_end|>\n"
        "<|im_start|>tool id=c1\n4<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_goes_on(template: Template) -> None:
    body = {
        "messages": [USER, {"role": "assistant", "content": "The answer is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }

    assert chat_text(body, template).endswith("<|im_start|>assistant\nThe answer is")


def test_no_generation_prompt(template: Template) -> None:
    assert chat_text({"messages": [USER], "add_generation_prompt": False}, template).endswith("hi<|im_end|>\n")


def test_the_body_is_left_as_it_is(template: Template) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [{"role": "assistant", "tool_calls": [call]}],
        "chat_template_kwargs": {},
        "reasoning_effort": "low",
    }
    before = repr(body)
    chat_text(body, template)
    assert repr(body) == before


# messages


def test_only_what_a_message_may_have_survives() -> None:
    [message] = rendered({"role": "user", "content": "hi", "name": "Ada", "weight": 1, "tool_calls": [{}]}).messages

    assert message == {"role": "user", "content": "hi", "name": "Ada"}


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": ""}]
)
def test_absent_content_is_empty(message: dict[str, Any]) -> None:
    assert rendered(message).messages == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("name", [None, 5, ["Ada"]])
def test_a_name_that_is_none(name: object) -> None:
    assert rendered(USER | {"name": name}).messages == [USER]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_tool_call_id_is_a_tools(role: str) -> None:
    assert rendered({"role": role, "content": "x", "tool_call_id": "c1"}).messages == [{"role": role, "content": "x"}]
    tool = {"role": "tool", "content": "x", "tool_call_id": "c1"}
    assert rendered(tool).messages == [tool]


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
    [message] = rendered({"role": "assistant", "content": "x"} | given_fields).messages

    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    assert ("reasoning" in message) == ("reasoning_content" in message) == (reasoning is not None)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_reasoning_is_an_assistants(role: str) -> None:
    assert rendered({"role": role, "content": "x", "reasoning": "a"}).messages == [{"role": role, "content": "x"}]


# tool calls


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (' {"a": {"b": [null]}} ', {"a": {"b": [None]}}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"big": 100000000000000000000}', {"big": 10**20}),
        ('{"lone": "\\ud800"}', {"lone": "\ud800"}),
        ("", {}),
        ("{", {}),
        ("[]", {}),
        ("42", {}),
        ("null", {}),
        ('"text"', {}),
        (None, {}),
        ([], {}),
        (7, {}),
    ],
)
def test_arguments_become_an_object(sent: object, arguments: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}

    [message] = rendered({"role": "assistant", "tool_calls": [call]}).messages

    assert message["tool_calls"] == [call | {"function": {"name": "f", "arguments": arguments}}]


def test_arguments_may_be_absent_and_need_not_be_numbers() -> None:
    [message] = rendered({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    nan = {"function": {"name": "f", "arguments": '{"x": NaN}'}}
    [message] = rendered({"role": "assistant", "tool_calls": [nan]}).messages
    assert str(message["tool_calls"][0]["function"]["arguments"]) == "{'x': nan}"


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_dropped(calls: object) -> None:
    [message] = rendered({"role": "assistant", "content": "x", "tool_calls": calls}).messages

    assert "tool_calls" not in message


@pytest.mark.parametrize(
    "calls",
    [[1], [None], ["f"], [{}], [{"function": None}], [{"function": "f"}], {"function": {}}, 5, "calls", True],
)
def test_tool_calls_that_are_none(calls: object) -> None:
    assert refused({"messages": [{"role": "assistant", "tool_calls": calls}]}) == "tool_calls"


def test_arguments_too_deep_to_read() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}

    assert refused({"messages": [{"role": "assistant", "tool_calls": [call]}]}) == "tool_calls"


# tools


def test_tools_are_written_out_anew() -> None:
    sent = [
        {"function": {"name": "f"}},
        {
            "function": {"strict": True, "parameters": {"b": 1}, "description": "d", "name": "g", "x": 1},
            "x": 1,
            "type": "function",
        },
        {"type": "function", "function": {"name": "h", "strict": None, "description": None}},
    ]

    tools = rendered(USER, tools=sent).tools

    assert tools is not None
    assert list(map(repr, tools)) == [
        "{'type': 'function', 'function': {'name': 'f', 'description': None, 'parameters': None}}",
        "{'type': 'function', 'function': {'name': 'g', 'description': 'd', 'parameters': {'b': 1}, 'strict': True}}",
        "{'type': 'function', 'function': {'name': 'h', 'description': None, 'parameters': None}}",
    ], "the order is part of the text"


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tools: object) -> None:
    assert rendered(USER, tools=tools).tools is None
    assert rendered(USER).tools is None


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
        [{"function": {"name": "f"}, "defer_loading": True}],
        [{"function": {"name": "f", "defer_loading": False}}],
    ],
)
def test_tools_that_are_none(tools: object) -> None:
    assert refused({"messages": [USER], "tools": tools}) == "tools"


# variables


def test_variables_reach_the_template(template: Template) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"effort": "high", "unknown": 1}}

    assert chat_text(body, template).startswith("<|begin|>effort=high\n<|im_start|>")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": None}, {}),
    ],
)
def test_reasoning_effort(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    seen = rendered(USER, **fields).variables

    own = {"tokenize": False, "add_generation_prompt": True, "continue_final_message": False}
    assert seen == own | variables


@pytest.mark.parametrize(
    "kwargs",
    ["x", [1], 7, {"tools": []}, {"messages": []}, {"conversation": []}, {"tokenize": True}, {"chat_template": "x"},
     {"add_generation_prompt": False}, {"documents": []}],
)  # fmt: skip
def test_variables_that_are_not_the_clients_to_set(kwargs: object) -> None:
    assert refused({"messages": [USER], "chat_template_kwargs": kwargs}) == "chat_template_kwargs"


# what cannot be known


@pytest.mark.parametrize(
    "field", ["chat_template", "documents", "mm_processor_kwargs", "truncate_prompt_tokens", "media_io_kwargs"]
)
def test_fields_that_change_the_prompt_in_ways_unknown_here(field: str) -> None:
    assert refused({"messages": [USER], field: 0}) == field
    assert chat_text({"messages": [USER], field: None}, Notes("x")) == "x"


@pytest.mark.parametrize(
    "messages", [None, [], {}, "hi", 7, [1], [None], ["hi"], [{}], [{"role": None}], [{"role": 1}]]
)
def test_messages_that_are_none(messages: object) -> None:
    assert refused({"messages": messages}) == "messages"


def test_no_messages() -> None:
    assert refused({}) == "messages"


def test_the_developer_role() -> None:
    assert refused({"messages": [USER, {"role": "developer", "content": "x"}]}) == "developer_role"


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["hi"], {"type": "text"}, 7, True],
)
def test_content_that_is_no_text(content: object) -> None:
    assert refused({"messages": [{"role": "user", "content": content}]}) == "content_parts"


LOOPS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "as_text", "as_parts"),
    [
        ("hi", "hi", ["hi"]),
        ("", "", [""]),
        (None, "", []),
        ([], "", []),
        ([{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}], "a\nb", ["a", "b"]),
    ],
)
def test_content_takes_the_form_that_the_template_wants(content: object, as_text: str, as_parts: list[str]) -> None:
    body = {"messages": [{"role": "user", "content": content}, {"role": "tool", "content": content}]}
    plain, parted = Notes(), Notes(source=LOOPS)
    chat_text(body, plain)
    chat_text(body, parted)
    assert [message["content"] for message in plain.messages] == [as_text, as_text]
    assert parted.messages[0]["content"] == [{"type": "text", "text": text} for text in as_parts]
    assert parted.messages[1]["content"] == as_text


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}", "string"),
        (LOOPS, "openai"),
        ("{% for m in loop_messages %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for p in m.content[1:] %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% set content = messages[0].content %}{% for p in content %}{{ p }}{% endfor %}", "openai"),
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}", "string"),
        ("{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}", None),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p }}{% endfor %}", None),
        ("{% for p in messages[0].content %}{{ p }}{% endfor %}", None),
        ("{% for %}", None),
    ],
)
def test_the_form_is_read_from_the_template_or_not_clear(source: str, wanted: str | None) -> None:
    assert content_format(source) == wanted


def test_an_unclear_form_is_refused() -> None:
    unclear = Notes(source="{% for p in messages[0].content %}{{ p }}{% endfor %}")
    assert refused({"messages": [USER]}, unclear) == "content_format"


def test_a_billing_header() -> None:
    message = {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."}

    assert refused({"messages": [message]}) == "billing_header"


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


@pytest.mark.parametrize("error", [ValueError(), KeyError("x"), RecursionError(), ZeroDivisionError(), OSError()])
def test_a_template_may_raise_anything(error: Exception) -> None:
    assert refused({"messages": [USER]}, Raises(error)) == "template"


@pytest.mark.parametrize("text", [None, ["a"], [1, 2], b"x"])
def test_a_template_may_answer_with_no_text(text: object) -> None:
    assert refused({"messages": [USER]}, Notes(text)) == "template"


def test_a_template_that_refuses_a_role(template: Template) -> None:
    assert refused({"messages": [{"role": "wizard", "content": "x"}]}, template) == "template"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
anything = st.fixed_dictionaries(
    {
        "messages": json_values
        | st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
                optional=dict.fromkeys(("content", "name", "tool_calls", "tool_call_id", "reasoning"), json_values),
            ),
            min_size=1,
            max_size=3,
        )
    },
    optional=dict.fromkeys(("tools", "chat_template_kwargs", "reasoning_effort", "documents"), json_values),
)


@given(anything)
def test_whatever_comes_is_text_or_inexact(body: dict[str, Any]) -> None:
    """And no other error: these bodies come from anybody."""
    with suppress(Inexact):
        assert chat_text(body, Notes("text")) == "text"


@pytest.mark.parametrize("arguments", ['{"a":' + "1" * 5000 + "}", "[" * 100_000])
def test_arguments_that_python_cannot_read_are_inexact(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert refused({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}) == "tool_calls"
