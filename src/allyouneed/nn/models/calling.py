"""A model called with tensors: `module(source, target)`, `module(tokens)`, `module(pixels)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Input, Rows, Signal

Lengths = Tensor | Sequence[int] | None


def tensor_batch(
    config: Any,
    source: Tensor,
    target: Tensor | None = None,
    lengths: Lengths = None,
    target_lengths: Lengths = None,
    types: Tensor | None = None,
) -> Batch:
    """A batch of token ids (batch, time) padded on the right, pixels (batch, channels, height, width) or log-mel frames
    (batch, mels, time). `target`: of an encoder-decoder, begin token first; of two towers, the texts."""
    if config.kind == "two-towers":
        first, second = config.image.embed, config.text.embed
    else:
        first, second = getattr(config, "source_embed", None) or config.embed, config.embed
    if config.kind not in ("encoder-decoder", "two-towers"):
        if target is not None or target_lengths is not None:
            raise UserError(f"a model of kind {config.kind} takes one input: module(tokens)")
        return Batch(_input("tokens", first, source, lengths, types))
    if target is None:
        takes = "module(source, target)" if config.kind == "encoder-decoder" else "module(pixels, tokens)"
        raise UserError(f"a model of kind {config.kind} takes two inputs: {takes}")
    if config.kind == "encoder-decoder" and len(source) != len(target):
        raise UserError(f"target: {len(target)} rows for {len(source)} sources; give one row per source")
    towers = config.kind == "two-towers"
    return Batch(
        _input("target", second, target, target_lengths, types if towers else None),
        _input("source", first, source, lengths, None if towers else types),
    )


def _input(name: str, embed: Any, value: Tensor, lengths: Lengths, types: Tensor | None) -> Input:
    if embed.reads is Signal:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise UserError(f"{name}: expected a floating-point tensor of pixels or frames")
        return Signal(value)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        raise UserError(f"{name}: expected an integer tensor of token ids (batch, time)")
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=value.device)
        if lengths.shape != value.shape[:1] or int(lengths.min()) < 1 or int(lengths.max()) > value.shape[1]:
            raise UserError(f"lengths of {name}: expected {len(value)} numbers from 1 to {value.shape[1]}")
    return Rows(value, lengths=lengths, types=types)
