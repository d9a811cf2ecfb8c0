"""Where there is a kernel, blocks are read where they lie; answers stay what they are. The kernel itself is held to its
definition by bench/check_kernels.py; here stands the definition."""

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
from allyouneed.nn.states import paged

CALLS: list[int] = []


def look(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, every: int,
    new: tuple[Tensor, Tensor],
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
    module.decode_attention = look
    monkeypatch.setitem(sys.modules, "allyouneed.kernels.triton.decode_attention", module)
    monkeypatch.setattr(paged, "usable", lambda _: True)
    CALLS.clear()


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_says_what_gathered_blocks_say(kernel: None, method: str) -> None:
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
    scheduler = Scheduler(engine, rows=9, pool=paged.BlockPool(blocks=60))
    states = [scheduler.submit(request, way) for request in requests]
    scheduler.run()
    assert CALLS
    assert [[h.tokens for h in state.answer or []] for state in states] == [[h.tokens for h in a] for a in plain]
