"""Training kernels of attention against the definitions in double precision: outputs and gradients, also those of a
bias by distance. Part of kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels.triton.training.tiled_attention import tiled_attention
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.block_mask import BlockLayout
from allyouneed.nn.ops.attention.dense import ScoreMod, attention_weights, dense_mask, repeat_kv
from allyouneed.nn.ops.attention.select import block_layouts
from allyouneed.nn.ops.attention.tiled import Tiled
from allyouneed.nn.patterns.core import Pattern
from bench.check.report import LIMITS, Check, random_starts

# pattern, batch, heads, key-value heads, time, width, width of values, block, bias (constant from this distance on, 0:
# none), segments of rows
TILES: list[tuple[Any, ...]] = [
    ("causal", 2, 2, 2, 70, 16, 16, 16, 20, "none"),
    ("full", 2, 4, 2, 60, 20, 12, 16, 9, "none"),
    ("causal", 2, 2, 1, 80, 16, 16, 16, 12, "packed"),
    ("full", 2, 2, 2, 70, 16, 16, 16, 17, "padded"),
    ("full", 1, 2, 2, 50, 16, 16, 32, 99, "none"),
]
TILES += [
    ("causal & (window(9) | strided(9))", 2, 2, 1, 90, 16, 16, 16, 0, "none"),
    ("block-window(8, 2) | global-prefix(8) | random-blocks(8, 2, 0)", 1, 2, 2, 70, 16, 20, 16, 0, "none"),
    ("causal & dilated(40, 4)", 1, 2, 2, 75, 16, 16, 16, 0, "none"),
]
LARGE_TILES: list[tuple[Any, ...]] = [
    ("causal", 3, 4, 4, 1024, 64, 64, 128, 128, "none"),
    ("full", 2, 4, 2, 1000, 64, 48, 128, 40, "padded"),
    ("causal", 2, 4, 4, 777, 128, 128, 128, 128, "packed"),
    ("causal", 1, 2, 2, 4096, 64, 64, 128, 128, "none"),
    ("causal & (window(32) | strided(32))", 2, 4, 4, 1024, 64, 64, 64, 0, "none"),
    ("block-window(64, 2) | global-prefix(64) | random-blocks(64, 3, 0)", 1, 2, 2, 2000, 64, 64, 64, 0, "none"),
    ("causal & dilated(256, 8)", 2, 4, 2, 1500, 64, 64, 64, 0, "none"),
]


def tiled_attentions(check: Any, cuda: bool) -> None:
    print("attention over tiles")
    for sizes in TILES + (LARGE_TILES if cuda else []):
        for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
            tiles(check, sizes, dtype)


def rows_of(kind: str, batch: int, time: int, device: str) -> TokenLayout:
    tokens = torch.zeros(batch, time, dtype=torch.long, device=device)
    if kind == "none":
        return TokenLayout.of(Rows(tokens))
    if kind == "padded":
        return TokenLayout.of(Rows(tokens, torch.tensor([time - 7 * n for n in range(batch)]), side="left"))
    ends = torch.tensor([[time // 5 + 3 * n, time // 2, time - 9] for n in range(batch)], device=device)
    step = torch.arange(time, device=device)
    segments = 1 + (step[None, :, None] >= ends[:, None]).sum(-1)
    return TokenLayout.of(Rows(tokens, segments=segments.where(segments < 4, 0)))


def tiles(check: Any, sizes: tuple[Any, ...], dtype: torch.dtype) -> None:
    text, batch, heads, kv, time, width, values, block, biased, kind = sizes
    torch.manual_seed(time)
    pattern, layout = Pattern.from_text(text), rows_of(kind, batch, time, check.device)
    shapes = ((heads, width), (kv, width), (kv, values))
    given = [torch.randn(batch, time, n, w).transpose(1, 2).to(dtype) for n, w in shapes]
    bias = [2 * torch.randn(heads, 2 * biased + 1)] if biased else []
    real = torch.ones(1, time, device=check.device) if layout.real is None else layout.real
    g = torch.randn(batch, heads, time, values).to(check.device) * real[:, None, :, None]
    parts = [BlockLayout(pattern, layout, layout, block)] if biased else block_layouts(pattern, layout, layout, block)
    plan = Tiled(pattern, parts, layout, lambda: None, biased or None)  # type: ignore[arg-type,return-value]
    step = torch.arange(1 - time, time, device=check.device)
    distance = step[time - 1 :, None] - step[time - 1 :] + time - 1

    def run(wide: torch.dtype, exact: bool) -> list[Tensor]:
        q, k, v = (check.leaf(x, wide) for x in given)
        leaves = [check.leaf(x, torch.float64 if exact else torch.float32) for x in bias]
        table = [x[:, step.clamp(-biased, biased) + biased] for x in leaves]  # by distance
        if exact:
            mod = ScoreMod(width**-0.5, bias=lambda *_: table[0][:, distance])
            mod = mod if table else ScoreMod(width**-0.5)
            mask = dense_mask(pattern, layout, layout)
            out = attention_weights(q, k, mask, layout.positions, layout.positions, mod) @ repeat_kv(v, heads)
        else:
            how = (width**-0.5, block, plan.causal, plan.masked_by, plan.near)
            out = tiled_attention(q, k, v, *(table or [None]), plan.segments, plan.plan, *how)
        out = out * real[:, None, :, None]
        return [out, *torch.autograd.grad((out.double() * g).sum(), [q, k, v, *leaves])]

    limits = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
    name = f"{text[:20]} {sizes[1:8]} {str(dtype)[6:]}{', bias' * bool(biased)}, {kind}"
    check.report(name, run(dtype, False), run(torch.float64, True), limits[dtype])


# batch, heads, time, width, features, relu, padded
FEATURES: list[tuple[Any, ...]] = [
    (2, 2, 70, 16, 24, False, False),
    (1, 2, 40, 12, 40, True, False),
    (2, 1, 50, 8, 130, False, True),
]
LARGE_FEATURES: list[tuple[Any, ...]] = [
    (2, 12, 1024, 64, 256, False, False),
    (1, 2, 5000, 128, 266, False, True),
    (2, 3, 777, 64, 256, True, False),
]


def performers(check: Any, cuda: bool) -> None:
    print("Performer")
    for sizes in FEATURES + (LARGE_FEATURES if cuda else []):
        for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
            performer_attention(check, sizes, dtype)
            performer_attention(check, sizes, dtype, packed=True)


def performer_attention(check: Any, sizes: tuple[Any, ...], dtype: torch.dtype, packed: bool = False) -> None:
    from allyouneed.nn.common import Common
    from allyouneed.nn.mixers.performer import Performer

    batch, heads, time, width, features, relu, padded = sizes
    torch.manual_seed(time)
    config = Performer(heads=heads, features=features, kernel="relu" if relu else "softmax")
    part: Any = config.build(Common(width=heads * width)).to(check.device)
    given = [torch.randn(batch, time, heads, width).transpose(1, 2).to(dtype) for _ in range(3)]
    g = torch.randn(batch, heads, time, width).to(check.device)
    ends = torch.tensor([time - 9 - 8 * n for n in range(batch)], device=check.device)
    real = torch.arange(time, device=check.device) < ends[:, None] if padded and not packed else None
    starts = random_starts(batch, time, check.device) if packed else None

    def run(wide: torch.dtype, exact: bool) -> list[Tensor]:
        q, k, v = (check.leaf(x, wide) for x in given)
        begin = part.begin(batch, q.transpose(1, 2).flatten(2))
        if not exact:
            y = part.attend_fused(q, k, v, real, dtype, starts)
        elif starts is not None:
            y = part.attend_packed(q, k, v, starts, begin[0], None)
        else:
            y = part.attend_causal(q, k, v, real, begin)[0]
        return [y, *torch.autograd.grad((y.double() * g).sum(), [q, k, v])]

    limits = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # exponents amplify the rounding of fp32
    name = (
        f"performer {sizes[:5]} {str(dtype)[6:]}{', relu' * relu}{', padded' * (real is not None)}{', packed' * packed}"
    )
    check.report(name, run(dtype, False), run(torch.float64, True), limits[dtype])


def packed_rows(check: Check, cuda: bool) -> None:
    """Packed rows in one tile: what is seen, and the gradients of q, k, v."""
    from allyouneed.nn.ops.attention import short_rows

    print("packed rows: what is seen, gradients of q, k, v")
    sizes = [(2, 4, 2, 20, 33, 16, 32), (1, 2, 2, 7, 7, 64, 16), (1, 4, 2, 100, 70, 16, 16), (2, 4, 2, 70, 70, 16, 16)]
    for batch, heads, own, queries, keys, width, values in [*sizes, *([(192, 8, 8, 128, 128, 64, 64)] if cuda else [])]:
        for causal in (False, True):
            torch.manual_seed(queries)
            dtype = torch.bfloat16 if cuda else torch.float16  # the interpreter multiplies no bfloat16
            shapes = (heads, queries, width), (own, keys, width), (own, keys, values), (heads, queries, values)
            given = [torch.randn(batch, h, t, w).to(check.device, dtype) for h, t, w in shapes]
            marks = [torch.arange(t, device=check.device, dtype=torch.int32).expand(batch, t) for t in (queries, keys)]
            both = [((mark + 5) // 6 % 5).contiguous() for mark in marks] + [(mark % 6).contiguous() for mark in marks]
            exact = [x.cpu().double().requires_grad_() for x in given[:3]]
            marks = [x.cpu() for x in both]
            wanted, _ = short_rows.attend(*exact, *marks, causal, width**-0.5)
            slopes = torch.autograd.grad((wanted * given[3].cpu().double()).sum(), exact)
            usual = short_rows.usable
            if not cuda:
                short_rows.usable = lambda x: True
            found, lse = short_rows.attend(*given[:3], *both, causal, width**-0.5)
            grads = list(short_rows.attend_backward(given[3], *given[:3], *both, causal, width**-0.5, lse))
            if queries == keys and width == values:  # side by side, and their sums
                qkv = torch.cat([x.transpose(1, 2).flatten(2) for x in given[:3]], -1)
                grads += short_rows.attend_qkv_backward(
                    given[3], qkv, [heads, own, own], both[0], both[2], causal, width**-0.5, lse
                )
                packed = torch.cat([x.transpose(1, 2).flatten(2) for x in slopes], -1)
                slopes = *slopes, packed, packed.sum((0, 1))
                grads[-1] = grads[-1].sum(0)
            short_rows.usable = usual
            name = f"rows {(batch, heads, own, queries, keys, width, values)}{' causal' if causal else ''}"
            check.report(name, [x.cpu() for x in (found, *grads)], [wanted.detach(), *slopes], LIMITS[torch.bfloat16])
