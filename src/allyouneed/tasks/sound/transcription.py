"""Write what is said: by an encoder-decoder, as Whisper, or by connectionist temporal classification on an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding
from allyouneed.data.batches.media import CaptionedItems, DescribedEncoding, StoredMedia
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.readers import Files
from allyouneed.data.files.sounds import TranscribedSounds
from allyouneed.data.media.speech import TICK, Speech, split_marks, timed_tokens
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies
from allyouneed.errors import UserError, near
from allyouneed.files.reading import read_json
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.sound.sounds import SoundTask
from allyouneed.tasks.task import Loss, token_loss
from allyouneed.tasks.translation.ctc_translation import BLANK, ctc_objective

FLAT = frozenset(Speech.model_fields)  # keys of `speech` in folders of imported models


class Transcription(SoundTask):
    """An encoder-decoder learns the next token of the transcript, control tokens included (Radford et al. 2022, 2.3);
    an encoder a token or the blank at every position, summed over all alignments (Graves et al. 2006, eq. 14)."""

    files: ClassVar[type[Files]] = TranscribedSounds
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "encoder-decoder")
    usual_rows: ClassVar[int] = 16
    least_rows: ClassVar[int] = 8
    metrics: ClassVar[dict[str, bool]] = {"wer": False, "cer": False, "loss": False}
    kind: Literal["transcription"] = "transcription"
    timestamps: bool = False
    """Learn the times of segments too, where a transcript has them: `<|0.00|> good morning<|1.20|>`."""
    language: str | None = None
    """The language of the transcripts, for a multilingual model to start from."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing of an encoder-decoder."""
    ctc: bool | None = None
    """Set by the model: an encoder is trained by connectionist temporal classification."""
    speech: Speech | None = None
    """Control tokens of the model to start from; default: begin and end."""

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, tree: Any) -> Any:
        """Folders of imported models have the control tokens beside `kind`."""
        if not isinstance(tree, Mapping) or "start" not in tree:
            return tree
        kept = {key: value for key, value in tree.items() if key not in FLAT}
        return kept | {"speech": {key: value for key, value in tree.items() if key in FLAT}}

    def reads_of(self, kind: str) -> Mapping[str, str]:
        return {"embed": "audio"} if kind == "encoder" else {"source_embed": "audio"}

    def for_model(self, model: Mapping[str, Any]) -> Self:
        ctc = model.get("kind") == "encoder"
        if self.timestamps and ctc:
            raise ValueError("task.timestamps: a model trained by CTC finds times by itself; remove it")
        languages = {} if self.speech is None else self.speech.languages
        if languages and self.language not in languages:
            shown = f"{self.language!r}{near(self.language, languages)}" if self.language else "missing"
            raise ValueError(f"task.language: {shown}; the model to start from is multilingual (en, zh, de, …)")
        if self.language is not None and not languages:
            raise ValueError("task.language: only a multilingual model has tokens of languages; remove it")
        if ctc and self.smoothing:
            raise ValueError("task.smoothing: only of an encoder-decoder; remove it")
        found = super().for_model(model)
        if found.sound is None:
            return found
        sound = found.sound.model_copy(update={"padded": not ctc})  # an encoder-decoder reads whole windows
        return found.model_copy(update={"ctc": ctc, "sound": sound})

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        task = read_json(start, "config.json", needed=False).get("task", {})
        if not isinstance(task, Mapping) or "lacks" in task:
            return {}
        speech = {key: value for key, value in task.items() if key in FLAT} if "start" in task else task.get("speech")
        seconds = {"sound": {"seconds": speech.get("seconds", 30.0)}} if isinstance(speech, Mapping) else {}
        return seconds | super().defaults_from(start) | ({"speech": speech} if speech else {})

    def learn_vocabularies(self, config: TokenizerConfig, files: Sequence[Files], filters: Filters) -> Vocabularies:
        found = super().learn_vocabularies(config, files, filters)
        if not self.timestamps:
            return found
        both = found.target.extended(timed_tokens(self.reader.seconds))
        return Vocabularies(both, both)

    def controls(self, tokenizer: Tokenizer) -> Speech:
        """The control tokens of an encoder-decoder."""
        return self.speech or Speech.of(tokenizer, self.reader.seconds)

    def encoding(self, vocabularies: Any, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        tokenizer = vocabularies.target
        if self.ctc:
            return AlignedEncoding(self.reader, tokenizer, max_tokens, special_count=0)
        speech = self.controls(tokenizer)
        most = len(speech.prompt(self.language, "transcribe", timed=False))
        return TimedEncoding(self.reader, tokenizer, max_tokens, most, speech if self.timestamps else None)

    def items(self, store: Store, vocabularies: Any, capacities: tuple[int, ...], seed: int) -> Items:
        tokenizer, sounds = vocabularies.target, self.stored(store, seed)
        if not self.ctc:
            return SpokenItems(store, tokenizer, sounds, self.controls(tokenizer), self.language)
        if tokenizer.pad != BLANK:
            raise UserError(f"task: CTC needs a tokenizer whose padding token has id {BLANK}")
        return AlignedItems(store, tokenizer, sounds)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        if self.ctc:
            return ctc_objective(model.head, hidden, layout, labels)
        return token_loss(model.head, hidden, labels, self.smoothing)


class AlignedEncoding(DescribedEncoding):
    """Sounds and transcripts; those that are longer than what the sound has positions for have no alignment: they are
    dropped."""

    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        for row in super().encode(chunk):
            yield row if isinstance(row, Dropped) else self._alignable(row)

    def _alignable(self, row: EncodedRow) -> EncodedRow | Dropped:
        text, sound = row
        room, needed = len(sound) // self.reader.step, len(text) + sum(a == b for a, b in pairwise(text))
        if needed <= room:
            return row
        return Dropped("transcript too long", f"needs {needed} positions, the sound has {room}")


class AlignedItems(CaptionedItems):
    """Sounds; the answer of each is its transcript."""

    def __init__(self, store: Store, tokenizer: Tokenizer, media: StoredMedia) -> None:
        super().__init__(store, tokenizer, media)
        self.pads = ()  # no side has tokens

    def lengths(self, epoch: int) -> Any:
        return (self.media.lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        texts = [self.store["text"][number] for number in members.tolist()]
        answers = np.full((len(texts), max(1, *map(len, texts))), IGNORE, np.int64)
        for row, text in zip(answers, texts, strict=True):
            row[: len(text)] = text
        return FlatBatch((), answers=answers, signal=self.signal(epoch, members))


class TimedEncoding(DescribedEncoding):
    """Sounds and transcripts, with the tokens of their times where they have any. `timed`: the tokens of times."""

    def __init__(
        self, reader: Any, tokenizer: Tokenizer, max_tokens: int | None, special_count: int, timed: Speech | None
    ) -> None:
        super().__init__(reader, tokenizer, max_tokens, special_count)
        self.timed = timed
        self.spec |= {"timed": None if timed is None else timed.first_time}

    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        for example, row in zip(chunk, super().encode(chunk), strict=True):
            marks = self.timed is not None and len(parts := split_marks(example.value)[1]) > 1
            if isinstance(row, Dropped) or not marks:
                yield row
                continue
            assert self.timed is not None
            ids: list[int] = []
            for part in parts:
                if isinstance(part, float):
                    ids.append(self.timed.first_time + round(part / TICK))
                else:
                    (tokenizer,) = self.tokenizers.values()
                    ids += tokenizer.encode(part.strip())
            if max(part for part in parts if isinstance(part, float)) > self.timed.seconds:
                yield Dropped("times beyond the window", f"the model reads {self.timed.seconds:g} s: {example.value}")
            else:
                yield self.drop_if_too_long(len(ids) + self.special_count) or [ids, *row[1:]]


class SpokenItems(CaptionedItems):
    """Sounds, and their transcripts behind control tokens: the label of each token is the next one."""

    def __init__(
        self, store: Store, tokenizer: Tokenizer, media: StoredMedia, speech: Speech, language: str | None
    ) -> None:
        super().__init__(store, tokenizer, media)
        self.end, self.first_time = speech.end, speech.first_time
        self.prompts = [speech.prompt(language, "transcribe", timed) for timed in (False, True)]
        text = store["text"]
        timed = np.zeros(len(store), bool)
        filled = np.flatnonzero(text.lengths)
        timed[filled] = text.values[text.offsets[filled]] >= self.first_time
        self._lengths = text.lengths + np.where(timed, *(len(prompt) for prompt in reversed(self.prompts)))
        self.timed = timed

    def lengths(self, epoch: int) -> Any:
        return (self._lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        tokens, labels = list[Any](), list[Any]()
        for number in members.tolist():
            prompt, text = self.prompts[int(self.timed[number])], self.store["text"][number].tolist()
            tokens += [*prompt, *text]
            labels += [*prompt[1:], *text, self.end]
        side = FlatSide(np.array(tokens, np.int64))
        return FlatBatch((side,), np.array(labels, np.int64), signal=self.signal(epoch, members))
