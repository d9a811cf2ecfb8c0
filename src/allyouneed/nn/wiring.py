"""How sub-layers hang on the residual stream. A wiring sees the whole block, so it may run them as it likes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout

Call = Callable[[Tensor], Tensor]  # a sub-layer with its context and state filled in


class Wiring(Part, slot="wiring"):
    """`begin` opens the stream, one built module per block carries it on, `end` closes it.

    The stream is whatever the wiring makes of it: one tensor here, two for ResiDual.
    """

    @abstractmethod
    def build(self, common: Common, sublayers: int) -> nn.Module:
        """A module called as `wiring(stream, calls, context)`."""

    @abstractmethod
    def cost(self, common: Common, sublayers: int) -> Cost: ...

    def begin(self, x: Tensor) -> Any:
        return x

    def end(self, common: Common) -> nn.Module | None:
        """What closes the stack, called as `end(stream, context)`; None: the stream is the result."""
        return None

    def end_cost(self, common: Common) -> Cost:
        return Cost()


class PostNorm(Wiring):
    """ "Attention Is All You Need", 3.1: LayerNorm(x + Sublayer(x)), dropout on the sub-layer's output (5.4)."""

    kind: Literal["post-norm"] = "post-norm"

    def build(self, common: Common, sublayers: int) -> nn.Module:
        return PostNormModule(common, sublayers)

    def cost(self, common: Common, sublayers: int) -> Cost:
        return common.norm.cost(common.width) * sublayers


class PostNormModule(nn.Module):
    def __init__(self, common: Common, sublayers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(common.norm.build(common.width) for _ in range(sublayers))
        self.dropout = Dropout(common.dropout)

    def forward(self, x: Tensor, calls: Sequence[Call], context: Context) -> Tensor:
        for norm, call in zip(self.norms, calls, strict=True):
            x = norm(x + self.dropout(call(x)), context)
        return x


class PreNorm(Wiring):
    """x + Sublayer(LayerNorm(x)), and one norm after the last block (Xiong et al. 2020, figure 1b)."""

    kind: Literal["pre-norm"] = "pre-norm"

    def build(self, common: Common, sublayers: int) -> nn.Module:
        return PreNormModule(common, sublayers)

    def cost(self, common: Common, sublayers: int) -> Cost:
        return common.norm.cost(common.width) * sublayers

    def end(self, common: Common) -> nn.Module | None:
        return common.norm.build(common.width)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class PreNormModule(PostNormModule):
    def forward(self, x: Tensor, calls: Sequence[Call], context: Context) -> Tensor:
        for norm, call in zip(self.norms, calls, strict=True):
            x = x + self.dropout(call(norm(x, context)))
        return x
