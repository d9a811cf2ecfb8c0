"""Initial weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from torch import nn

from allyouneed.config import Part


class Init(Part, slot="init"):
    @abstractmethod
    def apply(self, model: nn.Module, width: int) -> None:
        """Draw every weight of the model anew."""


class Xavier(Init):
    """Glorot, Bengio 2010, eq. 16, for every matrix (queries, keys and values made by one product count as one, as in
    torch.nn.MultiheadAttention), biases at zero; embeddings normal with deviation width^-1/2, so that scaled by √width
    they begin with variance 1 (as tensor2tensor and fairseq start the paper's model)."""

    kind: Literal["xavier"] = "xavier"

    def apply(self, model: nn.Module, width: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=width**-0.5)
