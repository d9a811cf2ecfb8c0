"""Top-k over a vocabulary without sorting it: the vocabulary is cut into blocks, and only blocks whose maximum is among
the k largest are searched. On CPU a block's maximum costs a fraction of finding its index."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu import build as native

BLOCK = 128
MIN_SIZE = 1 << 16  # logits; below, one pass over all of them is as fast


def uses_blocks(logits: Tensor, count: int) -> bool:
    return logits.device.type == "cpu" and logits.numel() >= MIN_SIZE and logits.shape[-1] >= 4 * count * BLOCK


def argmax(logits: Tensor) -> Tensor:
    """(…, vocab) to (…): the index of the maximum, the first of equal ones."""
    if not uses_blocks(logits, 1):
        return logits.argmax(-1)
    blocks = logits.shape[-1] // BLOCK
    whole = blocks * BLOCK
    even = logits[..., :whole].unflatten(-1, (blocks, BLOCK))
    tops = even.amax(-1)
    rest = logits[..., whole:]
    if rest.shape[-1]:
        tops = torch.cat([tops, rest.amax(-1, keepdim=True)], -1)
    block = tops.argmax(-1, keepdim=True)  # (…, 1)
    inside = block.clamp(max=blocks - 1)[..., None].expand(*block.shape, BLOCK)
    found = inside[..., 0, 0] * BLOCK + even.gather(-2, inside)[..., 0, :].argmax(-1)
    return torch.where(block[..., 0] == blocks, whole + rest.argmax(-1), found) if rest.shape[-1] else found


def topk(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the `count` largest of (…, vocab), best first; as `Tensor.topk`, but for the order of equal
    ones."""
    vocab = logits.shape[-1]
    blocks = vocab // BLOCK
    if not uses_blocks(logits, count):
        values, index = logits.topk(count)
        return values, index
    even = logits[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
    chosen = even.amax(-1).topk(count).indices.sort().values  # in vocabulary order: so are equal ones
    inside = even.gather(-2, chosen[..., None].expand(*chosen.shape, BLOCK)).flatten(-2)  # (…, count · BLOCK)
    rest = logits[..., blocks * BLOCK :]
    values, index = torch.cat([inside, rest], -1).topk(count)
    within = chosen.gather(-1, (index // BLOCK).clamp(max=count - 1)) * BLOCK + index % BLOCK
    return values, torch.where(index < count * BLOCK, within, index + (blocks - count) * BLOCK)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) of one token each: (…, vocab) and (…) to (…)."""
    flat = logits.flatten(0, -2)
    return -nn.functional.cross_entropy(flat, tokens.flatten(), reduction="none").view(tokens.shape)


def greedy_tokens(logits: Tensor, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row (rows, vocab) that is not banned, and its log-probability among all tokens. The
    logits are unchanged afterwards."""
    found = native.top_k(logits, 1, banned)
    if found is not None:
        return found[0][:, 0], found[1][:, 0]
    with MaskedColumns(logits, banned):
        tokens = argmax(logits)
    return tokens, token_log_probs(logits, tokens)


def topk_log_probs(logits: Tensor, count: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same for the `count` likeliest, best first, of logits (…, vocab)."""
    found = native.top_k(logits.flatten(0, -2), count, banned)
    if found is not None:
        return found[0].view(*logits.shape[:-1], count), found[1].view(*logits.shape[:-1], count)
    with MaskedColumns(logits, banned):
        top, tokens = topk(logits, count)
    if banned is not None and len(banned):  # the maximum may be banned: normalise over all tokens
        return tokens, top - logits.logsumexp(-1, keepdim=True)
    return tokens, top - (top[..., :1] - token_log_probs(logits, tokens[..., 0])[..., None])


class MaskedColumns:
    """`with MaskedColumns(logits, banned):` sets these columns to -inf in place and restores them on exit."""

    def __init__(self, logits: Tensor, banned: Tensor | None) -> None:
        self.logits, self.banned = logits, banned

    def __enter__(self) -> None:
        if self.banned is not None:
            self.kept = self.logits.index_select(-1, self.banned)
            self.logits.index_fill_(-1, self.banned, -torch.inf)

    def __exit__(self, *_: object) -> None:
        if self.banned is not None:
            self.logits.index_copy_(-1, self.banned, self.kept)
