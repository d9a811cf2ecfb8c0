"""Text classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allyouneed.data.files.labels import Labelled
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced, run_in_batches, to_list
from allyouneed.metrics.answers import label_figures
from allyouneed.nn.batch import Batch
from allyouneed.tasks.classification import text_row

TextInput = str | tuple[str, str]


@dataclass(frozen=True)
class TextClass:
    """The class of a text, and the probability of each class, most likely first. `labels`: all that a text has, if it
    may have several."""

    text: TextInput
    label: str
    scores: dict[str, float]
    labels: list[str]
    notes: list[str] = field(default_factory=list)


class Classifier(Predictor):
    """Classifies texts; an input is a string, or a pair of strings."""

    @property
    def labels(self) -> list[str]:
        return list(self.folder.labels)

    @property
    def several(self) -> bool:
        """A text may have any number of labels."""
        return bool(self.folder.task.get("several"))

    @property
    def _is_multi_label(self) -> bool:
        """Independent probabilities per class: trained with `several`, or imported with one class or with several at a
        time."""
        if self.several or self.folder.task["kind"] == "reranking":
            return True
        theirs = self.folder.origin.get("config", {})
        return bool(theirs) and (len(self.labels) == 1 or theirs.get("problem_type") == "multi_label_classification")

    def classify(self, texts: TextInput | Sequence[TextInput]) -> Any:
        """The class of a text, or of each text of a list; a list of classes where a text may have several."""
        one = isinstance(texts, str | tuple)
        found = [full.labels if self.several else full.label for full in self.classify_full([texts] if one else texts)]  # type: ignore[list-item]
        return found[0] if one else found

    def classify_full(self, texts: Sequence[TextInput]) -> list[TextClass]:
        """The same with the probabilities of all classes, and a note where a text was truncated."""
        if isinstance(texts, str):
            raise UserError("classify_full takes a list of texts; use [text] for a single one")
        pairs = [self._check_input(text) for text in texts]
        rows, notes = [], []
        for pair in pairs:
            row, note = self._row(pair)
            rows.append(row)
            notes.append(note)

        def answer(batch: list[int]) -> list[list[float]]:
            given = self.to_rows([rows[n] for n in batch])
            logits = self.model.logits(Batch(given)).float()
            return to_list(logits.sigmoid() if self._is_multi_label else logits.softmax(-1))

        probabilities = run_in_batches(self.model, [len(row[0]) for row in rows], answer)
        found, least = [], float(self.folder.task.get("threshold", 0.5))
        for text, scores, note in zip(texts, probabilities, notes, strict=True):
            ordered = dict(sorted(zip(self.labels, scores, strict=True), key=lambda both: -both[1]))
            best = next(iter(ordered))
            labels = [label for label, score in ordered.items() if score >= least] if self.several else [best]
            found.append(TextClass(text, best, ordered, labels, note))
        return found

    @property
    def _stack(self) -> str:
        """A language model with a classification head is a decoder."""
        return "decoder" if self.model.config.kind == "decoder" else "encoder"

    def _check_input(self, text: Any) -> tuple[str, ...]:
        texts = (text,) if isinstance(text, str) else text
        if not isinstance(texts, tuple) or len(texts) not in (1, 2) or not all(isinstance(t, str) for t in texts):
            raise UserError(f"expected a string or a pair of strings, got {type(text).__name__}")
        return texts

    def _row(self, texts: tuple[str, ...]) -> tuple[tuple[list[int], list[int]], list[str]]:
        """Tokens and types, truncated to `max_input`: the longer text of a pair is shortened first."""
        ids = self.tokenizer.encode_batch(texts)
        whole = sum(map(len, ids))
        room = self.max_input - self.tokenizer.template.count(len(texts))
        while sum(map(len, ids)) > room:
            longer = max(ids, key=len)
            del longer[-1]
        notes = []
        if sum(map(len, ids)) < whole:
            notes.append(f"{quote(texts[0])}: {whole} tokens, truncated to the training length of {room}")
        return text_row(ids, self.tokenizer), notes

    def judge(
        self, examples: Sequence[Labelled], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        texts: list[Any] = [e.texts if len(e.texts) > 1 else e.texts[0] for e in examples]
        found = [full.labels for full in self.classify_full(texts)]
        figures = label_figures(found, [example.labels for example in examples])
        text = f"accuracy {figures['accuracy']:5.1f} %\nmacro-F1 {figures['macro-f1']:5.1f}\n"
        text += f"micro-F1 {figures['micro-f1']:5.1f}  of {len(found)} texts"
        samples = [
            {"text": "  |  ".join(example.texts), "expected": ", ".join(example.labels), "found": ", ".join(labels)}
            for example, labels in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples)
