"""Speech to text with Whisper, in windows of 30 seconds (Radford et al. 2022, 3.8 and 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.data.languages import parse_name, resolve
from allyouneed.data.media.sound import HOP, RATE, log_mel
from allyouneed.data.media.sound_files import read_samples
from allyouneed.data.media.sound_input import SoundInput
from allyouneed.data.media.speech import TASKS, TICK, Speech, split_marks
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, add_tokens, evenly_spaced
from allyouneed.infer.predictors.image_classifier import for_readable
from allyouneed.infer.request import Request
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.infer.scheduler import new_graphs
from allyouneed.infer.speech.fallback import TranscriptionOptions, WindowResult
from allyouneed.infer.speech.timestamp_rules import TimestampRules
from allyouneed.infer.speech.timestamps import split_segments
from allyouneed.infer.speech.tracks import Segment, SegmentDetail, Track, Transcript, join, quietest
from allyouneed.infer.speech.words import Word, split_words, time_words, token_positions
from allyouneed.metrics.words import character_error_rate, word_error_rate
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.context import Memory
from allyouneed.nn.states.base import States
from allyouneed.runtime.process import inference, refuse_after_fork

if TYPE_CHECKING:
    from allyouneed.infer.cuda_graph.runner import GraphRunnerCache

BATCH = 8  # sounds per batch
LONGEST = 3600.0  # seconds of a sound that is scored
LOUDEST = 2.0  # samples should be within -1 and 1

SoundLike = Any  # a path; samples at RATE; or (samples, rate)
Progress = Callable[[float, float], None]


class Transcriber(Predictor):
    """Transcribes speech, or translates it into English (`task="translate"`)."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._graphs: GraphRunnerCache | None = None

    @classmethod
    def of(cls, folder: Folder) -> Transcriber:
        if getattr(folder.model.config, "kind", "") != "encoder":
            return cls(folder)
        from allyouneed.infer.speech.ctc_transcriber import CtcTranscriber

        return CtcTranscriber(folder)

    @property
    def mels(self) -> int:
        return int(self.model.config.source_embed.mels)

    def frames(self, samples: Tensor) -> Tensor:
        """(mels, time) What the model reads of a sound; a short one is padded with silence to a window."""
        seconds = self.speech.seconds
        return log_mel(samples, self.mels, seconds if len(samples) <= seconds * RATE else None)

    @cached_property
    def speech(self) -> Speech:
        """The special tokens that control the model."""
        settings = {key: value for key, value in self.folder.task.items() if key != "kind"}
        if "lacks" in settings:
            raise UserError(f"{self.folder.path}: cannot transcribe: {settings['lacks']}")
        if "sound" in settings:  # trained here
            seconds = float((settings["sound"] or {}).get("seconds", 30.0))
            if (given := settings.get("speech")) is None:
                return Speech.of(self.tokenizer, seconds)
            settings = given
        speech = parse(Speech, settings, f"{self.folder.path}: task")
        sizes = getattr(self.model.config, "vocabs", None)
        if sizes is not None and (largest := max(speech.ids)) >= sizes.target:
            raise UserError(f"{self.folder.path}: task: token id {largest}, but the model has {sizes.target:,} tokens")
        return speech

    @property
    def graphs(self) -> GraphRunnerCache | None:
        """Captured CUDA graphs of the current model; None on a CPU."""
        if self._graphs is None or self._graphs.model_runner.model is not self.model:
            start, end = self.speech.start, self.speech.end
            self._graphs = new_graphs(ModelRunner(self.model, start, end, end, limit=self.limit))
        return self._graphs

    @property
    def window(self) -> int:
        """Frames per window."""
        return round(self.speech.seconds * RATE / HOP)

    @property
    def languages(self) -> list[str]:
        return list(self.speech.languages)

    def transcribe(self, sounds: SoundLike | list[SoundLike], **options: Any) -> Any:
        """The transcript of a sound, or of each of a list. A sound is a path, samples (16 kHz, between -1 and 1), or a
        tuple of samples and their rate. `options`: see `transcribe_full`."""
        many = sounds if isinstance(sounds, list) else [sounds]
        found = [full.text for full in self.transcribe_full(many, **options)]
        return found if isinstance(sounds, list) else found[0]

    def transcribe_full(
        self,
        sounds: Sequence[SoundLike],
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        on_progress: Progress | None = None,
        **changes: Any,
    ) -> list[Transcript]:
        """The same with timestamps. `language`: default: detected. `timestamps`: also split sounds of one window into
        timed segments; longer sounds always are. `changes`: see `TranscriptionOptions`; `beam=1`, `temperatures=(0,)`,
        `previous=False`, … `on_progress(done, total)`: in sounds."""
        if isinstance(sounds, str | Path | Tensor | np.ndarray | tuple):
            raise UserError("transcribe_full takes a list of sounds; use [sound] for a single one")
        language = self.check(language, task)
        options = self.options(changes)
        for sound in sounds:
            if isinstance(sound, str | Path) and not Path(sound).is_file():
                raise UserError(f"{sound}: no such sound file")
        found: list[Transcript] = []
        for begin in range(0, len(sounds), BATCH):
            some = sounds[begin : begin + BATCH]
            tracks = [self.track(begin + n, sound, language) for n, sound in enumerate(some)]
            while active := [track for track in tracks if track.at < track.total]:
                with inference(self.model):
                    self.decode_window(active, task, timestamps, options)
                if on_progress is not None:
                    on_progress(begin + sum(min(1.0, t.at / t.total) for t in tracks), len(sounds))
            found += [self.transcript(track) for track in tracks]
        return found

    @property
    def seconds(self) -> float:
        """The longest sound that is read at once."""
        return self.speech.seconds

    def stream(self, pieces: Iterable[Any], rate: int = RATE, **options: Any) -> Iterator[Segment]:
        """The segments of a sound that comes in pieces, mono samples at `rate` between -1 and 1, each as soon as a
        pause follows. `options`: see `transcribe_full`."""
        from allyouneed.infer.speech.stream import stream

        return stream(self, pieces, rate, **options)

    def options(self, changes: dict[str, Any]) -> TranscriptionOptions:
        """Decoding options, with these changes."""
        return parse(TranscriptionOptions, changes, "transcribe")

    def detect(self, sounds: Sequence[SoundLike]) -> list[dict[str, float]]:
        """The probability of each language, most likely first, from the first window of each sound."""
        if not self.speech.languages:
            raise UserError("this model is English-only and cannot detect languages")
        found = []
        for number, sound in enumerate(sounds):
            with inference():
                memory = self._encode([self.track(number, sound, None)])
                probabilities = self._language_probabilities(memory)[0].tolist()
            found.append(dict(sorted(zip(self.languages, probabilities, strict=True), key=lambda both: -both[1])))
        return found

    def check(self, language: str | None, task: str) -> str | None:
        """The model's code for the language; an error if it cannot do the task."""
        if task not in TASKS:
            raise UserError(f"task {task!r}: expected {', '.join(TASKS)}")
        english = language is None or parse_name(language).language == "en"
        if not self.speech.languages and (task == "translate" or not english):
            raise UserError("this model is English-only; it has no other languages and does not translate")
        return language if language is None or not self.languages else resolve(language, self.languages)

    def track(self, number: int, sound: SoundLike, language: str | None = None) -> Track:
        """A sound to transcribe window by window (`decode_window`). Samples depend on the `number`."""
        samples = read_samples(sound)
        seconds = len(samples) / RATE
        loudest = float(samples.abs().max()) if len(samples) else 0.0
        if seconds < TICK or not loudest:
            note = "silence: every sample is 0" if seconds >= TICK else f"{seconds:.3f} s of sound: too short"
            track = Track(number, seconds, torch.empty(1, 0), language=language, notes=[note])
            track.at = track.total
            return track
        track = Track(number, seconds, self.frames(samples), 0, language)
        if loudest > LOUDEST:
            track.notes.append(f"samples up to {loudest:g}; expected -1 to 1")
        return track

    def _window_frames(self, track: Track) -> Tensor:
        """(mels, window), padded with 0, the middle of the value range, as in the authors' code."""
        cut = self.piece(track) if self.speech.no_timestamps is None and track.total > self.window else self.window
        part = track.frames[:, track.at : track.at + cut]
        return torch.nn.functional.pad(part, (0, self.window - part.shape[1]))

    def piece(self, track: Track) -> int:
        """Frames of the next window. Without timestamps, which say where a window's text ends, a longer sound is cut at
        the quietest place of the second half."""
        left = track.total - track.at
        if left <= self.window or self.speech.no_timestamps is not None:
            return min(left, self.window)
        return quietest(track.frames[:, track.at : track.at + self.window].mean(0))

    def _encode(self, tracks: Sequence[Track]) -> Memory:
        refuse_after_fork()
        values = torch.stack([self._window_frames(track) for track in tracks])
        dtype = next(self.model.parameters()).dtype
        memory: Memory = self.model.encode(Signal(values.to(self.device, dtype)))
        return memory

    def _select(self, memory: Memory, rows: list[int]) -> Memory:
        return memory.select(torch.tensor(rows, device=self.device))

    def _states(self, memory: Memory) -> States:
        return States(self.model.decoder.new_states(), len(memory.hidden), memory.hidden.device, memory)

    def _language_probabilities(self, memory: Memory) -> Tensor:
        """(sounds, languages), from the token after the start token."""
        begin = Rows.of([[self.speech.start]] * len(memory.hidden)).to(self.device)
        logits = self.model.head(self.model.advance(begin, self._states(memory)))[:, -1].float()
        return logits[:, list(self.speech.languages.values())].softmax(-1)

    def decode_window(self, tracks: list[Track], task: str, timestamps: bool, options: TranscriptionOptions) -> None:
        """Decode the next window of each track. A track is finished when `at` reaches `total`."""
        memory = self._encode(tracks)
        unknown = [n for n, track in enumerate(tracks) if track.language is None]
        if self.speech.languages and unknown:
            detected = self._language_probabilities(self._select(memory, unknown)).argmax(-1)
            for n, best in zip(unknown, detected.tolist(), strict=True):
                tracks[n].language = self.languages[best]
        times = self.speech.no_timestamps is not None
        for timed in (False, True):
            indices = [
                n for n, track in enumerate(tracks) if (times and (timestamps or track.total > self.window)) == timed
            ]
            if indices:
                chosen = [tracks[n] for n in indices]
                kept = memory if len(indices) == len(tracks) else self._select(memory, indices)
                results = self._with_fallback(kept, chosen, task, timed, options)
                for track, result in zip(chosen, results, strict=True):
                    self._add_segments(track, result, timed, options)

    def _with_fallback(
        self, memory: Memory, tracks: list[Track], task: str, timed: bool, options: TranscriptionOptions
    ) -> list[WindowResult]:
        """Decode at each temperature the windows whose result was not good enough before."""
        found: dict[int, WindowResult] = {}
        left = list(range(len(tracks)))
        for temperature in options.temperatures:
            kept = memory if len(left) == len(tracks) else self._select(memory, left)
            decoded = self._decode(kept, [tracks[n] for n in left], task, timed, options, temperature)
            found |= dict(zip(left, decoded, strict=True))
            left = [n for n in left if options.needs_fallback(found[n])]
            if not left:
                break
        return [found[n] for n in range(len(tracks))]

    def _prompt(self, track: Track, task: str, timed: bool) -> list[int]:
        speech, prompt = self.speech, []
        if track.context and speech.previous is not None:
            room = (self.limit or len(track.context) * 2 + 2) // 2 - 1
            prompt = [speech.previous, *track.context[-room:]]
        return [*prompt, *speech.prompt(track.language, task, timed)]  # type: ignore[arg-type]

    def _decode(
        self,
        memory: Memory,
        tracks: list[Track],
        task: str,
        timed: bool,
        options: TranscriptionOptions,
        temperature: float,
    ) -> list[WindowResult]:
        prompts = [self._prompt(track, task, timed) for track in tracks]
        states = self._states(memory)
        hidden = self.model.advance(Rows.of(prompts).to(self.device), states)
        rows = torch.arange(len(prompts), device=self.device)
        starts = torch.tensor([prompt.index(self.speech.start) for prompt in prompts], device=self.device)
        lasts = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        probabilities = self.model.head(hidden[rows, starts]).float().softmax(-1)
        token = self.speech.no_speech
        no_speech = [0.0] * len(rows) if token is None else probabilities[:, token].tolist()
        most = self.limit or 2 * round(self.speech.seconds / TICK)
        limits = [self._token_limit(prompt) for prompt in prompts]
        rules = TimestampRules(self.speech, timed, self.device)
        spec = DecodingSpec(options.decoding(temperature, most), self.speech.end, logits_processor=rules)
        requests = [
            RequestState(Request(prompt, limit, (track.number, track.at)), spec, limit)
            for prompt, limit, track in zip(prompts, limits, tracks, strict=True)
        ]
        if self.graphs is None or not self.graphs.decode_prefilled(states, requests):
            RunningBatch(self.model, states, [(spec, requests)]).run(hidden[rows, lasts])
        if error := next((request.error for request in requests if request.error is not None), None):
            raise error
        add_tokens(sum(map(len, prompts)), sum(len(h.tokens) for request in requests for h in request.hypotheses))
        return [
            self._result(options.best(request.hypotheses), probability, temperature)
            for request, probability in zip(requests, no_speech, strict=True)
        ]

    def _token_limit(self, prompt: Sequence[int]) -> int:
        """The most tokens decoded after this prompt."""
        most = self.limit or 2 * round(self.speech.seconds / TICK)
        return max(1, min(most // 2, most + 1 - len(prompt)))

    def _result(self, found: Hypothesis, no_speech: float, temperature: float) -> WindowResult:
        mean_log_prob = found.log_prob / (len(found.tokens) + 1)
        return WindowResult(found.tokens, self._text(found.tokens), mean_log_prob, no_speech, temperature)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if self.speech.is_text(token)]).strip()

    def _add_segments(self, track: Track, result: WindowResult, timed: bool, options: TranscriptionOptions) -> None:
        """Append the segments of this window and advance to the next."""
        left = self.piece(track)
        if options.is_silence(result):
            track.at += left
            return
        begin = track.at
        found, step = split_segments(result.tokens, self.speech.first_time, left)
        for segment in found:
            text = self._text(segment.tokens)
            start, end = (min(begin + frame, track.total) * HOP / RATE for frame in (segment.begin, segment.end))
            if text and start < end:  # text after the end of the sound is hallucinated
                track.segments.append(Segment(start, end, text))
                track.details.append(SegmentDetail(begin, segment.tokens, result))
                track.tokens += segment.tokens
                track.context += segment.tokens
        if not options.is_context(result):
            track.context.clear()
        track.at += step if timed else left

    def transcript(self, track: Track) -> Transcript:
        notes = track.notes
        if not track.segments and not notes:
            notes = ["no speech detected"]
        own = self.speech.first_text is not None  # windows of our own models do not begin with a space
        return Transcript(
            join(segment.text for segment in track.segments) if own else self._text(track.tokens),
            track.segments,
            track.seconds,
            track.language if self.speech.languages else None,
            notes,
        )

    def words(self, track: Track, task: str = "transcribe") -> list[Word]:
        """The words of a finished track with their times, by an alignment of each window."""
        found: list[Word] = []
        blocks = self.model.decoder.blocks
        layers = list(range(len(blocks) // 2, len(blocks)))  # the upper half, where the model lists no heads
        dtype = next(self.model.parameters()).dtype
        for seek in dict.fromkeys(detail.seek for detail in track.details):
            details = [detail for detail in track.details if detail.seek == seek]
            text = [token for detail in details for token in detail.tokens if self.speech.is_text(token)]
            prompt = self._prompt(replace(track, context=[]), task, timed=False)
            room = (self.limit or len(prompt) + len(text) + 1) - len(prompt) - 1
            text = text[:room]
            part = track.frames[:, seek : seek + self.window]
            values = torch.nn.functional.pad(part, (0, self.window - part.shape[1]))[None].to(self.device, dtype)
            rows = Rows.of([[*prompt, *text, self.speech.end]]).to(self.device)
            with inference():
                weights = self.model.attention(Batch(rows, Signal(values)), "cross", layers)
            heads = torch.cat([weights[layer][0] for layer in layers])  # (heads, tokens, positions)
            used = max(1, min(heads.shape[-1], part.shape[1] // 2))
            # the row of a token is that of the one before it, which predicts it
            positions = token_positions(heads[:, len(prompt) - 1 : -1, :used].cpu())
            ends = [
                segment.end for segment, detail in zip(track.segments, track.details, strict=True) if detail in details
            ]
            found += time_words(split_words(self.tokenizer, text), positions, seek * HOP / RATE, max(ends))
        return found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Sounds with transcripts; those that cannot be read are left out and noted."""
        changes = {} if decoding is None else self.judged_with(decoding)
        examples, found, notes = for_readable(
            examples,
            SoundInput(seconds=LONGEST),
            lambda some: self.transcribe([one.content for one in some], **changes),
        )
        expected = [split_marks(example.value)[0] for example in examples]
        figures = {"wer": word_error_rate(found, expected), "cer": character_error_rate(found, expected)}
        text = f"word error rate      {figures['wer']:5.1f} %\ncharacter error rate {figures['cer']:5.1f} %"
        samples = [
            {"sound": example.name, "reference": right, "found": text}
            for example, right, text in evenly_spaced(list(zip(examples, expected, found, strict=True)), show)
        ]
        return EvaluationResult(figures, f"{text}  of {len(found)} sounds, case and punctuation aside", samples, notes)

    def judged_with(self, decoding: Decoding) -> dict[str, Any]:
        """The options of a transcript that correspond to these."""
        return {"beam": decoding.beam if decoding.method == "beam" else 1}
