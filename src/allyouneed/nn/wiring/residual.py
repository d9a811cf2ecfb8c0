"""Residual wirings: how the sub-layers of a block are combined."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.init.depth import Depth, deepnorm_factors

Call = Callable[[Any], Any]  # a norm with its context, or a sub-layer with its context, state and dropout


class Wiring(Part, slot="wiring"):
    """`begin` opens the stream, one module per block carries it, `end` closes it.

    The stream is defined by the wiring: one tensor here, two for ResiDual. Where a stack changes wirings, the first
    stream is closed and a new one opened.
    """

    @abstractmethod
    def build(self, common: Common, sublayers: int, depth: Depth) -> nn.Module:
        """A `ChainedModule`, or a module that runs the sub-layers of a block: `wiring(stream, parts, context)`, each of
        `parts` a sub-layer and its state. Its attribute `depth` is used by inits."""

    @abstractmethod
    def cost(self, common: Common, sublayers: int) -> Cost: ...

    def begin(self, x: Tensor) -> Any:
        return x

    def outputs(self, common: Common) -> int:
        """Output features of `end`."""
        return common.width

    def end(self, common: Common) -> nn.Module | None:
        """Module that closes the stream, called as `end(stream, context)`; None: the stream is the result."""
        return None

    def end_cost(self, common: Common) -> Cost:
        return Cost()


# --- sub-layers on one residual stream --------------------------------------------------------------------------------


class Residual(Wiring):
    """A wiring with norms, dropout on what sub-layers give, and LayerScale."""

    @abstractmethod
    def build(self, common: Common, sublayers: int, depth: Depth) -> ResidualModule: ...

    def norm_count(self, sublayers: int) -> int:
        return sublayers

    def scale_start(self) -> float | None:
        return None

    def cost(self, common: Common, sublayers: int) -> Cost:
        scales = Cost(parameters=0 if self.scale_start() is None else common.width * sublayers)
        return common.norm.cost(common.width) * self.norm_count(sublayers) + scales


class Chained(Residual):
    """Sub-layers one after another: each reads `before(stream, *norms)`, and with its output y the stream becomes
    `after(stream, y, *norms)`; a sub-layer has `norms_each` norms."""

    norms_each: ClassVar[int] = 1
    before: ClassVar[Callable[..., Any]]
    after: ClassVar[Callable[..., Any]]

    def norm_count(self, sublayers: int) -> int:
        return self.norms_each * sublayers

    def build(self, common: Common, sublayers: int, depth: Depth) -> ResidualModule:
        return ChainedModule(self, common, sublayers, depth)


class BlockFormula(Residual):
    """A wiring given by one formula, `run`, over the stream, all sub-layers of a block and their norms."""

    @abstractmethod
    def run(self, stream: Any, sublayers: Sequence[Call], norms: Sequence[Call]) -> Any: ...

    def build(self, common: Common, sublayers: int, depth: Depth) -> ResidualModule:
        return BlockFormulaModule(self, common, sublayers, depth)


class ResidualModule(nn.Module):
    """Norms, dropout and scales of a formula."""

    def __init__(self, config: Residual, common: Common, sublayers: int, depth: Depth) -> None:
        super().__init__()
        self.config: Any = config
        self.sublayer_count, self.depth, self.scale_start = sublayers, depth, config.scale_start()
        self.norms = nn.ModuleList(common.norm.build(common.width) for _ in range(config.norm_count(sublayers)))
        self.dropout, self.skip_rate = Dropout(common.dropout), 0.0
        self.scales = nn.ParameterList(
            torch.full((common.width,), self.scale_start) for _ in range(sublayers) if self.scale_start is not None
        )

    def scale(self, y: Any, number: int) -> Any:
        """The output of sub-layer `number` with dropout (the paper, 5.4), LayerScale and stochastic depth."""
        y = self._skipped(self.dropout(y)) if self.training else y
        return y if self.scale_start is None else y * self.scales[number]

    def place(self, number: int, count: int) -> None:
        """It is in block `number`, from 0, of `count`: later ones are skipped more often (Huang et al. 2016, eq. 4)."""
        self.skip_rate = getattr(self.config, "depth_dropout", 0.0) * (number + 1) / count

    def _skipped(self, y: Any) -> Any:
        """Zero for some rows of the batch, so that only the stream is left of them; the others scaled accordingly."""
        if self.skip_rate == 0:
            return y
        kept = torch.rand(len(y), *[1] * (y.dim() - 1), device=y.device) >= self.skip_rate
        return y * (kept.to(y.dtype) / (1 - self.skip_rate))

    def reset_parameters(self) -> None:
        if self.scale_start is not None:
            for scale in self.scales:
                nn.init.constant_(scale, self.scale_start)


class ChainedModule(ResidualModule):
    """Called by the block around each sub-layer (models/block.py)."""

    def norm_calls(self, context: Context) -> list[list[Call]]:
        """The norms of each sub-layer."""
        calls: list[Call] = [partial(context.call, norm) for norm in self.norms]
        each = self.config.norms_each
        return [calls[number * each : (number + 1) * each] for number in range(self.sublayer_count)]

    def before(self, stream: Any, number: int, norms: list[Call]) -> tuple[Any, Any]:
        """What sub-layer `number` reads, and the stream."""
        return self.config.before(stream, *norms), stream

    def after(self, stream: Any, y: Any, number: int, norms: list[Call]) -> Any:
        """The stream after sub-layer `number`, given its output."""
        return self.config.after(stream, self.scale(y, number), *norms)


class BlockFormulaModule(ResidualModule):
    def forward(self, stream: Any, parts: Sequence[tuple[nn.Module, Any]], context: Context) -> Any:
        sublayers = [partial(self.branch, number, *part, context) for number, part in enumerate(parts)]
        return self.config.run(stream, sublayers, [partial(context.call, norm) for norm in self.norms])

    def branch(self, number: int, part: nn.Module, state: Any, context: Context, x: Any) -> Any:
        return self.scale(context.call(part, x, state), number)


class LayerScaled(Residual):
    """Touvron et al. 2021, "Going deeper with Image Transformers", eq. 9–10, LayerScale: a learned factor per feature
    on each sub-layer output, initially `layer_scale`. Huang et al. 2016, "Deep Networks with Stochastic Depth":
    sub-layers are skipped at random in training, each for some rows of the batch (`depth_dropout`)."""

    layer_scale: Annotated[float, Field(gt=0)] | None = None
    """Initial value of a learned factor per feature on each sub-layer output (LayerScale); default: none."""

    depth_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of skipping a sub-layer of the last block in training, less in earlier ones (stochastic depth)."""

    def scale_start(self) -> float | None:
        return self.layer_scale


class FinalNorm(Residual):
    """The stream is not normalised, so a final norm follows the last block."""

    def end(self, common: Common) -> nn.Module | None:
        return common.norm.build(common.width)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class PostNorm(Chained, LayerScaled):
    """ "Attention Is All You Need", 3.1: LayerNorm(x + Sublayer(x)), dropout on the sub-layer's output (5.4)."""

    kind: Literal["post-norm"] = "post-norm"

    def before(self, x: Any, norm: Call) -> Any:
        return x

    def after(self, x: Any, y: Any, norm: Call) -> Any:
        return norm(x + y)


class PreNorm(Chained, LayerScaled, FinalNorm):
    """x + Sublayer(LayerNorm(x)), and a norm after the last block (Xiong et al. 2020, figure 1b) if `final`."""

    kind: Literal["pre-norm"] = "pre-norm"
    final: bool = True
    """Normalise after the last block."""

    def before(self, x: Any, norm: Call) -> Any:
        return norm(x)

    def after(self, x: Any, y: Any, norm: Call) -> Any:
        return x + y

    def end(self, common: Common) -> nn.Module | None:
        return super().end(common) if self.final else None

    def end_cost(self, common: Common) -> Cost:
        return super().end_cost(common) if self.final else Cost()


class ResPostNorm(Chained, FinalNorm):
    """x + LayerNorm(Sublayer(x)) (Liu et al. 2022, "Swin Transformer V2", 3.2; OLMo 2 with RMSNorm)."""

    kind: Literal["res-post-norm"] = "res-post-norm"

    def before(self, x: Any, norm: Call) -> Any:
        return x

    def after(self, x: Any, y: Any, norm: Call) -> Any:
        return x + norm(y)


class Sandwich(Chained, FinalNorm):
    """x + LayerNorm(Sublayer(LayerNorm(x))) (Ding et al. 2021, "CogView", 2.4; Gemma 2 with RMSNorm)."""

    norms_each: ClassVar[int] = 2
    kind: Literal["sandwich"] = "sandwich"

    def before(self, x: Any, first: Call, second: Call) -> Any:
        return first(x)

    def after(self, x: Any, y: Any, first: Call, second: Call) -> Any:
        return x + second(y)


class ParallelResidual(BlockFormula, LayerScaled, FinalNorm):
    """x + Attention(LayerNorm(x)) + FFN(LayerNorm(x)): all sub-layers of a block see the same x (Wang, Komatsuzaki
    2021, "GPT-J-6B"; Chowdhery et al. 2022, "PaLM", 2), after `one` norm or one `each` (GPT-NeoX)."""

    kind: Literal["parallel"] = "parallel"
    norms: Literal["one", "each"] = "one"
    """`one` norm for all sub-layers of a block, or one for `each` (GPT-NeoX)."""

    def norm_count(self, sublayers: int) -> int:
        return 1 if self.norms == "one" else sublayers

    def run(self, stream: Any, sublayers: Sequence[Call], norms: Sequence[Call]) -> Any:
        seen = [norm(stream) for norm in norms] * (len(sublayers) // len(norms))
        return stream + sum(f(x) for f, x in zip(sublayers, seen, strict=True))


class DeepNorm(Chained):
    """Wang et al. 2022, "DeepNet", figure 2: LayerNorm(α x + Sublayer(x)); α from the number of layers unless set.

    Use it with the init of the same name.
    """

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Factor α of the residual stream; default: from the number of layers (figure 2)."""

    def build(self, common: Common, sublayers: int, depth: Depth) -> ResidualModule:
        alpha = deepnorm_factors(depth)[0] if self.alpha is None else self.alpha
        return ChainedModule(self.model_copy(update={"alpha": alpha}), common, sublayers, depth)

    def before(self, x: Any, norm: Call) -> Any:
        return x

    def after(self, x: Any, y: Any, norm: Call) -> Any:
        return norm(self.alpha * x + y)


class ResiDual(Chained):
    """Xie et al. 2023, "ResiDual", section 3: a second stream sums the sub-layer outputs and is normalised once at the
    end: x ← LayerNorm(x + Sublayer(x)), d ← d + Sublayer(x), result x + LayerNorm(d).

    `final_eps` is the eps of that last norm, where it differs from the model's; the authors' code sets one of its own
    for half precision, in which d is scaled down.
    """

    kind: Literal["resi-dual"] = "resi-dual"
    final_eps: Annotated[float, Field(ge=0)] | None = None
    """eps of the norm of the second stream at the end; default: that of the model's norm."""

    def begin(self, x: Tensor) -> Any:
        return x, x

    def before(self, stream: tuple[Any, Any], norm: Call) -> Any:
        return stream[0]

    def after(self, stream: tuple[Any, Any], y: Any, norm: Call) -> Any:
        x, dual = stream
        return norm(x + y), dual + y

    def end(self, common: Common) -> nn.Module | None:
        return ResiDualEnd(self, common)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class ResiDualEnd(nn.Module):
    adds = True  # to a stream that is normalised already

    def __init__(self, config: ResiDual, common: Common) -> None:
        super().__init__()
        own = {} if config.final_eps is None else {"eps": config.final_eps}
        self.norm = common.norm.model_copy(update=own).build(common.width)

    def forward(self, stream: tuple[Tensor, Tensor], context: Context) -> Tensor:
        x, dual = stream
        return x + context.call(self.norm, dual)
