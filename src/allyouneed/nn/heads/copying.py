"""The pointer of a copy head: each target token is generated from the vocabulary or copied from the source.

See et al. 2017, "Get To The Point", eq. 8-9; as an utterance rewriter: Su et al. 2019. With decoder states s_t, decoder
inputs x_t and encoder states h_i:

    a_t   = softmax_i(s_t W h_i / √width)                 one head of attention to the source
    h*_t  = Σ_i a_ti h_i
    p_gen = σ(w · [h*_t, s_t, x_t] + b)                   eq. 8
    P(w)  = p_gen P_vocab(w) + (1 − p_gen) Σ_{i: x_i = w} a_ti          eq. 9
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from allyouneed.nn.batch import IGNORE
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.heads.vocabulary import VocabularyHead, VocabularyHeadModule
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.ops.cross_entropy import chunk_bytes
from allyouneed.nn.patterns.core import Full


class CopyHeadModule(VocabularyHeadModule):
    """Its input is self-contained, so that searches and tasks need not know of the source: `read_source` appends to
    each hidden state the gate's logit, the attention weights a_t and the ids of the source tokens, as numbers:
    (…, width + 1 + 2 · source). The output is log P, which is its own logits."""

    reads_source = True

    def __init__(self, config: VocabularyHead, common: Common, vocab: int, tied: Tensor | None) -> None:
        super().__init__(config, common, vocab, tied)
        self.width, self.vocab = common.width, vocab
        self.query = common.linear.build(common.width, common.width, False)
        self.gate = nn.Linear(3 * common.width, 1)

    def read_source(self, x: Tensor, context: Context) -> Tensor:
        memory, inputs = context.memory, context.inputs
        assert memory is not None and memory.tokens is not None and inputs is not None
        source = memory.hidden
        flat = x.reshape(len(source), -1, self.width)  # beams of one source become its queries
        mask = dense_mask(Full(), context.queries, memory.layout)[:, 0]
        scores = self.query(flat) @ source.transpose(-1, -2) * self.width**-0.5  # (sources, queries, source)
        scores = scores if scores.dtype is torch.float64 else scores.float()
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask
        read = (weights.to(source.dtype) @ source).view_as(x)
        gate = self.gate(torch.cat([read, x.to(read.dtype), inputs.to(read.dtype)], -1))
        ids = memory.tokens[:, None].expand_as(weights).to(weights.dtype)
        pointers = torch.cat([weights, ids], -1).view(*x.shape[:2], -1)
        return torch.cat([x.to(weights.dtype), gate.to(weights.dtype), pointers], -1)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """log P (…, vocab); for hidden states alone (…, width), the logits of P_vocab."""
        if x.shape[-1] == self.width:
            return super().forward(x, layout)
        hidden, gate, weights, ids = self.split(x)
        generated = super().forward(hidden).to(x.dtype).log_softmax(-1)
        copied = generated.new_zeros(generated.shape).scatter_add(-1, ids, weights)
        # a token that is not in the source has probability 0: its logarithm must stay finite for the gradient
        copied = copied.clamp(min=torch.finfo(copied.dtype).tiny).log()
        return torch.logaddexp(logsigmoid(gate) + generated, logsigmoid(-gate) + copied)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, gate logits (…, 1), weights and token ids (…, source)."""
        source = (x.shape[-1] - self.width - 1) // 2
        hidden, gate, weights, ids = x.split([self.width, 1, source, source], -1)
        return hidden if self.product is not None else hidden.to(self.weight.dtype), gate, weights, ids.long()

    def loss(self, x: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        flat, wanted = x.flatten(0, -2), labels.flatten()
        rows = max(1, chunk_bytes(x.device) // (4 * self.vocab))  # the logits of a chunk are computed again backward
        parts = [
            checkpoint(self._chunk_loss, some, own, smoothing, use_reentrant=False, preserve_rng_state=False)
            for some, own in zip(flat.split(rows), wanted.split(rows), strict=True)
        ]
        total, plain = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
        return total, plain

    def _chunk_loss(self, x: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        log_probs, real = self(x), labels != IGNORE
        plain = -(log_probs.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * real).sum()
        if not smoothing:
            return plain, plain
        return (1 - smoothing) * plain - smoothing * (log_probs.mean(-1) * real).sum(), plain
