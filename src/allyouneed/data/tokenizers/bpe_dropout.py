"""BPE-dropout (Provilkov, Emelianenko & Voita 2020, "BPE-Dropout: Simple and Effective Subword Regularization"): while
a word is segmented, each applicable merge is left out with a fixed probability at every step, so that a model sees a
word in several segmentations. Only training data are encoded so."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from allyouneed.errors import UserError


class BPEDropout:
    """Random segmentations by the merges of a byte-level BPE tokenizer (`inner`: a `tokenizers.Tokenizer`).

    A segmentation has a number; a word has the same pieces wherever it stands in the texts of one number.
    """

    def __init__(self, inner: Any, rate: float) -> None:
        model = json.loads(inner.to_str())["model"]
        if model["type"] != "BPE":
            raise UserError(f"bpe_dropout: needs a tokenizer of kind bpe, and this one is {model['type'].lower()}")
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        self.ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self.ids: dict[str, int] = model["vocab"]
        self.words, self.rate = inner.pre_tokenizer, rate
        self.last: tuple[str, list[str]] = "", []  # a text is encoded several times in a row
        self.known: dict[tuple[str, int], list[int]] = {}

    def encode(self, text: str, segmentation: int) -> list[int]:
        if self.last[0] != text:
            self.last = text, [word for word, _ in self.words.pre_tokenize_str(text)]
        return [number for word in self.last[1] for number in self._encode_word(word, segmentation)]

    def _encode_word(self, word: str, segmentation: int) -> list[int]:
        key = word, segmentation
        if key not in self.known:
            pieces = self.segment(word, random.Random(f"{segmentation} {word}"))
            self.known[key] = [self.ids[piece] for piece in pieces]
        return self.known[key]

    def segment(self, word: str, rng: random.Random) -> Sequence[str]:
        """Algorithm 1 of the paper: the best merge of those that were not dropped in this step, until none is left."""
        pieces = list(word)
        while True:
            merges = [
                (rank, at)
                for at, pair in enumerate(pairwise(pieces))
                if (rank := self.ranks.get(pair)) is not None and rng.random() >= self.rate
            ]
            if not merges:
                return pieces
            _, at = min(merges)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
