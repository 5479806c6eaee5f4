import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import MAX_EVENT, EventStream
from tests.double import DONE, bytewise, delta, event, usage, usage_event

SEPARATORS = "\u2028\u2029\u0085\u000b\u000c\u001c"
ERROR = event({"error": {"message": "EngineCore died", "type": "server_error", "param": None, "code": 500}})

words = [*'ab"\\{}[]:, \n\r你🦀é', *SEPARATORS, "[DONE]", '"usage": {', '"error":', "data: "]
texts = st.lists(st.sampled_from(words), max_size=12).map("".join)
line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Whole streams as an engine may write them, with any line end and raw UTF-8."""
    out = b""
    for _ in range(draw(st.integers(0, 6))):
        end = draw(line_ends)
        kind = draw(st.sampled_from(["delta", "comment", "usage", "named", "params", "bare"]))
        if kind == "delta":
            data = {"choices": [{"delta": {"content": draw(texts)}, "finish_reason": None}], "usage": None}
            lines = [b"data: " + json.dumps(data, ensure_ascii=False).encode()]
        elif kind == "comment":
            lines = [draw(st.sampled_from([b":", b": ping", b":[DONE]"]))]
        elif kind == "usage":
            lines = [usage_event(prompt=draw(st.integers(0, 99))).rstrip(b"\n")]
        elif kind == "named":
            lines = [b"event: x", b"id: 1", b'data: {"a":1}']
        elif kind == "params":
            lines = [event({"choices": [], "kv_transfer_params": draw(st.sampled_from([None, {"h": 1}]))}).rstrip()]
        else:
            lines = [b"data: " + draw(texts).encode().replace(b"\n", b"").replace(b"\r", b"")]
        out += end.join([*lines, b"", b""])
    return out + draw(st.sampled_from([b"", DONE, b"data: [DONE]\r\n\r\n", b"data: [DONE]"]))


def fed(stream: EventStream, pieces: list[bytes]) -> bytes:
    return b"".join([*(stream.feed(piece) for piece in pieces), stream.rest()])


def cut(data: bytes, marks: list[int]) -> list[bytes]:
    places = sorted({mark % (len(data) + 1) for mark in marks} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def state(stream: EventStream) -> tuple[Any, ...]:
    return stream.usage, stream.error, stream.done, stream.aborted


@given(streams(), st.lists(st.integers(0, 10_000), max_size=20), st.booleans())
def test_no_cut_changes_what_goes_on(data: bytes, marks: list[int], hide: bool) -> None:
    at_once, in_pieces, bytes_ = (EventStream(hide_usage=hide) for _ in range(3))
    expected = fed(at_once, [data])
    assert fed(in_pieces, cut(data, marks)) == expected
    assert fed(bytes_, bytewise(data)) == expected
    assert state(at_once) == state(in_pieces) == state(bytes_)


@given(st.lists(texts, max_size=5), line_ends)
def test_ordinary_events_keep_every_byte(contents: list[str], end: bytes) -> None:
    data = b"".join(
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False).encode() + end + end
        for text in contents
    )
    stream = EventStream(hide_usage=True)
    assert fed(stream, bytewise(data)) == data
    assert state(stream) == (None, None, False, False)


def test_unicode_line_separators_end_nothing() -> None:
    data = b"data: " + json.dumps({"text": f"a{SEPARATORS}b"}, ensure_ascii=False).encode() + b"\n\n"
    stream = EventStream(hide_usage=False)
    assert stream.feed(data[:-1]) == b""
    assert stream.feed(data[-1:]) == data


def test_events_go_on_whole() -> None:
    stream = EventStream(hide_usage=False)
    assert stream.feed(delta("a") + delta("b")[:10]) == delta("a")
    assert stream.feed(delta("b")[10:] + delta("c")) == delta("b") + delta("c")


@pytest.mark.parametrize("hide", [True, False])
def test_usage_is_read_and_hidden_only_if_the_gateway_asked(hide: bool) -> None:
    stream = EventStream(hide_usage=hide)
    out = fed(stream, [delta("a"), usage_event(prompt=7, cached=3), DONE])
    assert out == delta("a") + (b"" if hide else usage_event(prompt=7, cached=3)) + DONE
    assert stream.usage == usage(prompt=7, cached=3)


def test_usage_beside_choices_is_the_clients() -> None:
    """With continuous_usage_stats every event has usage; none of those may go."""
    both = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage()})
    stream = EventStream(hide_usage=True)
    assert fed(stream, [both, DONE]) == both + DONE
    assert stream.usage == usage()


def test_the_last_usage_counts() -> None:
    stream = EventStream(hide_usage=True)
    fed(stream, [usage_event(completion=1), usage_event(completion=2)])
    assert stream.usage == usage(completion=2)


def test_usage_null_is_nothing() -> None:
    data = event({"choices": [], "usage": None})
    stream = EventStream(hide_usage=True)
    assert fed(stream, [data]) == data
    assert stream.usage is None


@pytest.mark.parametrize("comment", [b":\n\n", b": ping\n\n", b":\r\n\r\n", b": [DONE]\n\n", b"data: \n\n", b"\n\n"])
def test_comments_and_empty_events_pass(comment: bytes) -> None:
    stream = EventStream(hide_usage=True)
    assert fed(stream, [comment, delta("a")]) == comment + delta("a")
    assert not stream.done


@pytest.mark.parametrize(
    "done",
    [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]\r\r", b"data: [DONE]"],
)
def test_done_in_each_form(done: bytes) -> None:
    stream = EventStream(hide_usage=False)
    assert fed(stream, bytewise(done)) == done
    assert stream.done


@pytest.mark.parametrize(
    "other",
    [
        delta("[DONE]"),
        delta("data: [DONE]\n\n"),
        event("[DONE]"),
        b"data: [DONE] \n\n",
        b"data: [DONE]x\n\n",
        b"event: [DONE]\n\n",
        b"data: {\ndata: [DONE]\n\n",
    ],
)
def test_done_in_a_text_is_no_end(other: bytes) -> None:
    stream = EventStream(hide_usage=False)
    assert fed(stream, [other]) == other
    assert not stream.done


def test_an_error_event_passes_and_is_noted() -> None:
    stream = EventStream(hide_usage=True)
    assert fed(stream, [ERROR + DONE]) == ERROR + DONE
    assert stream.error is not None
    assert stream.error["code"] == 500


@pytest.mark.parametrize("text", ['"error": {"message": 1}', '"usage": {"a": 1}', '"finish_reason": "abort"'])
def test_words_in_a_text_mean_nothing(text: str) -> None:
    stream = EventStream(hide_usage=True)
    assert fed(stream, [delta(text)]) == delta(text)
    assert state(stream) == (None, None, False, False)


def test_an_abort_and_all_behind_it_stay_here() -> None:
    stream = EventStream(hide_usage=False)
    assert fed(stream, [delta("a") + delta("", "abort") + delta("b"), usage_event(), DONE]) == delta("a")
    assert stream.aborted
    assert not stream.done


def test_one_of_several_choices_aborted() -> None:
    data = event({"choices": [{"finish_reason": None}, {"finish_reason": "abort"}]})
    stream = EventStream(hide_usage=False)
    assert fed(stream, [data]) == b""
    assert stream.aborted


def test_transfer_parameters_are_taken_out() -> None:
    secret = event({"choices": [{"index": 0}], "kv_transfer_params": {"remote_host": "10.0.0.1"}})
    stream = EventStream(hide_usage=False)
    assert fed(stream, bytewise(secret)) == event({"choices": [{"index": 0}]})


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("space", [b"", b" ", b"  "])
def test_transfer_parameters_in_any_spelling(end: bytes, space: bytes) -> None:
    data = b'data:%b{"id": 1, "kv_transfer_params":%b{"remote_host": "canary"}}' % (space, space) + end
    stream = EventStream(hide_usage=False)
    assert b"canary" not in fed(stream, [data])


def test_transfer_parameters_beside_numbers_that_json_does_not_know() -> None:
    data = b'data: {"logprobs": [-Infinity], "kv_transfer_params": {"remote_host": "canary"}}\n\n'
    out = fed(EventStream(hide_usage=False), [data])
    assert b"canary" not in out
    assert b"-Infinity" in out


@pytest.mark.parametrize("null", [b'"kv_transfer_params":null', b'"kv_transfer_params": null'])
def test_no_transfer_parameters_are_left_alone(null: bytes) -> None:
    data = b'data: {"b": 1.0, %b, "a": 1e2}\n\n' % null
    assert fed(EventStream(hide_usage=False), [data]) == data


def test_numbers_that_json_does_not_know_pass() -> None:
    data = b'data: {"choices": [{"logprobs": -Infinity}], "usage": {"prompt_tokens": 1}}\n\n'
    stream = EventStream(hide_usage=True)
    assert fed(stream, [data]) == data


def test_an_event_without_end_is_bounded() -> None:
    stream = EventStream(hide_usage=True)
    piece = b"data: " + b"x" * 100_000
    out = b"".join(stream.feed(piece) for _ in range(50))
    assert len(out) >= 50 * len(piece) - MAX_EVENT - len(piece)
    assert out + stream.rest() == piece * 50


@given(st.integers(1, 3))
def test_a_long_event_within_bounds_is_read(pieces: int) -> None:
    data = event({"choices": [], "usage": usage(), "pad": "x" * (MAX_EVENT // 2)})
    stream = EventStream(hide_usage=True)
    assert fed(stream, cut(data, [len(data) * n // pieces for n in range(pieces)])) == b""
    assert stream.usage == usage()


def test_an_unfinished_event_is_held_until_it_is_asked_for() -> None:
    stream = EventStream(hide_usage=True)
    assert stream.feed(DONE[:-1]) == b""
    assert state(stream) == (None, None, False, False)
    assert stream.rest() == DONE[:-1]
    assert state(stream) == (None, None, True, False)
    assert stream.rest() == b""
