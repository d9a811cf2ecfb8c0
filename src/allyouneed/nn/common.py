"""Settings shared by all parts of a model."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from allyouneed.config import Config
from allyouneed.nn.init import Init, Xavier
from allyouneed.nn.linear.dense import Dense, Linear
from allyouneed.nn.norms import LayerNorm, Norm


class Common(Config):
    # cross-attention reads keys and values projected once by the model (mixers/attention/shared_kv.py)
    shares_keys: ClassVar[bool] = False

    width: Annotated[int, Field(gt=0)]
    """Features of a token between layers (d_model)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on sub-layer outputs and embeddings (the paper, 5.4)."""
    norm: Norm = LayerNorm()
    """The norm that the wirings use, and parts that normalise with the model's norm."""
    linear: Linear = Dense()
    """The linear map that all parts use."""
    init: Init = Xavier()
    """How weights are initialised."""


def least(*limits: int | None) -> int | None:
    """The lowest of the limits that there are; None: there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
