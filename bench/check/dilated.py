"""Decode attention to dilated segments (LongNet) by its kernel against the definition in double precision: outputs, and
keys and values where they are stored. Part of kernels.py.

    python bench/check/dilated.py                                    # check, and time tiles of the kernel
    TRITON_INTERPRET=1 python bench/check/dilated.py --device cpu    # check by Triton's interpreter
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.kernels.triton.mixer_steps.dilated_attention import DilatedTile, dilated_attention, dilated_tile
from allyouneed.nn.ops.attention.decode import BlockTable, DilatedBranches, define_decode_attention
from bench.check.alone import alone
from bench.check.graph_timer import Variant, print_variants, time_graph

LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# rows, heads, head width, positions, tokens per block, segments, dilations, ring of slots (0: none), splits and tile
BRANCHES: list[tuple[Any, ...]] = [
    (3, 4, 8, 40, 0, (7, 30), (1, 3), 0, (1, 16)),
    (5, 3, 10, 90, 0, (6, 24), (2, 5), 24, (2, 16)),
    (4, 2, 16, 60, 1, (64, 16, 10), (3, 2, 1), 0, (3, 16)),
    (2, 5, 20, 70, 8, (33,), (4,), 0, (1, 32)),
]
LARGE_BRANCHES: list[tuple[Any, ...]] = [
    (64, 12, 64, 5000, 0, (512, 2048), (1, 4), 2048, None),
    (1, 12, 64, 5000, 0, (512, 2048), (1, 4), 2048, None),
    (9, 6, 80, 700, 8, (100, 333, 600), (1, 3, 7), 0, (3, 64)),
    (64, 12, 64, 160, 0, (512, 2048), (1, 4), 0, None),
]
# what an H200 may choose among: splits, tile, warps, stages
TILES = (DilatedTile(1), DilatedTile(1, 32, 2, 3), DilatedTile(1, 32, 1), DilatedTile(1, 64, 4), DilatedTile(2))


def branches_of(heads: int, segments: tuple[int, ...], dilations: tuple[int, ...], device: str) -> DilatedBranches:
    """As LongNet has them: head j begins at j mod r."""
    sizes = [
        [[w, r, head % r] for w, r in zip(segments, dilations, strict=True)] for head in range(heads)
    ]  # (heads, branches, 3)
    most = max(-(-w // r) for w, r in zip(segments, dilations, strict=True))
    return DilatedBranches(torch.tensor(sizes, dtype=torch.int32, device=device), most)


def dilated(check: Any, cuda: bool) -> None:
    print("decode attention to dilated segments")
    for sizes in BRANCHES + (LARGE_BRANCHES if cuda else []):
        for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
            for new, turned in ((True, True), (True, False), (False, True)):
                if new or not sizes[7]:  # tokens of a ring are new
                    dilated_step(check, sizes, dtype, new, turned)


def dilated_step(check: Any, sizes: tuple[Any, ...], dtype: torch.dtype, new: bool, turned: bool) -> None:
    rows, heads, width, positions, every, segments, dilations, ring, cut = sizes
    torch.manual_seed(positions)
    device, branches = check.device, branches_of(heads, segments, dilations, check.device)
    slots = ring or (positions if every <= 1 else every)
    blocks = rows if every <= 1 else rows * -(-positions // every)
    keys, values = torch.randn(2, blocks, heads, slots, width).to(device, dtype)
    seen = torch.randint(1, positions - 1, (rows,))
    table = torch.arange(rows)[:, None] if every == 0 else torch.randperm(blocks).view(rows, -1)
    if every == 1:  # rows that share their pasts are of one length
        seen[:] = positions - 5
        table = torch.randint(0, rows, (rows, positions))
        table[:, positions - 5] = torch.arange(rows)
    parts = torch.randn(2, rows, 3 * heads, width).to(device)  # to be added up by the kernel
    q, k, v = parts.split(heads, 2)
    angle = torch.randn(rows, width // 2, dtype=torch.double)
    turns = torch.cat((angle.cos(), angle.sin()), -1).to(device) if turned else None
    given = BlockTable(table.to(device).int(), every, None, (0, ring) if ring else None)
    wide = [x.double() for x in (keys, values)]
    whole = [x.double().sum(0) for x in (q, k, v)]
    seen = seen.to(device)
    exact = define_decode_attention(
        whole[0], *wide, seen, width**-0.5, given, (whole[1], whole[2]) if new else None, turns, branches=branches
    )
    found = dilated_attention(
        q, keys, values, given.blocks, seen, width**-0.5, every, *branches, (k, v) if new else None,
        None if turns is None else turns.float(), None, None if cut is None else DilatedTile(*cut),
        given.ring or (0, 0),
    )  # fmt: skip
    name = f"dilated {sizes[:5]} {segments} {'ring' * bool(ring)} {str(dtype)[6:]}{', new' * new}{', turned' * turned}"
    check.report(name, [found, keys, values], [exact, *wide], LIMITS[dtype])


def times(rows: int = 64, heads: int = 12, width: int = 64, layers: int = 12) -> None:
    """At the sizes of family_speed/gpu.py, in the middle of the segments, as all layers of a step run it."""
    device, ring, position, scale = "cuda", 2048, 32768 + 1280, width**-0.5
    branches = branches_of(heads, (512, 2048), (1, 4), device)
    keys, values = torch.randn(2, layers, rows, heads, ring, width, device=device, dtype=torch.bfloat16)
    q, k, v = torch.randn(3, rows, heads, width, device=device, dtype=torch.bfloat16)
    table = BlockTable(torch.arange(rows, device=device, dtype=torch.int32)[:, None], 0, 1, (0, ring))
    seen = torch.full((rows,), position, device=device)
    counters = torch.zeros(rows * heads, dtype=torch.int32, device=device)
    counts = branches.log_counts(seen, torch.arange(position - ring, position, device=device)[None].expand(rows, -1))
    read = int(counts.exp().round().sum()) * 2 * width * keys.itemsize  # once per branch

    def run(cut: DilatedTile) -> list[Tensor]:
        caches = zip(keys, values, strict=True)
        how = (scale, 0, *branches, (k, v), None, counters, cut, (0, ring))
        return [dilated_attention(q, *cache, table.blocks, seen, *how) for cache in caches]

    wide = [x.double() for x in (q, keys[0], values[0], k, v)]
    exact = define_decode_attention(*wide[:3], seen, scale, table, (wide[3], wide[4]), branches=branches)
    usual, found = dilated_tile(rows, heads, branches.most), []
    for cut in dict.fromkeys((usual, *TILES)):
        error = float((run(cut)[0].double() - exact).norm() / exact.norm())
        name = f"splits {cut.shares}, tile {cut.tile}, warps {cut.warps}, stages {cut.stages}"
        seconds = time_graph(lambda cut=cut: run(cut)) / layers
        found.append(Variant(name + " (default)" * (cut == usual), seconds, read, error))
    print_variants(f"LongNet, {rows} rows, one layer", found)


if __name__ == "__main__":
    sys.exit(alone(__doc__, dilated, times))
