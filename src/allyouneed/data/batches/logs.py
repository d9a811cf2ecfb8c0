"""Encode the impressions of a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, id_format
from allyouneed.data.files.logs import Impression
from allyouneed.data.tokenizers.base import Tokenizer


class ImpressionEncoding(Encoding):
    """Items with the one shown last, their ages, the ids of their side information item by item, those of the other
    features, and the click. Of longer sequences the last `length` items before the one shown are kept."""

    name = "Impression"
    max_tokens = None

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        ids = id_format(tokenizer)
        self.columns = {"items": ids, "ages": "<u4", "sides": ids, "features": ids, "click": "<u1"}
        self.spec = {"texts": {"items": tokenizer.hash}, "length": length}

    def encode(self, chunk: Sequence[Impression]) -> Iterator[EncodedRow | Dropped]:
        for example in chunk:
            yield self.row(example)

    def row(self, example: Impression) -> EncodedRow:
        first = -(self.length + 1)
        columns = [self._ids(column[first:]) for column in example.items]
        sides = [number for row in zip(*columns[1:], strict=True) for number in row]
        return [columns[0], example.ages[first:], sides, self._ids(example.features), [int(example.click)]]

    def _ids(self, values: Sequence[str]) -> list[int]:
        return [ids[0] for ids in self.tokenizer.encode_batch(values)]
