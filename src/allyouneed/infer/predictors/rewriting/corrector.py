"""Corrections of texts, and the edits that make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.frames import default_frame
from allyouneed.infer.log_probs import target_log_probs
from allyouneed.infer.predictors.base import check_texts
from allyouneed.infer.predictors.generator import prompt_tokens
from allyouneed.infer.predictors.rewriting.seq2seq import Rewriting, Seq2Seq
from allyouneed.metrics.corrections import TextEdit, correction_scores, text_edits


@dataclass(frozen=True)
class CorrectedText:
    """A text, its correction, and the edits between them."""

    source: str
    text: str
    edits: list[TextEdit]
    notes: list[str] = field(default_factory=list)


class Corrector(Seq2Seq):
    """Corrects texts of any length, sentence by sentence; the spaces and line breaks between them stay."""

    @overload
    def correct(self, texts: str, **options: Any) -> str: ...

    @overload
    def correct(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def correct(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """The correction of a text, or of each of a list. `options`: see `correct_full`."""
        found = [full.text for full in self.correct_full([texts] if isinstance(texts, str) else texts, **options)]
        return found[0] if isinstance(texts, str) else found

    def correct_full(self, texts: Sequence[str], *, margin: float | None = None, **options: Any) -> list[CorrectedText]:
        """The same with edits and notes. `margin`: a sentence is changed only if its correction is exp(margin) times as
        probable as the sentence itself; 0: always; default: as trained. `options`: see `call_options`."""
        many = check_texts(texts, "correct_full")
        least = float(self.folder.task.get("margin", 0.0)) if margin is None else margin
        if not 0 <= least < float("inf"):
            raise UserError(f"margin={margin}: must be 0 or more")
        windows = [self.windows(text, alone=True) for text in many]
        pieces = [piece.strip() for some in windows for piece in some]
        kept = [piece for piece in pieces if piece]
        found = dict(zip(kept, self.seq2seq_full(kept, **options), strict=True))
        if least:
            self._keep_unsure(found, least)
        made = []
        for text, some in zip(many, windows, strict=True):
            notes, parts = list[str](), list[str]()
            for window in some:
                piece = window.strip()
                if piece:
                    notes += found[piece].notes
                    head, _, tail = window.partition(piece)
                    parts.append(head + found[piece].text.strip() + tail)
                else:
                    parts.append(window)
            whole = "".join(parts)
            made.append(CorrectedText(text, whole, text_edits(text, whole), notes))
        return made

    def _keep_unsure(self, found: dict[str, Rewriting], margin: float) -> None:
        """Replace corrections that are not clearly more probable than the piece itself by the piece."""
        changed = [piece for piece, full in found.items() if full.text.strip() != piece]
        before = self.log_probs(changed, changed)
        after = self.log_probs(changed, [found[piece].text for piece in changed])
        for piece, old, new in zip(changed, before, after, strict=True):
            if new - old < margin:
                full = found[piece]
                found[piece] = replace(full, candidates=[replace(full.candidates[0], text=piece)])

    def log_probs(self, sources: Sequence[str], targets: Sequence[str]) -> list[float]:
        """The log-probability of each target given its source, in nats."""
        both = self.folder.tokenizers
        answers = [[*ids, both.target.eos] for ids in both.target.encode_batch(targets)]
        if self.writer is not None:
            prompts = [prompt_tokens(both.target, text, answers=True) for text in sources]
            return target_log_probs(self.model, None, prompts, answers)
        frame = default_frame(both)
        read = [frame.source(ids) for ids in both.source.encode_batch(sources)]
        return target_log_probs(self.model, read, [frame.begin] * len(read), answers)

    def figures(self, examples: Sequence[Any], found: Sequence[str], resamples: int) -> tuple[dict[str, float], str]:
        sources = [example.texts[0] for example in examples]
        expected = [[example.texts[1], *getattr(example, "others", ())] for example in examples]
        scores = correction_scores(sources, found, expected)
        figures, text = super().figures(examples, found, resamples)
        edits = {"f0.5": scores.f05, "precision": scores.precision, "recall": scores.recall}
        lines = [f"{name:<9} {value:5.1f}  of edits" for name, value in edits.items()]
        return edits | figures, "\n".join([*lines, text])

    def answers(self, texts: Sequence[str], decoding: Decoding | None) -> tuple[list[str], list[str]]:
        return self.correct(texts, decoding=decoding), []
