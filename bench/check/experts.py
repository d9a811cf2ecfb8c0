"""Experts at once against one product per expert in double precision; a part of kernels.py."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from allyouneed.config import parse
from allyouneed.kernels.triton.expert_linear import expert_down, expert_linear, expert_up, route
from allyouneed.nn.channels.moe import MoE, RouterModule
from allyouneed.nn.ops.experts import each_alone, grouped_products
from bench.check.report import LIMITS, Check

# experts, rows, inputs, outputs, bias
SIZES = [(5, 3, 40, 24, True), (3, 40, 16, 40, False), (60, 2, 130, 20, True)]
LARGE_SIZES = [(8, 2, 768, 4096, False), (8, 128, 2048, 768, True), (64, 200, 1024, 1000, False)]
# rows, experts, top, inputs, and the router
ROUTES: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (3, 5, 2, 40, {}),
    (4, 12, 3, 20, {"scores": "sigmoid", "normalise": True, "scale": 2.5, "bias": True, "correction": 0.1}),
    (5, 12, 4, 33, {"groups": {"count": 3, "top": 2, "score": "two-best"}, "scores": "sigmoid", "correction": 0.1}),
    (2, 60, 6, 130, {"groups": {"count": 6, "top": 2}, "normalise": True}),
]
LARGE_ROUTES = [(64, 8, 2, 768, {}), (1, 8, 2, 768, {"normalise": True}), (3, 256, 8, 7168, ROUTES[2][4])]
# rows, experts, top, inputs, hidden features, gated, bias
STEPS = [(1, 5, 2, 40, 24, True, False), (2, 6, 3, 48, 20, False, True), (7, 5, 2, 40, 70, True, True),
         (70, 4, 1, 16, 20, False, False), (5, 3, 2, 33, 24, True, False)]  # fmt: skip
LARGE_STEPS = [(1, 8, 2, 768, 1024, True, False), (64, 8, 2, 768, 1024, True, False), (4, 8, 2, 768, 1024, True, False),
               (16, 64, 6, 2048, 1408, True, False), (200, 8, 2, 512, 2048, False, True)]  # fmt: skip
TRAINED = [(8, 5000, 768, 4096, False), (8, 5000, 2048, 768, True), (16, 300, 64, 80, True)]


def prepared(
    check: Check, sizes: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> tuple[list[nn.Linear], torch.Tensor, torch.Tensor]:
    experts, rows, inputs, outputs, bias = sizes
    torch.manual_seed(rows)
    maps = [nn.Linear(inputs, outputs, bias, dtype=dtype, device=check.device) for _ in range(experts)]
    chosen = torch.randint(0, experts, (rows,))
    ends = chosen.bincount(minlength=experts).cumsum(0, dtype=torch.int32).to(check.device)
    return maps, torch.randn(rows, inputs).to(check.device, dtype), ends


def routes(check: Check, sizes: tuple[int, int, int, int, dict[str, Any]], dtype: torch.dtype) -> None:
    """The experts of each token must be the same; their weights are compared."""
    rows, experts, top, inputs, router = sizes
    torch.manual_seed(rows)
    keys = {"kind": "moe", "experts": experts, "top": top, "expert": {"kind": "ffn", "hidden": 8}, "router": router}
    module = RouterModule(parse(MoE, keys), inputs).eval()
    if module.correction is not None:
        module.correction.normal_(std=0.2)
    module, x = module.to(check.device, dtype), torch.randn(rows, inputs).to(check.device, dtype)
    exact = deepcopy(module).double()(x.double())
    groups = None if module.config.groups is None else module.config.groups
    limits = None if groups is None else (groups.count, groups.top, groups.score == "two-best")
    weight, bias, config = module.linear.weight, module.linear.bias, module.config
    given = (top, config.scores == "sigmoid", config.normalise, config.scale, module.correction, limits)
    parts = torch.nn.functional.linear(x.float(), weight.float())
    for name, start in (("", x), (", from logits", torch.stack((parts / 4, parts * 3 / 4)))):
        chosen, scores = route(start, weight, bias, *given)
        wanted = [exact.experts.double(), exact.weights]
        check.report(f"route {sizes[:4]} {str(dtype)[6:]}{name}", [chosen, scores], wanted, 2e-5)


def steps(check: Check, sizes: tuple[int, int, int, int, int, bool, bool], dtype: torch.dtype) -> None:
    """The hidden layers of all choices, and their weighted outputs."""
    rows, experts, top, inputs, hidden, gated, bias = sizes
    torch.manual_seed(rows)
    up, down = (
        [nn.Linear(a, b, bias).to(check.device, dtype) for _ in range(experts)]
        for a, b in ((inputs, hidden * (1 + gated)), (hidden, inputs))
    )
    x, shared = torch.randn(2, rows, inputs).to(check.device, dtype)
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(rows)]).to(check.device)
    scores = torch.rand(rows, top, device=check.device)
    both = torch.stack([deepcopy(up[e]).double()(x[n // top].double()) for n, e in enumerate(chosen.flatten())])
    exact = torch.nn.functional.silu(both[:, :hidden]) * both[:, hidden:] if gated else both.relu()
    found = expert_up(x, up, chosen.int(), "silu" if gated else "relu", gated)
    check.report(f"experts up {sizes} {str(dtype)[6:]}", [found], [exact], LIMITS[dtype])
    outputs = torch.stack([deepcopy(down[e]).double()(found[n].double()) for n, e in enumerate(chosen.flatten())])
    total = (outputs.unflatten(0, (rows, top)) * scores.double()[..., None]).sum(1)
    for added in (None, shared):
        mixed = expert_down(found, down, chosen.int(), scores, added).sum(0)
        wanted = total if added is None else total + added.double()
        check.report(f"experts down {sizes} {str(dtype)[6:]}", [mixed], [wanted], LIMITS[dtype])


def experts(check: Check, cuda: bool) -> None:
    print("a decode step: experts of each token and their weights; hidden layers; weighted outputs")
    for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
        for routing in ROUTES + (LARGE_ROUTES if cuda else []):
            routes(check, routing, dtype)
        for one in STEPS + (LARGE_STEPS if cuda else []):
            steps(check, one, dtype)
    print("linear maps of few rows, each of its own expert")
    for sizes in SIZES + (LARGE_SIZES if cuda else []):
        # the interpreter multiplies no bfloat16
        for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
            maps, x, ends = prepared(check, sizes, dtype)
            exact = each_alone(x.double(), [deepcopy(one).double() for one in maps], ends)
            check.report(f"experts {sizes} {str(dtype)[6:]}", [expert_linear(x, maps, ends)], [exact], LIMITS[dtype])
    print("grouped products: outputs, gradients of x and all weights")
    for sizes in TRAINED if cuda else []:
        maps, x, ends = prepared(check, sizes, torch.bfloat16)
        doubles = [deepcopy(one).double() for one in maps]
        runs = []
        for run, given, own in ((grouped_products, x, maps), (each_alone, x.double(), doubles)):
            leaves = [given.requires_grad_(), *(p for one in own for p in one.parameters())]
            y = run(given, own, ends)
            torch.manual_seed(0)
            loss = (y.double() * torch.randn(y.shape).to(check.device)).sum()
            grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
            runs.append([y, grads[0], torch.cat([grad.flatten() for grad in grads[1:]])])
        check.report(f"grouped products {sizes}", *runs, LIMITS[torch.bfloat16])
