"""Blocks of plain functions on a wiring, to hold wirings to their formulas."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from allyouneed.nn.models.block import Block


class Called(nn.Module):
    """A sub-layer that computes this function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, context, state=None):
        return self.function(x)


def wired(wiring: nn.Module, functions: Sequence[Callable[[Tensor], Tensor]]) -> Block:
    """A block with this wiring and these functions as its sub-layers."""
    block = Block.__new__(Block)
    nn.Module.__init__(block)
    block.wiring = wiring
    block.sublayers = nn.ModuleDict({str(number): Called(function) for number, function in enumerate(functions)})
    return block
