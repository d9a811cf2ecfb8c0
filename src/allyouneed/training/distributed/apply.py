"""Parallelism, applied to a model from outside: model files know nothing of it.

ddp: `replicas.py`. tensor: `tensor_parallel.py`. fsdp: every block is a unit that holds a shard of its weights and
gathers the rest when it runs; embeddings, norms outside blocks and the head form another unit. Weights are stored and
updated in fp32. With `precision: bf16` they are gathered in bf16, which halves what is sent; gradients are summed in
fp32.
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

from allyouneed.nn.context import Context, ReplayedDecisions
from allyouneed.nn.models.block import Block
from allyouneed.nn.states.base import State
from allyouneed.training.distributed.config import ParallelConfig
from allyouneed.training.distributed.objective import Objective
from allyouneed.training.distributed.process_group import ProcessGroup
from allyouneed.training.distributed.replicas import DataParallelModel, TensorParallelReplica
from allyouneed.training.distributed.tensor_parallel import AXIS, parallelize


def checkpoint_activations(model: nn.Module) -> None:
    """Blocks store only their input and are recomputed in the backward pass (Chen et al. 2016)."""
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = _checkpointed(module.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(stream: Any, context: Context, states: dict[str, State] | None = None) -> Any:
        if states or context.replay is not None or not torch.is_grad_enabled():
            return forward(stream, context, states)
        replay, before = ReplayedDecisions(), dict(context.memo)
        times = 0

        def compute(stream: Any) -> Any:
            nonlocal times
            times += 1
            if times == 1:
                return forward(stream, replace(context, replay=replay), states)
            # same state as in the first pass; what it plans for later layers is discarded
            replay.next = 0
            losses: list[Tensor] | None = None if context.losses is None else []
            again = replace(context, memo=dict(before), losses=losses, replay=replay)
            return forward(stream, again, states)

        return checkpoint(compute, stream, use_reentrant=False)

    return run


def shard_model(
    model: nn.Module, parallel: ParallelConfig, processes: ProcessGroup, device: torch.device, bf16: bool = False
) -> None:
    """Give each process its part of the weights. The model is initially the same on all of them. `bf16`: the precision
    of the computation, and so of gathered weights."""
    if processes.is_single or (parallel.kind != "fsdp" and processes.tensor == 1):
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    both = _mesh(device, processes)
    if processes.tensor > 1:
        parallelize(model, both[AXIS])
    if not _fully_sharded(parallel, processes):
        return
    mesh = both["data"]
    policy = MixedPrecisionPolicy()
    if bf16:  # autocast decides about activations
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.register_forward_hook(_zero_missing_gradients)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # the head runs after `run` and needs its weights
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for method in ("run", "advance"):
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # sum, not mean: each process divides its loss by the tokens of all
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@cache
def _mesh(device: torch.device, processes: ProcessGroup) -> DeviceMesh:
    """(data, tensor): consecutive ranks form a tensor-parallel group."""
    return init_device_mesh(device.type, (processes.data_ranks, processes.tensor), mesh_dim_names=("data", AXIS))


def _fully_sharded(parallel: ParallelConfig, processes: ProcessGroup) -> bool:
    return parallel.kind == "fsdp" and processes.data_ranks > 1


def _zero_missing_gradients(module: nn.Module, given: Any, found: Any) -> Any:
    """A parameter without a gradient on this rank (an expert without tokens, a layer with empty rows) may have one on
    another, and the reduction needs all: make it 0."""
    if not torch.is_grad_enabled():
        return found
    # matrices split by tensor_parallel.py always have one
    weights = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if isinstance(found, Tensor):
        return _ZeroGradients.apply(found, *weights)
    return type(found)([_ZeroGradients.apply(found[0], *weights), *found[1:]])


class _ZeroGradients(torch.autograd.Function):
    """Identity, with a zero gradient for each of the weights (an expanded scalar)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return gradients[0], *zeros


def wrap_model(
    model: nn.Module,
    stateful_model: Any,
    task: Objective,
    parallel: ParallelConfig,
    processes: ProcessGroup,
    device: torch.device,
) -> Any:
    """The model that computes losses of an update's batches."""
    if processes.data_ranks == 1 or _fully_sharded(parallel, processes):
        return stateful_model
    return (
        DataParallelModel(model, stateful_model, task)
        if processes.tensor == 1
        else TensorParallelReplica(model, stateful_model, task, _mesh(device, processes)["data"].get_group())
    )
