"""What the fuzz says: requests of clients and answers of engines, well formed, odd and broken."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.double import DONE, LAST_CHUNK, chunk, completed, delta, head, usage_event
from tests.gateway.house import KEY

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/x", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/models", "/v1/models/tiny", "/v1/models/x/y", "/tokenize",
    "/detokenize", "/v1/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify",
    "/v1/audio/transcriptions", "/health", "/ready", "/metrics", "/", "/docs", "/openapi.json",
)  # fmt: skip
METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "post", "")
ENDS = ("wait", "wait", "wait", "wait", "shut", "leave", "reset")
"""What a client does once it has sent everything: read, close its half, close, reset."""

T = TypeVar("T")


def _of(*values: T) -> st.SearchStrategy[T]:
    return st.sampled_from(values)


_RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@nested": '{"a":' * 900 + "1" + "}" * 900,
    "@level": "[" * 260 + "]" * 260,
    "@digits": "9" * 5000,
    "@infinite": "1e999",
    "@minus": "-0",
    "@half": '"\\ud800"',
    "@open": '"',
    "@twice": '1,"model":"tiny","stream":true,"cache_salt":"x"',
}
"""What json.dumps would not write, by the string that stands for it."""


def _odd() -> st.SearchStrategy[Any]:
    """JSON of any type."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.one_of(
        st.sampled_from(
            [None, True, False, 0, -1, 1, 2**31, 2**53, 2**64, 1e308, 0.5, "", "tiny", "\0", [], {}, [None]]
        ),
        st.sampled_from([*_RAW, "x" * 20_000, [{}], [[]], {"": None}, "auto", "abort", "length"]),
        st.recursive(
            leaves,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=6,
        ),
    )


ODD = _odd()
FIELDS = (
    "model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n",
    "temperature", "tools", "tool_choice", "cache_salt", "kv_transfer_params", "ec_transfer_params", "prompt_logprobs",
    "logprobs", "echo", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "documents", "mm_processor_kwargs", "truncate_prompt_tokens", "add_special_tokens", "best_of", "suffix", "stop",
    "response_format", "user", "priority", "request_id", "vllm_xargs", "query", "texts", "reasoning_effort", "system",
    "prompt_embeds", "return_token_ids", "previous_response_id", "instructions",
)  # fmt: skip
OF_MESSAGES = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content", "type", "x")
OF_PARTS = ("type", "text", "image_url", "input_audio", "refusal", "cache_control")
OF_TOOLS = ("type", "function", "name", "input_schema", "parameters", "description")


def text_of(value: object) -> bytes:
    """The JSON of a value, with what is raw in it."""
    text = json.dumps(value)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


@st.composite
def _body(draw: st.DrawFn) -> bytes:
    kind = draw(_of("object", "object", "object", "object", "value", "bytes"))
    if kind == "bytes":
        given = (b"", b"{", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08", b'{"a":"\xff"}')
        return draw(st.binary(max_size=60) | st.sampled_from(given))
    if kind == "value":
        return text_of(draw(ODD))
    message: dict[str, Any] = {"role": "user", "content": draw(_of("Tell me.", "the engine loads " * 60))}
    body: dict[str, Any] = {"model": "tiny", "messages": [message], "prompt": "Tell me.", "input": "Tell me."}
    if draw(st.booleans()):
        body["stream"] = True
    for place in draw(st.lists(_of("top", "top", "message", "part", "tool", "more"), max_size=3)):
        if place == "top":
            body[draw(st.sampled_from(FIELDS))] = draw(ODD)
        elif place == "message":
            message[draw(st.sampled_from(OF_MESSAGES))] = draw(ODD)
        elif place == "part":
            message["content"] = [{"type": "text", "text": "x"}, {draw(st.sampled_from(OF_PARTS)): draw(ODD)}]
        elif place == "tool":
            function = {"name": "f", "parameters": {}}
            body["tools"] = [{"type": "function", "function": function, draw(st.sampled_from(OF_TOOLS)): draw(ODD)}]
        elif isinstance(body["messages"], list):
            body["messages"].append({"role": draw(_of("system", "tool", "assistant")), "content": draw(ODD)})
    return text_of(body)


_token = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
_value = st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=30)
_known = _of(
    "Expect: 100-continue", "Expect: x", "Connection: close", "Connection: keep-alive, x", "Connection: upgrade",
    "Upgrade: websocket", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA", "Sec-WebSocket-Key: x",
    "Content-Type: application/json", "Content-Type: multipart/form-data; boundary=x", "Content-Type: \xff",
    "Content-Encoding: gzip", "Accept-Encoding: gzip", "X-Request-Id: a b", "X-Request-Id: ok-1", "X-Request-Id: \x7f",
    "Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Traceparent: x", "Tracestate: a=b",
    "Host: other", "Authorization: Basic x", "Authorization: Bearer", "Authorization: Bearer \xe9", "X-Api-Key: x",
    "Cookie: a=b", "Range: bytes=0-1", "Forwarded: for=x", "X-Forwarded-For: 10.0.0.1", "Trailer: x", "TE: trailers",
    "X-Data-Parallel-Rank: 7", " folded: x", "no colon", ": empty", "Content-Length: 0", "Transfer-Encoding: gzip",
)  # fmt: skip
_header = _known | st.builds("{}: {}".format, _token, _value)
_version = _of(*["1.1"] * 4, "1.0", "0.9", "2.0", "1.7", "x")
_key = _of(f"authorization: Bearer {KEY}", f"Authorization: bearer  {KEY}", f"x-api-key: {KEY}")
_framing = _of(*["length"] * 5, *["chunked"] * 2, "none", "less", "more", "both", "two", "odd")
_coding = _of("transfer-encoding: chunked", "Transfer-Encoding: Chunked", "transfer-encoding:\tchunked")
_odd_framing = _of(
    *("content-length: -1", "content-length: 1e3", "content-length: 99999999999999999999"),
    *("transfer-encoding: chunked, gzip", "transfer-encoding: x"),
)
_last_chunk = _of(
    *(LAST_CHUNK, LAST_CHUNK, b"", b"0\r\nx: y\r\n\r\n", b"00;a=b\r\n\r\n", b"0\r\ncontent-length: 5\r\n\r\n"),
    *(b"-1\r\n\r\n", b"fffffffffffffffff\r\n", b"g\r\n\r\n"),
)


@st.composite
def _path(draw: st.DrawFn, paths: tuple[str, ...]) -> str:
    path = draw(_of(*paths))
    if draw(st.integers(0, 9)):
        return path
    near = _of(f"{path}?a=%ff&b", f"{path}/", f"/{path}", f"http://other{path}", "*", f"{path}%2f..", f"{path}#x", "")
    return draw(near | _token.map(path.__add__))


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    usual = draw(st.booleans())
    method = "POST" if usual else draw(_of(*METHODS) | _token)
    path = draw(_path(PATHS[:2] if usual else PATHS))
    lines = [f"{method} {path} HTTP/{draw(_version)}", "host: gateway"]
    if draw(st.integers(0, 9)):
        lines.append(draw(_key))
    lines += draw(st.lists(_header, max_size=3))
    body = draw(_body())
    framing = draw(_framing)
    if framing not in {"none", "chunked"}:
        lines.append(f"content-length: {max(0, len(body) + {'less': -3, 'more': 3}.get(framing, 0))}")
    if framing in {"chunked", "both"}:
        lines.append(draw(_coding))
        size = draw(_of(1, 7, 100, 100_000))
        size = size if size * 500 > len(body) else 100_000
        body = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size)) + draw(_last_chunk)
    elif framing == "two":
        lines.append("content-length: 1")
    elif framing == "odd":
        lines.append(draw(_odd_framing))
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


@st.composite
def broken(draw: st.DrawFn, data: bytes) -> bytes:
    """The data with a few bytes changed, left out, said twice, or put in."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        before, after = data[:at], data[at:]
        some = draw(st.integers(1, 40))
        how = draw(_of("flip", "cut", "drop", "twice", "insert"))
        if how == "flip":
            data = before + bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in after[:1]) + after[1:]
        elif how == "cut":
            data = before
        elif how == "drop":
            data = before + after[some:]
        elif how == "twice":
            data = before + after[:some] + after
        else:
            data = before + draw(st.binary(max_size=6) | _of(b"\r\n", b"\r\n\r\n", b"\0", b"\n")) + after
    return data


@dataclass(frozen=True)
class Said:
    """What a client says on one connection, and how."""

    data: bytes
    cuts: tuple[int, ...]
    pause: float
    """Seconds between two writes."""
    end: str
    requests: int | None
    """Answers that may be expected; None where that cannot be known."""


@st.composite
def sayings(draw: st.DrawFn) -> Said:
    """One to three requests, at times with broken bytes, in a few writes."""
    requests = draw(st.lists(_request(), min_size=1, max_size=3) if draw(st.booleans()) else st.tuples(_request()))
    data = b"".join(requests)
    whole = draw(st.integers(0, 2)) > 0
    if not whole:
        data = draw(broken(data))
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=3))
    if draw(st.integers(0, 3)) == 0:  # a write for each request, the next when the one before is answered
        cuts += [sum(map(len, requests[:at])) for at in range(1, len(requests))]
    pause = draw(_of(0.0005, 0.01))
    expected = len(requests) if whole else None
    return Said(data, tuple(sorted(cuts)), pause, draw(st.sampled_from(ENDS)), expected)


# Engines


@dataclass(frozen=True)
class Play:
    """How an engine answers one request."""

    stream: bool
    """The client asks for a stream."""
    pieces: tuple[bytes, ...]
    end: str
    """How it ends: open, close, reset, silence."""
    models: bytes = field(repr=False)
    """What another engine says to /v1/models meanwhile."""
    metrics: bytes = field(repr=False)
    """What it says to /metrics."""


_heads = st.lists(
    _of(
        ("content-length", "5"), ("content-length", "-1"), ("content-length", "99999999999999999999"),
        ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked"), ("connection", "close"),
        ("connection", "keep-alive, x-secret"), ("content-encoding", "gzip"), ("set-cookie", "a=b"),
        ("location", "http://other/"), ("x-request-id", "theirs"), ("x-secret", "x"), ("date", "x"), ("trailer", "x"),
        ("www-authenticate", "Bearer"), ("retry-after", "x"), ("upgrade", "h2c"), ("x-long", "x" * 70_000),
        ("x-bytes", "\xff\x01"), ("", "x"), ("content-type", "text/html"), ("x-moongate-route", "theirs"),
    ),
    max_size=2,
)  # fmt: skip
_statuses = _of(
    *[200] * 8, 100, 101, 103, 199, 201, 204, 206, 301, 304, 400, 401, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504,
    599, 600, 999,
)  # fmt: skip
_types = _of("application/json", "text/event-stream; charset=utf-8", "text/event-stream", "text/plain", "", "\xff")
_dones = _of(DONE, DONE, b"data:[DONE]\r\n\r\n", b"data: [DONE]", b"data: [DONE]\r\r", b" data: [DONE]\n\n")
_other_events = _of(
    *(
        b": comment\n\n",
        b"event: x\ndata: y\n\n",
        b"\n\n\n",
        b"\xef\xbb\xbf",
        b"id: 1\n\n",
        b"data\n\n",
        b"\xff\xfe\n\n",
    )
)
_first_words = _of(b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 x\r\nlink: x\r\n\r\n", b"\r\n")
_ends = _of("open", "close", "reset")
_late_ends = _of(*["close"] * 6, "reset", "silence")
_metric_names = _of("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:cache_config_info", "vllm:x")
_labels = _of(
    *('block_size="32",num_gpu_blocks="8192"', 'block_size="x",num_gpu_blocks="-1"', 'block_size="0"', 'a="', ""),
)
_numbers = _of("0.0", "NaN", "-1", "1e999", "+Inf", "x", "", "1 2 3")
OF_ANSWERS = (
    "id",
    "choices",
    "usage",
    "error",
    "kv_transfer_params",
    "ec_transfer_params",
    "object",
    "model",
    "system_fingerprint",
)
OF_CHOICES = ("index", "message", "delta", "finish_reason", "logprobs", "token_ids")
OF_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")


@st.composite
def _answer(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """An answer of an engine with odd fields."""
    for place in draw(st.lists(_of("top", "choice", "usage", "details", "error"), max_size=2)):
        if place == "top":
            base[draw(st.sampled_from(OF_ANSWERS))] = draw(ODD)
        elif place == "choice":
            base["choices"] = [{"index": 0, draw(st.sampled_from(OF_CHOICES)): draw(ODD)}]
        elif place == "usage":
            base["usage"] = {"prompt_tokens": 3, "completion_tokens": 3, draw(st.sampled_from(OF_USAGE)): draw(ODD)}
        elif place == "details":
            base["usage"] = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": draw(ODD)}}
        else:
            base["error"] = {"message": "x", "code": draw(ODD), "type": draw(ODD)}
    return base


@st.composite
def _event(draw: st.DrawFn) -> bytes:
    kind = draw(_of("word", "word", "odd", "odd", "usage", "done", "other"))
    if kind == "word":
        return delta("word")
    if kind == "usage":
        return usage_event()
    if kind == "done":
        return draw(_dones)
    if kind == "odd":
        data = text_of(draw(_answer({"id": "x", "choices": [{"index": 0, "delta": {}}]})))
        return b"data: " + data + draw(_of(b"\n\n", b"\r\n\r\n", b"\r\r", b"\n"))
    return draw(_other_events | st.binary(max_size=40))


@st.composite
def plays(draw: st.DrawFn) -> Play:
    """An engine's answer: a stream or a whole, framed honestly or not, at times with broken bytes."""
    stream = draw(st.booleans())
    if stream:
        events = draw(st.lists(_event(), max_size=5))
        body = b"".join(events) + draw(_of(DONE, DONE, DONE, b""))
    else:
        body = draw(st.builds(text_of, _answer(completed()) | ODD) | st.binary(max_size=40))
    framing = draw(_of("chunked", "length", "close"))
    honest = draw(st.booleans())
    kind = "text/event-stream" if stream else "application/json"
    fields = [("content-type", kind if draw(st.integers(0, 4)) else draw(_types))]
    if framing == "length":
        fields.append(("content-length", str(len(body))))
    elif framing == "chunked":
        fields.append(("transfer-encoding", "chunked"))
    if not honest:
        fields += draw(_heads)
    cuts = (0, *sorted(draw(st.lists(st.integers(0, len(body)), max_size=4))), len(body))
    parts = [body[at:to] for at, to in pairwise(cuts) if to > at]
    pieces = [head(200 if honest else draw(_statuses), fields)]
    pieces += [chunk(part) for part in parts] + [LAST_CHUNK] if framing == "chunked" else parts
    if not honest:  # in one piece: of what comes late, nobody could know which request it answers
        data = b"".join(pieces)
        said = draw(broken(data)) if draw(st.booleans()) else data
        pieces = [draw(_first_words) + said + draw(_of(b"", b"", data, b"x"))]
    end = _ends if honest and framing != "close" else _late_ends
    return Play(stream, tuple(pieces), draw(end), draw(_models()), draw(_metrics()))


@st.composite
def _models(draw: st.DrawFn) -> bytes:
    card = {"id": "queer", "root": "/models/queer", "parent": None, "max_model_len": 4096}
    if draw(st.booleans()):
        card[draw(st.sampled_from(tuple(card)))] = draw(ODD)
    cards = draw(_of([card], [card, card], []) | st.lists(ODD, max_size=2))
    return text_of(draw(st.just({"object": "list", "data": cards}) | st.builds(lambda odd: {"data": odd}, ODD) | ODD))


@st.composite
def _metrics(draw: st.DrawFn) -> bytes:
    name, labels, value = draw(_metric_names), draw(_labels), draw(_numbers)
    line = f"# TYPE {name} gauge\n{name}{{{labels}}} {value}\n".encode()
    return draw(st.just(line) | broken(line))
