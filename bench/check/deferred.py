"""Decode kernels that write their matrices once in several tokens against the recurrences in double precision, over
several writes of rows that are at different places: outputs of all steps, and the last matrices. Part of
kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from allyouneed.kernels.triton import memory_step
from allyouneed.kernels.triton.mixer_steps import state_space_step
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.performer import MIN_WEIGHT, RELU_FLOOR, Performer
from allyouneed.nn.ops import ssd
from allyouneed.nn.ops.deferred import RECENT, Recent, begin_recent
from allyouneed.runtime.cuda.constant_states import by_columns

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
STEPS = RECENT + 5  # some rows write twice
# rows, heads, groups, states, head width, and columns of a program and of a piece that it folds (none: as they are)
SPACES = [(3, 4, 2, 10, 5, None), (2, 2, 1, 16, 8, (4, 2)), (2, 3, 3, 5, 11, (8, 4))]
LARGE_SPACES: list[tuple[Any, ...]] = [(64, 24, 1, 128, 64, None), (1, 24, 1, 128, 64, None), (9, 8, 2, 200, 80, None)]
# rows, heads, features, head width, ReLU features, columns
SUMS = [(3, 2, 20, 5, False, None), (2, 3, 16, 8, True, (4, 2)), (2, 2, 33, 12, False, (8, 4))]
LARGE_SUMS: list[tuple[Any, ...]] = [(64, 12, 256, 64, False, None), (1, 12, 256, 64, False, None)]
LARGE_SUMS += [(9, 5, 100, 80, True, None)]


def deferred(check: Any, cuda: bool) -> None:
    print("decode steps with deferred writes: outputs, the last matrices")
    for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
        for sizes in SPACES + (LARGE_SPACES if cuda else []):
            spaces(check, sizes, dtype)
        for some in SUMS + (LARGE_SUMS if cuda else []):
            sums(check, some, dtype)


def set_tiles(module: Any, given: tuple[int, int] | None) -> Any:
    usual = module.tiles
    if given is not None:
        module.tiles = lambda *_: dict(zip(("BLOCK", "PIECE"), given, strict=True))
    return usual


def completed(h: Tensor, recent: Recent, counts: Tensor) -> Tensor:
    """The matrices after their recent tokens, so many of each row."""
    keys, values, logs = (part.double() for part in recent)
    h, keys = h.double(), keys.repeat_interleave(h.shape[1] // keys.shape[1], 1)
    for place in range(RECENT):
        new = logs[:, :, place, None, None].exp() * h + keys[:, :, place, :, None] * values[:, :, place, None]
        h = torch.where((place < counts)[:, None, None, None], new, h)
    return h


def spaces(check: Any, sizes: tuple[Any, ...], dtype: torch.dtype) -> None:
    rows, heads, groups, states, width, columns = sizes
    torch.manual_seed(states)
    device, hidden = check.device, heads * width
    bias, skip, a_log = torch.randn(heads) - 1, torch.randn(heads), torch.rand(heads)
    bias, skip, a_log = (x.to(device) for x in (bias, skip, a_log))
    begins, h = (5 * torch.arange(rows) % RECENT).to(device), torch.randn(rows, heads, states, width).to(device)
    exact_h, h = h.double(), by_columns(h)
    recent, usual = begin_recent(h, groups), set_tiles(state_space_step, columns)
    found, exact = [], []
    for step in range(STEPS):
        mixed = torch.randn(rows, hidden + 2 * groups * states).to(device, dtype)
        z, steps = (torch.randn(rows, n).to(device, dtype) for n in (hidden, heads))
        x, b, c = mixed.split([hidden, groups * states, groups * states], 1)
        found.append(state_space_step.mamba2_step(x, b, c, steps, bias, a_log, skip, z, h, recent, begins + step))
        x, b, c = (y.double().unflatten(1, (n, -1))[:, :, None] for y, n in ((x, heads), (b, groups), (c, groups)))
        dt = softplus(steps.double() + bias)[..., None]  # (rows, heads, 1)
        y, exact_h = ssd.recurrent(x * dt[..., None], -a_log.double().exp()[:, None] * dt, b, c, exact_h)
        exact.append((y + skip[:, None, None] * x).flatten(1) * silu(z.double()))
    state_space_step.tiles = usual
    last = completed(h, recent, (begins + STEPS) % RECENT)
    found_all, exact_all = torch.stack(found), torch.stack(exact)
    check.report(f"Mamba-2 {sizes} {str(dtype)[6:]}", [found_all, last], [exact_all, exact_h], LIMITS[dtype])


def sums(check: Any, sizes: tuple[Any, ...], dtype: torch.dtype) -> None:
    rows, heads, features, width, relu, columns = sizes
    torch.manual_seed(features)
    device, inner, config = check.device, heads * width, {"kernel": "relu" if relu else "softmax"}
    part: Any = Performer(heads=heads, features=features, **config).build(Common(width=inner)).to(device)
    carry = part.begin(rows, torch.zeros(rows, 1, inner, device=device))
    exact_carry = part.begin(rows, torch.zeros(rows, 1, inner, device=device, dtype=torch.float64))
    matrices, tops, recent = by_columns(carry[0]), carry[1], part.begin_recent(carry)
    begins, floor = (5 * torch.arange(rows) % RECENT).to(device), RELU_FLOOR if relu else None
    found, exact, usual = [], [], set_tiles(memory_step, columns)
    for step in range(STEPS):
        qkv = torch.randn(rows, 3 * inner).to(device, dtype)
        given = (matrices, tops, recent, begins + step, floor, MIN_WEIGHT)
        found.append(memory_step.performer_step(qkv, part.features, *given))
        q, k, v = (part.split(x.double()) for x in qkv[:, None].chunk(3, -1))
        y, exact_carry = part.attend_causal(q, k, v, None, exact_carry)
        exact.append(y[:, :, 0].flatten(1))
    memory_step.tiles = usual
    last = completed(matrices[..., :-1], recent, (begins + STEPS) % RECENT)
    mine = [torch.stack(found), torch.cat((last, matrices[..., -1:].double()), -1), tops]
    names = slice(2 if relu else 3)  # ReLU features have no maximum
    given = [torch.stack(exact), *exact_carry]
    check.report(f"Performer {sizes} {str(dtype)[6:]}", mine[names], given[names], LIMITS[dtype])
