"""Targets by connectionist temporal classification: the likeliest output of each copy of a source token, repetitions
merged and blanks removed (Graves et al. 2006, 3.2, best path decoding)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis
from allyouneed.infer.whole_targets.engine import TargetEngine
from allyouneed.nn.batch import Batch, Rows
from allyouneed.tasks.translation.ctc_translation import BLANK


class CtcEngine(TargetEngine):
    """`upsample`: copies of each source token."""

    method = "ctc-translation"
    upsample: int

    def check(self, spec: DecodingSpec) -> None:
        super().check(spec)
        if spec.decoding.best > 1:
            raise UserError(f"best={spec.decoding.best}: ctc-translation finds one hypothesis; remove best")

    def targets(self, sources: list[Sequence[int]], spec: DecodingSpec) -> list[list[Hypothesis]]:
        copied = [[token for token in source for _ in range(self.upsample)] for source in sources]
        rows = Rows.of(copied, self.runner.pad)
        hidden, _ = self.model.run(Batch(rows.to(self.device)), None)
        scores = self.model.head(hidden).float().log_softmax(-1)
        banned = sorted({*spec.forbidden, *spec.eos_ids} - {BLANK})
        best, outputs = scores.index_fill(-1, torch.tensor(banned, device=self.device), -torch.inf).max(-1)
        lengths = [len(source) * self.upsample for source in sources]
        paths = zip(outputs.tolist(), best.tolist(), lengths, strict=True)
        return [[hypothesis(path[:length], probs[:length])] for path, probs, length in paths]


def hypothesis(path: Sequence[int], log_probs: Sequence[float]) -> Hypothesis:
    """A path of tokens and blanks as a target. The log-probability is that of the path; that of a token is the highest
    of its repetitions."""
    tokens: list[int] = []
    certain: list[float] = []
    before = BLANK
    for token, log_prob in zip(path, log_probs, strict=True):
        if token != before and token != BLANK:
            tokens.append(token)
            certain.append(log_prob)
        elif token != BLANK:
            certain[-1] = max(certain[-1], log_prob)
        before = token
    total = sum(log_probs)
    return Hypothesis(tokens, total / max(1, len(path)), total, [*certain, 0.0], finished=True)
