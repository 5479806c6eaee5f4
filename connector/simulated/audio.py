"""/v1/audio/transcriptions: a file in a form to words.

As vLLM 0.32 answers (vllm/entrypoints/speech_to_text): `text` is told in the same JSON as `json`; a
stream brings transcription.chunk after transcription.chunk and ends with [DONE]. It takes no salt.

What is heard has nothing to do with what was said: the file's bytes become the ids of a prompt, 50 a
second, and the words are those that this prompt brings. How long it lasts is read from a WAV file's
head and reckoned at 16 kB a second from any other. `diarized_json` is refused, as by most models.
"""

import hashlib
import io
import math
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from connector.simulated.answers import DONE, Chosen, Heading, event
from connector.simulated.ask import Refusal, Sampling, checked, malformed, sampled
from connector.simulated.engine import Generation, Output
from connector.simulated.serving import Desk

TOKENS_PER_SECOND = 50
BYTES_PER_SECOND = 16_000
TOLD = ("text", "json", "verbose_json", "diarized_json")


class TranscriptionBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    stream: bool | None = False
    stream_include_usage: bool | None = False
    stream_continuous_usage_stats: bool | None = False
    temperature: float = 0.0
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Transcriptions:
    """The endpoint."""

    desk: Desk

    async def create(self, request: Request) -> Response:
        async with request.form() as form:
            fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            file = form.get("file")
            audio = await file.read() if isinstance(file, UploadFile) else None
        body = _checked(fields, audio)
        adapter = self.desk.adapter(body.model)
        _check_format(body, body.model or self.desk.model.names[0])
        if not audio:
            raise Refusal("Invalid or unsupported audio file.")
        seconds = lasting(audio)
        sampling = checked(Sampling, {"temperature": body.temperature, "stream": body.stream})
        ask = sampled(sampling, chat=False, max_tokens=body.max_completion_tokens, echo=False)
        prompts = self.desk.prompts([self._heard(audio, seconds, body.prompt)], ask, adapter)
        told = TranscriptionForm(self.desk.heading(request, body.model), body, seconds)
        return await self.desk.answer(request, prompts, told, stream=ask.stream)

    def _heard(self, audio: bytes, seconds: float, prompt: str) -> list[int]:
        """Ids for what was given; at most half of what the model takes is audio."""
        model = self.desk.model
        count = min(max(1, math.ceil(seconds * TOKENS_PER_SECOND)), model.max_model_len // 2)
        drawn = hashlib.shake_128(audio).digest(4 * count)
        ids = [int.from_bytes(drawn[place : place + 4], "big") % model.vocabulary for place in range(0, len(drawn), 4)]
        return [*(self.desk.completion_tokens({"prompt": prompt}) if prompt else ()), *ids]


def lasting(audio: bytes) -> float:
    """Seconds."""
    try:
        with wave.open(io.BytesIO(audio)) as file:
            return float(file.getnframes() / (file.getframerate() or 1))
    except (wave.Error, EOFError):
        return len(audio) / BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class TranscriptionForm:
    """/v1/audio/transcriptions."""

    heading: Heading
    body: TranscriptionBody
    seconds: float

    def whole(self, choices: Sequence[Chosen]) -> dict[str, Any]:
        text = choices[0].text
        if self.body.response_format != "verbose_json":
            return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(self.seconds)}}
        return {
            "duration": self.seconds,
            "language": self.body.language or "en",
            "text": text,
            "segments": [self._segment(choices[0])],
            "words": None,
        }

    def stream(self, generations: Sequence[Generation]) -> "TranscriptionEvents":
        return TranscriptionEvents(self.heading, self.body, generations[0])

    def _segment(self, choice: Chosen) -> dict[str, Any]:
        return {
            "id": 0,
            "avg_logprob": 0.0,
            "compression_ratio": 1.0,
            "end": self.seconds,
            "no_speech_prob": None,
            "seek": 0,
            "start": 0.0,
            "temperature": self.body.temperature,
            "text": choice.text,
            "tokens": list(choice.token_ids),
        }


class TranscriptionEvents:
    """One transcription in events."""

    def __init__(self, heading: Heading, body: TranscriptionBody, generation: Generation) -> None:
        self._heading = heading
        self._body = body
        self._generation = generation
        self._generated = 0

    def begin(self) -> list[bytes]:
        return []

    def events(self, output: Output) -> list[bytes]:
        self._generated += output.token is not None
        if output.finish is None and not output.text:
            return []
        choice: dict[str, Any] = {"delta": {"content": output.text}}
        if output.finish is not None:
            choice |= {"finish_reason": output.finish, "stop_reason": output.stop_reason}
        always = self._body.stream_include_usage and self._body.stream_continuous_usage_stats
        return [event(self._chunk([choice]) | ({"usage": self._usage()} if always else {}))]

    def end(self) -> list[bytes]:
        usage = [event(self._chunk([]) | {"usage": self._usage()})] if self._body.stream_include_usage else []
        return [*usage, DONE]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"transcribe-{self._heading.request_id}",
            "object": "transcription.chunk",
            "created": self._heading.created,
            "model": self._heading.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        prompt = len(self._generation.prompt.tokens)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._generated,
            "completion_tokens": self._generated,
        }


def _checked(fields: dict[str, str], audio: bytes | None) -> TranscriptionBody:
    """Raises `Refusal`."""
    if audio is None and "file" in fields:
        message = "Expected 'file' to be a file-like object, not 'str'."
        raise Refusal(message, status=422, kind="Unprocessable Entity")
    if audio is None:
        raise malformed([{"type": "missing", "loc": ("file",), "msg": "Field required", "input": fields}])
    body = checked(TranscriptionBody, fields)
    options = ("stream_include_usage", "stream_continuous_usage_stats")
    if not body.stream and (given := next((name for name in options if getattr(body, name)), None)):
        raise Refusal.of(given, "Stream options can only be defined when `stream=True`.")
    return body


def _check_format(body: TranscriptionBody, model: str) -> None:
    form = body.response_format
    if form not in TOLD:
        raise Refusal("Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`")
    if form == "diarized_json":
        raise Refusal(f"Currently do not support diarized_json for {model}")
    if form == "verbose_json" and body.stream:
        raise Refusal("verbose_json format doesn't support streaming case")
