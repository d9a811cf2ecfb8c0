"""LSTM and GRU as token mixers, with states for decoding.

The weights are those of a torch.nn.LSTM or torch.nn.GRU: the model's `linear` does not apply to these maps. Sentences
run through a native kernel on CPUs (nn/ops/rnn.py), elsewhere through torch's own. In int8 models the weights are
stored in int8, and activations stay floats (`Int8RNN`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.linear.int8 import Int8Codes, Int8Weight, weight_version
from allyouneed.nn.ops.rnn import Cell, Maps, fused_rnn, run_cells
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer
from allyouneed.torch_private import settle_rnn_weights


class RNN(Mixer):
    """h_t = f(x_t, h_{t−1}). `bidirectional`: a second one runs from the end of the sentence, and both outputs are
    concatenated (Schuster, Paliwal 1997)."""

    gates: ClassVar[int]  # number of gates
    carries: ClassVar[int]  # vectors carried from token to token

    hidden: Annotated[int, Field(gt=0)] | None = None
    """Features of the state, per direction; default: the model width in total."""
    bidirectional: bool = False
    """Run a second one from the end and concatenate both outputs."""
    bias: bool = True
    """Whether the linear maps have a bias."""

    @property
    @abstractmethod
    def cell(self) -> Cell: ...

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    def leak(self) -> str | None:
        return "its backward half reads later tokens; set bidirectional: false" if self.bidirectional else None

    def size(self, common: Common) -> int:
        return self.hidden or max(1, common.width // self.directions)

    def outputs(self, common: Common) -> int:
        return self.size(common) * self.directions

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        size, count = self.size(common), self.gates * self.directions
        maps = size * (common.width + size)
        total = Cost(parameters=count * (maps + 2 * self.bias * size), flops=2 * count * maps)
        return total if self.bidirectional else total + recurrent_cost(self.carries * size, common.width)


class LSTM(RNN):
    """Hochreiter, Schmidhuber 1997, with the forget gate of Gers et al. 2000, as in torch.nn.LSTM."""

    gates: ClassVar[int] = 4
    carries: ClassVar[int] = 2

    kind: Literal["lstm"] = "lstm"

    @property
    def cell(self) -> Cell:
        return "lstm"

    def build(self, common: Common) -> SubLayer:
        return RNNModule(nn.LSTM, self, common)


class GRU(RNN):
    """Cho et al. 2014, "Learning Phrase Representations using RNN Encoder–Decoder", eq. 5–8.

    The paper applies the reset gate `before` the state matrix, U (r ⊙ h); torch.nn.GRU and cuDNN apply it `after`, r ⊙
    (U h). `before` has no fused kernel on GPUs and runs token by token there.
    """

    gates: ClassVar[int] = 3
    carries: ClassVar[int] = 1

    kind: Literal["gru"] = "gru"
    reset: Literal["after", "before"] = "after"
    """Apply the reset gate after the state matrix (torch, cuDNN) or before it (the paper; no fused kernel on GPUs)."""

    @property
    def cell(self) -> Cell:
        return "gru" if self.reset == "after" else "gru-reset-first"

    def build(self, common: Common) -> SubLayer:
        return RNNModule(nn.GRU, self, common) if self.reset == "after" else ResetBeforeModule(nn.GRU, self, common)


class RNNModule(SubLayer):
    def __init__(self, kind: Callable[..., nn.RNNBase], config: RNN, common: Common) -> None:
        super().__init__()
        self.hidden, self.carries, self.bidirectional = config.size(common), config.carries, config.bidirectional
        self.cell = config.cell
        self.rnn: nn.RNNBase | Int8RNN = kind(
            common.width, self.hidden, bias=config.bias, batch_first=True, bidirectional=config.bidirectional
        )

    @property
    def float_rnn(self) -> nn.RNNBase:
        """The network with float weights."""
        return self.rnn.dequantized if isinstance(self.rnn, Int8RNN) else self.rnn

    def rnn_to_int8(self) -> None:
        """Store the weights in int8 (nn/models/precision.py)."""
        self.rnn = Int8RNN(self.float_rnn)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if isinstance(state, Recurrent):
            return state.advance(self.run, x, context)
        unpacked = unpack_rows(context)
        rows = unpacked.gather(x)
        if not rows.numel():
            return x.new_zeros(*x.shape[:2], self.hidden * (1 + self.bidirectional))
        # padding after a sentence changes nothing before it; it is skipped where nothing is read of it
        real = unpacked.real if self.bidirectional or unpacked.tokens is not None else None
        return unpacked.scatter(self.run_sentences(rows, real), x)

    def run_sentences(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Sentences (batch, time, width), padded on the right."""
        y: Tensor
        begin = self.begin(len(x), x)
        if (found := self.scan(x, begin, real)) is not None:
            if not self.bidirectional:
                return found[0]
            lengths = torch.full((len(x),), x.shape[1], device=x.device) if real is None else real.sum(1)
            steps = torch.arange(x.shape[1], device=x.device)
            back = (lengths[:, None] - 1 - steps).where(steps < lengths[:, None], steps)[..., None]  # reversed time
            if (other := self.scan(x.gather(1, back.expand_as(x)), begin, real, "_reverse")) is not None:
                return torch.cat((found[0], other[0].gather(1, back.expand_as(other[0]))), -1)
        if real is None or not self.bidirectional:
            y, _ = self.rnn(x)
            return y
        packed, _ = self.rnn(_pack(x, real))
        return pad_packed_sequence(packed, True, total_length=x.shape[1])[0]

    def run(self, x: Tensor, carry: Carry, real: Tensor | None) -> tuple[Tensor, Carry]:
        """New tokens, continuing from the carry; padding on the right does not change it."""
        if (found := self.scan(x, carry, real)) is not None:
            return found
        begin = tuple(value[None].to(x.dtype) for value in carry)  # (1, batch, hidden) each
        y, after = self.rnn(x if real is None else _pack(x, real), begin if len(begin) > 1 else begin[0])
        after = after if len(begin) > 1 else (after,)
        if real is None:
            return y, tuple(value[0] for value in after)
        some = real.any(1)[:, None]
        y = pad_packed_sequence(y, True, total_length=x.shape[1])[0]
        return y, tuple(torch.where(some, new[0], old) for new, old in zip(after, carry, strict=True))

    def scan(self, x: Tensor, carry: Carry, real: Tensor | None, which: str = "") -> tuple[Tensor, Carry] | None:
        """One direction, or None where torch's kernels are faster: an LSTM without padding."""
        if self.cell == "lstm" and real is None:
            return None
        return fused_rnn(self.cell, x, Maps.of(self.float_rnn, which), carry, real)

    def begin(self, batch: int, like: Tensor) -> Carry:
        return (like.new_zeros(batch, self.hidden),) * self.carries

    def fold(self, carry: Carry, x: Tensor, real: Tensor | None) -> Carry:
        return self.run(x, carry, real)[1]

    def new_state(self) -> State:
        if self.bidirectional:
            raise ValueError("a bidirectional RNN cannot decode; set bidirectional: false")
        return Recurrent(self.begin, self.fold)


def _pack(x: Tensor, real: Tensor) -> nn.utils.rnn.PackedSequence:
    """A PackedSequence; rows without tokens count as length 1, which torch requires."""
    lengths = real.sum(1).clamp(min=1).cpu()
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


class Int8RNN(nn.Module):
    """Replacement of a torch LSTM or GRU with weights in int8 (`weight_ih_l0.codes`, …), a quarter of the bytes. It
    computes as the network with the dequantized weights does."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.shell = [rnn]  # not a submodule: its weights are not stored
        self.is_filled, self.dtype = False, torch.float32
        self.bias = rnn.bias
        for name, tensor in rnn.named_parameters():
            if name.startswith("weight"):
                self.add_module(name, Int8Codes(Int8Weight.of(tensor)))
            else:
                self.register_buffer(name, tensor.detach().float())

    @property
    def is_lstm(self) -> bool:
        return isinstance(self.shell[0], nn.LSTM)

    @property
    def dequantized(self) -> nn.RNNBase:
        rnn = self.shell[0]
        if not self.is_filled:
            weights = {name: codes.weight for name, codes in self.named_children() if isinstance(codes, Int8Codes)}
            for name, tensor in {**weights, **dict(self.named_buffers(recurse=False))}.items():
                setattr(rnn, name, nn.Parameter(tensor.to(self.dtype), requires_grad=False))
            settle_rnn_weights(rnn)
            self.is_filled = True
        return rnn

    def forward(self, *given: Any) -> Any:
        return self.dequantized(*given)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8RNN:
        """`model.to(bfloat16)` computes in that type; biases are not rounded."""
        held = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0)).dtype
        for name, tensor in held.items():
            setattr(self, name, tensor.to(getattr(self, name).device))
        self.forget()
        return self

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        super()._load_from_state_dict(*given, **named)
        self.forget()

    def forget(self) -> None:
        """The codes have changed."""
        self.is_filled = False
        weight_version.count += 1


class ResetBeforeModule(RNNModule):
    """Same weights as nn.GRU, in the order r, z, candidate."""

    def scan(self, x: Tensor, carry: Carry, real: Tensor | None, which: str = "") -> tuple[Tensor, Carry]:
        found = super().scan(x, carry, real, which)
        return run_cells(self.cell, x, Maps.of(self.float_rnn, which), carry, real) if found is None else found
