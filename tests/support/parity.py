"""Compares a family with its reference: their model with random weights, saved by them, loaded through our table.

`both(their_model)` gives our model with the same weights. `compare` runs both and returns the largest differences of
outputs and of gradients; `tests/parity/conftest.py` records them for docs/family.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from allyouneed.interop.families import FAMILIES

TOLERANCE = 1e-5


def randomise(theirs: nn.Module, seed: int = 0) -> None:
    """Random weights, none small: no bias is zero and no gain is one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                matrix = parameter.dim() > 1
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 if matrix else noise * 0.1 + 1.0)


def saved(theirs: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Their config and weights as saved by them."""
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return config, weights


def ours(theirs: Any, folder: Path) -> nn.Module:
    """Our model with their weights, through the family's table."""
    config, weights = saved(theirs, folder)
    return FAMILIES[config["model_type"]].convert(config, weights)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry where that is above one (a gradient is a sum of many)."""
    assert found.isfinite().all() and expected.isfinite().all() and expected.any(), "nothing to compare"
    scale = max(1.0, expected.abs().max().item())
    return (found - expected).abs().max().item() / scale


def pair_differences(pairs: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Tensor]) -> tuple[float, float]:
    """Largest difference of what is found and expected, and of the gradients by the weights that both have."""
    outputs = max((found - expected).abs().max().item() for found, expected in pairs)
    ours, theirs = (
        torch.autograd.grad(sum(pair[side].sin().sum() for pair in pairs), weights, retain_graph=True)
        for side in (0, 1)
    )
    gradients = max(
        (a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in zip(ours, theirs, strict=True)
    )
    return outputs, gradients


def gradient_difference(
    model: nn.Module, theirs: nn.Module, folder: Path, own_loss: Tensor, their_loss: Tensor
) -> float:
    """Largest difference of any weight's gradient: theirs are carried through the same table as the weights were."""
    own_loss.backward()
    their_loss.backward()
    config, _ = saved(theirs, folder)
    with torch.no_grad():
        for parameter in theirs.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.copy_(gradient)
    _, gradients = saved(theirs, folder)
    carrier = FAMILIES[config["model_type"]].convert(config, gradients)
    expected: Mapping[str, Tensor] = dict(carrier.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        wanted = expected[name].detach()
        found = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
        # unused weights (an expert, a position) have no gradient in either
        worst = max(worst, difference(found, wanted) if wanted.any() else found.abs().max().item())
    return worst
