"""Which class a text belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allyouneed.data.files.labels import Labelled
from allyouneed.errors import UserError
from allyouneed.evaluate.answers import accuracy, macro_f1
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, in_batches, on_host, spread
from allyouneed.infer.translation.split import quoted
from allyouneed.nn.batch import Batch
from allyouneed.tasks.classification import text_row

Text = str | tuple[str, str]


@dataclass(frozen=True)
class Class:
    """What a text is, and how likely each class is, likeliest first."""

    text: Text
    label: str
    scores: dict[str, float]
    notes: list[str] = field(default_factory=list)


class Classifier(Predictor):
    """Says which class texts belong to; a text is a string, or two that are looked at together."""

    @property
    def labels(self) -> list[str]:
        return list(self.folder.labels)

    @property
    def _each(self) -> bool:
        """Whether each class has a chance of its own: imported models that have one class, or several at a time."""
        theirs = self.folder.origin.get("config", {})
        return bool(theirs) and (len(self.labels) == 1 or theirs.get("problem_type") == "multi_label_classification")

    def classify(self, texts: Text | Sequence[Text]) -> Any:
        """The class of a text, or of each text of a list."""
        one = isinstance(texts, str | tuple)
        found = [full.label for full in self.classify_full([texts] if one else texts)]  # type: ignore[list-item]
        return found[0] if one else found

    def classify_full(self, texts: Sequence[Text]) -> list[Class]:
        """The same with the probabilities of all classes, and notes where a text was too long to be read whole."""
        if isinstance(texts, str):
            raise UserError("classify_full takes a list of texts; write [text] for a single one")
        pairs = [self._checked(text) for text in texts]
        rows, notes = [], []
        for pair in pairs:
            row, note = self._row(pair)
            rows.append(row)
            notes.append(note)

        def answer(batch: list[int]) -> list[list[float]]:
            given = self.given([rows[n] for n in batch])
            logits = self.model.logits(Batch(given)).float()
            return on_host(logits.sigmoid() if self._each else logits.softmax(-1))

        chances = in_batches(self.model, [len(row[0]) for row in rows], answer)
        found = []
        for text, scores, said in zip(texts, chances, notes, strict=True):
            ordered = dict(sorted(zip(self.labels, scores, strict=True), key=lambda both: -both[1]))
            found.append(Class(text, next(iter(ordered)), ordered, said))
        return found

    def _checked(self, text: Any) -> tuple[str, ...]:
        texts = (text,) if isinstance(text, str) else text
        if not isinstance(texts, tuple) or len(texts) not in (1, 2) or not all(isinstance(t, str) for t in texts):
            raise UserError(f"a text to classify is a string or two of them, not {type(text).__name__}")
        return texts

    def _row(self, texts: tuple[str, ...]) -> tuple[tuple[list[int], list[int]], list[str]]:
        """Tokens and types. What is longer than what it was trained on is read up to there: from the longer text of two
        tokens are taken away, one by one."""
        ids = self.tokenizer.encode_batch(texts)
        whole = sum(map(len, ids))
        room = self.longest - self.tokenizer.template.count(len(texts))
        while sum(map(len, ids)) > room:
            longer = max(ids, key=len)
            del longer[-1]
        notes = []
        if sum(map(len, ids)) < whole:
            notes.append(
                f"{quoted(texts[0])}: {whole} tokens; only {room} of them were read, as many as it was trained on"
            )
        return text_row(ids, self.tokenizer), notes

    def judge(
        self, examples: Sequence[Labelled], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        texts: list[Any] = [e.texts if len(e.texts) > 1 else e.texts[0] for e in examples]
        found = [full.label for full in self.classify_full(texts)]
        expected = [example.label for example in examples]
        figures = {"accuracy": accuracy(found, expected), "macro-f1": macro_f1(found, expected)}
        text = f"accuracy {figures['accuracy']:5.1f} %\nmacro-F1 {figures['macro-f1']:5.1f}  of {len(found)} texts"
        samples = [
            {"text": "  |  ".join(example.texts), "expected": example.label, "found": label}
            for example, label in spread(list(zip(examples, found, strict=True)), show)
        ]
        return Judged(figures, text, samples)
