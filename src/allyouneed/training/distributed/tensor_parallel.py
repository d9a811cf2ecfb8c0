"""Tensor parallelism: the large matrices of every block are split over a group of processes by torch's parallel plans,
from outside; model files know nothing of it.

Shoeybi et al. 2019, "Megatron-LM", 3: projections to queries, keys, values and the hidden layer are split by outputs,
so that each process has whole heads and a part of the hidden layer; projections back to the width are split by inputs
and their outputs summed. Everything else is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from allyouneed.config import tree_of
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule
from allyouneed.nn.linear.dense import Dense, MergedLinear
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Block
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.models.weights import meta_model
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule

AXIS = "tensor"  # mesh dimension
ATTENTION = (SelfAttention, CrossAttention)
CHANNELS = (FFNModule, GLUModule)
COLUMN_PARALLEL = ("qkv", "q", "k", "v", "kv", "up", "gate_up")  # split by outputs
ROW_PARALLEL = ("out", "down")  # split by inputs


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each process of the group its part. The model is initially the same on all of them."""
    degree, orders = mesh.size(), row_orders(model, mesh.size())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in orders:
                parameter.copy_(parameter[orders[name]])
    for part in _parts(model):
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMN_PARALLEL if _has(part, name)}
        plan |= {name: RowwiseParallel() for name in ROW_PARALLEL if _has(part, name)}
        parallelize_module(part, mesh, plan, src_data_rank=None)
        if isinstance(part, ATTENTION):
            for size in ("heads", "kv_heads", "inner", "kv_width"):
                setattr(part, size, getattr(part, size) // degree)
            for norm in (part.q_norm, part.k_norm):
                if norm is not None:
                    _sum_norm_gradients(norm, mesh.get_group())


def tensor_parallel_size(model: nn.Module) -> int:
    """The tensor-parallel degree of a model."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh[AXIS].size()
    return 1


def row_orders(model: nn.Module, degree: int) -> dict[str, Tensor]:
    """For joined projections (queries, keys and values in one matrix), by parameter name: the row permutation after
    which each contiguous part holds one process's share of every projection."""
    found: dict[str, Tensor] = {}
    if degree == 1:
        return found
    parts = set(_parts(model))
    for path, part in model.named_modules():
        for name in COLUMN_PARALLEL if part in parts else ():
            joined = getattr(part, name, None)
            if isinstance(joined, MergedLinear):
                order = _order(joined.outputs, degree)
                found |= {f"{path}.{name}.{key}": order for key, _ in joined.named_parameters()}
    return found


def _order(outputs: Sequence[int], degree: int) -> Tensor:
    begins = torch.tensor([0, *outputs]).cumsum(0).tolist()
    each = [torch.arange(begin, begin + size).chunk(degree) for begin, size in zip(begins, outputs, strict=False)]
    return torch.cat([parts[number] for number in range(degree) for parts in each])


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    return (
        part
        for block in model.modules()
        if isinstance(block, Block)
        for part in block.sublayers.values()
        if isinstance(part, ATTENTION + CHANNELS)
    )


def _has(part: nn.Module, name: str) -> bool:
    return getattr(part, name, None) is not None


# --- parameters shared by the heads of several processes -------------------------------------------------------------


def _sum_norm_gradients(norm: nn.Module, group: Any) -> None:
    """A per-head norm has one weight for all heads: sum its gradients over the group."""

    def forward(*given: Any) -> Any:
        own = dict(norm._parameters)
        try:
            for name, weight in own.items():
                norm._parameters[name] = None if weight is None else _SumGradients.apply(weight, group)
            return type(norm).forward(norm, *given)
        finally:
            norm._parameters.update(own)

    norm.forward = forward


class _SumGradients(torch.autograd.Function):
    """Identity; sums gradients over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


# --- what is not supported --------------------------------------------------------------------------------------------


def tensor_parallel_problems(config: Model, degree: int) -> list[str]:
    """Why this model cannot be split to this degree, by the path of the part."""
    model = meta_model(config)
    found: list[str] = []
    if not isinstance(config.linear, Dense):
        kind = tree_of(config.linear)["kind"]
        found.append(f"model.linear: {kind} cannot be split, because its scale is per matrix; dense can")
    inside: set[nn.Module] = set()
    for name, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        for number, span in enumerate(stack.spans):
            inside |= {stack.blocks[n] for n in span}
            for slot, part in stack.blocks[span[0]].sublayers.items():  # type: ignore[union-attr, operator]
                layers = getattr(config, name, None)
                kind = type(part).__name__ if layers is None else getattr(layers[number], slot).kind
                found += [f"model.{name}[{number}].{slot}{text}" for text in _problems(part, kind, degree)]
    if not inside or any(module not in inside for module in model.modules() if isinstance(module, Block)):
        found.append("model.kind: has blocks outside its stacks, which cannot be split (parallel.tensor)")
    return found


def _problems(part: nn.Module, kind: str, degree: int) -> Iterator[str]:
    words = f"split {degree} ways (parallel.tensor)"
    if type(part) not in ATTENTION + CHANNELS:
        yield f": {kind} cannot be {words}; attention, ffn and glu can"
        return
    if isinstance(part, CHANNELS):
        if part.norm is not None:
            yield f".norm: normalises the whole hidden layer, which cannot be {words}; remove it"
        if (hidden := part.down.weight.shape[1]) % degree:  # type: ignore[index]
            yield f".hidden: {hidden} cannot be {words}; make it a multiple"
        return
    assert isinstance(part, ATTENTION)
    for key, count in (("heads", part.heads), ("kv_heads", part.kv_heads)):
        if count % degree:
            yield f".{key}: {count} cannot be {words}; make it a multiple"
    if type(part.relative) not in (RelativeModule, RotaryModule):
        yield f".positions: differ by head and cannot be {words}; rotary and none can"
    if type(part.scores) is not ScoresModule:
        yield f".scores: have weights across heads and cannot be {words}; scaled-dot and dot can"
    if part.sub_norm is not None:
        yield f".sub_norm: normalises across heads, which cannot be {words}; remove it"


__all__ = ["AXIS", "parallelize", "row_orders", "tensor_parallel_problems", "tensor_parallel_size"]
