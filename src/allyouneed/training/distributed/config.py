"""The recipe key `parallel`: how a run uses the processes started by torchrun."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from allyouneed.config import Config, model_validator


class ParallelConfig(Config):
    """ddp: each process has the whole model and reads its shard of the rows (Li et al. 2020, "PyTorch Distributed").
    fsdp: each holds only a shard of weights, gradients and optimiser state and gathers a layer when it runs
    (Rajbhandari et al. 2020, "ZeRO", stage 3). auto: ddp. No effect with one process.

    `tensor`: that many consecutive ranks read the same rows and split the matrices of every block (tensor_parallel.py);
    ddp and fsdp then apply between such groups.

    `patience`: minutes after which a process that does not answer ends the run. What only the main process does
    (validation, saving) may take longer.
    """

    kind: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """How processes share the work: `ddp`, `fsdp`, `none`; `auto` is ddp."""
    tensor: PositiveInt = 1
    """This many consecutive ranks split the matrices of every block (tensor parallelism)."""
    patience: Annotated[float, Field(gt=0, le=1440)] = 10
    """Minutes that a process waits for another before the run ends with a report of who waited where."""

    def text(self, data_ranks: int) -> str:
        """A short description."""
        kind = "ddp" if self.kind == "auto" else self.kind
        if self.tensor == 1:
            return kind
        return f"tensor {self.tensor}" + (f" × {kind} {data_ranks}" if data_ranks > 1 else "")

    @model_validator(mode="before")
    @classmethod
    def _parse_kind(cls, tree: Any) -> Any:
        return {"kind": tree} if isinstance(tree, str) else tree
