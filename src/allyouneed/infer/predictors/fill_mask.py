"""Masked language models: fill `<mask>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import MASK
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import (
    EvaluationResult,
    Predictor,
    check_texts,
    evenly_spaced,
    run_in_batches,
    to_list,
)
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.two_stream import append_query_stream

EVERY = 7  # in samples, one of this many tokens is masked
Framed = tuple[list[int], list[int]]  # token ids with special tokens, and their types
SHOWN = 40  # tokens to which the texts of samples are truncated


@dataclass(frozen=True)
class Filling:
    """One candidate for one mask. `text`: the whole text with this mask filled."""

    token: str
    score: float  # its probability
    text: str


class MaskFiller(Predictor):
    """Fills each `<mask>` with one token."""

    @property
    def mask(self) -> int:
        return self.tokenizer.mask

    def fill_mask(self, texts: str | Sequence[str], top: int = 5) -> Any:
        """For each `<mask>` of a text the `top` most likely `Filling`s, best first; for a list, for each text."""
        many = check_texts([texts] if isinstance(texts, str) else texts, "fill_mask")
        if top < 1:
            raise UserError(f"top={top}: must be at least 1")
        rows = [self._row(text) for text in many]
        found = self._most_likely(rows, top)
        fillings = [self._fillings(row, tokens) for row, tokens in zip(rows, found, strict=True)]
        return fillings[0] if isinstance(texts, str) else fillings

    def check_masked(self, text: str) -> None:
        """Refuse a text without a mask, or one that is too long."""
        self._row(text)

    def _row(self, text: str) -> Framed:
        ids = self.tokenizer.encode_masked(text)
        if self.mask not in ids:
            raise UserError(f"{quote(text)}: contains no {MASK}; put one where a token is missing")
        row = self.tokenizer.frame(ids)
        if self.limit is not None and len(row[0]) > self.limit:
            raise UserError(
                f"{quote(text)}: {len(row[0])} tokens with special tokens, more than the model's {self.limit}; "
                "shorten it"
            )
        return row

    def _most_likely(self, rows: list[Framed], top: int) -> list[list[tuple[list[int], list[float]]]]:
        """For each mask of each row: tokens and their probabilities."""

        def answer(batch: list[int]) -> list[list[tuple[list[int], list[float]]]]:
            given = self.to_rows([rows[n] for n in batch])
            masks = (given.tokens == self.mask).nonzero()
            logits = self.model.head(self._hidden(given, masks)).float()
            never = [*self.tokenizer.specials, *range(self.tokenizer.size, logits.shape[1])]  # not text
            probabilities = logits.softmax(-1)
            probabilities[:, never] = -1.0  # excluded without renormalizing the others
            best, tokens = probabilities.topk(min(top, logits.shape[1] - len(never)))
            found: list[list[tuple[list[int], list[float]]]] = [[] for _ in batch]
            for row, ids, scores in zip(masks[:, 0].tolist(), tokens.tolist(), to_list(best), strict=True):
                found[row].append((ids, scores))
            return found

        return run_in_batches(self.model, [len(row) for row, _ in rows], answer)

    def _hidden(self, given: Rows, masks: Tensor) -> Tensor:
        """Hidden states at the masks; `masks`: (masks, 2) row and position."""
        found: Tensor = self.model(Batch(given))[masks[:, 0], masks[:, 1]]
        return found

    def _fillings(self, row: Framed, found: list[tuple[list[int], list[float]]]) -> list[list[Filling]]:
        positions = [n for n, number in enumerate(row[0]) if number == self.mask]
        candidates = []
        for position, (ids, scores) in zip(positions, found, strict=True):
            candidates.append(
                [
                    Filling(self.tokenizer.decode([number]), score, self._text(row, {position: number}))
                    for number, score in zip(ids, scores, strict=True)
                ]
            )
        return candidates

    def _text(self, row: Framed, filled: dict[int, int]) -> str:
        """The text with these tokens at these positions and `<mask>` at the other masks."""
        return self._unframed([filled.get(position, number) for position, number in enumerate(row[0])])

    def _unframed(self, ids: list[int]) -> str:
        marks = self.tokenizer.template
        return self.tokenizer.decode_masked(ids[len(marks.before) : len(ids) - len(marks.after)])

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Samples only; validation measures the likelihood of masked tokens."""
        samples = []
        for example in evenly_spaced(examples, show):
            ids = self.tokenizer.encode(example.texts[0])[:SHOWN]
            hidden = np.arange(len(ids)) % EVERY == min(EVERY, len(ids)) // 2
            row = [self.mask if hide else number for number, hide in zip(ids, hidden, strict=True)]
            (found,) = self._most_likely([self.tokenizer.frame(row)], 1)
            predicted = dict(zip(np.flatnonzero(hidden).tolist(), [tokens[0] for tokens, _ in found], strict=True))
            samples.append(
                {
                    "text": self.tokenizer.decode_masked(row),
                    "hidden": " ".join(self.tokenizer.tokens([ids[position] for position in predicted])),
                    "predicted": " ".join(self.tokenizer.tokens(list(predicted.values()))),
                }
            )
        return EvaluationResult({}, "", samples)


class TranslationMaskFiller(MaskFiller):
    """Fills `<mask>` in a sentence, or in a sentence and its translation, with a tab in between
    (tasks/language/translation_lm.py)."""

    def _row(self, text: str) -> Framed:
        first, tab, second = text.partition("\t")
        row, types = super()._row(first) if not tab else ([], [])
        for language, sentence in enumerate((first, second) if tab else ()):
            framed, _ = self.tokenizer.frame(self.tokenizer.encode_masked(sentence))
            row, types = row + framed, types + [language] * len(framed)
        if self.mask not in row:
            raise UserError(f"{quote(text)}: contains no {MASK}; put one where a token is missing")
        if self.limit is not None and max(types.count(0), types.count(1)) > self.limit:
            raise UserError(f"{quote(text)}: a sentence has more tokens than the model's {self.limit}; shorten it")
        return row, types

    def to_rows(self, framed: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rows:
        """Positions restart at the second sentence."""
        rows = super().to_rows(framed)
        places = [[*range(list(types).count(0)), *range(list(types).count(1))] for _, types in framed]
        return replace(rows, positions=Rows.of(places).tokens.to(rows.tokens.device))

    def _text(self, row: Framed, filled: dict[int, int]) -> str:
        ids, types = row
        inner = [filled.get(position, number) for position, number in enumerate(ids)]
        cut = types.count(0)
        return "\t".join(self._unframed(part) for part in (inner[:cut], inner[cut:]) if part)


class PermutationMaskFiller(MaskFiller):
    """Fills `<mask>` with a permutation language model: masked positions are queried and see all other tokens."""

    def _with_queries(self, given: Rows) -> Rows:
        is_mask = given.tokens == self.mask
        positions = [row.nonzero().flatten().tolist() for row in is_mask]
        return append_query_stream(replace(given, order=is_mask.long()), positions, self.tokenizer.pad)

    def _hidden(self, given: Rows, masks: Tensor) -> Tensor:
        rows = self._with_queries(given)
        assert rows.order is not None and rows.lengths is not None
        found: Tensor = self.model(Batch(rows))
        return found[(rows.order < 0) & self._is_real(rows)]  # row by row, in reading order

    def _is_real(self, rows: Rows) -> Tensor:
        assert rows.lengths is not None
        return torch.arange(rows.tokens.shape[1], device=rows.tokens.device) < rows.lengths[:, None]
