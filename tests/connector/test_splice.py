"""Members of an object taken out and put in, against the standard library's json."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.splice import NotAnObject, members, spliced

NAMES = ["a", "b", "cache_salt", "", "é🦀", 'q"{[,:', "back\\slash", "\n"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.sampled_from('ab"\\{}[]:, \né🦀'))
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
)
spaces = st.text(st.sampled_from(" \t\n\r"), max_size=2)
names = st.lists(st.sampled_from(NAMES), max_size=3)


@st.composite
def spellings(draw: st.DrawFn, name: str) -> str:
    """A name as JSON has it, any of its characters escaped."""
    plain = json.dumps(name, ensure_ascii=draw(st.booleans()))
    at = draw(st.integers(0, 4))
    if at < len(name) and name[at].isascii() and name[at].isalpha():
        plain = plain.replace(name[at], f"\\u{ord(name[at]):04x}", 1)
    return plain


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, str, Any]]]:
    """An object in any spelling, and its members: name, text, value. A name may stand there more than once."""
    parts = []
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=5)):
        value = draw(values)
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        parts.append((name, f"{draw(spellings(name))}{draw(spaces)}:{draw(spaces)}{text}", value))
    inner = ",".join(draw(spaces) + text + draw(spaces) for _, text, _ in parts)
    return f"{draw(spaces)}{{{inner}{draw(spaces)}}}{draw(spaces)}".encode(), parts


def pairs(raw: bytes) -> list[tuple[str, Any]]:
    """The members of an object in their order, by json."""
    found: list[tuple[str, Any]] = json.loads(raw, object_pairs_hook=list)
    return found


def plain(value: Any) -> Any:
    """A value as `pairs` has it."""
    found: Any = json.loads(json.dumps(value), object_pairs_hook=list)
    return found


def canon(found: list[tuple[str, Any]]) -> str:
    """Comparable although NaN is not equal to itself and 0 is to False."""
    return json.dumps(found)


@given(objects())
def test_members_are_found_where_json_finds_them(case: tuple[bytes, list[tuple[str, str, Any]]]) -> None:
    raw, parts = case
    found = list(members(raw))
    assert [raw[m.start : m.end].decode() for m in found] == [text for _, text, _ in parts]
    assert [m.name for m in found] == [name for name, _, _ in parts]
    assert canon([(m.name, plain(json.loads(raw[m.value : m.end]))) for m in found]) == canon(pairs(raw))


@given(objects(), names, st.dictionaries(st.sampled_from(["x", "y", 'q"']), values, max_size=2))
def test_what_is_dropped_goes_and_what_is_put_stands_in_front(
    case: tuple[bytes, list[tuple[str, str, Any]]], drop: list[str], put: dict[str, Any]
) -> None:
    raw, parts = case
    out = b"".join(spliced(raw, drop, {name: json.dumps(value).encode() for name, value in put.items()}))
    stay = [(name, plain(value)) for name, _, value in parts if name not in drop]
    assert canon(pairs(out)) == canon([(name, plain(value)) for name, value in put.items()] + stay)


@given(objects(), names)
def test_every_other_byte_stays(case: tuple[bytes, list[tuple[str, str, Any]]], drop: list[str]) -> None:
    raw, parts = case
    out = b"".join(spliced(raw, drop, {}))
    if not any(name in drop for name, _, _ in parts):
        assert out == raw
    kept = [text.encode() for name, text, _ in parts if name not in drop]
    assert [out[m.start : m.end] for m in members(out)] == kept
    assert out.split(b"{", 1)[0] == raw.split(b"{", 1)[0]
    assert out.rsplit(b"}", 1)[1] == raw.rsplit(b"}", 1)[1]


@pytest.mark.parametrize(
    ("raw", "drop", "put", "out"),
    [
        (b'{"n":1e2,"m":12345678901234567890123,"d":0}', {"d"}, {}, b'{"n":1e2,"m":12345678901234567890123}'),
        (b'{"d":0,"a":"\\u00e9\\/"}', {"d"}, {}, b'{"a":"\\u00e9\\/"}'),
        (b'{"a":1 , "d":0 , "b":2}', {"d"}, {}, b'{"a":1 ,  "b":2}'),
        (b'{"a":NaN,"d":[-Infinity]}', {"d"}, {}, b'{"a":NaN}'),
        (b'{"d":1,"d":{"d":2}}', {"d"}, {}, b"{}"),
        (b'{"a":{"d":1}}', {"d"}, {}, b'{"a":{"d":1}}'),
        (b"{}", set(), {"x": b"1"}, b'{"x":1}'),
        (b" { } ", {"d"}, {"x": b"1", "y": b"2"}, b' {"x":1,"y":2 } '),
        (b'{"d":1}', {"d"}, {"x": b"1"}, b'{"x":1}'),
        (b'{"a":1}', set(), {"x": b"1"}, b'{"x":1,"a":1}'),
    ],
)
def test_spelled_out(raw: bytes, drop: set[str], put: dict[str, bytes], out: bytes) -> None:
    assert b"".join(spliced(raw, drop, put)) == out


@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"[]", b'[{"a":1}]', b'"{"', b"1", b"null", b"\xef\xbb\xbf{}", b"\x0b{}",
        '{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-16-be"), b"{", b'{"', b'{"a', b'{"a"', b'{"a":',
        b'{"a":1', b'{"a":1,', b'{"a":"', b'{"a":"\\', b'{"a":[', b'{"a":[[]', b'{"a":{"b":"}"', b'{"a":}',
        b'{"a":1"b":2}', b'{"a" 1}', b"{a:1}", b"{'a':1}", b"{1:1}", b'{"\\x":1}', b'{"\\ud800":1}',
        b'{"\xff":1}', b'{"a\n":1}', b"{,}", b'{,"a":1}', b'{"a":1;"b":2}', b'{"a":1]',
    ],
)  # fmt: skip
def test_what_is_no_object(raw: bytes) -> None:
    with pytest.raises(NotAnObject):
        list(members(raw))
    with pytest.raises(NotAnObject):
        spliced(raw, {"d"}, {"x": b"1"})


@given(objects(), st.data())
def test_what_is_cut_short_is_no_object(case: tuple[bytes, Any], data: st.DataObject) -> None:
    raw = case[0].rstrip()
    with pytest.raises(NotAnObject):
        list(members(raw[: data.draw(st.integers(0, len(raw) - 1))]))


@given(st.text(st.sampled_from('{}[]",:\\ a1\n\x00é')).map(str.encode) | st.binary(), names)
def test_any_bytes_are_an_object_or_are_not(raw: bytes, drop: list[str]) -> None:
    """And whatever is JSON's object is one here."""
    try:
        out = b"".join(spliced(raw, drop, {}))
    except NotAnObject:
        with suppress(orjson.JSONDecodeError):
            assert not isinstance(orjson.loads(raw), dict)
    else:
        assert len(out) <= len(raw)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: b'{"a":' + b"[" * n,
        lambda n: b'{"a":' + b"[" * n + b"]" * n + b"}",
        lambda n: b'{"a":"' + b"\\" * n,
        lambda n: b'{"a":"' + b'\\"' * n + b'"}',
        lambda n: b"{" + b" " * n,
        lambda n: b'{"a"' + b" " * n,
        lambda n: b'{"a":1' + b" " * n,
        lambda n: b'{"' + b"a" * n,
        lambda n: b'{"a":' + b"1" * n,
        lambda n: b"{" + b",".join([b'"d":1'] * n) + b"}",
        lambda n: b"{" + b" , ".join([b'"d":1,"a":2'] * n) + b"}",
        lambda n: b'{"a":[' + b'"",' * n + b'""]}',
    ],
    ids=["open", "deep", "backslashes", "quotes", "space", "space before a colon", "space at the end", "a long name",
         "a long number", "dropped", "every other dropped", "many strings"],
)  # fmt: skip
def test_twice_the_bytes_take_twice_the_time(make: Callable[[int], bytes]) -> None:
    """Within a wide margin: quadratic, the second would take sixty-four times as long as the first."""

    def taken(raw: bytes) -> float:
        start = time.perf_counter()
        with suppress(NotAnObject):
            spliced(raw, {"d"}, {})
        return time.perf_counter() - start

    small, large = make(30_000), make(240_000)
    first = min(taken(small) for _ in range(3))
    second = min(taken(large) for _ in range(3))
    assert second < 24 * first + 0.02
