"""POST /v1/audio/transcriptions and /v1/audio/translations. The next windows of all sounds in progress are decoded
together."""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import PlainTextResponse, Response

from allyouneed.apps.serve.bodies import off_loop, parse_multipart
from allyouneed.apps.serve.errors import ApiError, over_limit, validation_error
from allyouneed.apps.serve.responses import Events, event_stream, json_response
from allyouneed.apps.serve.unknown_fields import check_fields
from allyouneed.errors import UserError
from allyouneed.runtime.process import inference

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.infer.speech.tracks import Track, Transcript

router = APIRouter(tags=["OpenAI"])
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
GRANULARITIES = ("segment", "word")
FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", "stream", "seed", "beam_size")
WINDOWS = 8  # decoded together
PROMPT = 4000  # characters


class Form(BaseModel):
    """The fields of the form. `granularities`: of timestamps."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    stream: bool = False
    seed: int = 0
    beam_size: int = 5
    granularities: tuple[str, ...] = ()


@router.post("/v1/audio/transcriptions", openapi_extra={"requestBody": {"content": {"multipart/form-data": {}}}})
async def transcriptions(request: Request) -> Response:
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", openapi_extra={"requestBody": {"content": {"multipart/form-data": {}}}})
async def translations(request: Request) -> Response:
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    state = request.app.state
    form, content = await _read_form(request)
    if form.stream and form.response_format not in ("json", "text"):
        raise ApiError("stream: only with response_format json or text", param="stream")
    run = TranscriptionRun(form, content, task, state.settings.limits.upload_seconds)
    if form.stream:
        return await event_stream(run.stream(state.registry))
    async with state.registry.use(form.model) as model:
        track = await run.start(model)
        while track.at < track.total:
            await run.step(track)
        return await run.response(track)


class TranscriptionRun:
    """A sound, window by window."""

    def __init__(self, form: Form, content: bytes, task: str, longest: float) -> None:
        self.form, self.content, self.task, self.longest = form, content, task, longest

    async def start(self, model: ServedModel) -> Track:
        from allyouneed.infer.speech.fallback import TranscriptionOptions

        self.model, self.predictor = model, model.offering("decode_window", "transcribe speech")
        form = self.form
        temperature = {"temperatures": (form.temperature,)} if form.temperature else {}
        self.options = TranscriptionOptions(beam=form.beam_size, seed=form.seed, **temperature)
        try:
            language = self.predictor.check(form.language, self.task)
        except UserError as error:
            raise ApiError(str(error), param="language") from None
        samples = await asyncio.to_thread(_read, self.content, self.longest)
        track: Track = await asyncio.to_thread(self.predictor.track, 0, samples, language)
        if form.prompt:
            track.context = self.predictor.tokenizer.encode(" " + form.prompt.strip())
        return track

    @property
    def timed(self) -> bool:
        return self.form.response_format in ("srt", "vtt", "verbose_json")

    async def step(self, track: Track) -> None:
        """Decode the next window, together with those of other requests."""
        predictor, options, timed, task = self.predictor, self.options, self.timed, self.task

        def decode(tracks: list[Any]) -> list[Any]:
            with inference():
                predictor.decode_window(tracks, task, timed, options)
            return tracks

        await self.model.compute(("transcribe", task, timed, options), [track], decode, WINDOWS)

    async def stream(self, registry: Any) -> Events:
        """As OpenAI's events: what each window adds, then the whole text."""
        async with registry.use(self.form.model) as model:
            track = await self.start(model)
            sent = ""
            while track.at < track.total:
                await self.step(track)
                text = self.predictor.transcript(track).text
                if len(text) > len(sent):
                    yield {"type": "transcript.text.delta", "delta": text[len(sent) :]}
                    sent = text
            yield {"type": "transcript.text.done", "text": sent}

    async def response(self, track: Track) -> Response:
        found: Transcript = self.predictor.transcript(track)
        match self.form.response_format:
            case "text":
                return PlainTextResponse(found.text + "\n")
            case "srt":
                return PlainTextResponse(subtitles(found, ",", numbered=True))
            case "vtt":
                return PlainTextResponse("WEBVTT\n\n" + subtitles(found, ".", numbered=False))
            case "verbose_json":
                return json_response(await self._verbose(track, found))
        return json_response({"text": found.text, "usage": {"type": "duration", "seconds": round(found.seconds + 0.5)}})

    async def _verbose(self, track: Track, found: Transcript) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "task": self.task,
            "language": found.language or "en",
            "duration": found.seconds,
            "text": found.text,
        }
        granularities = self.form.granularities or ("segment",)
        if "word" in granularities:
            predictor, task = self.predictor, self.task
            (words,) = await self.model.compute(
                ("words", task), [track], lambda tracks: [predictor.words(one, task) for one in tracks], WINDOWS
            )
            answer["words"] = [{"word": word.text, "start": word.start, "end": word.end} for word in words]
        if "segment" in granularities:
            answer["segments"] = [
                {
                    "id": number,
                    "seek": detail.seek,
                    "start": segment.start,
                    "end": segment.end,
                    "text": segment.text,
                    "tokens": list(detail.tokens),
                    "temperature": detail.result.temperature,
                    "avg_logprob": detail.result.mean_log_prob,
                    "compression_ratio": _compression(detail.result.text),
                    "no_speech_prob": detail.result.no_speech,
                }
                for number, (segment, detail) in enumerate(zip(found.segments, track.details, strict=True))
            ]
        return answer


async def _read_form(request: Request) -> tuple[Form, bytes]:
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise ApiError("send a form: multipart/form-data with a file", param="file")
    body = await request.body()
    fields, files = await off_loop(len(body), parse_multipart, kind, body, files=1, fields=32)
    content = files.get("file")
    if content is None:
        raise ApiError("file: a sound file is missing", param="file")
    values: dict[str, Any] = {}
    granularities = []
    for name, value in fields:
        if name in ("timestamp_granularities[]", "timestamp_granularities"):
            granularities.append(value)
        elif name in FIELDS:
            values[name] = value
    unused = ("include[]", "chunking_strategy")
    check_fields(dict(fields), (*FIELDS, "timestamp_granularities", "timestamp_granularities[]", *unused), unused)
    return _check_form(values | {"granularities": tuple(granularities)}), content


def _check_form(values: dict[str, Any]) -> Form:
    try:
        form = TypeAdapter(Form).validate_python({name: value for name, value in values.items() if value != ""})
    except ValidationError as error:
        raise validation_error(error.errors()) from None
    for name, value, allowed in (
        ("response_format", (form.response_format,), FORMATS),
        ("timestamp_granularities", form.granularities, GRANULARITIES),
    ):
        if wrong := [one for one in value if one not in allowed]:
            raise ApiError(f"{name}: {wrong[0][:40]!r} (allowed: {', '.join(allowed)})", param=name)
    if not 0 <= form.temperature <= 1:
        raise ApiError(f"temperature={form.temperature}: expected 0 to 1", param="temperature")
    if not 1 <= form.beam_size <= 20:
        raise ApiError(f"beam_size={form.beam_size}: expected 1 to 20", param="beam_size")
    if not 0 <= form.seed < 1 << 63:
        raise ApiError(f"seed={form.seed}: expected 0 to {(1 << 63) - 1}", param="seed")
    if len(form.prompt) > PROMPT:
        raise over_limit("characters in the prompt", len(form.prompt), PROMPT, "prompt")
    return form


def _read(content: bytes, longest: float) -> Any:
    """The samples of an uploaded file."""
    from allyouneed.data.media.sound_files import read_sound

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload"
        path.write_bytes(content)
        try:
            return read_sound(path, longest=longest)
        except UserError as error:
            raise ApiError(str(error).replace(str(path), "the file"), param="file") from None


def _compression(text: str) -> float:
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def subtitles(found: Transcript, point: str, numbered: bool) -> str:
    """Segments as subtitles: SRT with numbers and a decimal comma, WebVTT without and with a point."""
    parts = []
    for number, segment in enumerate(found.segments, 1):
        head = f"{number}\n" if numbered else ""
        text = segment.text.replace("-->", "->")
        parts.append(f"{head}{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{text}\n\n")
    return "".join(parts)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
