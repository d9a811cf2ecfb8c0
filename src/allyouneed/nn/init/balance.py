"""The first loss of a model near ln of its vocabulary, whatever parts it is made of.

An initialisation is published for one arrangement of embedding, norms and head. In another one, a tied head may find
the token it has just read again: with token vectors of deviation 1 and width w, its logit is about √w.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

STACKS = ("decoder", "second", "encoder")  # the first that a model has is read by its head
LARGE = 0.5  # deviation from which token vectors outweigh what sub-layers add to them at first
BELOW = 1.5  # ln(vocabulary) less this is the largest logit of the token itself: it adds 0.2 to the loss
ADDED = 0.1  # gain of a second normalised stream
DROWNED = 0.3  # of the deviation of fixed positions
POSITIONS, ROWS = 64, 4096  # that deviations are estimated from


@torch.no_grad()
def balance(model: nn.Module) -> None:
    """Begin with smaller gains in the norms that a tied head reads, where it would recognise the token vectors."""
    embed: Any = getattr(model, "embed", None)
    head: Any = getattr(model, "head", None)
    tokens = getattr(embed, "tokens", None)
    stack: Any = next((part for name in STACKS if (part := getattr(model, name, None)) is not None), None)
    if tokens is None or tokens.weight.is_meta or stack is None or not hasattr(head, "project_input"):
        return
    if head.scale != 1.0 or head.transform is not None or head.maxout is not None:
        return
    vocab, width = head.weight.shape
    size = deviation(tokens.weight)
    norms, gain = added_norms(stack), ADDED
    if head.weight is tokens.weight and (found := recognising(stack, size, size * getattr(embed, "scale", 1.0))):
        itself, even = width * size, math.log(vocab)  # the logit of the token itself
        norms, gain = found, 1.0 if itself <= even else max(1.0, even - BELOW) / itself
    for norm in norms:
        if norm.weight is not None:  # `first` is 0 where the norm multiplies by 1 + weight
            norm.weight.mul_(gain) if norm.first else norm.weight.fill_(gain - 1)


@torch.no_grad()
def drowned_tokens(model: Any) -> str | None:
    """What to say where token vectors begin far below the fixed positions they are added to."""
    embed = getattr(model, "embed", None)
    positions, tokens = getattr(embed, "positions", None), getattr(embed, "tokens", None)
    if embed is None or positions is None or tokens is None or list(positions.parameters()):
        return None
    added = positions(torch.arange(POSITIONS, device=tokens.weight.device)[None])
    size = deviation(tokens.weight) * getattr(embed, "scale", 1.0)
    if added is None or size >= DROWNED * (fixed := deviation(added[0])):
        return None
    return (
        f"token vectors begin at a deviation of {size:.2g} under fixed positions of {fixed:.2g}, which slows learning; "
        f"set embed.positions.amplitude: {size:.2g}, or use learned positions, rotary or alibi in the mixers"
    )


def recognising(stack: Any, size: float, scaled: float) -> list[Any]:
    """The norms after which a tied head would find the token vectors again. `size`: deviation of the matrix; `scaled`:
    of the vectors that enter the stack."""
    carries = scaled >= LARGE and stack.end is not None and not added_norms(stack)
    amplifies = getattr(getattr(stack.blocks[-1].wiring, "config", None), "alpha", None) is not None  # DeepNorm
    return closing_norms(stack) if size >= LARGE or carries or amplifies else []


def closing_norms(stack: Any) -> list[Any]:
    """The norms that give the output of a stack: those of its end, or the last one of its last block, unless earlier
    blocks share it."""
    ends = [] if stack.end is None else norms_in(stack.end)
    if ends and not added_norms(stack):
        return ends
    *before, block = stack.blocks
    own = norms_in(getattr(block.wiring, "norms", []))[-1:] if all(other is not block for other in before) else []
    return ends + own if own else []


def added_norms(stack: Any) -> list[Any]:
    """Norms of a second stream, whose result is added to one that is normalised already (ResiDual)."""
    return norms_in(stack.end) if getattr(stack.end, "adds", False) else []


def norms_in(part: Any) -> list[Any]:
    modules = part.modules() if isinstance(part, nn.Module) else ()
    return [one for one in modules if hasattr(one, "first") and hasattr(one, "weight")]


def deviation(rows: Tensor) -> float:
    return float(rows[:ROWS].float().square().mean().sqrt())
