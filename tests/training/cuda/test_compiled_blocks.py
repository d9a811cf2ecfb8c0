"""A block compiles to one graph for all batches: no data-dependent control flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from allyouneed import build
from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.mixers.attention import attention, infini
from allyouneed.nn.mixers.attention.longnet import LongNetAttention
from allyouneed.nn.models.block import Block
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.ops import unpack
from allyouneed.nn.ops.attention import by_distance
from allyouneed.nn.ops.attention import select as attend
from allyouneed.nn.ops.attention.block_mask import BlockLayout
from allyouneed.nn.ops.attention.flex import Flex
from allyouneed.nn.patterns.core import Causal, Full
from allyouneed.nn.positions.alibi import AlibiModule
from allyouneed.nn.sublayer import Mixer, SubLayer
from allyouneed.training.backend import Backend

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


Run = Callable[[Any, Any], Any]


def recording(graphs: list[Any], run: Run = lambda graph, inputs: graph) -> Run:
    """A compiler's backend that notes the graphs it gets."""
    return lambda graph, inputs: graphs.append(graph) or run(graph, inputs)


def compile_blocks(model: Any) -> list[Any]:
    """The graphs of all blocks, as they are compiled."""
    graphs: list[Any] = []
    backend = recording(graphs)  # the same for all: another one would make another graph
    for module in model.modules():
        if isinstance(module, Stack):
            module.plans_ahead = True
        if isinstance(module, AlibiModule):  # as `prepare` does on a GPU
            module.device_slopes = torch.tensor(module.slopes)
        if isinstance(module, Block):
            module.compile(backend=backend, fullgraph=True, dynamic=False)
    return graphs


def compile_for_training(model: Any, patch: pytest.MonkeyPatch, *run: Run) -> list[Any]:
    """The same as the training backend compiles them."""
    graphs: list[Any] = []
    whole = partialmethod(torch.nn.Module.compile, backend=recording(graphs, *run), fullgraph=True)
    patch.setattr(torch.nn.Module, "compile", whole)
    Backend(torch.device("cpu"), bf16=False, compiled=True, summary="").compile_model(model)
    return graphs


def check_equal(model: Any, batches: list[Batch], expected: list[torch.Tensor]) -> None:
    """Where there are tokens."""
    for batch, wanted in zip(batches, expected, strict=True):
        segments = batch.rows.segments
        real = torch.ones_like(batch.rows.tokens, dtype=torch.bool) if segments is None else segments > 0
        assert (model(batch) - wanted)[real].abs().max() < 1e-5


def as_on_a_gpu(pattern: Any, queries: TokenLayout, keys: TokenLayout, manner: Any, static: bool = False) -> Any:
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
    assert all(block.traceable for block in model.modules() if isinstance(block, Block))
    batches = []
    for length in (20, 33, 17):
        source = rows(length + 3, packed) if hasattr(model, "encode") else None
        batches.append(Batch(rows(length, packed), source))
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
        monkeypatch.setattr(attention, "select_attention", as_on_a_gpu)
        graphs = compile_blocks(model)
        check_equal(model, batches, expected)
    assert len(graphs) == (2 if name == "transformer-base" else 1)


HEADS = {"heads": 2}
CAUSAL = HEADS | {"pattern": "causal"}
MIXERS: dict[str, dict[str, Any]] = {
    "mla": CAUSAL | {"kv_rank": 12, "nope_width": 8, "rope_width": 8, "value_width": 16},
    "retention": HEADS,
    "gated-retention": HEADS,
    "rwkv": {},
    "mamba2": {"heads": 4, "state": 8},
    "performer": HEADS | {"features": 16},
    "infini": HEADS | {"segment": 100, "positions": {"kind": "rotary"}},
    "mixed-chunk": {"chunk": 100, "key_width": 8},
    "longnet": HEADS | {"segments": [64, 256], "dilations": [1, 4]},
    "alibi": {"kind": "attention", "positions": "alibi"} | CAUSAL,
    "t5": {"kind": "attention", "positions": "buckets"} | CAUSAL,
    "shaw": {"kind": "attention", "positions": {"kind": "shaw", "distance": 9}} | CAUSAL,
    "gau": {"pattern": "causal", "key_width": 8},
    "sparse": {"kind": "attention", "pattern": "causal & (window(16) | strided(16))"} | HEADS,
    "bigbird": {"kind": "attention", "pattern": "causal & (global-prefix(16) | random-blocks(16, 3, 0))"} | HEADS,
}


def flex_on_a_gpu(pattern: Any, queries: TokenLayout, keys: TokenLayout, mod: Any, static: bool = False) -> Any:
    """FlexAttention for what the compiled step of a GPU gives it."""
    if mod.by_query is not None:
        return attend._general(pattern, queries, keys, mod)
    by_kernel = mod.plain or mod.pair_bias is not None
    plan = attend.flex if (by_kernel and str(pattern) != "causal") or mod.pair_bias is not None else None
    return attend.select_attention(pattern, queries, keys, mod) if plan is None else plan(pattern, queries, keys)


FAST = ("gated-retention", "longnet", "t5")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in MIXERS])
def test_one_graph_for_all_layers_of_a_mixer(name: str, monkeypatch: pytest.MonkeyPatch):
    """The plain definitions in place of the kernels, which are single operators."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = {"repeat": 2, "mixer": {"kind": name} | MIXERS[name], "channel": {"kind": "ffn", "hidden": 32}}
    model: Any = build({"kind": "decoder", "vocab": 50, "width": 32, "decoder": [layer]}).eval()
    batches = [Batch(rows(0, False)) for _ in range(2)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
        monkeypatch.setattr(attention, "select_attention", flex_on_a_gpu)
        monkeypatch.setattr(by_distance, "has_kernels", lambda layout: True)
        monkeypatch.setattr(LongNetAttention, "select", LongNetAttention.dilated)
        graphs = compile_blocks(model)
        check_equal(model, batches, expected)
    assert len(graphs) == 1


SLIDING = {"size": 3, "sees": "past"}
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "convolution": SLIDING,
    "lightweight-convolution": SLIDING | HEADS,
    "dynamic-convolution": SLIDING | HEADS,
    "branches": {"left": {"kind": "convolution"} | SLIDING, "right": {"kind": "rwkv-channel", "hidden": 32}},
}
RESTARTING = [
    name
    for name, keys in (MIXERS | CONVOLUTIONS).items()
    if parse(Mixer, {"kind": name} | keys).build(Common(width=32)).unpacks  # type: ignore[type-abstract]
]
BY_DISTANCE: dict[str, dict[str, Any]] = {
    "shaw": MIXERS["shaw"],
    "transformer-xl": {"kind": "attention", "positions": "transformer-xl"} | CAUSAL,
    "lsh": HEADS | {"buckets": 4},
    "gau": MIXERS["gau"],
}
QUICK = ("performer", "shaw")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in [*RESTARTING, *BY_DISTANCE]]
)
def test_one_graph_for_packed_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, forward and backward: rows stay packed, so that their shapes are those of all batches."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    mixer, channel = (
        {"kind": name} | (MIXERS | CONVOLUTIONS | BY_DISTANCE)[name],
        {"kind": "rwkv-channel", "hidden": 32},
    )
    layer = {"repeat": 2, "mixer": mixer, "channel": channel}
    model: Any = build({"kind": "decoder", "vocab": 50, "width": 32, "decoder": [layer]})
    batches, parameters = [Batch(rows(length, True)) for length in (20, 33, 170)], list(model.parameters())

    def run(batch: Batch) -> list[torch.Tensor]:
        assert batch.rows.segments is not None
        hidden = model(batch) * (batch.rows.segments > 0)[..., None]
        return [hidden, *torch.autograd.grad(hidden.square().sum(), parameters)]

    expected = [run(batch) for batch in batches]
    monkeypatch.setattr(unpack, "stays_packed", lambda layout: True)
    monkeypatch.setattr(by_distance, "has_kernels", lambda layout: True)
    if name in BY_DISTANCE:
        monkeypatch.setattr(attention, "select_attention", flex_on_a_gpu)
    monkeypatch.setattr(
        infini, "select_attention", lambda pattern, q, k, mod: attend.dense(pattern, q, k)
    )  # flex has no gradients here
    monkeypatch.setattr(type(model.decoder.blocks[0].sublayers["mixer"]), "traceable", True)  # by its kernel
    graphs = compile_for_training(model, monkeypatch, aot_eager)
    for batch, wanted in zip(batches, expected, strict=True):
        for found, alone in zip(run(batch), wanted, strict=True):
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-5)
    assert len(graphs) == 1


def test_rows_to_unpack_run_eagerly(monkeypatch: pytest.MonkeyPatch):
    """Their shapes differ from batch to batch: whole rows and the other parts stay compiled."""
    torch._dynamo.reset()
    layer = {"repeat": 2, "mixer": {"kind": "performer", "heads": 2}, "channel": {"kind": "ffn", "hidden": 32}}
    model: Any = build({"kind": "decoder", "vocab": 50, "width": 32, "decoder": [layer]}).eval()
    batches = [Batch(rows(length, packed)) for length, packed in ((20, True), (0, False), (33, True), (17, True))]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
        graphs = compile_for_training(model, monkeypatch)
        check_equal(model, batches, expected)
    assert len(graphs) == 2  # the channel, and the block with whole rows


class _AddsLoss(SubLayer):
    traceable = True

    def forward(self, x: torch.Tensor, context: Any, state: Any = None) -> torch.Tensor:
        context.losses.append(x.square().mean())
        return x


def test_losses_of_layers_do_not_make_other_graphs(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    layer = {"repeat": 3, "mixer": {"kind": "attention"} | CAUSAL, "channel": {"kind": "ffn", "hidden": 32}}
    model: Any = build({"kind": "decoder", "vocab": 50, "width": 32, "decoder": [layer]}).train()
    for block in model.decoder.blocks:
        block.sublayers["channel"] = _AddsLoss()
    batch = Batch(rows(0, False))
    expected: list[torch.Tensor] = []
    model(batch, expected)
    graphs = compile_for_training(model, monkeypatch)
    found: list[torch.Tensor] = []
    model(batch, found)
    assert len(graphs) == 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pattern", [Causal(), Full()])
def test_a_grid_of_tiles_says_what_the_search_finds(pattern: Any):
    layout = [TokenLayout.of(rows(length, True)) for length in (20, 150)]
    for queries, keys in ((layout[0], layout[0]), (layout[0], layout[1])):
        part = BlockLayout(pattern, queries, keys, 64, rounded=True)
        some, every = part.grid()
        assert some.nonzero().tolist() == torch.stack((part.row, part.q, part.k), 1).tolist()
        assert every[part.row, part.q, part.k].tolist() == part.full.tolist()
