"""Denoising models: texts restored from corrupted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allyouneed.data.tokenizers.base import MASK
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced
from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq

SHOWN = 40  # tokens of a sample text
GAP = 3  # tokens removed from its middle


class Denoiser(Seq2Seq):
    """Writes whole texts; each `<mask>` stands for any number of tokens, or for none."""

    def fill(self, texts: str | Sequence[str], **options: Any) -> Any:
        """The text, or each text of a list, with every `<mask>` filled; what is around may be corrected as well.
        `options`: `beam=1`, `max_length=60`, …"""
        many = check_texts([texts] if isinstance(texts, str) else texts, "fill")
        for text in many:
            if MASK not in text:
                raise UserError(f"{quote(text)}: contains no {MASK}; put one where a token is missing")
        found = self.seq2seq(many, specials=True, **options)
        return found[0] if isinstance(texts, str) else found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Samples only; validation measures the likelihood of the texts."""
        samples = []
        for example in evenly_spaced(examples, show):
            ids = self.tokenizer.encode(example.texts[0])[:SHOWN]
            middle = len(ids) // 2
            text = MASK.join(self.tokenizer.decode_batch([ids[:middle], ids[middle + GAP :]]))
            samples.append({"text": text, "restored": self.fill(text, decoding=decoding)})
        return EvaluationResult({}, "", samples)
