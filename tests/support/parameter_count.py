"""Parameters of a built model. Several tests count those of all presets: each is built once in a process."""

from __future__ import annotations

import functools

import torch

from allyouneed.nn.models.base import Model


@functools.cache
def parameter_count(config: Model) -> int:
    with torch.device("meta"):
        model = config.build()
    assert model.config == config
    return sum(parameter.numel() for parameter in model.parameters())  # not of tensors: a tied matrix counts once
