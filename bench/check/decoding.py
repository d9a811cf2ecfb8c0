"""Kernels of a decode step against the plain definitions in double precision; a part of kernels.py."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.kernels.triton import small_batch_linear as narrow
from allyouneed.kernels.triton import topk as likeliest
from allyouneed.kernels.triton.add_norm import add_norm
from allyouneed.kernels.triton.copy_blocks import copy_blocks
from allyouneed.kernels.triton.decode_attention import SplitConfig, decode_attention
from allyouneed.nn.ops.activations import ACTIVATIONS as ACTIVATION
from bench.check.report import LIMITS, Check, Sizes

# rows, heads, kv heads, width, positions, tokens per block (kernels/triton/decode_attention.py), splits of the keys,
# keys of a split at least
LOOKS = [
    (3, 4, 4, 8, 20, 0, 1),
    (3, 8, 2, 10, 130, 0, 2),
    (5, 8, 2, 64, 200, 1, 3),
    (4, 2, 2, 16, 90, 8, 2),
    (6, 2, 2, 16, 200, 0, 4, 64),  # of short rows, some splits have no keys
    (6, 4, 2, 16, 200, 0, 5, 96),
    (3, 2, 2, 16, 60, 0, 3, 128),
]
LARGE_LOOKS = [
    (64, 32, 4, 64, 500, 0, 1),
    (1, 32, 4, 64, 4000, 0, 16),
    (256, 8, 8, 64, 60, 1, 1),
    (7, 6, 2, 80, 300, 8, 3),
    (1, 12, 12, 64, 1000, 0, 11, 128),
]
# rows, outputs, inputs, gated, activation, parts
MAPS = [
    (1, 20, 48, False, "relu", 1),
    (1, 1, 48, False, "", 1),  # Triton knows a size of one when it compiles
    (5, 1, 40, False, "", 1),
    (1, 20, 96, False, "", 2),
    (5, 20, 40, True, "silu", 1),
    (70, 33, 100, False, "", 3),
    (1, 20, 48, True, "glu", 1),
    (5, 20, 40, True, "glu", 1),
]
LARGE_MAPS = [(1, 5632, 2048, True, "silu", 1), (64, 2048, 5632, False, "", 4), (7, 50257, 768, False, "gelu", 1),
              (300, 512, 2048, False, "", 2), (33, 2048, 512, False, "gelu-tanh", 1)]  # fmt: skip
ACTIVATIONS = {"": lambda x: x, **{name: ACTIVATION[name] for name in ("relu", "silu", "gelu", "gelu-tanh")}}


def check_decode_attention(check: Check, sizes: Sizes, dtype: torch.dtype, new: bool, turned: bool) -> None:
    """One query a row over keys that lie where the rows' tables say; what is stored on the way counts as well."""
    rows, heads, kv, width, places, every, shares, *least = sizes
    torch.manual_seed(places)
    slots, blocks = (places, rows) if every <= 1 else (every, rows * (places // every + 1))
    keys, values = torch.randn(2, blocks, kv, slots, width).to(check.device, dtype)
    seen = torch.randint(0, places - 1, (rows,))
    if every == 1:  # rows that share their pasts are of one length
        seen[:] = places - 5
        table = torch.randint(0, rows, (rows, places))
        table[:, places - 5] = torch.arange(rows)
    else:
        table = torch.randperm(blocks).view(rows, -1)
    parts = torch.randn(2, rows, heads + 2 * kv, width).to(check.device)  # that are still to be added up
    q, k, v = parts.split([heads, kv, kv], 2)
    angle = torch.randn(places, width // 2, dtype=torch.double)
    turns = torch.cat((angle.cos(), angle.sin()), -1).to(check.device)
    at = torch.arange(places)
    block = table[:, :1].expand(-1, places) if every == 0 else table[:, at // every]
    spot = at % slots
    whole = [cache[block.to(check.device), :, spot.to(check.device)].double() for cache in (keys, values)]
    exact = attention_by_definition(
        check, q.double().sum(0), k.double().sum(0), v.double().sum(0), *whole, seen, turns, new, turned
    )
    given_table = (table.int().to(check.device), seen.to(check.device), width**-0.5, every)
    own = turns[seen.to(check.device)].float() if turned else None
    out = decode_attention(q, keys, values, *given_table, (k, v) if new else None, own,
               cut=SplitConfig(shares, 32, 4, *least))  # fmt: skip
    mine = [cache[block.to(check.device), :, spot.to(check.device)] for cache in (keys, values)]
    kind = f"{'new' if new else 'kept'}{', turned' if turned else ''}"
    check.report(f"look {tuple(sizes)} {str(dtype)[6:]} {kind}", [out, *mine], exact, LIMITS[dtype])


def attention_by_definition(
    check: Check, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, turns: Tensor, new: bool,
    turned: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition: keys and values (rows, places, heads, width)."""
    rows, seen = torch.arange(len(seen), device=check.device), seen.to(check.device)
    if turned:
        cos, sin = turns[seen][:, None].chunk(2, -1)
        q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
    if new:
        keys[rows, seen], values[rows, seen] = k, v
    group = q.shape[1] // keys.shape[2]
    wide = [x.repeat_interleave(group, 2) for x in (keys, values)]
    scores = torch.einsum("rhw,rphw->rhp", q, wide[0]) * q.shape[-1] ** -0.5
    hidden = torch.arange(keys.shape[1], device=check.device) >= (seen + new)[:, None]
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num()
    return [torch.einsum("rhp,rphw->rhw", weights, wide[1]), keys, values]


def check_copy_blocks(
    check: Check, rows: int, heads: int, size: int, width: int, capacity: int, dtype: torch.dtype
) -> None:
    """Rows of a paged cache, the last without tokens, into a cache whose rows are in one piece."""
    torch.manual_seed(rows)
    entries = -(-capacity // size)
    storage = torch.randn(rows * entries + 1, heads, size, width).to(check.device, dtype)
    table = 1 + torch.randperm(rows * entries).view(rows, entries).to(check.device)
    slots, counts = torch.randperm(2 * rows)[:rows].to(check.device), torch.randint(1, capacity + 1, (rows,))
    counts[-1] = 0
    target = torch.zeros(2 * rows, heads, capacity, width, dtype=dtype, device=check.device)
    exact = target.double()
    copy_blocks(storage, table, target, slots, counts.to(check.device))
    for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        whole = storage[table[row]].transpose(0, 1).flatten(1, 2)[:, :count]
        target[slot, :, count:], exact[slot, :, :count] = 0, whole.double()
    name = f"copied blocks ({rows}, {heads}, {size}, {width}, {capacity}) {str(dtype)[6:]}"
    check.report(name, [target], [exact], LIMITS[dtype])


def check_small_batch_linear(check: Check, sizes: tuple[int, int, int, bool, str, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs, gated, activation, parts = sizes
    torch.manual_seed(rows)
    shapes = ((rows, inputs), (outputs * (1 + gated), inputs), (outputs * (1 + gated),))
    x, weight, bias = (torch.randn(shape).to(check.device, dtype) for shape in shapes)
    tile = narrow.tile_config(rows, outputs, inputs, gated, parts > 1)._replace(parts=parts)
    tile = tile if check.device == "cuda" else tile._replace(inputs=16, outputs=16)
    out = narrow.linear(x, weight, bias, activation, gated, parts > 1, tile)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    act, gate = ACTIVATIONS.get(activation, lambda x: x), torch.sigmoid if activation == "glu" else lambda x: x
    exact = act(exact[:, :outputs]) * gate(exact[:, outputs:]) if gated else act(exact)
    check.report(f"linear {sizes} {str(dtype)[6:]}", [out.sum(0) if parts > 1 else out], [exact], LIMITS[dtype])


def check_add_norm(check: Check, rows: int, width: int, centre: bool, parts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight, bias = (torch.randn(*shape).to(check.device, dtype) for shape in ((rows, width), (width,), (width,)))
    more = torch.randn(parts, rows, width, device=check.device)
    found = add_norm(x, more, weight, bias if centre else None, 1e-5, centre, offset=0.0 if centre else 1.0)
    total = (x.double() + more.double().sum(0)).to(dtype).double()
    if centre:
        exact = torch.nn.functional.layer_norm(total, (width,), weight.double(), bias.double())
    else:
        exact = torch.nn.functional.rms_norm(total, (width,), weight.double() + 1, 1e-5)
    name = f"{'layer' if centre else 'rms'} norm of a sum ({rows}, {width}, {parts} parts) {str(dtype)[6:]}"
    check.report(name, found, [total, exact], LIMITS[dtype])


def check_rotary(check: Check, sizes: Sizes, dtype: torch.dtype, interleaved: bool) -> None:
    from allyouneed.kernels.triton.rotary import rotate

    batch, heads, time, width = sizes
    x = torch.randn(batch, time, 3 * heads * width, device=check.device, dtype=dtype)[..., : heads * width]
    x = x.unflatten(-1, (heads, width)).transpose(1, 2)  # as queries lie among keys and values
    table = torch.randn(2, batch if batch % 2 else 1, 1, time, width // 2, device=check.device)
    (cos, sin), wide = table.double(), x.double()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    exact = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    name = f"turned {sizes} {str(dtype)[6:]} {'in turns' if interleaved else 'halves'}"
    check.report(name, [rotate(x, table, interleaved)], [exact], LIMITS[dtype])


def check_topk(check: Check, rows: int, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    scores = (torch.randperm(rows * vocab).view(rows, vocab) / vocab).to(check.device)  # no two are equal
    scores = scores.to(dtype) if dtype == torch.float32 else scores
    bans = torch.zeros(2, vocab, device=check.device)
    bans[:, 3], bans[1, vocab // 2 :] = -torch.inf, -torch.inf
    ages = torch.arange(rows, device=check.device) % 7
    allowed = (scores + bans[(ages < 3).long()]).double()
    mass = scores.double().logsumexp(-1, keepdim=True)
    best, tokens = allowed.topk(4)
    newest, record = torch.zeros_like(ages), torch.zeros(8, 2, rows, device=check.device)
    older = ages.clone()
    likeliest.argmax_step(scores, bans, older, 3, newest, record, torch.full((1,), 5, device=check.device))
    found = [newest, record[5, 1], older, *likeliest.topk(scores, bans, ages, 3, 4)]
    exact = [tokens[:, 0].double(), best[:, 0] - mass[:, 0], (ages + 1).double(), best, tokens.double(), mass]
    check.report(f"likeliest ({rows}, {vocab})", found, exact, LIMITS[torch.float32])


def decoding(check: Check, cuda: bool) -> None:
    half = torch.bfloat16 if cuda else torch.float16
    print("what is seen, keys and values afterwards")
    for sizes in LOOKS + (LARGE_LOOKS if cuda else []):
        for dtype in (torch.float32, half):
            for new, turned in ((True, True), (True, False), (False, False)):
                check_decode_attention(check, sizes, dtype, new, turned)
    for copied in ((3, 2, 4, 10, 30), (5, 1, 8, 16, 64), *(((256, 4, 8, 64, 512),) if cuda else ())):
        for dtype in (torch.float32, half):
            check_copy_blocks(check, *copied, dtype)
    print("linear maps, norms, likeliest tokens")
    for one in MAPS + (LARGE_MAPS if cuda else []):
        check_small_batch_linear(check, one, half)
    for rows, width, centre, parts in ((4, 24, True, 3), (1, 2048, False, 2), (64, 512, True, 4)):
        for dtype in (torch.float32, half):
            check_add_norm(check, rows, width, centre, parts, dtype)
    for sizes in ((2, 3, 5, 8), (3, 5, 33, 20), *(((64, 32, 127, 64),) if cuda else ())):
        for dtype in (torch.float32, half):
            check_rotary(check, sizes, dtype, False)
            check_rotary(check, sizes, dtype, True)
    for rows, vocab in ((5, 100), (3, 5000), *(((64, 50257),) if cuda else ())):
        check_topk(check, rows, vocab, torch.float32)
