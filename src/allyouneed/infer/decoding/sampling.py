"""Sampling: filter the distribution of the next token (top-k, top-p, min-p) and draw from it."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.infer.decoding.options import Decoding


def filter_logits(
    logits: Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Set to -inf all but the `top_k` likeliest tokens, all outside the smallest set of probability `top_p` (nucleus,
    Holtzman et al. 2020), and all less than `min_p` times as likely as the likeliest (Nguyen et al. 2024). The
    likeliest token always stays."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p  # the tokens before it reach top_p
        outside[..., 0] = False
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)
    if min_p is not None:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def token_probs(logits: Tensor, options: Decoding) -> Tensor:
    """The distribution that tokens are drawn from, after temperature and filters, in double precision."""
    scaled = logits / options.temperature
    return filter_logits(scaled, options.top_k, options.top_p, options.min_p).double().softmax(-1)


def invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token of each row (rows, vocab) at which the cumulative weight passes `uniforms` (rows,) of the total.

    One number decides one row, so a row's sample does not depend on the rest of the batch.
    """
    total = weights.cumsum(-1)
    picked = torch.searchsorted(total, (uniforms[:, None] * total[:, -1:]), right=True)[:, 0]
    return picked.clamp(max=weights.shape[-1] - 1)


def uniform_stream(key: tuple[int, ...], count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) that depend on the key alone; a longer stream begins with a shorter one."""
    from numpy.random import PCG64, Generator, SeedSequence

    return torch.from_numpy(Generator(PCG64(SeedSequence(key))).random(count))


def uniforms_at(streams: Tensor, lengths: Tensor) -> Tensor:
    """The number of each row's stream (rows, tokens) for its next token, after `lengths` (rows,) generated ones."""
    return streams.gather(1, lengths.clamp(max=streams.shape[1] - 1)[:, None])[:, 0]
