import json
import time
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import Dialect, Usage
from gateway.sse import MAX_EVENT, EventStream, Fingerprint, without_private
from tests.double import DONE, bytewise, delta, event, usage, usage_event

SEPARATORS = "\u2028\u2029\u0085\u000b\u000c\u001c"
ERROR = event({"error": {"message": "EngineCore died", "type": "server_error", "param": None, "code": 500}})

PRINT = "vllm-0.32.0-tp1-1a2b"

words = [*'ab"\\{}[]:, \n\r你🦀é', *SEPARATORS, "[DONE]", '"usage": {', '"error":', "data: ", '"finish_reason":"stop"']
texts = st.lists(st.sampled_from(words), max_size=12).map("".join)
line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


def lines(data: object, name: str | None = None) -> list[bytes]:
    """The lines of an event as engines write it, compact, its text raw UTF-8."""
    named = [b"event: " + name.encode()] if name is not None else []
    return [*named, b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()]


def chat_event(draw: st.DrawFn) -> list[bytes]:
    finish = draw(st.sampled_from([None, None, None, "stop", "length", "abort"]))
    kind = draw(st.sampled_from(["delta", "delta", "delta", "usage", "params", "error"]))
    if kind == "delta":
        return lines({"choices": [{"delta": {"content": draw(texts)}, "finish_reason": finish}], "usage": None})
    if kind == "usage":
        told = {} if draw(st.booleans()) else {"system_fingerprint": PRINT}
        return lines({"choices": [], "usage": usage(prompt=draw(st.integers(0, 99)))} | told)
    if kind == "params":
        return lines({"choices": [], "kv_transfer_params": draw(st.sampled_from([None, {"h": 1}]))})
    return lines({"error": {"message": draw(texts), "code": 500}})


def responses_event(draw: st.DrawFn) -> list[bytes]:
    name = "response." + draw(st.sampled_from(["created", "output_text.delta", "completed", "incomplete", "failed"]))
    if name.endswith("delta"):
        return lines({"type": name, "delta": draw(texts)}, name)
    params = draw(st.sampled_from([None, {"h": 1}]))
    return lines({"type": name, "response": {"id": "resp_1", "usage": None, "kv_transfer_params": params}}, name)


def messages_event(draw: st.DrawFn) -> list[bytes]:
    name = draw(st.sampled_from(["message_start", "content_block_delta", "message_delta", "message_stop"]))
    data: dict[str, object] = {"type": name}
    if name == "message_start":
        data["message"] = {"id": "msg_1", "usage": {"input_tokens": draw(st.integers(0, 9)), "output_tokens": 0}}
    elif name == "content_block_delta":
        data["delta"] = {"type": "text_delta", "text": draw(texts)}
    elif name == "message_delta":
        data["delta"] = {"stop_reason": draw(st.sampled_from(["end_turn", "max_tokens", None]))}
        data["usage"] = {"input_tokens": 9, "output_tokens": draw(st.integers(0, 9))}
    return lines(data, name)


EVENTS = {Dialect.CHAT: chat_event, Dialect.RESPONSES: responses_event, Dialect.MESSAGES: messages_event}


@st.composite
def streams(draw: st.DrawFn, dialect: Dialect) -> bytes:
    """Whole streams as an engine may write them, with any line end and raw UTF-8."""
    out = b""
    for _ in range(draw(st.integers(0, 6))):
        end = draw(line_ends)
        kind = draw(st.sampled_from(["own", "own", "own", "own", "comment", "named", "bare"]))
        if kind == "own":
            said = EVENTS[dialect](draw)
        elif kind == "comment":
            said = [draw(st.sampled_from([b":", b": ping", b":[DONE]"]))]
        elif kind == "named":
            said = [b"event: x", b"id: 1", b'data: {"a":1}']
        else:
            said = [b"data: " + draw(texts).encode().replace(b"\n", b"").replace(b"\r", b"")]
        out += end.join([*said, b"", b""])
    return out + draw(st.sampled_from([b"", DONE, b"data: [DONE]\r\n\r\n", b"data: [DONE]", b'data: {"choi']))


def fed(stream: EventStream, pieces: list[bytes]) -> bytes:
    return b"".join([*(stream.feed(piece) for piece in pieces), stream.rest()])


def cut(data: bytes, marks: list[int]) -> list[bytes]:
    places = sorted({mark % (len(data) + 1) for mark in marks} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def state(stream: EventStream) -> tuple[Any, ...]:
    return stream.usage, stream.error, stream.done, stream.aborted


@pytest.mark.parametrize("hide", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("known", [False, True], ids=["new engine", "known engine"])
@pytest.mark.parametrize("dialect", Dialect)
@given(data=st.data())
def test_no_cut_changes_what_goes_on(dialect: Dialect, known: bool, hide: bool, data: st.DataObject) -> None:
    said = data.draw(streams(dialect))
    marks = data.draw(st.lists(st.integers(0, 10_000), max_size=20))

    def made(pieces: list[bytes]) -> tuple[bytes, object]:
        fingerprint = Fingerprint()
        if known:
            fingerprint.learn(PRINT)
        stream = EventStream(dialect, hide_usage=hide, fingerprint=fingerprint)
        out = fed(stream, pieces)
        events = stream.events if b"\r" not in said and not stream.aborted else None
        return out, (state(stream), stream.made, events, fingerprint.known, fingerprint.value)

    expected = made([said])
    assert made(cut(said, marks)) == expected
    assert made(bytewise(said)) == expected
    assert b'"h"' not in expected[0], "what is between engines stays there"


@given(st.lists(texts, max_size=5), line_ends)
def test_ordinary_events_keep_every_byte(contents: list[str], end: bytes) -> None:
    data = b"".join(
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False).encode() + end + end
        for text in contents
    )
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, bytewise(data)) == data
    assert state(stream) == (None, None, False, False)


BEFORE = (
    '{"choices":[{"delta":{"content":"',
    '{"choices":[{"text":"',
    '{"error":{"message":"',
    '{"error":{},"content":"',
)
TEXTS = (
    "", "a", "é", "abort", "[DONE]", "_transfer_params", "\\", '"', '\\"', "\r", "\n", "\n\n", "data: ",
    "\r\rdata: [DONE]\r\r", "\n\ndata: [DONE]\n\n", '","finish_reason":"abort', '","usage":{"prompt_tokens":1},"x":"',
    '"},"error":{"message":"', '","kv_transfer_params":{"h":1},"x":"', '"}}]}\n\ndata: {"choices":[{"x":"',
)  # fmt: skip
BEHIND = ('"}}]}', '"},"finish_reason":"stop"}]}', '"},"finish_reason":"abort"}]}', '"')
ENDS = ("\n\n", "\n", "", "\r\r", "\r\n\r\n")


@pytest.mark.parametrize("hide", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("known", [False, True], ids=["new engine", "known engine"])
@pytest.mark.parametrize("together", [1, 2])
def test_an_event_like_the_last_one_is_read_as_any_other(together: int, known: bool, hide: bool) -> None:
    def made(pieces: list[bytes]) -> tuple[bytes, object]:
        fingerprint = Fingerprint()
        if known:
            fingerprint.learn(PRINT)
        stream = EventStream(Dialect.CHAT, hide_usage=hide, fingerprint=fingerprint)
        out = fed(stream, pieces)
        counted = not any(b"\r" in piece for piece in pieces) and not stream.aborted
        return out, (state(stream), stream.events if counted else None)

    usual = f"data: {BEFORE[0]}the text{BEHIND[0]}\n\n".encode()
    behind = usual * (together - 1)
    for before, text, after, end in product(BEFORE, TEXTS, BEHIND, ENDS):
        odd = f"data: {before}{text}{after}{end}".encode()
        pieces = [usual + behind, odd + behind, usual + behind]
        assert made(pieces) == made(bytewise(b"".join(pieces))), odd


def test_unicode_line_separators_end_nothing() -> None:
    data = b"data: " + json.dumps({"text": f"a{SEPARATORS}b"}, ensure_ascii=False).encode() + b"\n\n"
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert stream.feed(data[:-1]) == b""
    assert stream.feed(data[-1:]) == data


def test_events_go_on_whole() -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert stream.feed(delta("a") + delta("b")[:10]) == delta("a")
    assert stream.feed(delta("b")[10:] + delta("c")) == delta("b") + delta("c")


@pytest.mark.parametrize("hide", [True, False])
def test_usage_is_read_and_hidden_only_if_the_gateway_asked(hide: bool) -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=hide)
    out = fed(stream, [delta("a"), usage_event(prompt=7, cached=3), DONE])
    assert out == delta("a") + (b"" if hide else usage_event(prompt=7, cached=3)) + DONE
    assert stream.usage == Usage(7, 6, 3)


def test_usage_beside_choices_is_the_clients() -> None:
    """With continuous_usage_stats every event has usage; none of those may go."""
    both = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage()})
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, [both, DONE]) == both + DONE
    assert stream.usage == Usage(29, 6, 0)


def test_the_last_usage_counts() -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    fed(stream, [usage_event(completion=1), usage_event(completion=2)])
    assert stream.usage == Usage(29, 2, 0)


def test_usage_null_is_nothing() -> None:
    data = event({"choices": [], "usage": None})
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, [data]) == data
    assert stream.usage is None


@pytest.mark.parametrize("comment", [b":\n\n", b": ping\n\n", b":\r\n\r\n", b": [DONE]\n\n", b"data: \n\n", b"\n\n"])
def test_comments_and_empty_events_pass(comment: bytes) -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, [comment, delta("a")]) == comment + delta("a")
    assert not stream.done


@pytest.mark.parametrize(
    "done",
    [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]\r\r", b"data: [DONE]"],
)
def test_done_in_each_form(done: bytes) -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=False)
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
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert fed(stream, [other]) == other
    assert not stream.done


def test_an_error_event_passes_and_is_noted() -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, [ERROR + DONE]) == ERROR + DONE
    assert stream.error is not None
    assert stream.error["code"] == 500


@pytest.mark.parametrize("text", ['"error": {"message": 1}', '"usage": {"a": 1}', '"finish_reason": "abort"'])
def test_words_in_a_text_mean_nothing(text: str) -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, [delta(text)]) == delta(text)
    assert state(stream) == (None, None, False, False)


def test_an_abort_and_all_behind_it_stay_here() -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert fed(stream, [delta("a") + delta("", "abort") + delta("b"), delta("c"), usage_event(), DONE]) == delta("a")
    assert stream.aborted
    assert not stream.done


def test_one_of_several_choices_aborted() -> None:
    data = event({"choices": [{"finish_reason": None}, {"finish_reason": "abort"}]})
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert fed(stream, [data]) == b""
    assert stream.aborted


def test_transfer_parameters_are_taken_out() -> None:
    secret = event({"choices": [{"index": 0}], "kv_transfer_params": {"remote_host": "10.0.0.1"}})
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert fed(stream, bytewise(secret)) == event({"choices": [{"index": 0}]})


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("space", [b"", b" ", b"  "])
def test_transfer_parameters_in_any_spelling(end: bytes, space: bytes) -> None:
    data = b'data:%b{"id": 1, "kv_transfer_params":%b{"remote_host": "canary"}}' % (space, space) + end
    stream = EventStream(Dialect.CHAT, hide_usage=False)
    assert b"canary" not in fed(stream, [data])


def test_transfer_parameters_beside_numbers_that_json_does_not_know() -> None:
    data = b'data: {"logprobs": [-Infinity], "kv_transfer_params": {"remote_host": "canary"}}\n\n'
    out = fed(EventStream(Dialect.CHAT, hide_usage=False), [data])
    assert b"canary" not in out
    assert b"-Infinity" in out


@pytest.mark.parametrize("null", [b'"kv_transfer_params":null', b'"kv_transfer_params": null'])
def test_no_transfer_parameters_are_left_alone(null: bytes) -> None:
    data = b'data: {"b": 1.0, %b, "a": 1e2}\n\n' % null
    assert fed(EventStream(Dialect.CHAT, hide_usage=False), [data]) == data


def test_numbers_that_json_does_not_know_pass() -> None:
    data = b'data: {"choices": [{"logprobs": -Infinity}], "usage": {"prompt_tokens": 1}}\n\n'
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, [data]) == data


def test_an_event_without_end_is_bounded() -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    piece = b"data: " + b"x" * 100_000
    out = b"".join(stream.feed(piece) for _ in range(50))
    assert len(out) >= 50 * len(piece) - MAX_EVENT - len(piece)
    assert (piece * 50).startswith(out)
    assert stream.torn
    assert stream.feed(b"\n\n" + delta("b")).endswith(b"x\n\n" + delta("b"))


@given(st.integers(1, 3))
def test_a_long_event_within_bounds_is_read(pieces: int) -> None:
    data = event({"choices": [], "usage": usage(), "pad": "x" * (MAX_EVENT // 2)})
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert fed(stream, cut(data, [len(data) * n // pieces for n in range(pieces)])) == b""
    assert stream.usage == Usage(29, 6, 0)


def test_an_unfinished_event_is_held_until_it_is_asked_for() -> None:
    stream = EventStream(Dialect.CHAT, hide_usage=True)
    assert stream.feed(DONE[:-1]) == b""
    assert state(stream) == (None, None, False, False)
    assert stream.rest() == DONE[:-1]
    assert state(stream) == (None, None, True, False)
    assert stream.rest() == b""


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("said", [delta("a") * 4_000, b"data: " + b"x" * 600_000, b":\n" * 300_000], ids=len)
def test_a_byte_at_a_time_takes_time_for_each_byte_only(dialect: Dialect, said: bytes) -> None:
    """Were all that is held looked at again for each byte, this would take hours."""
    stream = EventStream(dialect, hide_usage=True)
    start = time.process_time()
    for piece in bytewise(said):
        stream.feed(piece)
    assert time.process_time() - start < 20


# What the client would have got had the gateway not asked for the usage


def finished(reason: str = "stop", **more: object) -> bytes:
    return event({"id": "1", "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": reason}]} | more)


USAGE = event({"id": "1", "choices": [], "usage": usage(), "system_fingerprint": PRINT})


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_fingerprint_stands_where_it_would_have(size: int) -> None:
    said = delta("a") + finished() + delta("b") + finished("length") + USAGE + DONE
    engine = Fingerprint()
    for _ in range(2):  # the second stream is not held up
        stream = EventStream(Dialect.CHAT, hide_usage=True, fingerprint=engine)
        out = fed(stream, [said[at : at + size] for at in range(0, len(said), size)])
        stamp = {"system_fingerprint": PRINT}
        assert out == delta("a") + finished(**stamp) + delta("b") + finished("length", **stamp) + DONE
        assert engine.value == PRINT


def test_only_the_first_stream_of_an_engine_is_held_up() -> None:
    engine = Fingerprint()
    first = EventStream(Dialect.CHAT, hide_usage=True, fingerprint=engine)
    assert first.feed(delta("a")) == delta("a")
    assert first.feed(finished()) == b""
    assert first.feed(delta("b")) == b"", "nothing overtakes"
    assert first.feed(USAGE) == finished(system_fingerprint=PRINT) + delta("b")
    second = EventStream(Dialect.CHAT, hide_usage=True, fingerprint=engine)
    assert second.feed(finished()) == finished(system_fingerprint=PRINT)


@pytest.mark.parametrize("told", [{}, {"system_fingerprint": None}])
def test_an_engine_that_has_no_fingerprint_gets_none(told: dict[str, object]) -> None:
    engine = Fingerprint()
    bare = event({"choices": [], "usage": usage()} | told)
    for _ in range(2):
        stream = EventStream(Dialect.CHAT, hide_usage=True, fingerprint=engine)
        assert fed(stream, [delta("a"), finished(), bare, DONE]) == delta("a") + finished() + DONE
    assert engine.known


@pytest.mark.parametrize("end", [DONE, DONE.rstrip(), b"", b'data: {"choi'], ids=["done", "half done", "none", "half"])
def test_what_was_held_is_let_go_where_the_usage_never_comes(end: bytes) -> None:
    engine = Fingerprint()
    stream = EventStream(Dialect.CHAT, hide_usage=True, fingerprint=engine)
    out = fed(stream, [delta("a"), finished(), end])
    assert out == delta("a") + finished() + (end if b"DONE" in end else b"")
    assert not engine.known


def test_a_fingerprint_of_the_engines_own_is_left_alone() -> None:
    engine = Fingerprint()
    engine.learn(PRINT)
    said = finished(system_fingerprint="another")
    assert fed(EventStream(Dialect.CHAT, hide_usage=True, fingerprint=engine), [said, DONE]) == said + DONE


def test_nothing_is_stamped_where_the_client_asked_for_the_usage() -> None:
    engine = Fingerprint()
    engine.learn(PRINT)
    said = finished() + USAGE + DONE
    assert fed(EventStream(Dialect.CHAT, fingerprint=engine), [said]) == said


# Events, and the two other protocols


@pytest.mark.parametrize("name", [None, "content_block_delta"])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_events_are_counted_once_each(name: str | None, pieces: int) -> None:
    said = [b"\n".join([*lines({"type": name, "text": "a"}, name), b"", b""]) for _ in range(10)]
    stream = EventStream(Dialect.MESSAGES)
    for at in range(0, 10, pieces):
        stream.feed(b"".join(said[at : at + pieces]))
    assert stream.events == 10


COMPLETED = {
    "type": "response.completed",
    "response": {"id": "resp_1", "usage": {"input_tokens": 7, "output_tokens": 2}},
}


def test_a_response_tells_its_id_its_usage_and_its_end() -> None:
    stream = EventStream(Dialect.RESPONSES)
    said = event({"type": "response.created", "response": {"id": "resp_1", "usage": None}})
    assert stream.feed(said) == said
    assert (stream.made, stream.usage, stream.done) == ("resp_1", None, False)
    assert stream.feed(event(COMPLETED)) == event(COMPLETED)
    assert (stream.made, stream.usage, stream.done) == ("resp_1", Usage(7, 2, None), True)


@pytest.mark.parametrize("name", [None, 7, {"a": 1}, ["x"]])
def test_a_response_without_a_name_is_none_to_keep(name: object) -> None:
    stream = EventStream(Dialect.RESPONSES)
    stream.feed(event({"type": "response.created", "response": {"id": name}}))
    assert stream.made is None


def test_transfer_parameters_inside_a_response_are_taken_out() -> None:
    secret = {"id": "resp_1", "n": 1, "kv_transfer_params": {"remote_host": "canary"}}
    out = fed(EventStream(Dialect.RESPONSES), [event({"type": "response.completed", "response": secret})])
    assert b"canary" not in out
    assert json.loads(out.removeprefix(b"data: ")) == {
        "type": "response.completed",
        "response": {"id": "resp_1", "n": 1},
    }


def test_a_message_tells_its_usage_in_two_parts() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 4}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}
    said = event(start) + event(end) + event({"type": "message_stop"})
    stream = EventStream(Dialect.MESSAGES)
    assert fed(stream, bytewise(said)) == said
    assert stream.usage == Usage(7, 5, 4)
    assert stream.done


def test_a_message_that_was_given_up_does_not_end() -> None:
    end = {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 5}}
    stream = EventStream(Dialect.MESSAGES)
    assert fed(stream, [event({"type": "ping"}), event(end) + event({"type": "message_stop"})]) == event(
        {"type": "ping"}
    )
    assert stream.aborted
    assert not stream.done


@pytest.mark.parametrize("dialect", [Dialect.RESPONSES, Dialect.MESSAGES])
def test_done_ends_chats_only(dialect: Dialect) -> None:
    stream = EventStream(dialect)
    assert fed(stream, [DONE]) == DONE
    assert not stream.done


# Answers in one piece


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"id": 1, "kv_transfer_params": {"h": 1}, "n": 1e2}', b'{"id": 1,  "n": 1e2}'),
        (b'{"ec_transfer_params":7,"kv_transfer_params":null}', b"{}"),
        (b'{"logprobs":NaN,"kv_transfer_params":1}', b'{"logprobs":NaN}'),
        (b'{"choices":[{"kv_transfer_params":1}]}', b'{"choices":[{"kv_transfer_params":1}]}'),
        (b'{"response":null,"kv_transfer_params":1}', b'{"response":null}'),
        (b"[1]", b"{}"),
    ],
)
def test_an_answer_without_what_is_private(body: bytes, left: bytes) -> None:
    assert without_private(body) == left
