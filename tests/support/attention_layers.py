"""One attention layer of ours against a reference layer: same weights, sentences of unequal lengths, outputs and
gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.sublayer import Mixer

TOLERANCE = 1e-5  # fp32: outputs are of size 1, a sum of some hundred products

Named = Callable[[str], Tensor]  # a name of theirs -> its weight, or the gradient of that


def build_mixer(width: int, keys: dict[str, Any], norm: str = "layer") -> Any:
    """Our mixer with uninitialised weights."""
    common = Common(width=width, norm=norm)
    mixer = Mixer.choose(keys)
    assert not mixer.problems(common), mixer.problems(common)
    return mixer.build(common).eval()


def randomise_module(module: nn.Module, seed: int = 0, size: float = 0.2) -> Any:
    """Random parameters: no bias is zero and no gain is one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size + gain)
    return module.eval()


def rows(lengths: Sequence[int], width: int, seed: int = 1) -> tuple[Tensor, TokenLayout, Tensor]:
    """Hidden states (batch, time, width), their layout, and 1 for real tokens."""
    time = max(lengths)
    tokens = torch.ones(len(lengths), time, dtype=torch.long)
    x = torch.randn(len(lengths), time, width, generator=torch.Generator().manual_seed(seed))
    layout = TokenLayout.of(Rows(tokens, lengths=torch.tensor(lengths)))
    real = torch.arange(time)[None] < torch.tensor(lengths)[:, None]
    return x, layout, real.float()[..., None]


def hidden(real: Tensor, causal: bool) -> Tensor:
    """Their additive mask: (batch, 1, time, time), very negative where masked."""
    time = real.shape[1]
    seen = real[:, None, None, :, 0].bool().expand(-1, 1, time, time)
    if causal:
        seen = seen & torch.ones(time, time, dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def differences(
    ours: nn.Module,
    theirs: nn.Module,
    convert: Callable[[Named], dict[str, Tensor]],
    run_theirs: Callable[[Tensor], Tensor],
    lengths: Sequence[int],
    width: int,
) -> tuple[float, float]:
    """The largest differences of outputs and of gradients. `convert` maps their weights to ours; it is linear, so it
    also maps gradients."""
    weights = dict(theirs.named_parameters())
    found = ours.load_state_dict({k: v.detach().clone() for k, v in convert(lambda name: weights[name]).items()})
    assert not found.missing_keys and not found.unexpected_keys
    x, layout, real = rows(lengths, width)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) * real
    outputs, gradients = [], []
    for run, module in ((lambda x: ours(x, Context(layout)), ours), (run_theirs, theirs)):
        module.zero_grad()
        given = x.clone().requires_grad_()
        outputs.append(run(given) * real)
        (outputs[-1] * direction).sum().backward()
        assert given.grad is not None
        gradients.append(given.grad)
    assert outputs[1].abs().max() > 0.1
    expected = convert(lambda name: weights[name].grad)  # type: ignore[arg-type, return-value]
    pairs = [gradients, *([parameter.grad, expected[name]] for name, parameter in ours.named_parameters())]
    return max_difference(*outputs), max(max_difference(one, other) for one, other in pairs)


def agreement(ours: Tensor, theirs: Tensor, parameters: Sequence[Tensor]) -> tuple[float, float]:
    """The largest differences of outputs, and of gradients of these parameters."""
    one, other = (
        torch.autograd.grad(found.square().sum(), parameters, retain_graph=True, materialize_grads=True)
        for found in (ours, theirs)
    )
    return max_difference(ours, theirs), max(max_difference(*pair) for pair in zip(one, other, strict=True))


def max_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; where numbers are greater than 1, in units of the greatest."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max().clamp(min=1))
