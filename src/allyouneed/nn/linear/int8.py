"""Dense maps and tables of token vectors at eight bits a weight, for inference: a quarter of the bytes to store and to
read, and products of integers.

A weight is a whole number of its output's step (−127 … 127, symmetric, so 0 stays 0). A token is rounded when it comes,
by its own range and nobody else's, to one of 256 numbers of which one means 0:

    y_o = step_o · step_x · Σ_i codes_oi (q_i − zero) + b_o,   q = round(x / step_x) + zero,   step_x = (max − min)/255

(Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", eq.
1 and 7), with min ≤ 0 ≤ max. The sums are integers, so they are exact in any order and whoever the neighbours are.
`plainly` is that sentence; on x86 processors the products are made by FBGEMM from weights that are packed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn

MOST = 127  # of a weight
SMALLEST = 6.1e-5  # the least step of a token: FBGEMM's own


class Codes(NamedTuple):
    """Whole numbers (outputs, inputs), and what one of them is worth in each output (outputs,)."""

    numbers: Tensor
    step: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Codes:
        if weight.is_meta:  # a hollow model: the numbers will be put in
            # not empty_like: for what has no memory torch would load its compiler first
            empty = partial(torch.empty, device="meta")
            return cls(empty(weight.shape, dtype=torch.int8), empty(len(weight), dtype=torch.float32))
        weight = weight.detach().float()
        step = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / MOST
        return cls((weight / step[:, None]).round_().clamp_(-MOST, MOST).to(torch.int8), step)


class Changes:
    """How often numbers of any such module have been replaced: what was made of them before is out of date."""

    count = 0


changes = Changes()


class Int8Linear(nn.Module):
    """What a dense map becomes. `weight` is what its codes stand for, for those who look at it."""

    codes: Tensor
    step: Tensor
    bias: Tensor | None

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", codes.numbers)
        self.register_buffer("step", codes.step)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self._product: Callable[[Tensor], Tensor] | None = None
        self.out_features, self.in_features = codes.numbers.shape

    @property
    def weight(self) -> Tensor:
        return self.codes * self.step[:, None]

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not x.numel() or not packs():
            return plainly(x, self.codes, self.step, self.bias)
        if self._product is None:
            self._product = Packed(self.codes, self.step, self.bias)
        found = self._product(x if x.dtype is torch.float32 else x.float())
        return found if x.dtype is torch.float32 else found.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """`model.to(bfloat16)` moves steps and bias, but does not round them."""
        held = self.step, self.bias
        super()._apply(fn, recurse)
        self.step = held[0].to(self.codes.device)
        self.bias = None if held[1] is None else held[1].to(self.codes.device)
        self._product = None
        changes.count += 1
        return self

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        super()._load_from_state_dict(*given, **named)
        self._product = None
        changes.count += 1

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Int8Table(nn.Module):
    """What a table of token vectors becomes; a head that shares it shares its codes."""

    codes: Tensor
    step: Tensor

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        self.register_buffer("codes", codes.numbers)
        self.register_buffer("step", codes.step)
        self.num_embeddings, self.embedding_dim = codes.numbers.shape

    @property
    def weight(self) -> Tensor:
        return self.codes * self.step[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.codes[tokens] * self.step[tokens][..., None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Table:
        step = self.step
        super()._apply(fn, recurse)
        self.step = step.to(self.codes.device)
        return self


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def rounded(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 … levels of each token's own step, not yet rounded (…, inputs); its step (…, 1); which number is 0."""
    low, high = x.amin(-1, keepdim=True).clamp_(max=0), x.amax(-1, keepdim=True).clamp_(min=0)
    step = (high.sub_(low)).mul_(1 / levels)
    zero = low.div_(step.clamp(min=torch.finfo(step.dtype).tiny)).round_().neg_()
    step = step.clamp_(min=SMALLEST)
    return torch.addcmul(zero, x, step.reciprocal()), step, zero


def plainly(x: Tensor, codes: Tensor, step: Tensor, bias: Tensor | None) -> Tensor:
    """The definition, on any device."""
    numbers, token_step, zero = rounded(x.float(), 255)
    whole = numbers.round_().clamp_(0, 255) - zero
    found = nn.functional.linear(whole, codes.float()) * (token_step * step)
    return (found if bias is None else found + bias).to(x.dtype)


@cache
def packs() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def levels() -> int:
    """Processors without VNNI add pairs of products in 16 bits; there tokens have half as many levels, lest they
    overflow."""
    return 255 if torch.cpu._is_vnni_supported() else 127


def _bare(name: str) -> Callable[..., Tensor]:
    """An operator of torch's without what Python adds to each call of it: it looks through all arguments for stand-ins
    of traced objects, which costs a sixth of a small product."""
    overload = getattr(torch.ops.quantized, name).default
    found: Callable[..., Tensor] = getattr(overload, "_op", overload)
    return found


class Packed:
    """The same from weights in FBGEMM's order. One token goes through one call, which finds its range itself; for
    several, each with a range of its own, FBGEMM gets numbers that are scaled already, and counts from 0:
    step_x · (Σ codes q · step_o − zero · Σ codes · step_o) + b."""

    def __init__(self, codes: Tensor, step: Tensor, bias: Tensor | None) -> None:
        zeros = torch.zeros(len(codes), dtype=torch.long)
        with catch_warnings():  # torch means to drop such tensors one day; there is no other way to FBGEMM yet
            filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            weight = torch._make_per_channel_quantized_tensor(codes, step.double(), zeros, 0)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            self.alone: Any = torch.ops.quantized.linear_prepack(weight, bias)
            self.bare: Any = self.alone if bias is None else torch.ops.quantized.linear_prepack(weight, None)
        finally:
            torch.backends.quantized.engine = before
        self.dynamic = _bare("linear_dynamic")
        self.scaled = _bare("linear_with_input_q_dq_qweight_dq_output_fp32")
        sums = codes.sum(1, dtype=torch.int64) * step
        self.corrections = torch.stack([sums, torch.zeros_like(sums) if bias is None else bias])  # (2, outputs)
        self.inputs, self.reduced = codes.shape[1], levels() < 255

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() == self.inputs:
            return self.dynamic(x, self.alone, self.reduced)
        flat = x.reshape(-1, self.inputs)
        numbers, step, zero = rounded(flat, levels())
        sums = self.scaled(numbers, 1.0, 0, self.bare)
        added = torch.cat([zero.mul_(step).neg_(), torch.ones_like(step)], 1)  # (tokens, 2)
        return sums.mul_(step).addmm_(added, self.corrections).view(*x.shape[:-1], -1)


# --- whole models -----------------------------------------------------------------------------------------------------


def to_int8(model: nn.Module) -> nn.Module:
    """The model itself with its dense maps, its tables of tokens and its vocabulary head in eight bits; all else is
    widened to single precision. It does not train any more.

    What is used in several places stays one. To read what such a model's `state_dict` holds, build, `to_int8`, load.
    """
    from allyouneed.nn.embed.tokens import EmbedModule
    from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
    from allyouneed.nn.linear.dense import Joined

    known: dict[int, Codes] = {}  # by the weight they are made of
    keep: list[Tensor] = []  # an id names a tensor as long as it lives

    def codes(weight: Tensor) -> Codes:
        if id(weight) not in known:
            known[id(weight)] = Codes.of(weight)
            keep.append(weight)
        return known[id(weight)]

    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        if isinstance(parent, VocabularyHeadModule) and parent.product is None:
            parent.put(Int8Linear(codes(parent.weight), parent.bias))
        if isinstance(parent, EmbedModule) and type(getattr(parent, "tokens", None)) is nn.Embedding:
            tokens = parent.tokens
            made[tokens] = made.get(tokens) or Int8Table(codes(tokens.weight))
            parent.tokens = made[tokens]  # type: ignore[assignment]
        for name, child in list(parent.named_children()):
            if (
                isinstance(child, nn.Linear)
                and type(child) in (nn.Linear, Joined)
                and not getattr(parent, "exact", False)
            ):
                made[child] = made.get(child) or Int8Linear(codes(child.weight), child.bias)
                setattr(parent, name, made[child])
    return model.float().eval()
