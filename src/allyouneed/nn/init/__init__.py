"""Weight initialisation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.init.balance import balance
from allyouneed.nn.init.depth import deepnorm_factors

Deviation = Annotated[float, Field(gt=0)]


class Init(Part, slot="init"):
    balanced: bool = True
    """Begin with a smaller gain in the norm before a tied head that would recognise the token vectors, so that the
    first loss is near the logarithm of the vocabulary; `false`: the scheme as it was published."""

    @abstractmethod
    def apply(self, model: nn.Module, width: int) -> None:
        """Initialise every weight of the model, as published."""

    def start(self, model: nn.Module, width: int) -> None:
        """Initialise a whole model."""
        self.apply(model, width)
        if self.balanced:
            balance(model)


class Xavier(Init):
    """Glorot, Bengio 2010, eq. 16, for every matrix (a merged qkv matrix counts as one, as in
    torch.nn.MultiheadAttention), zero biases; embeddings normal with deviation width^-1/2, so that after scaling by
    √width they have variance 1 (as in tensor2tensor and fairseq)."""

    kind: Literal["xavier"] = "xavier"

    def apply(self, model: nn.Module, width: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=width**-0.5)


# --- role of a matrix -----------------------------------------------------------------------------------------------

Role = Literal["q", "k", "v", "out", "up", "down", "other"]

# names of the linear maps of sub-layers, and the roles of their row blocks in order
ROLES: dict[str, tuple[Role, ...]] = {
    "qkv": ("q", "k", "v"),
    "q": ("q",),
    "kv": ("k", "v"),
    "k": ("k",),
    "v": ("v",),
    "out": ("out",),
    "gate_up": ("up", "up"),
    "up": ("up",),
    "down": ("down",),
}


class Owner(NamedTuple):
    """Owner of a matrix: its module in a sub-layer, the wiring of its block, and the number of sub-layers that add to
    the residual stream."""

    module: nn.Module
    name: str
    wiring: nn.Module
    branches: int


class Matrix(NamedTuple):
    weight: Tensor  # (outputs, inputs, …); a slice of a merged matrix
    role: Role
    owner: Owner | None  # None: outside blocks


class ByRole(Init):
    """Initialises each matrix by its role. Biases are zero; other modules reset themselves."""

    @abstractmethod
    def draw(self, matrix: Matrix, width: int) -> None: ...

    @abstractmethod
    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        """An embedding of tokens or positions, or one `inside` a block."""

    @torch.no_grad()
    def apply(self, model: nn.Module, width: int) -> None:
        owners = dict(_owners(model))
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for module in model.modules():
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(module, nn.Embedding):
                self.draw_table(module.weight, module in owners, width)
            elif isinstance(weight, nn.Parameter) and weight.dim() > 1:
                if id(weight) not in tables:  # skip tied heads
                    for matrix in _matrices(weight, owners.get(module)):
                        self.draw(matrix, width)
                if isinstance(bias, nn.Parameter):
                    nn.init.zeros_(bias)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, Owner]]:
    """Every module inside a sub-layer of a block, and its owner."""
    for stack in model.modules():
        blocks: list[Any] = list(getattr(stack, "blocks", []))
        branches = sum(len(block.sublayers) for block in blocks)
        for block in blocks:
            for sublayer in block.sublayers.values():
                for module in sublayer.modules():
                    for name, child in module.named_children():
                        yield child, Owner(module, name, block.wiring, branches)


def _matrices(weight: Tensor, owner: Owner | None) -> Iterator[Matrix]:
    roles: tuple[Role, ...] = ROLES.get(owner.name, ("other",)) if owner is not None else ("other",)
    if owner is None or len(roles) == 1:
        yield Matrix(weight, roles[0], owner)
        return
    sizes = [len(weight) // len(roles)] * len(roles)
    if owner.name in ("qkv", "kv"):
        sizes = [
            (_int_attribute(owner, "heads") if role == "q" else _int_attribute(owner, "kv_heads"))
            * _int_attribute(owner, "head_width")
            for role in roles
        ]
    if sum(sizes) != len(weight):
        raise ValueError(f"{type(owner.module).__name__}.{owner.name} has {len(weight)} rows, not {sizes}")
    for piece, role in zip(weight.split(sizes), roles, strict=True):
        yield Matrix(piece, role, owner)


def _int_attribute(owner: Owner, name: str) -> int:
    value = getattr(owner.module, name)
    assert isinstance(value, int), f"{type(owner.module).__name__}.{name} is not an integer"
    return value


# --- published schemes ----------------------------------------------------------------------------------------------


class OneDeviation(ByRole):
    std: Deviation = 0.02
    """Standard deviation of the weights."""
    truncated: bool = False
    """Redraw what is more than two deviations from zero."""

    def draw(self, matrix: Matrix, width: int) -> None:
        self.draw_table(matrix.weight, True, width)

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        if self.truncated:
            nn.init.trunc_normal_(weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        else:
            nn.init.normal_(weight, std=self.std)


class Normal(OneDeviation):
    """Every matrix and embedding normal with one deviation, truncated at two deviations if `truncated` (Radford et al.
    2018, 4.1; Devlin et al. 2019, truncated in the authors' code)."""

    kind: Literal["normal"] = "normal"


class GPT2(OneDeviation):
    """Radford et al. 2019, 2.3: as `normal`, with the output projections of sub-layers divided by √N, N the number of
    sub-layers that add to the residual stream (two per layer in GPT-2)."""

    kind: Literal["gpt2"] = "gpt2"

    def draw(self, matrix: Matrix, width: int) -> None:
        super().draw(matrix, width)
        if matrix.role in ("out", "down") and matrix.owner is not None:
            matrix.weight.div_(matrix.owner.branches**0.5)


class Small(ByRole):
    """Nguyen, Salazar 2019, "Transformers without Tears", SmallInit: every matrix normal with deviation √(2 / (width +
    4 width)), Xavier's value for feed-forward layers; embeddings with width^-1/2."""

    kind: Literal["small"] = "small"

    def draw(self, matrix: Matrix, width: int) -> None:
        nn.init.normal_(matrix.weight, std=(2 / (5 * width)) ** 0.5)

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        nn.init.normal_(weight, std=width**-0.5)


class T5(ByRole):
    """Raffel et al. 2020, the authors' mesh-tensorflow code: normal with deviation inputs^-1/2, for queries (inputs ·
    head_width)^-1/2 because attention scores are not scaled; embeddings 1, position bias tables width^-1/2. All
    times `factor`."""

    kind: Literal["t5"] = "t5"
    factor: Deviation = 1.0
    """Multiplies every deviation."""

    def draw(self, matrix: Matrix, width: int) -> None:
        std = matrix.weight[0].numel() ** -0.5
        if matrix.role == "q" and matrix.owner is not None:
            std *= _int_attribute(matrix.owner, "head_width") ** -0.5
        nn.init.normal_(matrix.weight, std=self.factor * std)

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        nn.init.normal_(weight, std=self.factor * (width**-0.5 if inside else 1.0))


class DeepNormInit(ByRole):
    """Wang et al. 2022, "DeepNet", figure 2: Xavier normal with gain β for feed-forward layers, values and output
    projections, 1 for queries and keys; β from the number of layers unless set. Embeddings as in `xavier`."""

    kind: Literal["deepnorm"] = "deepnorm"
    beta: Deviation | None = None
    """Gain β of feed-forward layers, values and outputs; default: from the number of layers (figure 2)."""

    def draw(self, matrix: Matrix, width: int) -> None:
        gain = 1.0
        if matrix.owner is not None and matrix.role in ("v", "out", "up", "down"):
            gain = self._beta(matrix.owner.wiring) if self.beta is None else self.beta
        nn.init.xavier_normal_(matrix.weight, gain)

    @staticmethod
    def _beta(wiring: Any) -> float:
        return deepnorm_factors(wiring.depth)[1]

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        nn.init.normal_(weight, std=width**-0.5)
