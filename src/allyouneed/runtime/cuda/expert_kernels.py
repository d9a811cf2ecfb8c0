"""Decode kernels of a mixture of experts: one launch chooses the experts of every token, one computes their hidden
layers, one their weighted outputs (kernels/triton/expert_linear.py). Only the chosen experts' weights are read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allyouneed.nn.channels.feedforward import GLUModule
from allyouneed.nn.channels.moe import MoEModule, RouterModule
from allyouneed.nn.context import Context
from allyouneed.nn.ops.activations import fused_name
from allyouneed.nn.ops.experts import same_dtype
from allyouneed.runtime.cuda.kernels import Kernel, StepSetup, is_narrow, kernel, make_kernel, total
from allyouneed.runtime.cuda.mixer_kernels import require_kernels
from allyouneed.runtime.program import Unsupported

MOST_ROWS = 256  # above, rows are sorted by expert
MOST_EXPERTS = 1024
LARGE_ROUTER = 1 << 17  # weights of a router that one program per row would read too slowly


@make_kernel.register(MoEModule)
def _moe(part: MoEModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    maps, dtype = part.grouped_maps(), setup.states.dtype
    if maps is None or part.capacity is not None:  # a token has one choice per expert: no row exceeds its own capacity
        raise Unsupported("only experts of two dense maps, without a capacity of the batch, have fused kernels")
    up, down, first = maps
    if setup.states.rows > MOST_ROWS or len(up) > MOST_EXPERTS or not same_dtype((*up, *down), dtype):
        raise Unsupported("the kernels of experts are for few rows")
    gated, name = isinstance(first, GLUModule), fused_name(first.activation)
    shared = None if part.shared is None else kernel(part.shared, setup, state, False)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.expert_linear import expert_down, expert_up

        chosen, scores = route_tokens(part.router, x)
        hidden = expert_up(x, up, chosen) if name is None else expert_up(x, up, chosen, name, gated)
        hidden = first.hidden(hidden) if name is None else hidden
        added = None if shared is None else total(shared(x, positions, context)).to(x.dtype)
        found = expert_down(hidden, down, chosen, scores, added)
        return found if partial else total(found).to(x.dtype)

    return run


def route_tokens(router: RouterModule, x: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and their weights (rows, top), as `RouterModule` chooses them."""
    from allyouneed.kernels.triton.expert_linear import route
    from allyouneed.kernels.triton.small_batch_linear import linear, tile_config

    config, weight = router.config, router.linear.weight
    groups = None
    if config.groups is not None:
        groups = (config.groups.count, config.groups.top, config.groups.score == "two-best")
    if weight.numel() > LARGE_ROUTER and is_narrow(x, weight):  # logits in fp32 parts
        tile = tile_config(len(x), weight.shape[0], weight.shape[1], False, True)
        x = linear(x, weight, None, parts=True, cut=tile._replace(parts=max(2, tile.parts)))
    return route(
        x, weight, router.linear.bias, router.top, config.scores == "sigmoid", config.normalise, config.scale,
        router.correction, groups,
    )  # fmt: skip
