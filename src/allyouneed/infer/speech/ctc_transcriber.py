"""Speech to text by connectionist temporal classification: the likeliest output of every position, repetitions merged
and blanks removed (Graves et al. 2006, 3.2, best path decoding). Each token has a place, so words have times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.media.sound_input import SHORTEST, SoundInput
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import add_tokens
from allyouneed.infer.predictors.transcriber import Transcriber
from allyouneed.infer.speech.audio_classifier import sound_input
from allyouneed.infer.speech.fallback import TranscriptionOptions, WindowResult
from allyouneed.infer.speech.tracks import Segment, SegmentDetail, Track, Transcript, join, quietest
from allyouneed.infer.speech.words import Word, split_words
from allyouneed.infer.whole_targets.ctc import hypothesis
from allyouneed.nn.batch import Batch, Signal
from allyouneed.runtime.process import refuse_after_fork
from allyouneed.tasks.translation.ctc_translation import BLANK

PAUSE = 0.6  # seconds between two segments


class CtcTranscriber(Transcriber):
    """Transcribes speech with an encoder that was trained by CTC."""

    languages: list[str] = []  # noqa: RUF012

    @property
    def reader(self) -> SoundInput:
        return sound_input(self.folder)

    @property
    def seconds(self) -> float:
        return self.reader.seconds

    @property
    def hop(self) -> int:
        """Samples of a frame of what the model reads."""
        return 1 if self.reader.mels is None else HOP

    @property
    def window(self) -> int:
        return round(self.reader.seconds * RATE / self.hop)

    def check(self, language: str | None, task: str) -> str | None:
        if task != "transcribe":
            raise UserError("this model does not translate; it transcribes what it was trained on")
        if language is not None:
            raise UserError(f"language={language!r}: this model has no languages to choose from; remove it")
        return None

    def options(self, changes: dict[str, Any]) -> TranscriptionOptions:
        if changes:
            name = next(iter(changes))
            raise UserError(f"{name}: a model trained by CTC takes the likeliest output of every position; remove it")
        return TranscriptionOptions()

    def judged_with(self, decoding: Decoding) -> dict[str, Any]:
        return {}

    def frames(self, samples: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(samples, (0, max(0, SHORTEST - len(samples))))
        return self.reader.features(padded)

    def track(self, number: int, sound: Any, language: str | None = None) -> Track:
        found = super().track(number, sound, language)
        found.hop = self.hop
        return found

    def piece(self, track: Track) -> int:
        left = track.total - track.at
        if left <= self.window:
            return left
        part = track.frames[:, track.at : track.at + self.window]
        if self.hop == HOP:
            return quietest(part.mean(0))
        return quietest(torch.nn.functional.avg_pool1d(part.abs(), HOP)[0]) * HOP

    def decode_window(self, tracks: list[Track], task: str, timestamps: bool, options: TranscriptionOptions) -> None:
        refuse_after_fork()
        pieces = [self.piece(track) for track in tracks]
        parts = [track.frames[:, track.at : track.at + size] for track, size in zip(tracks, pieces, strict=True)]
        made = SoundInput.signal(parts).to(self.device)
        dtype = next(self.model.parameters()).dtype
        hidden, layout = self.model.run(Batch(Signal(made.values.to(dtype), made.lengths)), None)
        scores = self.model.head(hidden).float().log_softmax(-1)
        banned = sorted(set(self.tokenizer.specials) - {BLANK})
        best, outputs = scores.index_fill(-1, torch.tensor(banned, device=self.device), -torch.inf).max(-1)
        lengths = [outputs.shape[1]] * len(parts) if layout.real is None else layout.real.sum(1).tolist()
        for track, size, path, probs, length in zip(
            tracks, pieces, outputs.tolist(), best.tolist(), lengths, strict=True
        ):
            whole = track.at == 0 and size == track.total and not timestamps
            self._add_path(track, path[:length], probs[:length], size / max(1, length), whole)
            track.at += size
        add_tokens(sum(lengths))

    def _add_path(
        self, track: Track, path: Sequence[int], log_probs: Sequence[float], step: float, whole: bool
    ) -> None:
        """The words on a path of tokens and blanks, each of `step` frames. `whole`: as one segment."""
        found = hypothesis(path, log_probs)
        if not found.tokens:
            return
        seconds = step * track.hop / RATE
        begin = track.at * track.hop / RATE
        spans = _spans(path)
        words, at = list[tuple[Word, tuple[int, ...]]](), 0
        for text, count in split_words(self.tokenizer, found.tokens):
            first, last = spans[at][0], spans[at + count - 1][1]
            word = Word(text.strip(), begin + first * seconds, min(begin + (last + 1) * seconds, track.seconds))
            words.append((word, tuple(found.tokens[at : at + count])))
            at += count
        track.words += [word for word, _ in words if word.text]
        groups: list[list[tuple[Word, tuple[int, ...]]]] = []
        for one in words:
            if groups and (whole or one[0].start - groups[-1][-1][0].end < PAUSE):
                groups[-1].append(one)
            else:
                groups.append([one])
        for group in groups:
            tokens = tuple(token for _, some in group for token in some)
            text = self.tokenizer.decode(list(tokens)).strip()
            if not text:
                continue
            result = WindowResult(list(tokens), text, found.log_prob / max(1, len(path)), 0.0, 0.0)
            track.segments.append(Segment(group[0][0].start, group[-1][0].end, text))
            track.details.append(SegmentDetail(track.at, tokens, result))
            track.tokens += tokens

    def transcript(self, track: Track) -> Transcript:
        notes = track.notes or ([] if track.segments else ["no speech detected"])
        text = join(segment.text for segment in track.segments)
        return Transcript(text, track.segments, track.seconds, None, notes)

    def words(self, track: Track, task: str = "transcribe") -> list[Word]:
        return track.words


def _spans(path: Sequence[int]) -> list[tuple[int, int]]:
    """First and last position of each token of a path."""
    found: list[tuple[int, int]] = []
    before = BLANK
    for position, token in enumerate(path):
        if token == before and token != BLANK:
            found[-1] = found[-1][0], position
        elif token != BLANK:
            found.append((position, position))
        before = token
    return found
