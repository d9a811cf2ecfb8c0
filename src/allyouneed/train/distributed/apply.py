"""Parallelism, applied to a model from outside: model files know nothing of it.

ddp: `replicas.py`. tensor: `tensor_parallel.py`. fsdp: every block is a unit that keeps a part of its weights and borrows the
rest of them when it runs; embeddings, norms outside of blocks and the head are a unit of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from allyouneed.nn.context import Context, Replay
from allyouneed.nn.models.block import Block
from allyouneed.nn.states.base import State
from allyouneed.train.distributed.config import Parallel
from allyouneed.train.distributed.objective import Objective
from allyouneed.train.distributed.process_group import Team
from allyouneed.train.distributed.replicas import Copy, Replica
from allyouneed.train.distributed.tensor_parallel import AXIS, split


def compute_twice(model: nn.Module) -> None:
    """Blocks keep only what goes in, and compute their insides once more for the backward pass (Chen et al. 2016)."""
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = _twice(module.forward)  # type: ignore[method-assign]


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(stream: Any, context: Context, states: dict[str, State] | None = None) -> Any:
        if states or context.replay is not None or not torch.is_grad_enabled():
            return forward(stream, context, states)
        replay, before = Replay(), dict(context.memo)
        times = 0

        def compute(stream: Any) -> Any:
            nonlocal times
            times += 1
            if times == 1:
                return forward(stream, replace(context, replay=replay), states)
            # as it was the first time: what this layer planned for those after it is planned again, for nobody
            replay.next = 0
            losses: list[Tensor] | None = None if context.losses is None else []
            again = replace(context, memo=dict(before), losses=losses, replay=replay)
            return forward(stream, again, states)

        return checkpoint(compute, stream, use_reentrant=False)

    return run


def spread(model: nn.Module, parallel: Parallel, team: Team, device: torch.device) -> None:
    """Give each process its part of the weights, where the recipe says so. The model is the same on all of them."""
    if team.alone or (parallel.kind != "fsdp" and team.tensor == 1):
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    both = _mesh(device, team)
    if team.tensor > 1:
        split(model, both[AXIS])
    if not _fully_sharded(parallel, team):
        return
    mesh = both["data"]
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.register_forward_hook(_everyone_takes_part)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)  # the head comes after `run`, and needs its weights
    for way in ("run", "advance"):
        if hasattr(model, way):
            register_fsdp_forward_method(model, way)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # summed, not averaged: each process divides its loss by the tokens of all
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@cache
def _mesh(device: torch.device, team: Team) -> DeviceMesh:
    """Neighbours split matrices; those at the same place of each group meet."""
    return init_device_mesh(device.type, (team.readers, team.tensor), mesh_dim_names=("data", AXIS))


def _fully_sharded(parallel: Parallel, team: Team) -> bool:
    return parallel.kind == "fsdp" and team.readers > 1


def _everyone_takes_part(module: nn.Module, given: Any, found: Any) -> Any:
    """Whoever has no gradient here (an expert that nobody chose, a layer whose rows are all empty) may have one
    elsewhere, and they meet: here it is 0, not missing."""
    if not torch.is_grad_enabled():
        return found
    # matrices that are split (tensor_parallel.py) always have one
    weights = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if isinstance(found, Tensor):
        return _TakesPart.apply(found, *weights)
    return type(found)([_TakesPart.apply(found[0], *weights), *found[1:]])


class _TakesPart(torch.autograd.Function):
    """Nothing, with a gradient of 0 for each of the weights; one number, seen as many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return gradients[0], *zeros


def reader_of(
    model: nn.Module, reader: Any, task: Objective, parallel: Parallel, team: Team, device: torch.device
) -> Any:
    """What an update reads its batches with."""
    if team.readers == 1 or _fully_sharded(parallel, team):
        return reader
    return (
        Replica(model, reader, task)
        if team.tensor == 1
        else Copy(model, reader, task, _mesh(device, team)["data"].get_group())
    )
