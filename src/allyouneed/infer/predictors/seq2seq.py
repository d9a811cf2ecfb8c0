"""Text to text with instructions in the input: T5's prompts, summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

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
from allyouneed.metrics.translation import evaluate


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
    """Rewrites texts. A text longer than the model's limit is an error, unless `unlimited` is set.

    `specials`: parse special tokens such as T5's `<extra_id_0>` in the text; otherwise they are plain text.
    """

    def build_engine(self) -> Engine:
        return sequence_engine(self.model, self.folder.tokenizers, self.limit, shortlist=self.folder.shortlist)

    @property
    def draft_engine(self) -> Engine:
        return draft_engine(self)

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
                text,
                [self._candidate(one, decoding) for one in best],
                self._notes(text, best[0]),
                total_stats([best]),
            )
            for text, best in zip(many, found, strict=True)
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

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """BLEU and chrF from 0 to 100, and the percentage of exact matches."""
        found = self.seq2seq([example.texts[0] for example in examples], decoding=decoding)
        expected = [example.texts[1] for example in examples]
        scores = evaluate(found, expected, None, resamples=resamples)
        samples = [
            {"source": example.texts[0], "reference": example.texts[1], "found": text}
            for example, text in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(
            {"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}, scores.text(), samples
        )
