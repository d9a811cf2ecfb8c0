"""What a token has seen of its text after a whole stack, from what each part declares (`Mixer.visible`): whether the
vector that a head pools depends on all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.heads.pooling import Pool
from allyouneed.nn.models.base import STACKS
from allyouneed.nn.models.block import Layer
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.sublayer import through

LONGEST = 4096  # tokens of a text that is tried


def seen_by(layers: Sequence[Layer], tokens: TokenFields, place: int) -> Tensor:
    """The tokens that the output at this place depends on, (time) bool: from the last layer back to the first."""
    seen = tokens.position == tokens.position[place]
    for layer in reversed(layers):
        if layer.halt is not None and layer.halt.leak() is not None:  # it depends on all tokens when a text is done
            return torch.ones_like(seen)
        parts = [part.visible(tokens) for name, part in layer.sublayers.items() if name != "cross"]
        for _ in range(layer.repeat):
            before = seen
            for visible in reversed(parts):
                seen = seen | through(seen, visible)
            if torch.equal(before, seen):
                break
    return seen


def tokens_seen(model: Any, pool: Pool, length: int) -> int:
    """How many tokens of a text of this length the pooled vector of a model with one stack depends on."""
    if pool == "mean":  # every token sees itself
        return length
    with torch.device("cpu"):  # also where a model is built on another one, or on none (meta)
        position = torch.arange(length)
        first = position == 0 if getattr(model.embed, "chosen", "none") == "first" else None
        tokens = TokenFields(position, torch.ones_like(position), chosen=first)
        return int(seen_by(getattr(model, model.kind), tokens, 0 if pool == "first" else length - 1).sum())


def seeing_pool(model: Any, wanted: Sequence[Pool], length: int) -> Pool:
    """The first of these poolings that sees whole texts of this length; the mean always does."""
    return next((pool for pool in wanted if tokens_seen(model, pool, length) == length), "mean")


def blind_pool(model: Any, length: int | None = None) -> str | None:
    """What is wrong with the pooling of the model's head; None: it sees whole texts of this length, or the head pools
    nothing. Without a length: whether it sees more than one token at all."""
    if model.kind == "two-towers":
        return blind_pool(model.text, length) or blind_pool(model.image, length)
    pool: Pool | None = getattr(model.head, "pool", None)
    if model.kind not in STACKS:
        return None
    length = readable(model, 2 if length is None else length)
    if pool is None or (seen := tokens_seen(model, pool, length)) == length:
        return None
    better = seeing_pool(model, ("last", "first"), length)
    return f"head.pool: the {pool} token sees {seen:,} of {length:,} tokens of a text in this stack; set it to {better}"


def readable(model: Any, length: int) -> int:
    """As much of a text of this length as the model reads, and as is tried."""
    return min(length, LONGEST, model.limit or LONGEST)
