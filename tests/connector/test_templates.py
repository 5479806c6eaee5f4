"""What is read from a chat template's source, and the language that it is written in."""

from datetime import datetime

import jinja2
import pytest

from connector.templates import chat_template

MESSAGES = [{"role": "user", "content": "hi"}]
EACH = "{% for m in messages %}"
END = "{% endfor %}"
PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"


def macro(parameters: str, over: str, call: str) -> str:
    """A macro that loops over something, called with something of each message."""
    loop = "{% for p in " + over + " %}{% endfor %}"
    return "{% macro f(" + parameters + ") %}" + loop + "{% endmacro %}" + EACH + "{{ f(" + call + ") }}" + END


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("", "string"),
        (EACH + "{{ m.content }}" + END, "string"),
        (EACH + "{% for c in m.tool_calls %}{{ c }}{% endfor %}{{ m.content }}" + END, "string"),
        (EACH + PARTS + END, "openai"),
        (EACH + "{% for p in m['content'] %}{% endfor %}" + END, "openai"),
        (EACH + "{% for p in m['content'] | list | reverse %}{% endfor %}" + END, "openai"),
        (EACH + "{% for p in m.content[1:] %}{% endfor %}" + END, "openai"),
        (EACH + "{% for p in m.content if p.text %}{% endfor %}" + END, "openai"),
        (EACH + "{% for p in m.content.parts %}{% endfor %}" + END, "string"),
        (EACH + "{% for p in (m.content or []) %}{% endfor %}" + END, "string"),
        # the messages under another name
        ("{% for m in messages[1:] | list %}" + PARTS + END, "openai"),
        ("{% set rest = messages[1:] %}{% for m in rest %}" + PARTS + END, "openai"),
        ("{% set a = messages %}{% set b = a[::-1] %}{% for m in b %}" + PARTS + END, "openai"),
        ("{% set b = a %}{% set a = messages %}{% for m in b %}" + PARTS + END, "openai"),
        ("{% set messages = messages[1:] %}" + EACH + PARTS + END, "openai"),
        ("{% set a = messages %}{% set messages = a %}" + EACH + PARTS + END, "openai"),
        ("{% for m in loop_messages %}" + PARTS + END, "string"),
        ("{% for m in messages or [] %}" + PARTS + END, "string"),
        ("{% set rest = messages if x else [] %}{% for m in rest %}" + PARTS + END, "string"),
        # content under another name
        (EACH + "{% set content = m.content %}{% for p in content %}{% endfor %}" + END, "openai"),
        (EACH + "{% set body = m.content %}{% for p in body %}{% endfor %}" + END, "string"),
        (EACH + "{% for p in content | list %}{% endfor %}" + END, "string"),
        ("{% for p in messages[0].content %}{% endfor %}", "string"),
        # macros
        (macro("content", "content", "m.content"), "openai"),
        (macro("c", "c", "m['content']"), "openai"),
        (macro("a, c", "c", "1, m.content"), "openai"),
        (macro("a, c", "c", "c=m.content"), "openai"),
        (macro("a, c", "a", "1, m.content"), "string"),
        (macro("c", "c | list", "m.content"), "string"),
        (macro("content", "content", "messages[0].content"), "string"),
        (macro("content", "content", "m.name"), "string"),
        ("{% macro f(c) %}{% macro g(d) %}{% for p in c %}{% endfor %}{% endmacro %}{% endmacro %}"
         + EACH + "{{ f(m.content) }}" + END, "openai"),
        # where vLLM gives up
        ("{% for a, b in messages %}{% endfor %}" + EACH + PARTS + END, "string"),
        (EACH + PARTS + END + "{% for a, b in messages %}{% endfor %}", "string"),
        (EACH + "{% for k, v in m.content %}{% endfor %}" + PARTS + END, "string"),
        (EACH + PARTS + "{% for k, v in m.content %}{% endfor %}" + END, "openai"),
        ("{% set ns = namespace() %}{% set ns.m = messages %}" + EACH + PARTS + END, "string"),
        ("{% generation %}" + EACH + PARTS + END + "{% endgeneration %}", "openai"),
    ],
)  # fmt: skip
def test_a_template_that_loops_over_content_wants_parts(source: str, wanted: str) -> None:
    assert chat_template(source).content == wanted


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ a }}{% if b is defined %}{% endif %}", {"a", "b"}),
        ("{% set a = a | default(1) %}{{ a }}", {"a"}),
        ("{% set a = 1 %}{{ a }}", set()),
        ("{% for a in b %}{{ a.c }}{% endfor %}", {"b"}),
        ("{% macro f(a) %}{{ a ~ b }}{% endmacro %}{{ f(c) }}", {"b", "c"}),
        ("{% generation %}{% set a = 1 %}{% endgeneration %}{{ a }}", {"a"}),
        ("{{ raise_exception('x') }}{{ strftime_now('%Y') }}{{ range(3) }}", {"raise_exception", "strftime_now"}),
    ],
)
def test_what_a_template_reads_and_does_not_set(source: str, variables: set[str]) -> None:
    assert chat_template(source).variables == variables


@pytest.mark.parametrize(("source", "knows"), [("'developer'", True), ('"developer"', True), ("developer", False)])
def test_a_template_knows_developers_if_it_names_them(source: str, knows: bool) -> None:
    assert chat_template(source).knows_developers is knows


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}", '{"b": "<é>", "a": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ ['é'] | tojson(true) }}", '["\\u00e9"]'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}b", "a1b"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
    ],
)
def test_the_language(source: str, text: str) -> None:
    assert chat_template(source).text(MESSAGES, {}) == text


def test_the_time_is_this_machines() -> None:
    year = chat_template("{{ strftime_now('%Y') }}").text(MESSAGES, {})
    assert abs(int(year) - datetime.now().year) <= 1  # noqa: DTZ005


def test_a_template_can_refuse() -> None:
    with pytest.raises(jinja2.TemplateError, match="no such role"):
        chat_template("{{ raise_exception('no such role') }}").text(MESSAGES, {})


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"])
def test_a_template_is_kept_in_a_box(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        chat_template(source + "{{ missing.x }}").text(MESSAGES, {})
    assert MESSAGES == [{"role": "user", "content": "hi"}]


def test_each_template_is_read_once() -> None:
    assert chat_template("{{ a }}") is chat_template("{{ a }}")
