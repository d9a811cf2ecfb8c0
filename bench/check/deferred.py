"""Decode kernels that write their matrices once in several tokens against the recurrences in double precision, over
several writes of rows that are at different places: outputs of all steps, and the last matrices. Part of
kernels.py.

    python bench/check/deferred.py                                    # check, and time tiles of Performer's kernel
    TRITON_INTERPRET=1 python bench/check/deferred.py --device cpu    # check by Triton's interpreter
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.kernels.triton.mixer_steps import state_space_step
from allyouneed.kernels.triton.mixer_steps.feature_sums import SumsTile, performer_step, sums_tile
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.performer import MIN_WEIGHT, RELU_FLOOR, Performer
from allyouneed.nn.ops import ssd
from allyouneed.nn.ops.deferred import RECENT, Recent, begin_recent
from allyouneed.runtime.cuda.constant_states import by_columns
from bench.check.alone import alone
from bench.check.graph_timer import Variant, print_variants, time_graph

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
STEPS = RECENT + 5  # some rows write twice
# what an H200 may choose among: columns of a program and of a piece, warps, registers of a thread
TILES = (SumsTile(64, 8, 4, 80), SumsTile(32, 8, 4, 80), SumsTile(64, 16, 4, 128), SumsTile(32, 16, 4, 128))
TILES += (SumsTile(64, 8, 4), SumsTile(64, 16, 8, 80))
# rows, heads, groups, states, head width, and columns of a program and of a piece that it folds (none: as they are)
SPACES = [(3, 4, 2, 10, 5, None), (2, 2, 1, 16, 8, (4, 2)), (2, 3, 3, 5, 11, (8, 4))]
LARGE_SPACES: list[tuple[Any, ...]] = [(64, 24, 1, 128, 64, None), (1, 24, 1, 128, 64, None), (9, 8, 2, 200, 80, None)]
# rows, heads, features, head width, ReLU features, columns of a program and of a piece (none: as they are)
SUMS: list[tuple[Any, ...]] = [(3, 2, 20, 5, False, None), (2, 3, 16, 8, True, (4, 2))]
SUMS += [(2, 2, 33, 12, False, (16, 4)), (1, 2, 160, 5, False, (4, 4))]
LARGE_SUMS: list[tuple[Any, ...]] = [(64, 12, 256, 64, False, None), (1, 12, 256, 64, False, None)]
LARGE_SUMS += [(9, 5, 100, 80, True, None), (64, 12, 256, 64, False, (32, 8)), (7, 3, 300, 40, True, (16, 8))]


def deferred(check: Any, cuda: bool) -> None:
    print("decode steps with deferred writes: outputs, the last matrices")
    for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
        for sizes in SPACES + (LARGE_SPACES if cuda else []):
            spaces(check, sizes, dtype)
        for some in SUMS + (LARGE_SUMS if cuda else []):
            sums(check, some, dtype)


def set_tiles(given: tuple[int, int] | None) -> Any:
    usual = state_space_step.tiles
    if given is not None:
        state_space_step.tiles = lambda *_: dict(zip(("BLOCK", "PIECE"), given, strict=True))
    return usual


def completed(h: Tensor, recent: Recent, counts: Tensor) -> Tensor:
    """The matrices after the first `counts` recent tokens of each row."""
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
    recent, usual = begin_recent(h, groups), set_tiles(columns)
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
    *shape, relu, columns = sizes
    found, exact = sums_steps(check.device, shape, relu, dtype, None if columns is None else SumsTile(*columns))
    check.report(f"Performer {sizes} {str(dtype)[6:]}", found, exact, LIMITS[dtype])


def sums_steps(
    device: str, shape: list[int], relu: bool, dtype: torch.dtype, tile: SumsTile | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, the last sums and, where features have one, their maximum: by the kernel, and exact."""
    rows, heads, features, width = shape
    torch.manual_seed(features)
    inner, config = heads * width, {"kernel": "relu" if relu else "softmax"}
    part: Any = Performer(heads=heads, features=features, **config).build(Common(width=inner)).to(device)
    carry = part.begin(rows, torch.zeros(rows, 1, inner, device=device))
    exact_carry = part.begin(rows, torch.zeros(rows, 1, inner, device=device, dtype=torch.float64))
    matrices, tops, recent = by_columns(carry[0]), carry[1], part.begin_recent(carry)
    begins, floor = (5 * torch.arange(rows) % RECENT).to(device), RELU_FLOOR if relu else None
    found, exact = [], []
    for step in range(STEPS):
        qkv = torch.randn(rows, 3 * inner).to(device, dtype)
        given = (matrices, tops, recent, begins + step, floor, MIN_WEIGHT, None, tile)
        found.append(performer_step(qkv, part.features, *given))
        q, k, v = (part.split(x.double()) for x in qkv[:, None].chunk(3, -1))
        y, exact_carry = part.attend_causal(q, k, v, None, exact_carry)
        exact.append(y[:, :, 0].flatten(1))
    last = completed(matrices[..., :-1], recent, (begins + STEPS) % RECENT)
    mine = [torch.stack(found), torch.cat((last, matrices[..., -1:].double()), -1), tops]
    names = slice(2 if relu else 3)
    return mine[names], [torch.stack(exact), *exact_carry][names]


def times() -> None:
    """At the sizes of family_speed/gpu.py."""
    time_performer(64, TILES)
    time_performer(1, (SumsTile(16, 8, 4, 80), SumsTile(32, 8, 4, 80)))


def time_performer(
    rows: int, tiles: tuple[SumsTile, ...], heads: int = 12, features: int = 256, width: int = 64, layers: int = 12
) -> None:
    """RECENT steps of all layers, one of which writes the matrices."""
    part: Any = Performer(heads=heads, features=features).build(Common(width=heads * width)).cuda()
    states = []
    for _ in range(layers):
        carry = part.begin(rows, torch.zeros(rows, 1, heads * width, device="cuda"))
        states.append((by_columns(carry[0]), carry[1], part.begin_recent(carry)))
    qkv = torch.randn(rows, 3 * heads * width, device="cuda", dtype=torch.bfloat16)
    positions = [torch.full((rows,), number, device="cuda") for number in range(RECENT)]
    counters = torch.zeros(rows * heads, dtype=torch.int32, device="cuda")
    # the matrix and half of the recent tokens are read; an eighth of it and one token are written
    matrix, token = (4 * rows * heads * n for n in (features * (width + 1), features + width))
    moved = int(matrix * (1 + 1 / RECENT) + token * ((RECENT - 1) / 2 + 1))

    def run(tile: SumsTile) -> None:
        for position in positions:
            for matrices, tops, recent in states:
                performer_step(qkv, part.features, matrices, tops, recent, position, None, MIN_WEIGHT, counters, tile)

    usual, found = sums_tile(rows * heads, width, features), []
    for tile in dict.fromkeys((usual, *tiles)):
        mine, exact = sums_steps("cuda", [rows, heads, features, width], False, torch.bfloat16, tile)
        error = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True))
        name = f"columns {tile.block}, piece {tile.piece}, warps {tile.warps}, registers {tile.registers or 'free'}"
        seconds = time_graph(lambda tile=tile: run(tile), 10) / layers / RECENT
        found.append(Variant(name + " (default)" * (tile == usual), seconds, moved, error))
    print_variants(f"Performer, {rows} rows, one layer with its features", found)


if __name__ == "__main__":
    sys.exit(alone(__doc__, deferred, times))
