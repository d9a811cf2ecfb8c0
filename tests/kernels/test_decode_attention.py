"""Attention of one new token: its definition against plain attention, and paged decoding with the kernel's calling
convention. The kernel itself is checked by bench/check/kernels.py."""

from __future__ import annotations

import sys
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.config import override, parse, preset_tree
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.attention import decode
from allyouneed.nn.ops.attention.decode import BlockTable, define_decode_attention
from allyouneed.nn.states import paged
from allyouneed.runtime.cpu import executor

CALLS: list[int] = []


def reference_kernel(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, every: int,
    new: tuple[Tensor, Tensor], *_: None,
) -> Tensor:  # fmt: skip
    """One query (rows, heads, width) over blocks (blocks, kv heads, size, width), row by row."""
    CALLS.append(len(q))
    found = []
    for row, count in enumerate(seen.tolist()):
        for cache, one in zip((keys, values), new, strict=True):
            cache[table[row, count // every], :, count % every] = one[row]
        k, v = (cache[table[row]].transpose(0, 1).flatten(1, 2)[:, : count + 1] for cache in (keys, values))
        found.append(sdpa(q[row][:, None], k, v, scale=scale, enable_gqa=True)[:, 0])
    return torch.stack(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("allyouneed.kernels.triton.decode_attention")
    module.decode_attention = reference_kernel
    monkeypatch.setitem(sys.modules, "allyouneed.kernels.triton.decode_attention", module)
    for place in (paged, decode):
        monkeypatch.setattr(place, "usable", lambda _: True)
    monkeypatch.setattr(executor, "native_library", lambda: None)  # torch decodes, as on a GPU
    monkeypatch.setattr(executor, "wait_for_build", lambda: None)
    CALLS.clear()


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_blocks_read_in_place_give_the_same_tokens_as_gathered_ones(kernel: None, method: str) -> None:
    torch.manual_seed(0)
    sizes = ["vocab=61", "width=32", "decoder[0].repeat=2", "decoder[0].mixer.heads=4", "decoder[0].mixer.kv_heads=2"]
    model: Any = parse(Model, override(preset_tree("llama-15m"), sizes)).build().eval()  # type: ignore[type-abstract]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    engine, dice = Engine(model, 1, 2, 0, [0, 1]), Random(1)
    way = Decoding(method=method, max_length=20, **({"beam": 3} if method == "beam" else {}))  # type: ignore[arg-type]
    prompts = [[1, *(dice.randrange(3, 61) for _ in range(dice.randrange(20)))] for _ in range(12)]
    requests = [Request(prompt, 20, (n,)) for n, prompt in enumerate(prompts)]
    plain = engine.decode(requests, way)
    assert not CALLS
    scheduler = Scheduler(engine.runner, rows=9, pool=paged.BlockPool(blocks=60))
    states = [scheduler.submit(request, way) for request in requests]
    scheduler.run()
    assert CALLS
    assert [[h.tokens for h in state.answer or []] for state in states] == [[h.tokens for h in a] for a in plain]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4])
def test_the_definition_is_softmax_attention_over_what_the_table_names(size: int, rotated: bool) -> None:
    torch.manual_seed(size)
    rows, heads, kv_heads, width, capacity, scale = 5, 4, 2, 6, 12, 0.3
    q, k, v = (torch.randn(rows, n, width, dtype=torch.double) for n in (heads, kv_heads, kv_heads))
    # rows that share blocks (beams) have as many tokens: none reads what another one writes
    lengths, dice = torch.tensor([7] * rows if size == 1 else [0, 3, 7, 10, 11]), Random(size)
    blocks, slots = (rows, capacity) if size < 2 else (rows * capacity // size, size)
    keys, values = torch.randn(2, blocks, kv_heads, slots, width, dtype=torch.double)
    if size == 0:
        table = torch.tensor(dice.sample(range(rows), rows))[:, None]
    elif size == 1:
        table = torch.randint(rows, (rows, capacity)).where(torch.arange(capacity) < lengths[:, None], -1)
        table = torch.where(table < 0, torch.arange(rows)[:, None], table)
    else:
        table = torch.tensor(dice.sample(range(blocks), blocks)).view(rows, -1)
    angles = torch.randn(rows, width // 2, dtype=torch.double)
    rotation = torch.cat((angles.cos(), angles.sin()), -1) if rotated else None
    before = keys.clone(), values.clone()
    found = define_decode_attention(q, keys, values, lengths, scale, BlockTable(table, size), (k, v), rotation)

    def turn(x: Tensor, row: int) -> Tensor:
        pairs = torch.complex(x[:, : width // 2], x[:, width // 2 :]) * torch.polar(torch.ones(3).double(), angles[row])
        return torch.cat((pairs.real, pairs.imag), -1)

    for row, count in enumerate(lengths.tolist()):
        places = [(table[row, 0 if size == 0 else p // size], p % size if size > 1 else p) for p in range(count)]
        query, new = (turn(q[row], row), turn(k[row], row)) if rotated else (q[row], k[row])
        past, seen = ([cache[block, :, slot] for block, slot in places] for cache in before)
        all_keys, all_values = (
            torch.stack([*past, new], 1),
            torch.stack([*seen, v[row]], 1),
        )  # (kv_heads, tokens, width)
        for head in range(heads):
            weights = (all_keys[head // 2] @ query[head] * scale).softmax(0)
            torch.testing.assert_close(found[row, head], weights @ all_values[head // 2])


def test_rows_that_share_a_block_need_no_gather() -> None:
    torch.manual_seed(0)
    q, (keys, values) = torch.randn(6, 4, 8), torch.randn(2, 3, 2, 10, 8)
    lengths, owners = torch.tensor([4, 4, 1, 1, 10, 10]), torch.arange(6)[:, None] // 2
    direct = define_decode_attention(q, keys, values, lengths, 0.5, BlockTable(owners, 0, 2))
    looked_up = define_decode_attention(q, keys, values, lengths, 0.5, BlockTable(owners, 0))
    torch.testing.assert_close(direct, looked_up)
