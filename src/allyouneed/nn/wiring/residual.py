"""How sub-layers hang on the residual stream. A wiring sees the whole block, so it may run them as it likes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout


class Depth(NamedTuple):
    """How many layers the model has on each side, and which side this is: some wirings scale with it."""

    encoder: int
    decoder: int
    side: Literal["encoder", "decoder"]


Call = Callable[[Tensor], Tensor]  # a sub-layer with its context and state filled in, or a norm with its context
Step = Callable[..., Any]  # (stream, sub-layer, its norms…) -> stream


class Wiring(Part, slot="wiring"):
    """`begin` opens the stream, one built module per block carries it on, `end` closes it.

    The stream is whatever the wiring makes of it: one tensor here, two for ResiDual. Where a stack changes from one
    wiring to another, the first closes its stream and the second opens it anew.
    """

    @abstractmethod
    def build(self, common: Common, sublayers: int, depth: Depth) -> nn.Module:
        """A module called as `wiring(stream, calls, context)`; its `depth` is known to inits that scale with it."""

    @abstractmethod
    def cost(self, common: Common, sublayers: int) -> Cost: ...

    def begin(self, x: Tensor) -> Any:
        return x

    def outputs(self, common: Common) -> int:
        """How many features `end` gives to what comes behind the stack."""
        return common.width

    def end(self, common: Common) -> nn.Module | None:
        """What closes the stack, called as `end(stream, context)`; None: the stream is the result."""
        return None

    def end_cost(self, common: Common) -> Cost:
        return Cost()


# --- sub-layers on one residual stream --------------------------------------------------------------------------------


class Residual(Wiring):
    """A wiring that is a formula, `run`, of the stream, the sub-layers and their norms."""

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
    """Owns what a formula needs. f comes with its dropout (the paper, 5.4: on the output, before it is added) and its
    LayerScale inside."""

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
        return self.config.run(stream, branches, norms, self.depth)

    def branch(self, number: int, call: Call, x: Tensor) -> Tensor:
        y = call(x)
        y = self.dropout(y) if self.training else y
        return y if self.scale_start is None else y * self.scales[number]

    def reset_parameters(self) -> None:
        if self.scale_start is not None:
            for scale in self.scales:
                nn.init.constant_(scale, self.scale_start)


class Scaled(Residual):
    """Touvron et al. 2021, "Going deeper with Image Transformers", eq. 9–10, LayerScale: a learned factor per feature
    on what a sub-layer adds, beginning at `layer_scale`."""

    layer_scale: Annotated[float, Field(gt=0)] | None = None

    def scale_start(self) -> float | None:
        return self.layer_scale


class Open(Residual):
    """Nothing normalises the stream itself, so one norm does after the last block."""

    def end(self, common: Common) -> nn.Module | None:
        return common.norm.build(common.width)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class Chained(Residual):
    """One sub-layer after another: `step` is the formula for one. Where it has two norms, those of sub-layer i are
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


class PostNorm(Chained, Scaled):
    """ "Attention Is All You Need", 3.1: LayerNorm(x + Sublayer(x)), dropout on the sub-layer's output (5.4)."""

    kind: Literal["post-norm"] = "post-norm"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: norm(x + f(x))


class PreNorm(Chained, Scaled, Open):
    """x + Sublayer(LayerNorm(x)), and one norm after the last block (Xiong et al. 2020, figure 1b), where `final`."""

    kind: Literal["pre-norm"] = "pre-norm"
    final: bool = True

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: x + f(norm(x))

    def end(self, common: Common) -> nn.Module | None:
        return super().end(common) if self.final else None

    def end_cost(self, common: Common) -> Cost:
        return super().end_cost(common) if self.final else Cost()


class ResPostNorm(Chained, Open):
    """x + LayerNorm(Sublayer(x)) (Liu et al. 2022, "Swin Transformer V2", 3.2; OLMo 2 with RMSNorm)."""

    kind: Literal["res-post-norm"] = "res-post-norm"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: x + norm(f(x))


class Sandwich(Chained, Open):
    """x + LayerNorm(Sublayer(LayerNorm(x))) (Ding et al. 2021, "CogView", 2.4; Gemma 2 with RMSNorm)."""

    norms_each: ClassVar[int] = 2
    kind: Literal["sandwich"] = "sandwich"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, before, after: x + after(f(before(x)))


class Parallel(Scaled, Open):
    """x + Attention(LayerNorm(x)) + FFN(LayerNorm(x)): all sub-layers of a block see the same x (Wang, Komatsuzaki
    2021, "GPT-J-6B"; Chowdhery et al. 2022, "PaLM", 2), behind `one` norm or one `each` (GPT-NeoX)."""

    kind: Literal["parallel"] = "parallel"
    norms: Literal["one", "each"] = "one"

    def norm_count(self, sublayers: int) -> int:
        return 1 if self.norms == "one" else sublayers

    def run(self, stream: Any, branches: Sequence[Call], norms: Sequence[Call], depth: Depth) -> Any:
        seen = [norm(stream) for norm in norms] * (len(branches) // len(norms))
        return stream + sum(f(x) for f, x in zip(branches, seen, strict=True))


class DeepNorm(Chained):
    """Wang et al. 2022, "DeepNet", figure 2: LayerNorm(α x + Sublayer(x)); α from the number of layers unless given.

    It belongs together with the init of the same name.
    """

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: Annotated[float, Field(gt=0)] | None = None

    def step(self, depth: Depth) -> Step:
        alpha = deepnorm_factors(depth)[0] if self.alpha is None else self.alpha
        return lambda x, f, norm: norm(alpha * x + f(x))


def deepnorm_factors(depth: Depth) -> tuple[float, float]:
    """α of the residual and β of the init ("DeepNet", figure 2)."""
    n, m = depth.encoder, depth.decoder
    if depth.side == "encoder" and m:
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    if depth.side == "decoder" and n:
        return (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)
    return (2 * (n + m)) ** (1 / 4), (8 * (n + m)) ** (-1 / 4)


class ResiDual(Chained):
    """Xie et al. 2023, "ResiDual", section 3: beside the post-norm stream a second one sums what sub-layers add, and is
    normalised once, at the end: x ← LayerNorm(x + Sublayer(x)), d ← d + Sublayer(x), result x + LayerNorm(d)."""

    kind: Literal["resi-dual"] = "resi-dual"

    def begin(self, x: Tensor) -> Any:
        return x, x

    def step(self, depth: Depth) -> Step:
        def both(stream: tuple[Tensor, Tensor], f: Call, norm: Call) -> tuple[Tensor, Tensor]:
            x, dual = stream
            added = f(x)
            return norm(x + added), dual + added

        return both

    def end(self, common: Common) -> nn.Module | None:
        return ResiDualEnd(common)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(common.width)


class ResiDualEnd(nn.Module):
    def __init__(self, common: Common) -> None:
        super().__init__()
        self.norm = common.norm.build(common.width)

    def forward(self, stream: tuple[Tensor, Tensor], context: Context) -> Tensor:
        x, dual = stream
        joined: Tensor = x + context.call(self.norm, dual)
        return joined
