"""Doubles of what the gateway talks to, on bare TCP: vLLM, a Mooncake master, an OTLP collector.

A double answers each request with a script, a list of steps that are played on the socket:

    bytes           are written as they stand, as fast as the peer takes them
    asyncio.Event   is waited for: the test opens the gate, nothing sleeps
    End             closes the connection, resets it, or stays silent for ever

`whole()` and `stream()` make scripts of well-formed answers, and take the framing, the cuts and the
ends that make them ill-formed. A script without an `End` leaves the connection open for the next
request. Every request is recorded, and so is the moment when the peer closed while it was answered.
A script may be endless: it is an iterable, and a step is taken from it when the one before it is done.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Self, cast
from urllib.parse import unquote, urlsplit

import orjson

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
HOT = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    MESSAGES,
    COUNT_TOKENS,
    EMBEDDINGS,
    TOKENIZE,
    DETOKENIZE,
    RERANK,
    SCORE,
    TRANSCRIPTIONS,
)
"""What takes a prompt. A double answers the paths below them in the same way."""
DONE = b"data: [DONE]\n\n"


class End(Enum):
    """How a script ends that does not leave the connection open."""

    FIN = "close"
    RST = "reset"
    SILENCE = "say nothing until the peer closes"


Step = bytes | asyncio.Event | End
Script = Iterable[Step]
Framing = Literal["length", "chunked", "close"]


def values(head: bytes, name: str) -> list[str]:
    """The values of a header (lower case) in a head as it came, in their order."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    return [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.lower() == name]


@dataclass
class Call:
    """One request that arrived."""

    method: str
    target: str
    head: bytes
    """The head as it came, with its empty line."""
    body: bytes
    connection: int
    """Number of the connection that it came on, from 0."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The peer closed before the answer was over."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Its script has been played."""
    taken: int = 0
    """Bytes of the answer that the peer, or its kernel, has taken."""

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    def headers(self, name: str) -> list[str]:
        return values(self.head, name)

    def header(self, name: str) -> str | None:
        return next(iter(self.headers(name)), None)

    def json(self) -> Any:
        return orjson.loads(self.body)


# Scripts


def head(status: int, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def whole(
    status: int,
    body: bytes | object,
    *,
    content_type: str = "application/json",
    headers: Sequence[tuple[str, str]] = (),
    framing: Framing = "length",
) -> list[Step]:
    """An answer in one piece; a body that is no bytes is written as JSON."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return stream(data, status=status, content_type=content_type, headers=headers, framing=framing)


def stream(
    *pieces: Step,
    status: int = 200,
    content_type: str = "text/event-stream; charset=utf-8",
    headers: Sequence[tuple[str, str]] = (),
    framing: Framing = "chunked",
) -> list[Step]:
    """An answer piece by piece: one write and, where it is chunked, one chunk for each.

    An `End` among the pieces is the end of it: what would frame the body's end is left out.
    """
    fields = [("content-type", content_type), *headers]
    if framing == "chunked":
        fields.append(("transfer-encoding", "chunked"))
    elif framing == "length":
        fields.append(("content-length", str(sum(len(piece) for piece in pieces if isinstance(piece, bytes)))))
    steps: list[Step] = [head(status, fields)]
    for piece in pieces:
        steps.append(chunk(piece) if framing == "chunked" and isinstance(piece, bytes) else piece)
        if isinstance(piece, End):
            return steps
    if framing != "length":
        steps.append(LAST_CHUNK if framing == "chunked" else End.FIN)
    return steps


def bytewise(data: bytes) -> list[bytes]:
    """One byte a piece."""
    return [data[at : at + 1] for at in range(len(data))]


# What vLLM says


def event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    """A chunk of a streamed chat, as vLLM 0.32 writes it."""
    return event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": text},
                    "logprobs": None,
                    "finish_reason": finish,
                    "token_ids": None,
                }
            ],
        }
    )


def usage(prompt: int | None = 29, completion: int = 6, cached: int | None = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached} if cached is not None else None
    return {
        "prompt_tokens": prompt,
        "total_tokens": (prompt or 0) + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def usage_event(**numbers: int | None) -> bytes:
    """The last event before [DONE] of a stream that was asked for its usage."""
    return event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "tiny",
            "choices": [],
            "usage": usage(**cast("dict[str, int]", numbers)),
        }
    )


def completed(text: str = "LYRA", finish: str = "stop", **numbers: int | None) -> dict[str, Any]:
    """A chat that is not streamed."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": finish,
            }
        ],
        "usage": usage(**cast("dict[str, int]", numbers)),
        "kv_transfer_params": None,
    }


def refused(status: int, message: str, kind: str = "BadRequestError") -> list[Step]:
    """An error as vLLM words it."""
    return whole(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def uncounted(call: Call) -> Script:
    """What a healthy engine says, but no number of the prompt's tokens that could be one: doubles cannot count."""
    return [
        step.replace(b'"prompt_tokens":29,', b'"prompt_tokens":-1,') if isinstance(step, bytes) else step
        for step in answered(call)
    ]


def answered(call: Call) -> Script:
    """What a healthy engine says to a hot request."""
    if call.path not in (CHAT, COMPLETIONS):
        return whole(200, {"id": "1", "model": "tiny", "usage": usage()})
    body = call.json()
    if not body.get("stream"):
        return whole(200, completed(finish="length" if body.get("max_tokens") == 1 else "stop"))
    asked = (body.get("stream_options") or {}).get("include_usage")
    last = (usage_event(),) if asked else ()
    return stream(delta(""), delta("LY"), delta("RA", "stop"), *last, DONE)


# Doubles


class Double:
    """A server on a free loopback port. Use it with `async with`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.everywhere: Script | None = None
        """Answers every request, whatever it is."""
        self.host = "127.0.0.1"
        self.port = 0
        self.idle: float | None = None
        """Seconds after which a connection without a request is closed."""
        self.connections = 0
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._arrived = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def open(self) -> int:
        """Connections that are open now."""
        return len(self._open)

    def answer(self, call: Call) -> Script:
        """The script for a request."""
        raise NotImplementedError

    async def arrival(self, path: str, number: int = 1) -> Call:
        """The request number `number` for a path, once it is there. Fails where none comes."""
        async with asyncio.timeout(10):
            while len(found := [call for call in self.calls if call.path == path]) < number:
                self._arrived.clear()
                await self._arrived.wait()
        return found[number - 1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; on the port it had, if it was stopped before."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), self.host, self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on and reset those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        players = [connection.reset() for connection in tuple(self._open)]
        await asyncio.gather(*(player for player in players if player is not None), return_exceptions=True)

    def opened(self, connection: "_Connection") -> int:
        self._open.add(connection)
        self.connections += 1
        return self.connections - 1

    def lost(self, connection: "_Connection") -> None:
        self._open.discard(connection)

    def record(self, call: Call) -> None:
        self.calls.append(call)
        self._arrived.set()


class _Connection(asyncio.Protocol):
    """One socket: takes a request, plays its script, takes the next."""

    def __init__(self, double: Double) -> None:
        self._double = double
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._player: asyncio.Task[None] | None = None
        self._call: Call | None = None
        self._due: Call | None = None
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._tired: asyncio.TimerHandle | None = None
        self._number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._number = self._double.opened(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._player is None:
            self._next()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._writable.set()
        if self._tired is not None:
            self._tired.cancel()
        if self._call is not None:
            self._call.closed.set()
        self._double.lost(self)

    def reset(self) -> asyncio.Task[None] | None:
        """Send a RST, whatever is under way."""
        if self._transport is not None:
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        return self._player

    def _next(self) -> None:
        """Start on the request that has arrived, if all of it has."""
        call = self._due or self._headed()
        if call is None:
            return
        length = int(call.header("content-length") or 0)
        if len(self._buffer) < length:
            self._due = call
            return
        self._due = None
        call.body = bytes(self._buffer[:length])
        del self._buffer[:length]
        if self._tired is not None:
            self._tired.cancel()
        self._call = call
        self._double.record(call)
        self._player = asyncio.create_task(self._play(call))

    def _headed(self) -> Call | None:
        """The request whose head has arrived, still without its body."""
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            return None
        head = bytes(self._buffer[:end])
        del self._buffer[:end]
        method, target, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ")
        return Call(method, target, head, b"", self._number)

    async def _play(self, call: Call) -> None:
        try:
            script = self._double.everywhere
            for step in self._double.answer(call) if script is None else script:
                if not await self._do(step) or self._gone.is_set():
                    return
        finally:
            self._player = self._call = None
            call.over.set()
        if self._double.idle is not None and self._transport is not None:
            self._tired = asyncio.get_running_loop().call_later(self._double.idle, self._transport.close)
        self._next()

    async def _do(self, step: Step) -> bool:
        """Play one step; False if it was the last."""
        assert self._transport is not None
        if isinstance(step, bytes):
            self._transport.write(step)
            await asyncio.sleep(0)
            await self._writable.wait()
            if self._call is not None:
                self._call.taken += len(step)
        elif isinstance(step, asyncio.Event):
            await self._either(step)
        elif step is End.SILENCE:
            await self._gone.wait()
        elif step is End.RST:
            await self._written()
            self.reset()
        else:
            self._transport.close()
        return not isinstance(step, End)

    async def _written(self) -> None:
        """Wait until the peer's kernel has what was written: a RST would overtake it."""
        assert self._transport is not None
        while self._transport.get_write_buffer_size():  # noqa: ASYNC110  # a transport has no such event
            await asyncio.sleep(0)

    async def _either(self, gate: asyncio.Event) -> None:
        """Wait for a gate or for the peer to leave."""
        waits = [asyncio.create_task(gate.wait()), asyncio.create_task(self._gone.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class Engine(Double):
    """A vLLM engine. `scripts` answer the next hot requests one by one, `script` all others."""

    def __init__(self, model: str = "tiny") -> None:
        super().__init__()
        self.script: Callable[[Call], Script] = answered
        self.scripts: deque[Script] = deque()
        self.health = 200
        self.cards: list[dict[str, Any]] = [
            {"id": model, "object": "model", "root": f"/models/{model}", "parent": None, "max_model_len": 4096}
        ]
        self.facts = {"block_size": "32", "num_gpu_blocks": "8192", "prefix_caching_hash_algo": "sha256_cbor"}
        self.waiting = 0.0
        self.metrics: bytes | None = None
        """Said in place of metrics that are well formed."""

    @property
    def asked(self) -> list[Call]:
        """The hot requests that came."""
        return [call for call in self.calls if _hot(call.path)]

    def always(self, *steps: Step) -> None:
        """Answer every hot request with these steps."""
        self.script = lambda _: steps

    def answer(self, call: Call) -> Script:
        match call.path:
            case "/health":
                return whole(self.health, b"")
            case "/v1/models":
                return whole(200, {"object": "list", "data": self.cards})
            case "/metrics":
                return whole(200, self._metrics(), content_type="text/plain; version=0.0.4")
            case path if _hot(path):
                return self.scripts.popleft() if self.scripts else self.script(call)
            case _:
                return whole(404, {"detail": "Not Found"})

    def _metrics(self) -> bytes:
        if self.metrics is not None:
            return self.metrics
        facts = ",".join(f'{name}="{value}"' for name, value in self.facts.items())
        labels = 'engine="0",model_name="tiny"'
        return (
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{{facts},engine="0"}} 1.0\n'
            f"vllm:num_requests_running{{{labels}}} 0.0\n"
            f"vllm:num_requests_waiting{{{labels}}} {self.waiting}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.0\n"
        ).encode()


def _hot(path: str) -> bool:
    return path in HOT or path.startswith(f"{RESPONSES}/")


class Master(Double):
    """A Mooncake master's HTTP port. `holds` are the keys that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: set[str] = set()
        self.everything = False
        """Hold every key that is asked for."""

    @property
    def keys(self) -> list[list[str]]:
        """The keys of each look-up."""
        return [_keys(call) for call in self.calls if call.path == "/batch_query_keys"]

    def answer(self, call: Call) -> Script:
        if call.path == "/health":
            return whole(200, {"status": "ok", "service_ready": True})
        if call.path == "/get_segments_detail":
            return whole(200, {"segments": [{"segment_name": "s", "client_id": "c", "status": "OK"}]})
        if call.path != "/batch_query_keys":
            return whole(409, {"success": False, "error_message": "UNAVAILABLE_IN_CURRENT_MODE"})
        data = {key: _found(self.everything or key in self.holds) for key in _keys(call)}
        return whole(200, {"success": True, "data": data})


def _keys(call: Call) -> list[str]:
    return [unquote(key) for key in urlsplit(call.target).query.removeprefix("keys=").split(",")]


def _found(there: bool) -> dict[str, Any]:
    return {
        "ok": there,
        "error": None if there else "OBJECT_NOT_FOUND",
        "values": [{"size_": 1}] if there else None,
        "disk_values": None,
        "local_disk_values": None,
        "nof_values": None,
    }


class Collector(Double):
    """An OTLP/HTTP collector. It keeps what it is sent; `bodies` are ExportTraceServiceRequests."""

    @property
    def bodies(self) -> list[bytes]:
        return [call.body for call in self.calls]

    def answer(self, call: Call) -> Script:
        return whole(200, b"", content_type="application/x-protobuf")
