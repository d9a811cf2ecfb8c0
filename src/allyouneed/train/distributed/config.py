"""How a run is spread over the processes that torchrun started: what a recipe says about it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from allyouneed.config import Config, model_validator


class Parallel(Config):
    """ddp: each process has the whole model and reads its share of the rows (Li et al. 2020, "PyTorch Distributed").
    fsdp: each keeps a part of weights, gradients and optimiser besides, and borrows a layer when it comes to it
    (Rajbhandari et al. 2020, "ZeRO", stage 3). auto: ddp. With one process, nothing is parallel.

    `tensor`: so many neighbours read the same rows and split the matrices of every block (tensor_parallel.py); ddp and fsdp are
    then between such groups.
    """

    kind: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    tensor: PositiveInt = 1

    def text(self, readers: int) -> str:
        """What so many groups do."""
        kind = "ddp" if self.kind == "auto" else self.kind
        if self.tensor == 1:
            return kind
        return f"tensor {self.tensor}" + (f" × {kind} {readers}" if readers > 1 else "")

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_a_kind(cls, tree: Any) -> Any:
        return {"kind": tree} if isinstance(tree, str) else tree
