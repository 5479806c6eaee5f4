"""Runs the legs of a request and copies the answer's bytes to the client.

The head of the answer is held back until the first byte of its body is there, so that whatever goes
wrong before that can still go to a spare, or be told with its real status. After that byte nothing
is tried again: the client gets one error event, then `data: [DONE]`.

An engine's refusal (4xx) is the client's to read: status and body go through, once, unwrapped. Only
an engine's 401 and 403 do not, since the client's key was fine.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connector.blocks import Prefix
from connector.errors import TimedOut, Unreachable, WireError
from connector.wire import Answer
from gateway.errors import EngineFailed, EngineTimedOut, GatewayError
from gateway.exchange import Exchange
from gateway.fleet import Fleet, Lease
from gateway.sse import PRIVATE, EventStream, parsed, written
from gateway.trace import Telemetry, Trace

MAX_WHOLE = 64 * 1024 * 1024
"""Bytes of an answer in one piece (not streamed), which is held until it is complete."""
LAST_WORDS = 5.0
"""Seconds beyond the total within which a client must have taken the end of its answer."""
ANSWERS = frozenset({200, *range(400, 600)})
"""Statuses that can be an answer. A redirect is never followed, and never the client's to follow."""
RETRIED = frozenset({502, 503, 504})
"""Statuses before the first byte that send a request to a spare."""
DRAINING = b"cannot schedule new futures"
"""In the 500 of an engine that shuts down while its /health still says 200."""

_DROPPED = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"content-length", b"date", b"server", b"set-cookie",
        b"www-authenticate", b"x-moongate-route", b"x-request-id",
    }
)  # fmt: skip
"""Headers of an engine's answer that stay here: hop by hop (RFC 9110, 7.6.1), its own, or ours to set."""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to try for a leg."""

    engine: str
    backlog: int
    """Prompt tokens that it would have to compute."""
    route: bytes | None = None
    """What the client is told of the placement, in x-moongate-route."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One request to an engine."""

    path: str
    body: bytes
    prefix: Prefix | None
    hide_usage: bool = False
    """A usage event at the end of the stream is the gateway's own and is not shown."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a leg."""

    engine: str
    status: int
    ttft: float
    """Seconds from sending to the first byte of the body."""
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    """Why the answer broke off after its first byte."""

    @property
    def ok(self) -> bool:
        return self.status < 400 and self.error is None

    def tokens(self, name: str) -> int | None:
        """`prompt_tokens` or `completion_tokens` of the usage."""
        return _count(self.usage.get(name)) if self.usage is not None else None

    @property
    def cached_tokens(self) -> int | None:
        """What the engine says it did not compute; needs its --enable-prompt-tokens-details."""
        details = self.usage.get("prompt_tokens_details") if self.usage is not None else None
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


@dataclass(frozen=True, slots=True)
class _Reply:
    """An engine's answer up to the first byte of its body, or all of it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    ttft: float
    usage: Mapping[str, Any] | None = None
    answer: Answer | None = None
    """Where more of the body comes from."""
    stream: EventStream | None = None
    finish_reasons: tuple[object, ...] = ()


class LegFailed(Exception):
    """An engine failed before the first byte: another may do better. `error` is told if none does."""

    def __init__(self, cause: str, error: GatewayError, reply: _Reply | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.error = error
        self.reply = reply
        """What the engine did answer, to be passed on in place of `error`."""


class Relay:
    """Sends legs to engines and answers to clients."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry, *, attempts: int, total: float) -> None:
        """`attempts` engines are tried for an answer; `total` seconds bound a request, its legs together."""
        self._fleet = fleet
        self._telemetry = telemetry
        self._attempts = attempts
        self._total = total

    def deadline(self) -> float:
        """When a request that is relayed from now on must be over, on the loop's clock."""
        return asyncio.get_running_loop().time() + self._total

    async def answer(
        self, exchange: Exchange, trace: Trace, leg: Leg, targets: Sequence[Target], deadline: float
    ) -> Result:
        """Run a leg on the first target that can, and give its answer to the client.

        Raises the `GatewayError` of the last attempt where none could.
        """
        tried = targets[: self._attempts]
        for number, target in enumerate(tried, 1):
            with self._fleet.lease(target.engine, target.backlog, leg.prefix) as lease:
                try:
                    reply = await self._open(trace, leg, lease, deadline)
                except LegFailed as failure:
                    self._telemetry.failures.labels(target.engine, failure.cause).inc()
                    if number < len(tried) and failure.cause != "total_timeout":
                        self._telemetry.retries.labels(tried[number].engine).inc()
                        continue
                    if failure.reply is None:
                        raise failure.error from None
                    reply = failure.reply
                lease.prefilled(reply.status < 400)
                return await self._give(exchange, target, reply, deadline)
        raise EngineFailed("No engine was tried; this is a defect of the gateway.")

    async def prefill(self, exchange: Exchange, trace: Trace, leg: Leg, target: Target, deadline: float) -> Result:
        """Run a prefill leg. Only finish_reason `length` is success; a refusal is given to the client.

        Raises `LegFailed` where another prefill engine may do better.
        """
        with self._fleet.lease(target.engine, target.backlog, leg.prefix) as lease:
            try:
                reply = _prefilled(await self._open(trace, leg, lease, deadline))
            except LegFailed as failure:
                self._telemetry.failures.labels(target.engine, failure.cause).inc()
                raise
            lease.prefilled(reply.status < 400)
            if reply.status >= 400:
                return await self._give(exchange, target, reply, deadline)
            return Result(target.engine, reply.status, reply.ttft, reply.usage)

    async def _open(self, trace: Trace, leg: Leg, lease: Lease, deadline: float) -> _Reply:
        """Send a leg and wait for the first byte of its answer. Raises `LegFailed`."""
        engine = lease.engine
        headers = [
            (b"content-type", b"application/json"),
            (b"accept-encoding", b"identity"),
            (b"x-request-id", uuid.uuid4().hex.encode()),
            *trace.context(),
            *engine.headers,
        ]
        sent = time.perf_counter()
        try:
            async with asyncio.timeout_at(deadline):
                answer = _answering(await engine.wire.send("POST", leg.path, headers, leg.body))
                reply = await self._first(answer, leg, sent)
        except Unreachable as error:
            self._fleet.suspect(engine.id, error.detail)
            raise LegFailed("unreachable", EngineFailed("The engine could not be reached; try again.")) from error
        except TimedOut as error:
            raise LegFailed(f"{error.phase}_timeout", _too_late(error.phase, error.limit)) from error
        except WireError as error:
            raise LegFailed("broken", EngineFailed("The engine broke off before it answered; try again.")) from error
        except TimeoutError as error:
            raise LegFailed("total_timeout", _too_late("total", self._total)) from error
        if reply.status in (401, 403):
            raise LegFailed("credentials", EngineFailed("The engine refused the gateway's own credentials."))
        if reply.status in RETRIED or (reply.status == 500 and DRAINING in reply.first):
            raise LegFailed(f"status_{reply.status}", EngineFailed("The engine failed; try again."), reply)
        if "abort" in reply.finish_reasons:
            raise LegFailed("aborted", EngineFailed("The engine gave the request up; try again."))
        return reply

    @staticmethod
    async def _first(answer: Answer, leg: Leg, sent: float) -> _Reply:
        """The reply as soon as something of its body can go on."""
        dropped = _DROPPED.union(name.strip() for name in (answer.header(b"connection") or b"").lower().split(b","))
        headers = [(name, value) for name, value in answer.headers if name not in dropped]
        stream = EventStream(hide_usage=leg.hide_usage)
        try:
            if not (answer.header(b"content-type") or b"").startswith(b"text/event-stream"):
                body = await answer.body(MAX_WHOLE)
                return _whole(answer.status, headers, body, time.perf_counter() - sent)
            first = b""
            while not first and not stream.aborted and (piece := await answer.read()):
                first = stream.feed(piece)
        except BaseException:
            answer.close()
            raise
        ttft = time.perf_counter() - sent
        ended = not first and not stream.aborted
        if ended:
            first = stream.rest()
        if stream.error is not None or stream.aborted:
            answer.close()
            status = stream.error.get("code") if stream.error is not None else None
            status = status if isinstance(status, int) and 400 <= status <= 599 else 500
            finish = ("abort",) if stream.aborted else ()
            body = written({"error": stream.error})
            return _Reply(status, [(b"content-type", b"application/json")], body, ttft, finish_reasons=finish)
        if ended and not stream.done:
            raise LegFailed("empty", EngineFailed("The engine ended its answer before it began; try again."))
        return _Reply(answer.status, headers, first, ttft, answer=answer, stream=stream)

    async def _give(self, exchange: Exchange, target: Target, reply: _Reply, deadline: float) -> Result:
        """Give a reply to the client, to its end."""
        if target.route is not None:
            reply.headers.append((b"x-moongate-route", target.route))
        if reply.answer is None or reply.stream is None:
            await exchange.answer(reply.status, reply.headers, reply.first)
            return Result(target.engine, reply.status, reply.ttft, reply.usage)
        try:
            await exchange.start(reply.status, reply.headers)
            await exchange.write(reply.first)
            error, cause = await self._copy(exchange, reply.answer, reply.stream, deadline)
        finally:
            reply.answer.close()
        if cause is not None:
            self._telemetry.failures.labels(target.engine, cause).inc()
        try:
            async with asyncio.timeout_at(deadline + LAST_WORDS):
                await exchange.finish(b"" if error is None else _last_words(error, reply.stream))
        except TimeoutError:
            cause = "client_stuck"
        return Result(target.engine, reply.status, reply.ttft, reply.stream.usage, cause)

    async def _copy(
        self, exchange: Exchange, answer: Answer, stream: EventStream, deadline: float
    ) -> tuple[GatewayError | None, str | None]:
        """Copy a stream. Returns what the client must be told where it broke off, and the cause.

        What the client has is whole once [DONE] has gone by, however the connection ends.
        """
        broken: tuple[GatewayError, str] = EngineFailed("The engine ended its stream without [DONE]."), "no_done"
        try:
            async with asyncio.timeout_at(deadline):
                while piece := await answer.read():
                    if events := stream.feed(piece):
                        await exchange.write(events)
                    if stream.aborted:
                        return EngineFailed("The engine gave the request up."), "aborted"
        except TimedOut as error:
            broken = _too_late(error.phase, error.limit), f"{error.phase}_timeout"
        except WireError:
            broken = EngineFailed("The engine broke off in the middle of its answer."), "broken"
        except TimeoutError:
            broken = _too_late("total", self._total), "total_timeout"
        last = stream.rest()
        if not stream.done:
            return broken
        if last:
            await exchange.write(last)
        return None, "engine_error" if stream.error is not None else None


def _answering(answer: Answer) -> Answer:
    """The answer, if its status is that of one."""
    if answer.status not in ANSWERS:
        answer.close()
        raise LegFailed(f"status_{answer.status}", EngineFailed("The engine gave no answer; try again."))
    return answer


def _whole(status: int, headers: list[tuple[bytes, bytes]], body: bytes, ttft: float) -> _Reply:
    """A reply whose body is complete: its usage and finish reasons read, private fields taken out."""
    if status != 200 and not any(field.encode() in body for field in PRIVATE):
        return _Reply(status, headers, body, ttft)
    data = parsed(body)
    if not isinstance(data, dict):
        return _Reply(status, headers, body, ttft)
    if any(data.get(field) is not None for field in PRIVATE):
        body = written({name: value for name, value in data.items() if name not in PRIVATE})
    usage = data.get("usage")
    choices = data.get("choices")
    return _Reply(
        status,
        headers,
        body,
        ttft,
        usage=usage if isinstance(usage, dict) else None,
        finish_reasons=tuple(c.get("finish_reason") for c in choices if isinstance(c, dict))
        if isinstance(choices, list)
        else (),
    )


def _count(value: object) -> int | None:
    """A number of tokens, if it can be one."""
    return value if type(value) is int and 0 <= value < 2**31 else None


def _last_words(error: GatewayError, stream: EventStream) -> bytes:
    """What ends a stream that broke off: an error event, unless the engine has sent its own, and [DONE]."""
    gap = b"\n\n" if stream.torn else b""
    told = b"" if stream.error is not None else b"data: " + error.body() + b"\n\n"
    return gap + told + b"data: [DONE]\n\n"


def _prefilled(reply: _Reply) -> _Reply:
    """A prefill's reply, if it is one that tells of a prefill or of a refusal."""
    if reply.status >= 500:
        raise LegFailed(f"status_{reply.status}", EngineFailed("The prefill failed; try again."), reply)
    if reply.status < 400 and set(reply.finish_reasons) != {"length"}:
        raise LegFailed("prefill_stopped", EngineFailed("The prefill did not run to its end; try again."))
    return reply


def _too_late(phase: str, limit: float) -> GatewayError:
    what = {
        "connect": "No connection to the engine within",
        "head": "The engine did not begin to answer within",
        "idle": "The engine fell silent for",
        "total": "The request took longer than",
    }[phase]
    return EngineTimedOut(f"{what} {limit:g} s.", code=f"{phase}_timeout")
