"""A block compiles to one graph for all batches: no data-dependent control flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed import build
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.mixers.attention import attention
from allyouneed.nn.models.block import Block
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.ops.attention import select as attend
from allyouneed.nn.ops.attention.block_mask import BlockLayout
from allyouneed.nn.ops.attention.flex import Flex
from allyouneed.nn.patterns.core import Causal, Full

SMALL = ["width=32", "vocab=50", "dropout=0.0"]
MODELS: dict[str, list[str]] = {
    "gpt2": ["decoder[0].repeat=3", "decoder[0].mixer.heads=2", "decoder[0].mixer.dropout=0.0"],
    "llama-15m": ["decoder[0].repeat=2", "decoder[0].mixer.heads=2", "decoder[0].mixer.kv_heads=1"],
    "transformer-base": [
        "encoder[0].repeat=2",
        "decoder[0].repeat=2",
        "encoder[0].mixer.heads=2",
        "decoder[0].mixer.heads=2",
        "decoder[0].cross.heads=2",
    ],
}


def rows(length: int, packed: bool) -> Rows:
    tokens = torch.randint(3, 50, (2, 256))
    if not packed:
        return Rows(tokens)
    segments = (torch.arange(256) // length + 1).repeat(2, 1)
    segments[:, -7:] = 0
    return Rows(tokens, segments=segments)


def as_on_a_gpu(pattern: Any, queries: TokenLayout, keys: TokenLayout, manner: Any) -> Any:
    """Packed rows by FlexAttention, which torch can also run on CPU."""
    if not queries.packed:
        return attend.select_attention(pattern, queries, keys, manner)
    return Flex(attend.block_layouts(pattern, queries, keys, 128, rounded=True), lambda: pytest.fail("no need"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_layers_and_batches(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = build(name, [*SMALL, *MODELS[name]]).eval()
    batches = []
    for length in (20, 33, 17):
        source = rows(length + 3, packed) if hasattr(model, "encode") else None
        batches.append(Batch(rows(length, packed), source))
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
        graphs = []
        monkeypatch.setattr(attention, "select_attention", as_on_a_gpu)

        def counted(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        for module in model.modules():
            if isinstance(module, Stack):
                module.plans_ahead = True
            if isinstance(module, Block):
                assert module.traceable
                module.compile(backend=counted, fullgraph=True, dynamic=False)
        for batch, wanted in zip(batches, expected, strict=True):
            found = model(batch)
            segments = batch.rows.segments
            real = torch.ones_like(batch.rows.tokens, dtype=torch.bool) if segments is None else segments > 0
            assert (found - wanted)[real].abs().max() < 1e-5
    assert len(graphs) == (2 if name == "transformer-base" else 1)


@pytest.mark.parametrize("pattern", [Causal(), Full()])
def test_a_grid_of_tiles_says_what_the_search_finds(pattern: Any):
    layout = [TokenLayout.of(rows(length, True)) for length in (20, 150)]
    for queries, keys in ((layout[0], layout[0]), (layout[0], layout[1])):
        part = BlockLayout(pattern, queries, keys, 64, rounded=True)
        some, every = part.grid()
        assert some.nonzero().tolist() == torch.stack((part.row, part.q, part.k), 1).tolist()
        assert every[part.row, part.q, part.k].tolist() == part.full.tolist()
