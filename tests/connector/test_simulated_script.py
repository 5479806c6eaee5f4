"""JSON that a schema describes, and texts that are said token by token."""

from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer as Backend

from connector.simulated.script import Example, Wanted, script, spelled
from connector.simulated.text import Word


class Node(BaseModel):
    """Mentions itself, in three ways."""

    name: str = Field(min_length=10, max_length=12)
    kind: Literal["leaf", "branch"]
    weight: float = Field(gt=2, lt=4)
    size: int = Field(multiple_of=5)
    next: "Node | None"
    children: list["Node"]
    others: dict[str, "Node"]


def value(schema: dict[str, Any]) -> Any:
    return Example(schema, cycle(["one", "two"])).value()


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, {}),
        ({"type": "string"}, "one"),
        ({"type": ["null", "integer"]}, 1),
        ({"type": "integer", "minimum": 7}, 7),
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "number", "exclusiveMinimum": 1}, 2.0),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
        ({"prefixItems": [{"type": "null"}, {"const": 4}]}, [None, 4]),
        ({"anyOf": [{"type": "null"}, {"enum": ["a", "b"]}]}, "a"),
        ({"type": "string", "format": "date"}, "2026-01-02"),
        ({"properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}, {"a": "one"}),
        (
            {"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
            {"a": 1},
        ),
        (
            {
                "allOf": [
                    {"properties": {"a": {"type": "null"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
                ]
            },
            {"a": None, "b": True},
        ),
        ({"$ref": "#"}, "one"),
    ],
)
def test_a_value_is_what_the_schema_says(schema: dict[str, Any], expected: object) -> None:
    assert value(schema) == expected


def test_a_model_that_mentions_itself_is_filled() -> None:
    node = Node.model_validate(value(Node.model_json_schema()))
    assert node.next is not None
    assert node.size % 5 == 0


def test_a_schema_without_a_finite_value_is_given_up() -> None:
    twice: dict[str, Any] = {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]}
    assert set(value(twice)) == {"a", "b"}
    assert value({"allOf": [{"$ref": "#"}, {"$ref": "#"}], "type": "null"}) is None
    assert len(value({"type": "array", "minItems": 10**9})) < 20_000


class Silent:
    length = 1

    def word(self, _: int) -> Word:
        return Word(0, " word")


def test_a_script_is_said_in_the_tokens_of_its_text(model_folder: Path) -> None:
    backend = Backend.from_file(str(model_folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    for text in ("a block", "größer, 模型", "{}", ""):
        words = spelled(backend, text)
        assert "".join(word.text for word in words) == text
    said = script(Wanted(schema={"properties": {"ü": {}}, "required": ["ü"]}, tool="größe"), backend, Silent())
    assert said.call is not None
    text = "".join(said.word(place).text for place in range(said.length + 3))
    assert len(text) == said.call.ends
    assert text[said.call.begins :].startswith(said.call.arguments)
    assert text[: said.call.named].endswith('"größe"')
    pieces = [said.call.piece(place, place + 1) for place in range(len(text))]
    assert "".join(pieces) == said.call.arguments == '{"ü": "word"}'
