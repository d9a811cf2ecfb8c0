"""The same run in double precision: how far each recorded value is from it.

The weights are those of the model, widened: an int8 or bf16 weight is the same number in float64. What the model rounds
on the way (float32 sums, bf16 activations, int8 activations of quantized maps) shows as a difference.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.recorder import Values, run_recorded
from allyouneed.nn.batch import Batch
from allyouneed.nn.models.precision import widen


def double_run(model: Any, batch: Batch) -> Values:
    """The values of the same run in float64."""
    plain = widen(model)
    exact = (deepcopy(plain) if plain is model else plain).double()
    given = batch.each(lambda value: value.double() if value.is_floating_point() else value)
    return run_recorded(exact, given)[1].values


def differences(values: Values, exact: Values) -> dict[str, float]:
    """The largest |difference| at each site; infinite where the shapes differ, because a discrete choice (an expert, a
    bucket) went another way."""
    return {name: largest_difference(values[name], exact[name]) for name in values if name in exact}


def largest_difference(value: Tensor, exact: Tensor) -> float:
    if value.shape != exact.shape:
        return float("inf")
    if not value.numel():
        return 0.0
    error = (value.double() - exact.double()).abs()
    if value.is_floating_point():  # masked scores are the smallest number of each type
        masked = (value == torch.finfo(value.dtype).min) & (exact == torch.finfo(exact.dtype).min)
        error = error.masked_fill(masked | ((value == exact) & value.isinf()), 0.0)
    return float(error.max())
