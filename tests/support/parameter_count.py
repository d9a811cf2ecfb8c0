"""Parameters of a built model. Several tests count those of all presets: each is built once in a process."""

from __future__ import annotations

import functools

from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import meta_model


@functools.cache
def parameter_count(config: Model) -> int:
    model = meta_model(config)
    assert model.config == config
    return sum(parameter.numel() for parameter in model.parameters())  # not of tensors: a tied matrix counts once
