"""The largest of many scores, without sorting them: a vocabulary is cut into pieces, and only the pieces whose best
scores are among the largest are looked into. On CPU the best of a piece costs a fraction of looking for its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu import build as native

PIECE = 128
WORTH = 1 << 16  # scores; below, one look at everything is as quick


def in_pieces(scores: Tensor, count: int) -> bool:
    return scores.device.type == "cpu" and scores.numel() >= WORTH and scores.shape[-1] >= 4 * count * PIECE


def best_place(scores: Tensor) -> Tensor:
    """Where the largest score stands, the first of equal ones (…, vocab) to (…): `argmax`."""
    if not in_pieces(scores, 1):
        return scores.argmax(-1)
    pieces = scores.shape[-1] // PIECE
    whole = pieces * PIECE
    even = scores[..., :whole].unflatten(-1, (pieces, PIECE))
    tops = even.amax(-1)
    rest = scores[..., whole:]
    if rest.shape[-1]:
        tops = torch.cat([tops, rest.amax(-1, keepdim=True)], -1)
    piece = tops.argmax(-1, keepdim=True)  # (…, 1)
    inside = piece.clamp(max=pieces - 1)[..., None].expand(*piece.shape, PIECE)
    found = inside[..., 0, 0] * PIECE + even.gather(-2, inside)[..., 0, :].argmax(-1)
    return torch.where(piece[..., 0] == pieces, whole + rest.argmax(-1), found) if rest.shape[-1] else found


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores (…, vocab), best first, and where they stand; as `topk` has it, but for the order of
    equal ones."""
    vocab = scores.shape[-1]
    pieces = vocab // PIECE
    if not in_pieces(scores, count):
        best, places = scores.topk(count)
        return best, places
    even = scores[..., : pieces * PIECE].unflatten(-1, (pieces, PIECE))
    chosen = even.amax(-1).topk(count).indices.sort().values  # in the order of the vocabulary: equals stay in it
    inside = even.gather(-2, chosen[..., None].expand(*chosen.shape, PIECE)).flatten(-2)  # (…, count · PIECE)
    rest = scores[..., pieces * PIECE :]
    best, places = torch.cat([inside, rest], -1).topk(count)
    within = chosen.gather(-1, (places // PIECE).clamp(max=count - 1)) * PIECE + places % PIECE
    return best, torch.where(places < count * PIECE, within, places + (pieces - count) * PIECE)


def log_chance(scores: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(scores) of one token each: (…, vocab) and (…) to (…)."""
    flat = scores.flatten(0, -2)
    return -nn.functional.cross_entropy(flat, tokens.flatten(), reduction="none").view(tokens.shape)


def best(scores: Tensor, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of scores (rows, vocab) that is not among the banned ones, and its log-chance, of
    which those keep their share. The scores are as before."""
    found = native.top_k(scores, 1, banned)
    if found is not None:
        return found[0][:, 0], found[1][:, 0]
    with Without(scores, banned):
        tokens = best_place(scores)
    return tokens, log_chance(scores, tokens)


def best_few(scores: Tensor, few: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same for the `few` likeliest, best first, of scores (…, vocab)."""
    found = native.top_k(scores.flatten(0, -2), few, banned)
    if found is not None:
        return found[0].view(*scores.shape[:-1], few), found[1].view(*scores.shape[:-1], few)
    with Without(scores, banned):
        top, tokens = likeliest(scores, few)
    if banned is not None and len(banned):  # the likeliest of all may be one of them: its share is not that of `top`
        return tokens, top - scores.logsumexp(-1, keepdim=True)
    return tokens, top - (top[..., :1] - log_chance(scores, tokens[..., 0])[..., None])


class Without:
    """`with Without(scores, banned):` these columns are -inf, and afterwards what they were: nothing is copied."""

    def __init__(self, scores: Tensor, banned: Tensor | None) -> None:
        self.scores, self.banned = scores, banned

    def __enter__(self) -> None:
        if self.banned is not None:
            self.kept = self.scores.index_select(-1, self.banned)
            self.scores.index_fill_(-1, self.banned, -torch.inf)

    def __exit__(self, *_: object) -> None:
        if self.banned is not None:
            self.scores.index_copy_(-1, self.banned, self.kept)
