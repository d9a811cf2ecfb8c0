"""Mask-predict (Ghazvininejad et al. 2019, 3): all tokens at once, then the least certain ones again, for a constant
number of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis
from allyouneed.infer.decoding.topk import topk
from allyouneed.infer.whole_targets.engine import TargetEngine
from allyouneed.nn.batch import Rows

ITERATIONS = 10  # T of the paper's main results


class MaskPredictEngine(TargetEngine):
    """`mask`: the id of the mask token. `Decoding.beam` lengths are tried for each source (the paper's length beam)."""

    method = "mask-predict"
    iterates = True
    mask: int

    def targets(self, sources: list[Sequence[int]], spec: DecodingSpec) -> list[list[Hypothesis]]:
        options, model = spec.decoding, self.model
        memory = model.encode(Rows.of(sources, self.runner.pad).to(self.device))
        lengths, length_log_probs = self._lengths(model.head.length_logits(memory).float(), sources, spec)
        count = lengths.shape[1]
        rows = torch.arange(len(sources), device=self.device).repeat_interleave(count)
        iterations = options.iterations or ITERATIONS
        tokens, log_probs = refine(self, memory.select(rows), lengths.flatten(), iterations, self._banned(spec))
        found: list[list[Hypothesis]] = [[] for _ in sources]
        for row, length in enumerate(lengths.flatten().tolist()):
            source, rank = divmod(row, count)
            own = log_probs[row, :length].tolist()
            # 3.3: of the lengths, the one whose tokens have the highest mean log-probability
            total, last = sum(own), float(length_log_probs[source, rank])
            found[source].append(
                Hypothesis(tokens[row, :length].tolist(), total / length, total, [*own, last], finished=True)
            )
        return [sorted(one, key=lambda hypothesis: -hypothesis.score) for one in found]

    def _lengths(self, logits: Tensor, sources: list[Sequence[int]], spec: DecodingSpec) -> tuple[Tensor, Tensor]:
        """The likeliest lengths of each target and their log-probabilities, (sources, beam), within the limits."""
        options = spec.decoding
        most = [options.limit(len(source)) for source in sources]
        most = most if self.runner.limit is None else [min(one, self.runner.limit) for one in most]
        candidates = torch.arange(1, logits.shape[1] + 1, device=logits.device)
        limits = torch.tensor(most, device=logits.device).clamp(max=len(candidates))[:, None]
        least = torch.full_like(limits, max(1, options.min_length)).minimum(limits)
        log_probs = logits.log_softmax(-1).masked_fill((candidates > limits) | (candidates < least), -torch.inf)
        beam = 1 if options.method == "greedy" else min(options.beam, len(candidates))
        values, found = topk(log_probs, beam)
        # where fewer lengths are possible, the best one is tried again
        return torch.where(values.isfinite(), found, found[:, :1]) + 1, values

    def _banned(self, spec: DecodingSpec) -> Tensor:
        return torch.tensor(sorted({*spec.forbidden, *spec.eos_ids, self.mask, self.runner.pad}), device=self.device)


def refine(
    engine: MaskPredictEngine, memory: object, lengths: Tensor, iterations: int, banned: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities (rows, longest) of targets with these `lengths` (rows,).

    3.2: round t masks the n = N (T − t) / T tokens with the lowest probability and predicts them again from the others;
    the rest keep their tokens and probabilities. The first round masks all.
    """
    longest = int(lengths.max())
    real = torch.arange(longest, device=lengths.device) < lengths[:, None]
    tokens = torch.full_like(real, engine.mask, dtype=torch.long)
    log_probs = torch.zeros(real.shape, device=lengths.device)
    masked = real
    for done in range(iterations):
        if done:
            count = (lengths * (iterations - done) // iterations).clamp(min=1)
            ranks = log_probs.masked_fill(~real, torch.inf).argsort(-1).argsort(-1)  # 0: least likely
            masked = real & (ranks < count[:, None])
            tokens = tokens.masked_fill(masked, engine.mask)
        hidden = engine.model.decode(Rows(tokens, lengths=lengths), memory)
        scores = engine.model.head(hidden).float().log_softmax(-1)
        best, predicted = scores.index_fill(-1, banned, -torch.inf).max(-1)
        tokens, log_probs = torch.where(masked, predicted, tokens), torch.where(masked, best, log_probs)
    return tokens, log_probs
