"""Text in, text out, by a model that was told in words what to do: T5's prompts, summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.evaluate.translation import evaluate
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.detokenizer import StopStrings, detokenize
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, checked, spread
from allyouneed.infer.speculative.decode import DraftStats, check_draft_options, total_stats
from allyouneed.infer.speculative.drafts import draft_for
from allyouneed.infer.translation.frames import guessing, plain_frame, write
from allyouneed.infer.translation.split import quoted


@dataclass(frozen=True)
class Answer:
    """One text a model made of another; `score`: log-probability over length penalty; `finished`: it came to an end."""

    text: str
    score: float
    finished: bool


@dataclass(frozen=True)
class Rewriting:
    """A text and what the model makes of it, best first. `guesses`: how often a draft was right, if there was one."""

    source: str
    candidates: list[Answer]
    notes: list[str] = field(default_factory=list)
    guesses: DraftStats | None = None

    @property
    def text(self) -> str:
        return self.candidates[0].text

    @property
    def score(self) -> float:
        return self.candidates[0].score


class Seq2Seq(Predictor):
    """Writes a text for each it reads. A text is read whole: one that is longer than the model can place is refused.

    `specials`: tokens such as T5's `<extra_id_0>` that are spelled in a text are meant; otherwise a text is only text.
    """

    @overload
    def seq2seq(self, texts: str, **options: Any) -> str: ...

    @overload
    def seq2seq(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def seq2seq(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """What the model makes of a text ("translate English to German: The house is wonderful."), or of each of a
        list. `options` are those of `seq2seq_full`: `beam=1`, `max_length=60`, …"""
        many = [texts] if isinstance(texts, str) else texts
        found = [full.text for full in self.seq2seq_full(many, **options)]
        return found[0] if isinstance(texts, str) else found

    def seq2seq_full(
        self,
        texts: Sequence[str],
        *,
        specials: bool = False,
        decoding: Decoding | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        first: int = 0,
        draft: Any = None,
        ahead: int | None = None,
        **changes: Any,
    ) -> list[Rewriting]:
        """The same with scores, several answers (`best=3`) and notes. `first`: the place of the first text in a longer
        request; samples depend on it and on the seed alone. `draft`: a smaller model, or "lookup", that guesses `ahead`
        tokens at a time, so that they come sooner."""
        many = checked(texts, "seq2seq_full")
        settled = Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding), **changes)
        guesser = draft_for(self, draft, ahead, guessing)
        if guesser is not None:
            check_draft_options(settled)
        both = self.folder.tokenizers
        frame = plain_frame(both)
        sources = [frame.source(ids) for ids in both.source.encode_batch(many, specials)]
        for text, source in zip(many, sources, strict=True):
            self._check(text, len(source))
        answers = write(
            self.model,
            both,
            frame,
            sources,
            settled,
            self.limit,
            self.exact,
            on_progress=on_progress,
            sample_keys=[(first + number,) for number in range(len(many))],
            stop=StopStrings(both.target, settled.stop) if settled.stop else None,
            draft=guesser,
        )
        return [
            Rewriting(
                text,
                [self._answer(found, settled) for found in best],
                self._notes(text, best[0]),
                total_stats([best]),
            )
            for text, best in zip(many, answers, strict=True)
        ]

    def _check(self, text: str, tokens: int) -> None:
        config = self.model.config
        limit = getattr(config, "source_limit", config.limit)
        if limit is not None and tokens > limit:
            raise UserError(
                f"{quoted(text)}: {tokens} tokens with the marks, the model can read {limit}; shorten it or cut it in "
                "parts"
            )

    def _answer(self, found: Hypothesis, decoding: Decoding) -> Answer:
        target = self.folder.tokenizers.target
        text = detokenize(target, found.tokens, stop=decoding.stop) if decoding.stop else target.decode(found.tokens)
        return Answer(text, found.score, found.finished)

    def _notes(self, text: str, found: Hypothesis) -> list[str]:
        if found.finished:
            return []
        if found.repeats:
            return [f"{quoted(text)}: repeats itself; stopped after {len(found.tokens)} tokens (loops=0 lets it go on)"]
        return [f"{quoted(text)}: stopped after {len(found.tokens)} tokens without coming to an end; max_length=…"]

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """BLEU and chrF from 0 to 100, and which share is exactly right, in per cent."""
        found = self.seq2seq([example.texts[0] for example in examples], decoding=decoding)
        expected = [example.texts[1] for example in examples]
        scores = evaluate(found, expected, None, resamples=resamples)
        samples = [
            {"source": example.texts[0], "reference": example.texts[1], "found": text}
            for example, text in spread(list(zip(examples, found, strict=True)), show)
        ]
        return Judged({"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}, scores.text(), samples)
