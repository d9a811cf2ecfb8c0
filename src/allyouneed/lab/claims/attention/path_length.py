from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.sublayer import Mixer

KERNEL, WINDOW = 3, 8
KINDS: dict[str, dict[str, Any]] = {
    "self-attention": {"kind": "attention", "heads": 2},
    "recurrent": {"kind": "lstm"},
    "convolutional": {"kind": "convolution", "size": KERNEL},
    "self-attention, restricted": {"kind": "attention", "heads": 2, "pattern": f"window({WINDOW + 1})"},
}


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((17, 33, 65), (9, 17))
    stated = {
        "self-attention": lambda n: 1,
        "recurrent": lambda n: n - 1,
        # table 1 gives log_k(n) for dilated convolutions; contiguous kernels need n/k, of which one half lies behind
        "convolutional": lambda n: math.ceil((n - 1) / (KERNEL // 2)),
        "self-attention, restricted": lambda n: math.ceil((n - 1) / WINDOW),
    }
    curves = {name: {float(n): float(path(keys, n)) for n in lengths} for name, keys in KINDS.items()}
    figures = [
        Figure(
            (f"{name}: path, measured over stated", f"{name}：实测路径/理论路径"),
            tuple(found[n] / stated[name](int(n)) for n in found),
            1.0,
            1.0,
        )
        for name, found in curves.items()
    ]
    return Outcome(tuple(figures), curves, ("tokens n", "longest path"), log=True)


def context(length: int, device: str = "cpu") -> Context:
    return Context(TokenLayout.of(Rows(torch.ones(1, length, dtype=torch.long, device=device))))


def reaches(y: Tensor, x: Tensor) -> bool:
    """Whether the last position of y depends on the first of x."""
    (gradient,) = torch.autograd.grad(y[0, -1].square().sum(), x, retain_graph=True, materialize_grads=True)
    return bool(gradient[0, 0].any())


def path(keys: dict[str, Any], length: int) -> int:
    """Steps between the first and the last position: layers, or steps of a recurrence."""
    torch.manual_seed(0)
    common, config = Common(width=8), parse(Mixer, keys)  # type: ignore[type-abstract]
    x = torch.randn(1, length, common.width, dtype=torch.double, requires_grad=True)
    if keys["kind"] == "lstm":
        layer: Any = config.build(common).double()
        return sum(not reaches(cut(layer, x, position), x) for position in range(1, length))
    y, layers = x, 0
    while not layers or not reaches(y, x):
        y, layers = config.build(common).double()(y, context(length)), layers + 1
        y = y / y.detach().abs().max()  # a vanishing influence still counts
    return layers


def cut(layer: Any, x: Tensor, position: int) -> Tensor:
    """A recurrence whose gradient is cut at this position."""
    _, carry = layer.run(x[:, :position], layer.begin(1, x), None)
    y, _ = layer.run(x[:, position:], tuple(value.detach() for value in carry), None)
    found: Tensor = y
    return found


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, table 1",
    (
        "Maximum path length: self-attention 1, recurrent n, convolutional n/k without dilation, restricted n/r.",
        "最长路径：自注意力 1，循环层 n，无空洞卷积 n/k，受限自注意力 n/r。",
    ),
    (
        "Layers are stacked until the gradient of the last position reaches the first; in a recurrence, the steps are "
        "counted whose cut leaves no gradient.",
        "不断叠加层，直到末位的梯度到达首位；对循环层，统计切断后梯度消失的步数。",
    ),
    measure,
)
