"""Words that do not belong in their text, found by a model that was trained to tell replaced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.batches.packing import generator
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, evenly_spaced, run_in_batches
from allyouneed.infer.predictors.tagger import Tagger
from allyouneed.metrics.ranking import auc
from allyouneed.nn.batch import Batch
from allyouneed.tasks.language.masked_lm import choose_masked
from allyouneed.tasks.task import VALIDATION_SEED

SHARE = 0.15  # of the tokens, replaced in an evaluation


class Discriminator(Tagger):
    """Tags each word as `original` or `replaced` (ELECTRA)."""

    @property
    def labels(self) -> list[str]:
        return ["original", "replaced"]

    def best(self, scores: Tensor) -> list[list[int]]:
        found: list[list[int]] = (scores[..., 0] > 0).long().tolist()
        return found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Tell tokens drawn at random from those of the texts; the same ones in every evaluation."""
        own = np.setdiff1d(np.arange(self.tokenizer.size), self.tokenizer.specials)
        texts, replaced = list[np.ndarray](), list[np.ndarray]()
        for number, ids in enumerate(self.tokenizer.encode_batch([example.text for example in examples])):
            rng, kept = generator(VALIDATION_SEED, 0, number), np.array(ids[: self.max_input - 2], np.int64)
            chosen = choose_masked(len(kept), None, SHARE, rng) if len(kept) else np.zeros(0, bool)
            drawn = np.where(chosen, own[rng.integers(len(own), size=len(kept))], kept)
            texts.append(drawn)
            replaced.append(drawn != kept)
        rows, first = [self.tokenizer.frame(ids.tolist()) for ids in texts], len(self.tokenizer.template.before)

        def answer(batch: list[int]) -> list[Tensor]:
            scores = self.model.logits(Batch(self.to_rows([rows[n] for n in batch])))[..., 0].float().cpu()
            return [scores[row, first : first + len(texts[n])] for row, n in enumerate(batch)]

        found = run_in_batches(self.model, [len(row) for row, _ in rows], answer)
        scores, wanted = torch.cat(found).numpy(), np.concatenate(replaced)
        right = (scores > 0) == wanted
        figures = {"auc": auc(scores, wanted), "accuracy": 100 * float(right.mean())}
        text = f"AUC      {figures['auc']:.3f}\naccuracy {figures['accuracy']:5.1f} %  of {len(wanted):,} tokens"
        samples = [
            {"text": self.tokenizer.decode(texts[n].tolist()), "found": self._shown(texts[n], found[n].numpy() > 0)}
            for n in evenly_spaced(range(len(examples)), show)
        ]
        return EvaluationResult(figures, f"{text}, {SHARE:.0%} of them replaced at random", samples)

    def _shown(self, ids: Any, marked: Any) -> str:
        return " ".join(self.tokenizer.tokens(ids[marked].tolist())) or "nothing"
