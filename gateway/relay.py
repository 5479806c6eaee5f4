"""Runs the legs of a request and copies the answer's bytes to the client.

`open` finds an engine that answers, up to the first byte of its body; `give` copies that answer to the
client. The head is held back until then, so that whatever goes wrong before can still go to a spare, or
be told with its real status. After that byte nothing is tried again: the client gets one error event,
then what ends a stream in its protocol; an answer that is no stream is broken off.

An engine's refusal (4xx) is the client's to read: status and body go through, once, unwrapped. Only
an engine's 401 and 403 do not, since the client's key was fine.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from connector.blocks import Prefix
from connector.errors import Exhausted, TimedOut, Unreachable, WireError
from connector.landmarks import NOWHERE, Landmarks
from connector.wire import Answer
from gateway.dialects import Dialect, Usage, gave_up, usage
from gateway.encodings import CODINGS, Undecodable, codings, decoder, unpacked
from gateway.errors import EngineFailed, EngineTimedOut, GatewayError, Unavailable
from gateway.exchange import Exchange
from gateway.fleet import Fleet, Lease
from gateway.limits import Budget
from gateway.sse import EventStream, holds_private, parsed, without_private
from gateway.trace import Telemetry

MAX_WHOLE = 64 * 1024 * 1024
"""Bytes of JSON in one piece (not streamed), which is held until it is complete."""
ENGINE_ENDS = 1.0
"""Seconds in which an engine must end its answer after the last event, so that its connection can be kept."""
ANSWERS = frozenset({200, *range(400, 600)})
"""Statuses that can be an answer. A redirect is never followed, and never the client's to follow."""
RETRIED = frozenset({502, 503, 504})
"""Statuses before the first byte that send a request to a spare."""
DRAINING = b"cannot schedule new futures"
"""In the 500 of an engine that shuts down while its /health still says 200."""
LEFT_ALONE = "left_alone"
"""The cause where a circuit breaker stood before the engine."""
OUR_FAULT = frozenset({"total_timeout", "reader_timeout", "no_descriptor"})
"""Causes that tell nothing of the engine."""

_DROPPED = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"date", b"server", b"set-cookie",
        b"www-authenticate", b"x-moongate-route", b"x-request-id", b"access-control-allow-origin",
        b"access-control-allow-credentials", b"access-control-allow-headers", b"access-control-allow-methods",
        b"access-control-expose-headers", b"access-control-max-age",
    }
)  # fmt: skip
"""Headers of an engine's answer that stay here: hop by hop (RFC 9110, 7.6.1), its own, or ours to set."""
_PRIVATE = b"_transfer_params"
"""What the names of private fields have in common."""
Packed = Sequence[str] | None
"""The codings of an answer that must be taken off; None where there are none, or one that is not known here."""
_JSON_TYPE = (b"content-type", b"application/json")
_ASKED = ((b"content-type", b"application/json"), (b"accept-encoding", b"identity"))


class Target(Struct, frozen=True):
    """An engine to try for a leg."""

    engine: str
    backlog: int
    """Prompt tokens that it would have to compute."""
    route: bytes | None = None
    """What the client is told of the placement, in x-moongate-route."""


class Leg(Struct, frozen=True):
    """One request to an engine."""

    target: str
    """Path and query."""
    body: Sequence[bytes]
    prefix: Prefix | None = None
    landmarks: Landmarks = NOWHERE
    method: str = "POST"
    dialect: Dialect = Dialect.CHAT
    content_type: bytes | None = None
    """Of the body, where it is not JSON."""
    hide_usage: bool = False
    """A usage event at the end of the stream is the gateway's own and is not shown."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """What engines are told beside the body: the request's id, the trace."""


class Result(Struct, frozen=True):
    """What came of a leg."""

    engine: str
    status: int
    ttft: float
    """Seconds from sending to the first byte of the body."""
    usage: Usage | None = None
    error: str | None = None
    """Why the answer broke off after its first byte."""
    events: int = 0
    """Of a stream, about one for each token: what is charged where no usage came."""
    made: str | None = None
    """The id of the response that the engine keeps."""

    @property
    def ok(self) -> bool:
        return self.status < 400 and self.error is None

    @property
    def cached_tokens(self) -> int | None:
        """What the engine says it did not compute."""
        return self.usage.cached if self.usage is not None else None


class Reply:
    """An engine's answer up to the first byte of its body, or all of it. Give it, or close it."""

    __slots__ = (
        "aborted",
        "answer",
        "data",
        "first",
        "headers",
        "lease",
        "made",
        "status",
        "stream",
        "ttft",
        "unpack",
        "usage",
    )

    def __init__(self, lease: Lease, answer: Answer, ttft: float) -> None:
        self.lease = lease
        self.status = answer.status
        self.headers = _passing(answer)
        self.ttft = ttft
        self.first = b""
        self.answer: Answer | None = None
        """Where more of the body comes from."""
        self.stream: EventStream | None = None
        self.unpack: Callable[[bytes], bytes] | None = None
        self.usage: Usage | None = None
        self.made: str | None = None
        self.aborted = False
        """The engine gave the request up."""
        self.data: Mapping[str, Any] = {}
        """Of an answer in one piece: its JSON."""

    def result(self, error: str | None = None) -> Result:
        stream = self.stream
        if stream is None:
            return Result(self.lease.engine.id, self.status, self.ttft, self.usage, error, made=self.made)
        return Result(
            self.lease.engine.id, self.status, self.ttft, stream.usage, error, events=stream.events, made=stream.made
        )

    def close(self) -> None:
        """Give up what has not come yet, and the hold on the engine. Does nothing the second time."""
        if self.answer is not None:
            self.answer.close()
        self.lease.release()


class LegFailed(Exception):
    """An engine failed before the first byte: another may do better. `error` is told if none does."""

    def __init__(self, cause: str, error: GatewayError, reply: Reply | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.error = error
        self.reply = reply
        """What the engine did answer, to be passed on in place of `error`."""


class Relay:
    """Sends legs to engines and answers to clients."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry, *, budget: float, total: float) -> None:
        """`budget` of all requests may be tried again; `total` seconds bound a request, its legs together."""
        self._fleet = fleet
        self._telemetry = telemetry
        self._budget = Budget(budget)
        self._total = total

    def deadline(self) -> float:
        """When a request that is relayed from now on must be over, on the loop's clock."""
        return asyncio.get_running_loop().time() + self._total

    def _goes_on(self, failure: LegFailed) -> bool:
        """Whether the next engine may be asked. One that was never sent anything costs no second try."""
        return failure.cause == LEFT_ALONE or (failure.cause not in OUR_FAULT and self.may_try_again())

    def may_try_again(self) -> bool:
        """Whether the budget has one more try, which is then taken."""
        return self._budget.spend()

    async def open(self, leg: Leg, targets: Sequence[Target], deadline: float) -> Reply:
        """Run a leg on the first target that answers. Raises the `GatewayError` of the last attempt where none does."""
        self._budget.earn()
        for number, target in enumerate(targets, 1):
            try:
                reply = await self.attempt(leg, target, deadline)
            except LegFailed as failure:
                if number < len(targets) and self._goes_on(failure):
                    if failure.reply is not None:
                        failure.reply.close()
                    self._telemetry.retries.inc(targets[number].engine)
                    continue
                if failure.reply is None:
                    raise failure.error from None
                reply = failure.reply
            if target.route is not None:
                reply.headers.append((b"x-moongate-route", target.route))
            reply.lease.prefilled(reply.status < 400)
            return reply
        raise EngineFailed("No engine was tried; this is a defect of the gateway.")

    async def prefill(self, leg: Leg, target: Target, deadline: float) -> Reply:
        """Run a prefill leg: a refusal to be given to the client, or a success, which is over.

        Only finish_reason `length` is success. Raises `LegFailed` where another prefill engine may do better.
        """
        try:
            reply = await self.attempt(leg, target, deadline)
        except LegFailed as failure:
            if failure.reply is not None:
                failure.reply.close()
            raise
        if reply.status >= 500 or (reply.status < 400 and not _ran_to_length(reply.data)):
            cause = f"status_{reply.status}" if reply.status >= 500 else "prefill_stopped"
            self._telemetry.failures.inc(target.engine, cause)
            reply.close()
            raise LegFailed(cause, EngineFailed("The prefill did not run to its end; try again."))
        reply.lease.prefilled(reply.status < 400)
        if reply.status < 400:
            reply.close()
        return reply

    async def attempt(self, leg: Leg, target: Target, deadline: float) -> Reply:
        """Send a leg and wait for the first byte of its answer. Raises `LegFailed`."""
        if not self._fleet.lets_through(target.engine):  # another request has begun to try it since the survey
            raise LegFailed(LEFT_ALONE, Unavailable("The engine is being tried by another request; try again."))
        lease = self._fleet.lease(target.engine, target.backlog, leg.prefix, leg.landmarks)
        engine = lease.engine
        try:
            reply = await self._first(leg, lease, deadline)
        except LegFailed as failure:
            self._telemetry.failures.inc(engine.id, failure.cause)
            if failure.cause in OUR_FAULT:
                engine.breaker.gave_no_sign()
            else:
                engine.breaker.failed()
            if failure.reply is None:
                lease.release()
            raise
        except BaseException:
            engine.breaker.gave_no_sign()
            lease.release()
            raise
        engine.breaker.answered()
        return reply

    async def _first(self, leg: Leg, lease: Lease, deadline: float) -> Reply:
        engine = lease.engine
        headers = _ASKED if leg.content_type is None else ((b"content-type", leg.content_type), _ASKED[1])
        sent = time.perf_counter()
        answer: Answer | None = None
        try:
            answer = await engine.wire.send(
                leg.method, leg.target, (*headers, *engine.headers, *leg.headers), leg.body, deadline
            )
            kind = _kind(answer)
            packed = _packed(answer)
            if kind.startswith(b"text/event-stream"):
                reply = await self._stream(leg, lease, answer, sent, packed)
            else:
                reply = await self._whole(leg, lease, answer, sent, packed, plain=b"json" not in kind and bool(kind))
        except Unreachable as error:
            self._fleet.suspect(engine.id, error.detail)
            raise LegFailed("unreachable", EngineFailed("The engine could not be reached; try again.")) from error
        except TimedOut as error:
            raise LegFailed(f"{error.phase}_timeout", _too_late(error.phase, error.limit)) from error
        except Exhausted as error:
            raise LegFailed("no_descriptor", Unavailable("The gateway has no connection left; try again.")) from error
        except (WireError, Undecodable) as error:
            if answer is not None:
                answer.close()
            raise LegFailed("broken", EngineFailed("The engine broke off before it answered; try again.")) from error
        except BaseException:
            if answer is not None:
                answer.close()
            raise
        return _judged(reply)

    @staticmethod
    async def _whole(leg: Leg, lease: Lease, answer: Answer, sent: float, packed: Packed, *, plain: bool) -> Reply:
        """The reply whose JSON is complete; of what is no JSON, with its first bytes."""
        if plain and answer.status == 200:
            first = await answer.read()
            reply = Reply(lease, answer, time.perf_counter() - sent)
            reply.first, reply.answer = first, answer
            return reply
        body = await answer.body(MAX_WHOLE)
        reply = Reply(lease, answer, time.perf_counter() - sent)
        if packed is not None:
            body = unpacked(body, packed, MAX_WHOLE)
            reply.headers = [pair for pair in reply.headers if pair[0] != b"content-encoding"]
        reply.first = body
        if answer.status == 200 or _PRIVATE in body:
            _read(reply, leg.dialect)
        return reply

    @staticmethod
    async def _stream(leg: Leg, lease: Lease, answer: Answer, sent: float, packed: Packed) -> Reply:
        """The reply as soon as something of its stream can go on."""
        stream = EventStream(leg.dialect, hide_usage=leg.hide_usage, fingerprint=lease.engine.fingerprint)
        unpack = decoder(packed) if packed is not None else None
        first = b""
        while not first and not stream.aborted and (piece := await answer.read()):
            first = stream.feed(piece if unpack is None else unpack(piece))
        reply = Reply(lease, answer, time.perf_counter() - sent)
        ended = not first and not stream.aborted
        if ended:
            first = stream.rest()
        reply.first = first
        if unpack is not None:
            reply.unpack = unpack
            reply.headers = [pair for pair in reply.headers if pair[0] != b"content-encoding"]
        if stream.error is not None or stream.aborted:  # before anything else came: told as what it is
            answer.close()
            _refused(reply, leg.dialect, stream)
        elif ended and not stream.done:
            raise LegFailed("empty", EngineFailed("The engine ended its answer before it began; try again."))
        else:
            reply.answer, reply.stream = answer, stream
        return reply

    async def give(self, exchange: Exchange, reply: Reply) -> Result:
        """Give a reply to the client, to its end."""
        try:
            if reply.answer is None:
                exchange.answer(reply.status, reply.headers, reply.first)
                return reply.result()
            if reply.stream is None:
                return await self._give_as_it_is(exchange, reply, reply.answer)
            return await self._give_stream(exchange, reply, reply.answer, reply.stream)
        except asyncio.CancelledError:
            if not exchange.left and not exchange.finished and reply.stream is not None:  # the gateway shuts down
                error = EngineFailed("The gateway was stopped before the answer was complete.")
                exchange.finish(_last_words(reply.stream, error))
            raise
        finally:
            reply.close()

    async def _give_stream(self, exchange: Exchange, reply: Reply, answer: Answer, stream: EventStream) -> Result:
        exchange.start(reply.status, reply.headers)
        copy = _Copy(exchange, answer, stream, reply.unpack)
        copy.pass_on(reply.first)
        error, cause = await self._pour(exchange, answer, copy)
        error, cause = copy.ended(error, cause)
        if cause is not None:
            self._telemetry.failures.inc(reply.lease.engine.id, cause)
        if cause == "reader_timeout":
            exchange.drop()
        elif not exchange.finished:
            exchange.finish(_last_words(stream, error) if error is not None else b"")
        return reply.result(cause)

    async def _give_as_it_is(self, exchange: Exchange, reply: Reply, answer: Answer) -> Result:
        """Bytes of which nothing is known here. Broken off, they must not look whole."""
        length = answer.header(b"content-length")
        exchange.start(reply.status, reply.headers, int(length) if length is not None else None)
        if reply.first:
            exchange.write(reply.first)
        _, cause = await self._pour(exchange, answer, exchange.write)
        if cause is None:
            exchange.finish()
        else:
            self._telemetry.failures.inc(reply.lease.engine.id, cause)
            exchange.drop()
        return reply.result(cause)

    async def _pour(
        self, exchange: Exchange, answer: Answer, copy: Callable[[bytes], None]
    ) -> tuple[GatewayError | None, str | None]:
        """Copy to the end. Returns what the client must be told where it broke off, and the cause."""

        def hold(full: bool) -> None:
            if full:
                answer.pause()
            else:
                answer.resume()

        exchange.throttle(hold)
        try:
            await answer.pour(copy)
        except TimedOut as error:
            return _too_late(error.phase, error.limit), f"{error.phase}_timeout"
        except (WireError, Undecodable):
            return EngineFailed("The engine broke off in the middle of its answer."), "broken"
        except _GaveUp:
            return EngineFailed("The engine gave the request up."), "aborted"
        return None, None


class _GaveUp(Exception):
    """The engine aborted the request in the middle of its stream."""


class _Copy:
    """Takes an engine's stream, piece by piece as it comes, and gives its events to the client."""

    def __init__(
        self, exchange: Exchange, answer: Answer, stream: EventStream, unpack: Callable[[bytes], bytes] | None
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._stream = stream
        self._unpack = unpack

    def __call__(self, piece: bytes) -> None:
        if self._exchange.finished:
            return
        events = self._stream.feed(piece if self._unpack is None else self._unpack(piece))
        if events:
            self.pass_on(events)
        if self._stream.aborted:
            raise _GaveUp

    def pass_on(self, events: bytes) -> None:
        """Give events to the client; the last one ends its answer, whatever the engine still does."""
        self._exchange.write(events)
        if self._stream.done:
            self._exchange.finish()
            self._answer.let_go(ENGINE_ENDS)

    def ended(self, error: GatewayError | None, cause: str | None) -> tuple[GatewayError | None, str | None]:
        """What the client must be told now that no more comes, and why."""
        stream = self._stream
        if not stream.done and not stream.aborted:
            last = stream.rest()
            if last:
                self.pass_on(last)
        if stream.done:
            return None, "engine_error" if stream.error is not None else None
        if cause is None:
            return EngineFailed("The engine ended its stream too early."), "no_done"
        return error, cause


def _kind(answer: Answer) -> bytes:
    """The content type of what is an answer."""
    if answer.status not in ANSWERS:
        raise LegFailed(f"status_{answer.status}", EngineFailed("The engine gave no answer; try again."))
    kinds = [value for name, value in answer.headers if name == b"content-type"]
    if len(kinds) > 1:
        raise LegFailed("broken", EngineFailed("The engine's answer is two things at once; try again."))
    return kinds[0] if kinds else b""


def _passing(answer: Answer) -> list[tuple[bytes, bytes]]:
    """The headers of an engine's answer that are the client's too."""
    named = answer.header(b"connection")
    if named is None or named in (b"keep-alive", b"close"):
        return [pair for pair in answer.headers if pair[0] not in _DROPPED]
    dropped = _DROPPED.union(name.strip() for name in named.lower().split(b","))
    return [pair for pair in answer.headers if pair[0] not in dropped]


def _packed(answer: Answer) -> Packed:
    header = answer.header(b"content-encoding")
    if header is None:
        return None
    names = codings(header)
    return None if any(name not in CODINGS for name in names) else names


def _read(reply: Reply, dialect: Dialect) -> None:
    """Read a whole answer: usage, finish reasons, the id that it is kept under. Private fields are taken out."""
    data = parsed(reply.first)
    if not isinstance(data, dict):
        return
    if _PRIVATE in reply.first and holds_private(data):
        reply.first = without_private(reply.first)
    reply.usage = usage(data)
    reply.aborted = gave_up(data)
    reply.data = data
    if dialect is Dialect.RESPONSES and isinstance(data.get("id"), str):
        reply.made = data["id"]


def _refused(reply: Reply, dialect: Dialect, stream: EventStream) -> None:
    """Make an answer with a status of a stream that begins with an error, or with an abort."""
    error = stream.error or {}
    status = error.get("code")
    reply.status = status if type(status) is int and 400 <= status <= 599 else 500
    reply.headers = [_JSON_TYPE]
    told = {"error": error} if dialect is not Dialect.MESSAGES else {"type": "error", "error": error}
    reply.first = json.dumps(told, separators=(",", ":")).encode()
    reply.aborted = stream.aborted


def _ran_to_length(data: Mapping[str, Any]) -> bool:
    choices = data.get("choices")
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(choice, dict) and choice.get("finish_reason") == "length" for choice in choices)
    )


def _judged(reply: Reply) -> Reply:
    """The reply, if it is the client's. Raises `LegFailed` where another engine may do better."""
    if reply.status in (401, 403):
        raise LegFailed("credentials", EngineFailed("The engine refused the gateway's own credentials."))
    if reply.aborted:
        raise LegFailed("aborted", EngineFailed("The engine gave the request up; try again."))
    if reply.status in RETRIED or (reply.status == 500 and DRAINING in reply.first):
        raise LegFailed(f"status_{reply.status}", EngineFailed("The engine failed; try again."), reply)
    return reply


def _last_words(stream: EventStream, error: GatewayError) -> bytes:
    """What ends a stream that broke off, unless the engine has told its own error."""
    gap = b"\n\n" if stream.torn else b""
    return gap + stream.dialect.last_words(error if stream.error is None else None)


def _too_late(phase: str, limit: float) -> GatewayError:
    what = {
        "connect": "No connection to the engine within",
        "head": "The engine did not begin to answer within",
        "idle": "The engine fell silent for",
        "reader": "The answer was not read for",
        "total": "The request took longer than",
    }[phase]
    return EngineTimedOut(f"{what} {limit:g} s.", code=f"{phase}_timeout")
