"""Greedy and top-k selection with log-probabilities in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs

PIECE = 2048  # logits per program


@triton.jit
def _argmax_pieces(
    scores, bans, ages, least, tops, places, highs, sums, vocab,
    PIECE: tl.constexpr, PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAP)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < vocab
    x = tl.load(scores + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
    high = tl.max(x, 0)
    mass = tl.sum(tl.exp(x - tl.where(high > float("-inf"), high, 0.0)), 0)
    young = (tl.load(ages + row) < least).to(tl.int64)
    ban = tl.load(bans + young * vocab + at, mask=inside, other=float("-inf"))
    allowed = x + ban
    top = tl.max(allowed, 0)
    place = tl.min(tl.where(allowed == top, at, vocab), 0)  # first index of ties
    tl.store(tops + row * PIECES + piece, top)
    tl.store(places + row * PIECES + piece, place)
    tl.store(highs + row * PIECES + piece, high)
    tl.store(sums + row * PIECES + piece, mass)


@triton.jit
def _argmax_merge(
    tops, places, highs, sums, ages, newest, record, clock, rows, vocab,
    PIECES: tl.constexpr, ALL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, ALL)
    inside = p < PIECES
    top = tl.load(tops + row * PIECES + p, mask=inside, other=float("-inf"))
    place = tl.load(places + row * PIECES + p, mask=inside, other=vocab)
    high = tl.load(highs + row * PIECES + p, mask=inside, other=float("-inf"))
    mass = tl.load(sums + row * PIECES + p, mask=inside, other=0.0)
    best, highest = tl.max(top, 0), tl.max(high, 0)
    token = tl.minimum(tl.min(tl.where(top == best, place, vocab), 0), vocab - 1)
    whole = highest + tl.log(tl.sum(mass * tl.exp(high - highest), 0))
    tl.store(newest + row, token.to(tl.int64))
    there = record + tl.load(clock) * 2 * rows + row
    tl.store(there, token.to(tl.float32))
    tl.store(there + rows, best - whole)
    tl.store(ages + row, tl.load(ages + row) + 1)


def argmax_step(
    scores: Tensor, bans: Tensor, ages: Tensor, least: int, newest: Tensor, record: Tensor, clock: Tensor
) -> None:
    """One greedy step: scores (rows, vocab); `bans` (2, vocab): 0, or -inf for banned tokens, for rows with at least
    `least` tokens (`ages`) and for shorter ones. Writes the token of each row to `newest` (rows,) and to step
    `clock` of `record` (steps, 2, rows) with its log-probability over all tokens, banned ones included; increments
    `ages`."""
    rows, vocab = scores.shape
    pieces = triton.cdiv(vocab, PIECE)
    tops, highs, sums = torch.empty(3, rows, pieces, device=scores.device)
    places = torch.empty(rows, pieces, dtype=torch.int32, device=scores.device)
    cut = {"PIECES": pieces, "OVERLAP": has_pdl(scores.device), "launch_pdl": has_pdl(scores.device)}
    _argmax_pieces[(rows, pieces)](
        scores, bans, ages, least, tops, places, highs, sums, vocab, PIECE=PIECE, **cut, num_warps=4
    )
    _argmax_merge[(rows,)](
        tops, places, highs, sums, ages, newest, record, clock, rows, vocab,
        ALL=triton.next_power_of_2(pieces), **cut, num_warps=1,
    )  # fmt: skip


@triton.jit
def _topk_pieces(
    scores, bans, ages, least, tops, places, highs, sums, vocab, group,
    PIECE: tl.constexpr, PIECES: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAP)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < vocab
    x = tl.load(scores + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
    high = tl.max(x, 0)
    tl.store(highs + row * PIECES + piece, high)
    tl.store(sums + row * PIECES + piece, tl.sum(tl.exp(x - tl.where(high > float("-inf"), high, 0.0)), 0))
    young = (tl.load(ages + row // group) < least).to(tl.int64)
    x += tl.load(bans + young * vocab + at, mask=inside, other=float("-inf"))
    for number in range(COUNT):
        top = tl.max(x, 0)
        place = tl.min(tl.where(x == top, at, vocab), 0)
        tl.store(tops + (row * PIECES + piece) * COUNT + number, top)
        tl.store(places + (row * PIECES + piece) * COUNT + number, place)
        x = tl.where(at == place, float("-inf"), x)


@triton.jit
def _topk_merge(
    tops, places, highs, sums, best, tokens, mass, vocab,
    PIECES: tl.constexpr, ALL: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, ALL)
    high = tl.load(highs + row * PIECES + p, mask=p < PIECES, other=float("-inf"))
    highest = tl.max(high, 0)
    weight = tl.load(sums + row * PIECES + p, mask=p < PIECES, other=0.0)
    tl.store(mass + row, highest + tl.log(tl.sum(weight * tl.exp(high - highest), 0)))
    c = tl.arange(0, ALL * COUNT)
    known = c < PIECES * COUNT
    x = tl.load(tops + row * PIECES * COUNT + c, mask=known, other=float("-inf"))
    place = tl.load(places + row * PIECES * COUNT + c, mask=known, other=vocab)
    for number in range(COUNT):
        top = tl.max(x, 0)
        token = tl.min(tl.where(x == top, place, vocab), 0)
        tl.store(best + row * COUNT + number, top)
        tl.store(tokens + row * COUNT + number, tl.minimum(token, vocab - 1).to(tl.int64))
        x = tl.where(place == token, float("-inf"), x)


def topk(scores: Tensor, bans: Tensor, ages: Tensor, least: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` (a power of two) best allowed scores of each row (rows, vocab), best first, and their tokens (rows,
    count); and the logsumexp of all (rows, 1). `bans`, `ages` (per group of rows), `least`: see `argmax_step`."""
    (rows, vocab), device = scores.shape, scores.device
    pieces = triton.cdiv(vocab, PIECE)
    highs, sums = torch.empty(2, rows, pieces, device=device)
    tops = torch.empty(rows, pieces, count, device=device)
    places = torch.empty(rows, pieces, count, dtype=torch.int32, device=device)
    best, mass = torch.empty(rows, count, device=device), torch.empty(rows, 1, device=device)
    tokens = torch.empty(rows, count, dtype=torch.long, device=device)
    cut = {"PIECES": pieces, "COUNT": count, "OVERLAP": has_pdl(device), "launch_pdl": has_pdl(device)}
    _topk_pieces[(rows, pieces)](
        scores, bans, ages, least, tops, places, highs, sums, vocab, rows // len(ages), PIECE=PIECE, **cut, num_warps=4
    )
    most = triton.next_power_of_2(pieces)
    _topk_merge[(rows,)](tops, places, highs, sums, best, tokens, mass, vocab, ALL=most, **cut, num_warps=2)
    return best, tokens, mass
