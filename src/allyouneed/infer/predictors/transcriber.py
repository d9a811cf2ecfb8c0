"""Sound in, text out: what Whisper hears, in windows of 30 seconds (Radford et al. 2022, 3.8 and 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.data.media.sound import HOP, RATE, log_mel
from allyouneed.data.media.sound_files import Sound, read_sound, to_rate
from allyouneed.data.media.speech import TASKS, TICK, Speech
from allyouneed.errors import UserError
from allyouneed.evaluate.words import character_error_rate, word_error_rate
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, spread
from allyouneed.infer.request import Request
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.infer.speech.fallback import Answer, Listening
from allyouneed.infer.speech.timestamp_rules import Rules
from allyouneed.infer.speech.timestamps import pieces
from allyouneed.nn.batch import Rows, Signal
from allyouneed.nn.context import Memory
from allyouneed.nn.states.base import States

TOGETHER = 8  # sounds that are heard at once
LOUDEST = 2.0  # of samples that were meant to be between -1 and 1

SoundLike = Any  # a path; samples at RATE; or (samples, rate)
Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Segment:
    """What was said from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """What was said. `language` is what was told or heard; None for a model that knows English only."""

    text: str
    segments: list[Segment]
    seconds: float
    language: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Track:
    """A sound on its way: from frame `at` on it is still to be heard."""

    number: int
    seconds: float
    frames: Tensor  # (mels, time), at least a window of them
    at: int = 0
    language: str | None = None
    segments: list[Segment] = field(default_factory=list)
    said: list[int] = field(default_factory=list)  # all tokens
    told: list[int] = field(default_factory=list)  # those of them the next window is told

    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return max(1, round(self.seconds * RATE) // HOP)


class Transcriber(Predictor):
    """Writes down speech, or translates it into English (`task="translate"`)."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.mels = int(self.model.config.source_embed.mels)

    @cached_property
    def speech(self) -> Speech:
        """Which tokens tell it what to do."""
        told = {key: value for key, value in self.folder.task.items() if key != "kind"}
        if "lacks" in told:
            raise UserError(f"{self.folder.path}: it cannot transcribe: {told['lacks']}")
        return parse(Speech, told, f"{self.folder.path}: task")

    @property
    def window(self) -> int:
        """Frames."""
        return round(self.speech.seconds * RATE / HOP)

    @property
    def languages(self) -> list[str]:
        return list(self.speech.languages)

    def transcribe(self, sounds: SoundLike | list[SoundLike], **options: Any) -> Any:
        """What was said in a sound, or in each of a list. A sound is a path, samples (16,000 a second, between -1 and
        1), or a tuple of samples and their rate. `options` are those of `transcribe_full`."""
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
        """The same with times. `language`: what is spoken, heard by the model itself when not given. `timestamps`: also
        sounds that fit into one window are told in pieces with times; longer ones always are. `changes` are those of
        `Listening`: `beam=1`, `temperatures=(0,)`, `previous=False`, … `on_progress(done, total)`: in sounds."""
        if isinstance(sounds, str | Path | Tensor | np.ndarray | tuple):
            raise UserError("transcribe_full takes a list of sounds; write [sound] for a single one")
        self._check(language, task)
        listening = parse(Listening, changes, "transcribe")
        for sound in sounds:
            if isinstance(sound, str | Path) and not Path(sound).is_file():
                raise UserError(f"{sound}: no such sound file")
        found: list[Transcript] = []
        was_training: bool = self.model.training
        self.model.eval()
        try:
            for begin in range(0, len(sounds), TOGETHER):
                some = sounds[begin : begin + TOGETHER]
                tracks = [self._track(begin + n, sound, language) for n, sound in enumerate(some)]
                while active := [track for track in tracks if track.at < track.total]:
                    with torch.inference_mode():
                        self._hear(active, task, timestamps, listening)
                    if on_progress is not None:
                        on_progress(begin + sum(min(1.0, t.at / t.total) for t in tracks), len(sounds))
                found += [self._told(track) for track in tracks]
        finally:
            self.model.train(was_training)
        return found

    def detect(self, sounds: Sequence[SoundLike]) -> list[dict[str, float]]:
        """How likely each language is, likeliest first, by the first window of each sound."""
        if not self.speech.languages:
            raise UserError("this model knows English only; it cannot tell languages apart")
        found = []
        for number, sound in enumerate(sounds):
            with torch.inference_mode():
                chances = self._languages(self._encoded([self._track(number, sound, None)]))[0].tolist()
            found.append(dict(sorted(zip(self.languages, chances, strict=True), key=lambda both: -both[1])))
        return found

    def _check(self, language: str | None, task: str) -> None:
        if task not in TASKS:
            raise UserError(f"task {task!r}: it is one of {', '.join(TASKS)}")
        if not self.speech.languages and (task == "translate" or language not in (None, "en")):
            raise UserError("this model knows English only: it takes no other language and does not translate")
        if language is not None and self.speech.languages and language not in self.speech.languages:
            raise UserError(
                f"this model does not know the language {language!r}; it knows: {', '.join(self.languages)}"
            )

    def _track(self, number: int, sound: SoundLike, language: str | None) -> Track:
        samples = _samples(sound)
        seconds = len(samples) / RATE
        loudest = float(samples.abs().max()) if len(samples) else 0.0
        if seconds < TICK or not loudest:
            said = (
                "all silence: every sample is 0" if seconds >= TICK else f"{seconds:.3f} s of sound: too short to hear"
            )
            track = Track(number, seconds, torch.empty(self.mels, 0), language=language, notes=[said])
            track.at = track.total
            return track
        short = seconds <= self.speech.seconds  # it is followed by silence
        track = Track(number, seconds, log_mel(samples, self.mels, self.speech.seconds if short else None), 0, language)
        if loudest > LOUDEST:
            track.notes.append(f"samples up to {loudest:g}: they should be between -1 and 1")
        return track

    def _long(self, track: Track) -> bool:
        return track.total > self.window

    def _frames(self, track: Track) -> Tensor:
        """(mels, window) What lacks at the end is 0, the middle of what frames can be, as its authors have it."""
        part = track.frames[:, track.at : track.at + self.window]
        return torch.nn.functional.pad(part, (0, self.window - part.shape[1]))

    def _encoded(self, tracks: Sequence[Track]) -> Memory:
        values = torch.stack([self._frames(track) for track in tracks])
        kind = next(self.model.parameters()).dtype
        memory: Memory = self.model.encode(Signal(values.to(self.device, kind)))
        return memory

    def _states(self, memory: Memory) -> States:
        return States(self.model.decoder.new_states(), len(memory.hidden), memory.hidden.device, memory)

    def _languages(self, memory: Memory) -> Tensor:
        """(sounds, languages) chances, by what comes after the start mark."""
        begin = Rows.of([[self.speech.start]] * len(memory.hidden)).to(self.device)
        logits = self.model.head(self.model.advance(begin, self._states(memory)))[:, -1].float()
        return logits[:, list(self.speech.languages.values())].softmax(-1)

    def _hear(self, tracks: list[Track], task: str, timestamps: bool, listening: Listening) -> None:
        """The next window of each."""
        memory = self._encoded(tracks)
        unknown = [n for n, track in enumerate(tracks) if track.language is None]
        if self.speech.languages and unknown:
            heard = self._languages(memory.select(torch.tensor(unknown, device=self.device))).argmax(-1)
            for n, best in zip(unknown, heard.tolist(), strict=True):
                tracks[n].language = self.languages[best]
        for timed in (False, True):
            places = [n for n, track in enumerate(tracks) if (timestamps or self._long(track)) == timed]
            if places:
                chosen = [tracks[n] for n in places]
                kept = memory if len(places) == len(tracks) else memory.select(torch.tensor(places, device=self.device))
                answers = self._answers(kept, chosen, task, timed, listening)
                for track, answer in zip(chosen, answers, strict=True):
                    self._note(track, answer, timed, listening)

    def _answers(
        self, memory: Memory, tracks: list[Track], task: str, timed: bool, listening: Listening
    ) -> list[Answer]:
        """At each temperature those are decoded again whose answer was no good."""
        found: dict[int, Answer] = {}
        left = list(range(len(tracks)))
        for temperature in listening.temperatures:
            kept = memory if len(left) == len(tracks) else memory.select(torch.tensor(left, device=self.device))
            decoded = self._decoded(kept, [tracks[n] for n in left], task, timed, listening, temperature)
            found |= dict(zip(left, decoded, strict=True))
            left = [n for n in left if listening.doubtful(found[n])]
            if not left:
                break
        return [found[n] for n in range(len(tracks))]

    def _prompt(self, track: Track, task: str, timed: bool) -> list[int]:
        speech, prompt = self.speech, []
        if track.told and speech.previous is not None:
            room = (self.limit or len(track.told) * 2 + 2) // 2 - 1
            prompt = [speech.previous, *track.told[-room:]]
        prompt.append(speech.start)
        if speech.languages:
            assert track.language is not None
            prompt += [speech.languages[track.language], speech.tasks[task]]  # type: ignore[index]
        return prompt if timed else [*prompt, speech.no_timestamps]

    def _decoded(
        self, memory: Memory, tracks: list[Track], task: str, timed: bool, listening: Listening, temperature: float
    ) -> list[Answer]:
        prompts = [self._prompt(track, task, timed) for track in tracks]
        states = self._states(memory)
        hidden = self.model.advance(Rows.of(prompts).to(self.device), states)
        rows = torch.arange(len(prompts), device=self.device)
        starts = torch.tensor([prompt.index(self.speech.start) for prompt in prompts], device=self.device)
        lasts = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        chances = self.model.head(hidden[rows, starts]).float().softmax(-1)
        silence = chances[:, self.speech.no_speech].tolist() if self.speech.no_speech is not None else [0.0] * len(rows)
        most = self.limit or 2 * round(self.speech.seconds / TICK)
        limits = [max(1, min(most // 2, most + 1 - len(prompt))) for prompt in prompts]
        rules = Rules(self.speech, timed, self.device)
        spec = DecodingSpec(listening.decoding(temperature, most), self.speech.end, logits_processor=rules)
        requests = [
            RequestState(Request(prompt, limit, (track.number, track.at)), spec, limit)
            for prompt, limit, track in zip(prompts, limits, tracks, strict=True)
        ]
        RunningBatch(self.model, states, [(spec, requests)]).run(hidden[rows, lasts])
        return [
            self._answer(listening.best(request.hypotheses), quiet, temperature)
            for request, quiet in zip(requests, silence, strict=True)
        ]

    def _answer(self, found: Hypothesis, silence: float, temperature: float) -> Answer:
        belief = found.log_prob / (len(found.tokens) + 1)
        return Answer(found.tokens, self._text(found.tokens), belief, silence, temperature)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token < self.speech.end]).strip()

    def _note(self, track: Track, answer: Answer, timed: bool, listening: Listening) -> None:
        """Write down what was said in this window, and go on to the next."""
        left = min(self.window, track.total - track.at)
        if listening.nobody(answer):
            track.at += left
            return
        begin = track.at
        found, step = pieces(answer.tokens, self.speech.first_time, left)
        for piece in found:
            text = self._text(piece.tokens)
            start, end = (min(begin + frame, track.total) * HOP / RATE for frame in (piece.begin, piece.end))
            if text and start < end:  # what is said after the sound has ended was not heard
                track.segments.append(Segment(start, end, text))
                track.said += piece.tokens
                track.told += piece.tokens
        if not listening.goes_on(answer):
            track.told.clear()
        track.at += step if timed else left

    def _told(self, track: Track) -> Transcript:
        notes = track.notes
        if not track.segments and not notes:
            notes = ["nobody speaks, as far as the model can hear"]
        return Transcript(
            self._text(track.said),
            track.segments,
            track.seconds,
            track.language if self.speech.languages else None,
            notes,
        )

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """Examples of `texts`: a sound file and what is said in it."""
        changes = {} if decoding is None else {"beam": decoding.beam if decoding.method == "beam" else 1}
        found = self.transcribe([example.texts[0] for example in examples], **changes)
        expected = [example.texts[1] for example in examples]
        figures = {"wer": word_error_rate(found, expected), "cer": character_error_rate(found, expected)}
        text = f"word error rate      {figures['wer']:5.1f} %\ncharacter error rate {figures['cer']:5.1f} %"
        samples = [
            {"sound": str(example.texts[0]), "expected": example.texts[1], "heard": heard}
            for example, heard in spread(list(zip(examples, found, strict=True)), show)
        ]
        return Judged(figures, f"{text}  of {len(found)} sounds, case and punctuation aside", samples)


def _samples(sound: SoundLike) -> Tensor:
    """(time,) at RATE."""
    if isinstance(sound, str | Path):
        return read_sound(sound)
    values, rate = sound if isinstance(sound, tuple) and len(sound) == 2 else (sound, RATE)
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.ascontiguousarray(values))
    if not isinstance(values, Tensor) or values.dim() != 1 or not isinstance(rate, int):
        said = (
            f"{type(values).__name__} of {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        )
        raise UserError(f"a sound is a path, a row of samples (mono), or (samples, rate); this is {said}")
    if not values.is_floating_point():
        raise UserError(f"sound as {values.dtype}: samples must be numbers between -1 and 1; divide by their maximum")
    return to_rate(Sound(values.float().cpu(), rate))
