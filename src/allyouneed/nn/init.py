"""Initial weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part

Deviation = Annotated[float, Field(gt=0)]


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


# --- what a matrix is for ---------------------------------------------------------------------------------------------

Role = Literal["q", "k", "v", "out", "up", "down", "other"]

# the names that linear maps of sub-layers have, and what their rows are, in order
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


class Home(NamedTuple):
    """Where a matrix lives: the sub-layer's module that owns it, its block's wiring, and how many sub-layers add to the
    residual stream that it adds to."""

    owner: nn.Module
    name: str
    wiring: nn.Module
    branches: int


class Matrix(NamedTuple):
    weight: Tensor  # (outputs, inputs, …); a slice where one product makes several things
    role: Role
    home: Home | None  # None: outside the blocks


class ByRole(Init):
    """An init that draws each matrix by what it is for. Biases begin at zero; norms and such begin themselves."""

    @abstractmethod
    def draw(self, matrix: Matrix, width: int) -> None: ...

    @abstractmethod
    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        """An embedding, of tokens or positions, or `inside` a block."""

    @torch.no_grad()
    def apply(self, model: nn.Module, width: int) -> None:
        homes = dict(_homes(model))
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for module in model.modules():
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(module, nn.Embedding):
                self.draw_table(module.weight, module in homes, width)
            elif isinstance(weight, nn.Parameter) and weight.dim() > 1:
                if id(weight) not in tables:  # a tied head
                    for matrix in _matrices(weight, homes.get(module)):
                        self.draw(matrix, width)
                if isinstance(bias, nn.Parameter):
                    nn.init.zeros_(bias)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def _homes(model: nn.Module) -> Iterator[tuple[nn.Module, Home]]:
    """Every module inside a sub-layer of a block of a stack, and its home."""
    for stack in model.modules():
        blocks: list[Any] = list(getattr(stack, "blocks", []))
        branches = sum(len(block.sublayers) for block in blocks)
        for block in blocks:
            for sublayer in block.sublayers.values():
                for owner in sublayer.modules():
                    for name, child in owner.named_children():
                        yield child, Home(owner, name, block.wiring, branches)


def _matrices(weight: Tensor, home: Home | None) -> Iterator[Matrix]:
    roles: tuple[Role, ...] = ROLES.get(home.name, ("other",)) if home is not None else ("other",)
    if home is None or len(roles) == 1:
        yield Matrix(weight, roles[0], home)
        return
    sizes = [len(weight) // len(roles)] * len(roles)
    if home.name in ("qkv", "kv"):
        sizes = [
            (_whole(home, "heads") if role == "q" else _whole(home, "kv_heads")) * _whole(home, "head_width")
            for role in roles
        ]
    if sum(sizes) != len(weight):
        raise ValueError(f"{type(home.owner).__name__}.{home.name} has {len(weight)} rows, not {sizes}")
    for piece, role in zip(weight.split(sizes), roles, strict=True):
        yield Matrix(piece, role, home)


def _whole(home: Home, name: str) -> int:
    value = getattr(home.owner, name)
    assert isinstance(value, int), f"{type(home.owner).__name__}.{name} is no number"
    return value


# --- what papers prescribe --------------------------------------------------------------------------------------------


class OneDeviation(ByRole):
    std: Deviation = 0.02
    truncated: bool = False

    def draw(self, matrix: Matrix, width: int) -> None:
        self.draw_table(matrix.weight, True, width)

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        if self.truncated:
            nn.init.trunc_normal_(weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        else:
            nn.init.normal_(weight, std=self.std)


class Normal(OneDeviation):
    """Every matrix and embedding normal with one deviation, cut off at two of them if `truncated` (Radford et al. 2018,
    4.1; Devlin et al. 2019, truncated in the authors' code)."""

    kind: Literal["normal"] = "normal"


class GPT2(OneDeviation):
    """Radford et al. 2019, 2.3: as `normal`, but what sub-layers add to the residual stream is divided by √N, N the
    number of sub-layers that add to it (two a layer in GPT-2)."""

    kind: Literal["gpt2"] = "gpt2"

    def draw(self, matrix: Matrix, width: int) -> None:
        super().draw(matrix, width)
        if matrix.role in ("out", "down") and matrix.home is not None:
            matrix.weight.div_(matrix.home.branches**0.5)


class Small(ByRole):
    """Nguyen, Salazar 2019, "Transformers without Tears", SmallInit: every matrix normal with deviation
    √(2 / (width + 4 width)), what Xavier gives the feed-forward layers; embeddings with width^-1/2."""

    kind: Literal["small"] = "small"

    def draw(self, matrix: Matrix, width: int) -> None:
        nn.init.normal_(matrix.weight, std=(2 / (5 * width)) ** 0.5)

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        nn.init.normal_(weight, std=width**-0.5)


class T5(ByRole):
    """Raffel et al. 2020, the authors' mesh-tensorflow code: normal with deviation inputs^-1/2, and for queries
    (inputs · head_width)^-1/2, because their attention does not divide by √head_width; embeddings 1, tables of position
    biases width^-1/2. All times `factor`."""

    kind: Literal["t5"] = "t5"
    factor: Deviation = 1.0

    def draw(self, matrix: Matrix, width: int) -> None:
        std = matrix.weight[0].numel() ** -0.5
        if matrix.role == "q" and matrix.home is not None:
            std *= _whole(matrix.home, "head_width") ** -0.5
        nn.init.normal_(matrix.weight, std=self.factor * std)

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        nn.init.normal_(weight, std=self.factor * (width**-0.5 if inside else 1.0))


class DeepNormInit(ByRole):
    """Wang et al. 2022, "DeepNet", figure 2: Xavier normal with gain β for feed-forward layers, values and output
    projections, 1 for queries and keys; β from the number of layers unless given. Embeddings as in `xavier`."""

    kind: Literal["deepnorm"] = "deepnorm"
    beta: Deviation | None = None

    def draw(self, matrix: Matrix, width: int) -> None:
        gain = 1.0
        if matrix.home is not None and matrix.role in ("v", "out", "up", "down"):
            gain = self._beta(matrix.home.wiring) if self.beta is None else self.beta
        nn.init.xavier_normal_(matrix.weight, gain)

    @staticmethod
    def _beta(wiring: Any) -> float:
        from allyouneed.nn.wiring.residual import deepnorm_factors  # wiring needs Common, which needs this file

        return deepnorm_factors(wiring.depth)[1]

    def draw_table(self, weight: Tensor, inside: bool, width: int) -> None:
        nn.init.normal_(weight, std=width**-0.5)
