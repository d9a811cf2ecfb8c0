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
from allyouneed.nn.depth import Depth, deepnorm_factors
from allyouneed.nn.dropout import Dropout

Call = Callable[[Tensor], Tensor]  # a sub-layer with its context and state filled in, or a norm with its context
BEFORE_NORM = "input of the last norm"  # in `Context.memo`
Step = Callable[..., Any]  # (stream, sub-layer, its norms…) -> stream


class Wiring(Part, slot="wiring"):
    """`begin` opens the stream, one module per block carries it, `end` closes it.

    The stream is defined by the wiring: one tensor here, two for ResiDual. Where a stack changes wirings, the first
    stream is closed and a new one opened.
    """

    @abstractmethod
    def build(self, common: Common, sublayers: int, depth: Depth) -> nn.Module:
        """A module called as `wiring(stream, calls, context)` with an attribute `depth`, used by inits."""

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
    """A wiring given by a formula, `run`, over the stream, the sub-layers and their norms."""

    @abstractmethod
    def run(self, stream: Any, branches: Sequence[Call], norms: Sequence[Call], depth: Depth) -> Any: ...

    def norm_count(self, sublayers: int) -> int:
        return sublayers

    def scale_start(self) -> float | None:
        return None

    def build(self, common: Common, sublayers: int, depth: Depth) -> nn.Module:
        return ResidualModule(self, common, sublayers, depth)

    def cost(self, common: Common, sublayers: int) -> Cost:
        scales = Cost(parameters=0 if self.scale_start() is None else common.width * sublayers)
        return common.norm.cost(common.width) * self.norm_count(sublayers) + scales


class ResidualModule(nn.Module):
    """Norms, dropout and scales of a formula. f includes dropout on its output (the paper, 5.4) and LayerScale."""

    def __init__(self, config: Residual, common: Common, sublayers: int, depth: Depth) -> None:
        super().__init__()
        self.config, self.depth, self.scale_start = config, depth, config.scale_start()
        self.norms = nn.ModuleList(common.norm.build(common.width) for _ in range(config.norm_count(sublayers)))
        self.dropout = Dropout(common.dropout)
        self.scales = nn.ParameterList(
            torch.full((common.width,), self.scale_start) for _ in range(sublayers) if self.scale_start is not None
        )

    def forward(self, stream: Any, calls: Sequence[Call], context: Context) -> Any:
        branches: list[Call] = [partial(self.branch, number, call) for number, call in enumerate(calls)]
        norms: list[Call] = [partial(context.call, norm) for norm in self.norms]
        if context.memory_builder is not None:
            norms = [partial(_keep_input, context, norm) for norm in self.norms]
        return self.config.run(stream, branches, norms, self.depth)

    def branch(self, number: int, call: Call, x: Tensor) -> Tensor:
        y = call(x)
        y = self.dropout(y) if self.training else y
        return y if self.scale_start is None else y * self.scales[number]

    def reset_parameters(self) -> None:
        if self.scale_start is not None:
            for scale in self.scales:
                nn.init.constant_(scale, self.scale_start)


def _keep_input(context: Context, norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x); a builder of memory may read x (models/retro.py)."""
    context.memo[BEFORE_NORM] = x
    normed: Tensor = context.call(norm, x)
    return normed


class LayerScaled(Residual):
    """Touvron et al. 2021, "Going deeper with Image Transformers", eq. 9–10, LayerScale: a learned factor per feature
    on each sub-layer output, initially `layer_scale`."""

    layer_scale: Annotated[float, Field(gt=0)] | None = None
    """Initial value of a learned factor per feature on each sub-layer output (LayerScale); default: none."""

    def scale_start(self) -> float | None:
        return self.layer_scale


class FinalNorm(Residual):
    """The stream is not normalised, so a final norm follows the last block."""

    def end(self, common: Common) -> nn.Module | None:
        return common.norm.build(common.width)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class Chained(Residual):
    """Sub-layers in sequence: `step` is the formula of one. With two norms per sub-layer, those of sub-layer i are
    norms[2i] and norms[2i + 1]."""

    norms_each: ClassVar[int] = 1

    @abstractmethod
    def step(self, depth: Depth) -> Step: ...

    def run(self, stream: Any, branches: Sequence[Call], norms: Sequence[Call], depth: Depth) -> Any:
        step, each = self.step(depth), self.norms_each
        for number, f in enumerate(branches):
            stream = step(stream, f, *norms[number * each : (number + 1) * each])
        return stream

    def norm_count(self, sublayers: int) -> int:
        return self.norms_each * sublayers


class PostNorm(Chained, LayerScaled):
    """ "Attention Is All You Need", 3.1: LayerNorm(x + Sublayer(x)), dropout on the sub-layer's output (5.4)."""

    kind: Literal["post-norm"] = "post-norm"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: norm(x + f(x))


class PreNorm(Chained, LayerScaled, FinalNorm):
    """x + Sublayer(LayerNorm(x)), and a norm after the last block (Xiong et al. 2020, figure 1b) if `final`."""

    kind: Literal["pre-norm"] = "pre-norm"
    final: bool = True
    """Normalise after the last block."""

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: x + f(norm(x))

    def end(self, common: Common) -> nn.Module | None:
        return super().end(common) if self.final else None

    def end_cost(self, common: Common) -> Cost:
        return super().end_cost(common) if self.final else Cost()


class ResPostNorm(Chained, FinalNorm):
    """x + LayerNorm(Sublayer(x)) (Liu et al. 2022, "Swin Transformer V2", 3.2; OLMo 2 with RMSNorm)."""

    kind: Literal["res-post-norm"] = "res-post-norm"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: x + norm(f(x))


class Sandwich(Chained, FinalNorm):
    """x + LayerNorm(Sublayer(LayerNorm(x))) (Ding et al. 2021, "CogView", 2.4; Gemma 2 with RMSNorm)."""

    norms_each: ClassVar[int] = 2
    kind: Literal["sandwich"] = "sandwich"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, before, after: x + after(f(before(x)))


class ParallelResidual(LayerScaled, FinalNorm):
    """x + Attention(LayerNorm(x)) + FFN(LayerNorm(x)): all sub-layers of a block see the same x (Wang, Komatsuzaki
    2021, "GPT-J-6B"; Chowdhery et al. 2022, "PaLM", 2), after `one` norm or one `each` (GPT-NeoX)."""

    kind: Literal["parallel"] = "parallel"
    norms: Literal["one", "each"] = "one"
    """`one` norm for all sub-layers of a block, or one for `each` (GPT-NeoX)."""

    def norm_count(self, sublayers: int) -> int:
        return 1 if self.norms == "one" else sublayers

    def run(self, stream: Any, branches: Sequence[Call], norms: Sequence[Call], depth: Depth) -> Any:
        seen = [norm(stream) for norm in norms] * (len(branches) // len(norms))
        return stream + sum(f(x) for f, x in zip(branches, seen, strict=True))


class DeepNorm(Chained):
    """Wang et al. 2022, "DeepNet", figure 2: LayerNorm(α x + Sublayer(x)); α from the number of layers unless set.

    Use it with the init of the same name.
    """

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Factor α of the residual stream; default: from the number of layers (figure 2)."""

    def step(self, depth: Depth) -> Step:
        alpha = deepnorm_factors(depth)[0] if self.alpha is None else self.alpha
        return lambda x, f, norm: norm(alpha * x + f(x))


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

    def step(self, depth: Depth) -> Step:
        def both(stream: tuple[Tensor, Tensor], f: Call, norm: Call) -> tuple[Tensor, Tensor]:
            x, dual = stream
            added = f(x)
            return norm(x + added), dual + added

        return both

    def end(self, common: Common) -> nn.Module | None:
        return ResiDualEnd(self, common)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class ResiDualEnd(nn.Module):
    def __init__(self, config: ResiDual, common: Common) -> None:
        super().__init__()
        own = {} if config.final_eps is None else {"eps": config.final_eps}
        self.norm = common.norm.model_copy(update=own).build(common.width)

    def forward(self, stream: tuple[Tensor, Tensor], context: Context) -> Tensor:
        x, dual = stream
        joined: Tensor = x + context.call(self.norm, dual)
        return joined
