"""Dilated segments of whole rows as dense batches (LongNet, Ding et al. 2023).

In a branch (w, r), head h of a segment of w tokens keeps every r-th token from o_h on. Cut into (w / r, r), these are
the diagonal of heads and remainders: a strided view, and attention within a segment is dense attention over w / r
tokens. Branches are merged by their log-sum-exp (block_sparse.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.nn.ops.attention.block_sparse import merge_softmax
from allyouneed.nn.ops.attention.dense import AttentionFn, HasFallback, ScoreMod
from allyouneed.nn.ops.attention.flex import Flex, can_flex


@dataclass(frozen=True)
class DilatedSegments:
    """One branch over rows of `time` tokens. `interleaved`: head h starts at token h mod r, otherwise at h // ⌈heads /
    r⌉."""

    time: int
    heads: int
    segment: int  # w, at most `time`
    dilation: int  # r
    interleaved: bool

    @property
    def count(self) -> int:
        return -(-self.time // self.segment)

    @property
    def kept(self) -> int:
        """Tokens of a segment in one head."""
        return -(-self.segment // self.dilation)

    @property
    def padded(self) -> bool:
        """Whether some of them do not exist: they are later than all others."""
        return self.count * self.segment != self.time or self.kept * self.dilation != self.segment

    @property
    def _split(self) -> tuple[tuple[int, int], int]:
        """Heads as two axes, and which of them is that of the first tokens."""
        groups = -(-self.heads // self.dilation)
        return ((groups, self.dilation), 2) if self.interleaved else ((self.dilation, groups), 1)

    def gather(self, x: Tensor) -> Tensor:
        """(batch, heads, time, width) to (batch · segments, all heads, kept, width)."""
        split, axis = self._split
        x = pad(x, (0, 0, 0, self.count * self.segment - self.time, 0, split[0] * split[1] - self.heads))
        x = x.unflatten(2, (self.count, self.segment))
        x = pad(x, (0, 0, 0, self.kept * self.dilation - self.segment))
        # (batch, heads as two axes, segments, kept, r, width)
        x = x.unflatten(3, (self.kept, self.dilation)).unflatten(1, split)
        x = x.diagonal(0, axis, 5).movedim(-1, axis).flatten(1, 2)  # (batch, all heads, segments, kept, width)
        return x.transpose(1, 2).flatten(0, 1)

    def scatter(self, y: Tensor) -> Tensor:
        """The inverse of `gather`, with zeros for tokens that a head leaves out."""
        split, axis = self._split
        y = y.unflatten(0, (-1, self.count)).transpose(1, 2).unflatten(1, split).movedim(axis, -1)
        y = torch.diag_embed(y, 0, axis, 5).flatten(1, 2)[:, : self.heads]  # (batch, heads, segments, kept, r, width)
        return y.flatten(3, 4)[:, :, :, : self.segment].flatten(2, 3)[:, :, : self.time]

    def covered(self, device: torch.device) -> Tensor:
        """(heads, time) bool: tokens that a head keeps."""
        ones = torch.ones(self.count, self._split[0][0] * self._split[0][1], self.kept, 1, device=device)
        return self.scatter(ones)[0, :, :, 0] > 0


class DilatedAttention(HasFallback):
    """Softmax over the keys of all branches. `kernels`: attention within a segment, for each branch; `make_fallback`
    builds the plan for what they cannot do."""

    def __init__(
        self, branches: Sequence[DilatedSegments], kernels: Sequence[Flex], device: torch.device,
        make_fallback: Callable[[], AttentionFn],
    ) -> None:  # fmt: skip
        self.branches, self.kernels, self.make_fallback = list(branches), list(kernels), make_fallback
        self.skipped = [None if one.dilation == 1 else ~one.covered(device) for one in branches]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if dropout or not score_mod.plain or not can_flex(q, v):
            return self.fallback(q, k, v, dropout, score_mod)
        outs, sums = [], []
        for branch, kernel, skipped in zip(self.branches, self.kernels, self.skipped, strict=True):
            out, lse = kernel.with_lse(branch.gather(q), branch.gather(k), branch.gather(v), score_mod.scale)
            lse = branch.scatter(lse[..., None])[..., 0]
            outs.append(branch.scatter(out))
            sums.append(lse if skipped is None else lse.masked_fill(skipped, float("-inf")))
        return merge_softmax(outs, sums)
