"""Text to text: pairs of any kind, instructions in the input (T5's prompts), summaries, corrections."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.detokenizer import StopStrings, detokenize
from allyouneed.infer.decoding.notes import drop_invalid, invalid_notes, loop_note
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import default_frame, draft_engine, generate_targets, sequence_engine
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced
from allyouneed.infer.predictors.generating import GeneratingPredictor
from allyouneed.infer.speculative.stats import DraftStats, total_stats
from allyouneed.metrics.rewriting import rewriting_figures

if TYPE_CHECKING:
    from allyouneed.infer.predictors.generator import Generator

SENTENCE = re.compile(r"(?:[^.!?…。！？\n]|[.!?…](?=\S))*(?:[.!?…]+[\"'”’)\]]*|[。！？]+[”’」』）]*|\n)?\s*")
SHORT_WORD = re.compile(r"(?:^|\s)[A-Z][a-z]{0,2}\.\s*$")
WORD = re.compile(r"\s*\S+\s*")


@dataclass(frozen=True)
class RewriteCandidate:
    """One output text; `score`: log-probability over length penalty; `finished`: it ended with an end token."""

    text: str
    score: float
    finished: bool


@dataclass(frozen=True)
class Rewriting:
    """A text and its outputs, best first. `guesses`: acceptance of the draft tokens, with speculative decoding."""

    source: str
    candidates: list[RewriteCandidate]
    notes: list[str] = field(default_factory=list)
    guesses: DraftStats | None = None

    @property
    def text(self) -> str:
        return self.candidates[0].text

    @property
    def score(self) -> float:
        return self.candidates[0].score


class Seq2Seq(GeneratingPredictor):
    """Rewrites texts, with an encoder-decoder or with a decoder whose prompt is the text. A text longer than the
    model's limit is an error, unless `unlimited` is set.

    `specials`: parse special tokens such as T5's `<extra_id_0>` in the text; otherwise they are plain text.
    """

    @cached_property
    def writer(self) -> Generator | None:
        """Who continues the texts, if the model is a decoder."""
        from allyouneed.infer.predictors.generator import Generator

        return Generator(self.folder) if self.model.config.kind == "decoder" else None

    def build_engine(self) -> Engine:
        if self.writer is not None:
            return self.writer.engine
        return sequence_engine(self.model, self.folder.tokenizers, self.limit, shortlist=self.folder.shortlist)

    @property
    def draft_engine(self) -> Engine:
        return draft_engine(self) if self.writer is None else self.engine

    @overload
    def seq2seq(self, texts: str, **options: Any) -> str: ...

    @overload
    def seq2seq(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def seq2seq(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """The output for a text ("translate English to German: The house is wonderful."), or for each of a list.
        `options`: see `seq2seq_full`; `beam=1`, `max_length=60`, …"""
        many = [texts] if isinstance(texts, str) else texts
        found = [full.text for full in self.seq2seq_full(many, **options)]
        return found[0] if isinstance(texts, str) else found

    def seq2seq_full(self, texts: Sequence[str], *, specials: bool = False, **options: Any) -> list[Rewriting]:
        """The same with scores, the n best (`best=3`) and notes. `options`: see `call_options`."""
        many = check_texts(texts, "seq2seq_full")
        if self.writer is not None:
            return self._continue(many, specials, options)
        call = self.call_options(**options)
        decoding = call.decoding
        both = self.folder.tokenizers
        frame = default_frame(both)
        sources = [frame.source(ids) for ids in both.source.encode_batch(many, specials)]
        if decoding.unlimited is None:
            for text, source in zip(many, sources, strict=True):
                self._check(text, len(source))
        found = generate_targets(
            self.engine_for(decoding, call.draft),
            frame,
            sources,
            decoding,
            on_progress=call.on_progress,
            sample_keys=[(call.first + number,) for number in range(len(many))],
            stop=StopStrings(both.target, decoding.stop) if decoding.stop else None,
            draft=call.draft,
        )
        return [
            Rewriting(
                text, [self._candidate(one, decoding) for one in best], self._notes(text, best[0]), total_stats([best])
            )
            for text, best in zip(many, found, strict=True)
        ]

    def _continue(self, texts: list[str], specials: bool, options: dict[str, Any]) -> list[Rewriting]:
        """The texts as prompts of a decoder. By default, an answer may be as long as a training example."""
        assert self.writer is not None
        self.writer.exact = self.exact
        if (options.get("decoding") or self.decoding_options({})).max_length is None:
            options = {"max_length": self.max_input} | options
        return [
            Rewriting(
                one.prompt,
                [RewriteCandidate(c.text, c.score, c.finished) for c in one.candidates],
                one.notes,
                one.guesses,
            )
            for one in self.writer.generate_full(texts, specials=specials, **options)
        ]

    def _check(self, text: str, tokens: int) -> None:
        config = self.model.config
        limit = getattr(config, "source_limit", config.limit)
        if limit is not None and tokens > limit:
            raise UserError(
                f"{quote(text)}: {tokens} tokens with special tokens, more than the model's {limit}; shorten or "
                "split it, or set unlimited (--unlimited) to attend to the nearest of them"
            )

    def _candidate(self, found: Hypothesis, decoding: Decoding) -> RewriteCandidate:
        target = self.folder.tokenizers.target
        text = detokenize(target, found.tokens, stop=decoding.stop) if decoding.stop else target.decode(found.tokens)
        return RewriteCandidate(drop_invalid(text), found.score, found.finished)

    def _notes(self, text: str, found: Hypothesis) -> list[str]:
        notes = invalid_notes(text, self.folder.tokenizers.target.decode(found.tokens))
        if found.finished:
            return notes
        if found.repeats:
            return [*notes, loop_note(text, len(found.tokens))]
        ended = f"{quote(text)}: stopped after {len(found.tokens)} tokens without an end token; raise max_length"
        return [*notes, ended]

    @property
    def room(self) -> int:
        """The most tokens of a text that is read at once: as in training, within the limit. A decoder reads it together
        with what it writes, and keeps half of its room for that."""
        special_count = sum(map(len, self.folder.tokenizers.source.source_affixes))
        return max(1, self.max_input - special_count if self.writer is None else self.max_input // 2 - 2)

    def windows(self, text: str, alone: bool = False) -> list[str]:
        """The text in pieces of whole sentences that the model reads at once, or in single ones (`alone`); joined, they
        are the text."""
        tokenizer, room = self.folder.tokenizers.source, self.room

        def fits(piece: str) -> bool:
            return len(tokenizer.encode(piece.strip())) <= room

        if not alone and fits(text):
            return [text]
        pieces: list[str] = []
        for sentence in sentences(text):
            short = [sentence] if fits(sentence) else _smaller(sentence, fits)
            for number, part in enumerate(short):
                if pieces and (number or not alone) and fits(pieces[-1] + part):
                    pieces[-1] += part
                else:
                    pieces.append(part)
        return pieces or [text]

    def truncated(self, text: str) -> tuple[str, list[str]]:
        """What the model reads of a text at once, and a note if that is not all of it."""
        first, *rest = self.windows(text)
        note = f"{quote(text)}: longer than the {self.room} tokens that are read at once; the rest was left out"
        return first, [note] if rest else []

    def figures(self, examples: Sequence[Any], found: Sequence[str], resamples: int) -> tuple[dict[str, float], str]:
        """The metrics of these outputs, by name and as text."""
        return rewriting_figures(found, [example.texts[1] for example in examples], resamples)

    def answers(self, texts: Sequence[str], decoding: Decoding | None) -> tuple[list[str], list[str]]:
        """The outputs that are judged, and notes. Of a text beyond the model's limit, the beginning is read."""
        cut = texts if self.limit is None else [self.truncated(text)[0] for text in texts]
        count = sum(one != text for one, text in zip(cut, texts, strict=True))
        notes = [f"{count:,} of {len(texts):,} texts are longer than {self.room} tokens and were truncated"]
        return self.seq2seq(cut, decoding=decoding), notes if count else []

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        found, notes = self.answers([example.texts[0] for example in examples], decoding)
        figures, text = self.figures(examples, found, resamples)
        samples = [
            {"source": example.texts[0], "reference": example.texts[1], "found": output}
            for example, output in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples, notes)


def sentences(text: str) -> list[str]:
    """The text in sentences with the spaces after them: they end with a line, or with a mark and a space, unless a
    short word with a capital ("Mr.", "No.") is before it or a small letter after it."""
    found: list[str] = []
    for piece in filter(None, SENTENCE.findall(text)):
        before = found[-1] if found else "\n"
        if not before.rstrip(" ").endswith("\n") and (SHORT_WORD.search(before) or piece[0].islower()):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def _smaller(sentence: str, fits: Callable[[str], bool]) -> list[str]:
    """A long sentence in words, and a long word in characters."""
    words = WORD.findall(sentence) or [sentence]
    return [part for word in words for part in ([word] if fits(word) else word)]
