"""Kernels of gated attention units against their definitions in double precision, for kernels.py: several tiles
of keys and of values, splits of the keys, block tables, and the ends of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels.triton.mixer_steps.gated import GatedParts, chunk_scores, gau_step, mixed_chunk_step
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.gau import GAU, MixedChunk
from bench.check.report import LIMITS, Check

# rows, key features, values, tokens per block (kernels/triton/decode_attention.py), tokens at most, splits, positions
UNITS = [(3, 20, 70, 0, 140, 3, "both"), (3, 6, 10, 1, 70, 1, "bias"), (5, 40, 200, 4, 90, 2, "rotary")]
WIDE_UNITS = [(17, 20, 200, 0, 40, None, "both"), (64, 20, 300, 0, 40, None, "both")]
LARGE_UNITS = [(64, 128, 1536, 0, 300, None, "both"), (64, 128, 1530, 1, 100, None, "both")]
# rows, key features, values, tokens of a chunk, steps, positions
CHUNKS = [(3, 20, 70, 5, 12, "both"), (5, 6, 10, 3, 8, "bias"), (2, 40, 130, 37, 40, "rotary")]
WIDE_CHUNKS = [(17, 20, 200, 9, 12, "both")]
LARGE_CHUNKS = [(64, 128, 1536, 128, 260, "both"), (1, 128, 1536, 128, 260, "both")]


def parts_of(module: Any, count: int, dtype: torch.dtype) -> GatedParts:
    """The parts for `count` positions."""
    at, turns, numbers, biases = torch.arange(count, device=module.gains.device), None, None, None
    if module.rotary is not None:
        table = module.rotary.tables(at[None], torch.float32)[0][:, 0, 0]  # (2, positions, s / 2)
        turns = torch.cat(tuple(table), -1)
    if module.bias is not None:
        numbers = module.bias.numbers(at[None], torch.zeros_like(at[None, :1])).flatten().int()
        biases = module.bias.table.weight.to(dtype)
    return GatedParts(module.gains.to(dtype), module.offsets.to(dtype), turns, numbers, biases, 0)


def filled(config: Any, dtype: torch.dtype) -> Any:
    """The module in double precision, with weights that `dtype` can hold."""
    module = config.build(Common(width=4))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.to(dtype).double()


def unit(check: Check, sizes: Sequence[Any], dtype: torch.dtype) -> None:
    rows, width, values, every, most, shares, positions = sizes
    torch.manual_seed(most)
    module = filled(GAU(pattern="causal", hidden=values, key_width=width, positions=positions), dtype)
    row, at = torch.arange(rows), torch.arange(most).expand(rows, most)
    seen = row * (most - 1) // (rows - 1)
    blocks, slots = (rows, most) if every <= 1 else (rows * -(-most // every), every)
    table = torch.randperm(blocks).int().view(rows, -1)
    if every == 1:  # tokens of any rows, but the newest of its own
        table = torch.randint(0, rows, (rows, most), dtype=torch.int32)
        table[row, seen] = row.int()
    uvz = torch.randn(rows, 2 * values + width).to(dtype)
    k, v = (torch.randn(blocks, 1, slots, n).to(dtype) for n in (width, values))
    arrived = torch.zeros(rows * values, dtype=torch.int32)
    uvz, table, seen, at, k, v, arrived = (x.to(check.device) for x in (uvz, table, seen, at, k, v, arrived))
    gated = parts_of(module.to(check.device), most, dtype)
    gated = gated._replace(turns=None if gated.turns is None else gated.turns[seen])
    exact_k, exact_v = k.double(), v.double()
    found = gau_step(uvz, gated, k, v, table, seen, every, arrived, shares)
    assert not arrived.any(), "counters are not zero again"

    u, new, z = uvz.double().split(module.parts, -1)
    q, own = (module.rotate(module.scaled(z[:, None], n), seen[:, None]) for n in (0, 1))  # (rows, 1, s)
    block, slot = (table.expand(rows, most), at) if every <= 1 else (table.gather(1, at // every), at % every)
    place = block.gather(1, seen[:, None])[:, 0], 0, slot.gather(1, seen[:, None])[:, 0]
    exact_k[place], exact_v[place] = own[:, 0], new
    mask = (at <= seen[:, None])[:, None, None]  # (rows, 1, 1, most)
    scores = q[:, None] @ exact_k[block, 0, slot][:, None].mT
    weights = module.weights(scores, mask, mask.sum(-1, keepdim=True), seen[:, None], at)
    exact = u * (weights[:, 0] @ exact_v[block, 0, slot])[:, 0]
    check.report(f"gau {sizes} {str(dtype)[6:]}", [found, k, v], [exact, exact_k, exact_v], LIMITS[dtype])


def chunks(check: Check, sizes: Sequence[Any], dtype: torch.dtype) -> None:
    rows, width, values, chunk, steps, positions = sizes
    torch.manual_seed(steps)
    module = filled(MixedChunk(chunk=chunk, hidden=values, key_width=width, positions=positions), dtype)
    gated = parts_of(module.to(check.device), steps + chunk, dtype)
    count, current, sums = module.begin(rows, torch.zeros(1, dtype=dtype, device=check.device))
    count += 2 * torch.arange(rows, device=check.device).int()[:, None] % chunk  # rows are not at the same token
    carry: Any = (count.clone(), current.double(), sums.double())
    arrived = torch.zeros(rows * values, dtype=torch.int32, device=check.device)
    outputs: list[Tensor] = []
    wanted: list[Tensor] = []
    for _ in range(steps):
        uvz = torch.randn(rows, 2 * values + width).to(check.device, dtype)
        u, v, z = uvz.split(module.parts, -1)
        scores = chunk_scores(z, gated, count, current)
        outputs.append(mixed_chunk_step(u, v, scores, gated.length, count, current, sums, arrived))
        u, v, z = uvz.double()[:, None].split(module.parts, -1)
        seen, carry = module.run(z, v, carry, None)
        wanted.append((u * seen)[:, 0])
    assert not arrived.any() and torch.equal(count, carry[0]), "counts differ"
    known = torch.arange(chunk, device=check.device) < count % chunk  # others are of the chunk before
    found = [torch.stack(outputs), current * known[..., None], sums]
    exact = [torch.stack(wanted), *carry[1:]]
    check.report(f"mixed chunks {sizes} {str(dtype)[6:]}", found, exact, LIMITS[dtype])


def gated_units(check: Check, cuda: bool) -> None:
    print("gated attention units: outputs, keys and values, or chunk and sums")
    # the interpreter multiplies no bfloat16
    for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
        with torch.no_grad():
            for sizes in UNITS + WIDE_UNITS + (LARGE_UNITS if cuda else []):
                unit(check, sizes, dtype)
            for sizes in CHUNKS + WIDE_CHUNKS + (LARGE_CHUNKS if cuda else []):
                chunks(check, sizes, dtype)
