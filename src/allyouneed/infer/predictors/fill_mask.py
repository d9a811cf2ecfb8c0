"""What stands behind `<mask>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import MASK
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, checked, in_batches, on_host, spread
from allyouneed.infer.translation.split import quoted
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.two_stream import append_query_stream

EVERY = 7  # in samples, one token of so many is hidden
Framed = tuple[list[int], list[int]]  # tokens with marks, and their types
SHOWN = 40  # and a text is cut after so many tokens


@dataclass(frozen=True)
class Filling:
    """One way to fill one mask. `text` is the whole text with this mask filled so, the others as they were."""

    token: str
    score: float  # its probability
    text: str


class MaskFiller(Predictor):
    """Fills `<mask>`: each is one token."""

    @property
    def mask(self) -> int:
        return self.tokenizer.mask

    def fill_mask(self, texts: str | Sequence[str], top: int = 5) -> Any:
        """For each `<mask>` of a text the `top` likeliest `Filling`s, likeliest first; of a list, for each text."""
        many = checked([texts] if isinstance(texts, str) else texts, "fill_mask")
        if top < 1:
            raise UserError(f"top={top}: at least 1")
        rows = [self._row(text) for text in many]
        found = self._likeliest(rows, top)
        fillings = [self._fillings(row, tokens) for row, tokens in zip(rows, found, strict=True)]
        return fillings[0] if isinstance(texts, str) else fillings

    def _row(self, text: str) -> Framed:
        ids = self.tokenizer.encode_masked(text)
        if self.mask not in ids:
            raise UserError(f"{quoted(text)}: there is no {MASK} in it; write it where something is to be filled in")
        row = self.tokenizer.frame(ids)
        if self.limit is not None and len(row[0]) > self.limit:
            raise UserError(
                f"{quoted(text)}: {len(row[0])} tokens with the marks, the model has places for {self.limit}; "
                "shorten it"
            )
        return row

    def _likeliest(self, rows: list[Framed], top: int) -> list[list[tuple[list[int], list[float]]]]:
        """For each mask of each row: tokens and their probabilities."""

        def answer(batch: list[int]) -> list[list[tuple[list[int], list[float]]]]:
            given = self.given([rows[n] for n in batch])
            masks = (given.tokens == self.mask).nonzero()
            logits = self.model.head(self._hidden(given, masks)).float()
            never = [*self.tokenizer.specials, *range(self.tokenizer.size, logits.shape[1])]  # no text
            shares = logits.softmax(-1)
            shares[:, never] = -1.0  # never shown; what they are likely is left to nobody else
            chances, tokens = shares.topk(min(top, logits.shape[1] - len(never)))
            found: list[list[tuple[list[int], list[float]]]] = [[] for _ in batch]
            for row, ids, scores in zip(masks[:, 0].tolist(), tokens.tolist(), on_host(chances), strict=True):
                found[row].append((ids, scores))
            return found

        return in_batches(self.model, [len(row) for row, _ in rows], answer)

    def _hidden(self, given: Rows, masks: Tensor) -> Tensor:
        """What the model makes of these masks, (row, place) each."""
        found: Tensor = self.model(Batch(given))[masks[:, 0], masks[:, 1]]
        return found

    def _fillings(self, row: Framed, found: list[tuple[list[int], list[float]]]) -> list[list[Filling]]:
        places = [n for n, number in enumerate(row[0]) if number == self.mask]
        answers = []
        for place, (ids, scores) in zip(places, found, strict=True):
            answers.append(
                [
                    Filling(self.tokenizer.decode([number]), score, self._text(row[0], {place: number}))
                    for number, score in zip(ids, scores, strict=True)
                ]
            )
        return answers

    def _text(self, row: list[int], filled: dict[int, int]) -> str:
        """The text with these tokens in these places and `<mask>` in the places of the others."""
        marks = self.tokenizer.template
        inner = [filled.get(place, number) for place, number in enumerate(row)]
        return self.tokenizer.decode_masked(inner[len(marks.before) : len(inner) - len(marks.after)])

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """Samples only: how likely hidden tokens are is what validation measures."""
        samples = []
        for example in spread(examples, show):
            ids = self.tokenizer.encode(example.texts[0])[:SHOWN]
            hidden = np.arange(len(ids)) % EVERY == min(EVERY, len(ids)) // 2
            row = [self.mask if hide else number for number, hide in zip(ids, hidden, strict=True)]
            (found,) = self._likeliest([self.tokenizer.frame(row)], 1)
            told = dict(zip(np.flatnonzero(hidden).tolist(), [tokens[0] for tokens, _ in found], strict=True))
            samples.append(
                {
                    "text": self.tokenizer.decode_masked(row),
                    "hidden": " ".join(self.tokenizer.tokens([ids[place] for place in told])),
                    "told": " ".join(self.tokenizer.tokens(list(told.values()))),
                }
            )
        return Judged({}, "", samples)


class Asker(MaskFiller):
    """Fills `<mask>` with a model that was trained to be asked: each is told from all that is not masked, and nobody
    sees the mask."""

    def _hidden(self, given: Rows, masks: Tensor) -> Tensor:
        hidden_ones = given.tokens == self.mask
        places = [row.nonzero().flatten().tolist() for row in hidden_ones]
        rows = append_query_stream(replace(given, order=hidden_ones.long()), places, self.tokenizer.pad)
        assert rows.order is not None and rows.lengths is not None
        found: Tensor = self.model(Batch(rows))
        return found[(rows.order < 0) & self._inside(rows)]  # row after row, in reading order

    def _inside(self, rows: Rows) -> Tensor:
        assert rows.lengths is not None
        return torch.arange(rows.tokens.shape[1], device=rows.tokens.device) < rows.lengths[:, None]
