"""LSTM and GRU over whole rows, as torch.nn.LSTM and torch.nn.GRU define them, and the GRU of the paper (Cho et al.
2014).

`run_cells` is the definition, token by token. `fused_rnn` computes the same on CPUs in single precision, with gradients
(kernels/cpu/rnn.h): what the gates get from the inputs, and the gradients of the weights, are one product each of all
tokens. torch's own GRU has a slow backward pass there, and none at all for a reset gate in front of the state matrix.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Cell = Literal["lstm", "gru", "gru-reset-first"]


class Maps(NamedTuple):
    """Weights of one direction, with the gates stacked: i, f, g, o of an LSTM, r, z, n of a GRU."""

    of_input: Tensor  # W (gates · hidden, width)
    of_state: Tensor  # U (gates · hidden, hidden)
    input_bias: Tensor | None
    state_bias: Tensor | None

    @classmethod
    def of(cls, rnn: nn.RNNBase, which: str = "") -> Maps:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return cls(*(getattr(rnn, f"{name}_l0{which}", None) for name in names))  # type: ignore[arg-type]

    def project(self, cell: Cell, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """W x with all biases that are just added (batch, time, gates · hidden); and that of U h, where a GRU
        multiplies both by r."""
        if self.input_bias is None or self.state_bias is None:
            return linear(x, self.of_input), None
        if cell != "gru":
            return linear(x, self.of_input, self.input_bias + self.state_bias), None
        hidden = self.of_state.shape[1]
        added, own = self.state_bias.split([2 * hidden, hidden])
        return linear(x, self.of_input, self.input_bias + nn.functional.pad(added, (0, hidden))), own


Carry = tuple[Tensor, ...]  # h, and c of an LSTM (batch, hidden)


def run_cells(cell: Cell, x: Tensor, maps: Maps, carry: Carry, real: Tensor | None) -> tuple[Tensor, Carry]:
    """h after every token (batch, time, hidden), zero in padding, and the carry after each row's last real one. `real`
    (batch, time) bool is left-aligned."""
    seen, own = maps.project(cell, x)
    found = []
    for t in range(x.shape[1]):
        new = step(cell, seen[:, t], maps.of_state, own, carry)
        if real is not None:
            new = tuple(torch.where(real[:, t, None], one, old) for one, old in zip(new, carry, strict=True))
        carry = new
        found.append(new[0])
    y = torch.stack(found, 1)
    return y if real is None else y * real[..., None], carry


def step(cell: Cell, seen: Tensor, weight: Tensor, own: Tensor | None, carry: Carry) -> Carry:
    if cell == "lstm":
        h, c = carry
        i, f, g, o = (seen + linear(h, weight)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    (h,), hidden = carry, weight.shape[1]
    if cell == "gru-reset-first":
        return (gru_step(seen, h, weight[: 2 * hidden].T, weight[2 * hidden :].T),)
    r, z, n = seen.chunk(3, -1)
    reset, update, kept = linear(h, weight).chunk(3, -1)
    r, z = (r + reset).sigmoid(), (z + update).sigmoid()
    n = (n + r * (kept if own is None else kept + own)).tanh()
    return (z * h + (1 - z) * n,)


def gru_step(seen: Tensor, h: Tensor, gates: Tensor, own: Tensor) -> Tensor:
    """Cho et al. 2014, eq. 5–8; `seen` is the projected input (r, z, candidate), z is the share of the old state."""
    r, z, new = seen.chunk(3, -1)
    reset, update = (h @ gates).chunk(2, -1)
    r, z = (r + reset).sigmoid(), (z + update).sigmoid()
    return z * h + (1 - z) * (new + (r * h) @ own).tanh()


def fused_rnn(cell: Cell, x: Tensor, maps: Maps, carry: Carry, real: Tensor | None) -> tuple[Tensor, Carry] | None:
    """`run_cells` by the native library, or None where it does not apply."""
    single = all(tensor.dtype is torch.float32 for tensor in (x, maps.of_state, *carry))
    if x.device.type != "cpu" or not single or not x.numel() or torch.compiler.is_compiling():
        return None
    from allyouneed.kernels.cpu.rnn import find_library, rnn_layer

    if (library := find_library(x.shape[1], x, *maps, *carry)) is None:
        return None
    seen, own = maps.project(cell, x)
    lengths = None if real is None else real.sum(1)
    found = rnn_layer(library, cell, seen.float(), maps.of_state, own, carry, lengths)
    if lengths is None:
        return found[0], tuple(part[:, -1] for part in found)
    last, some = (lengths - 1).clamp(min=0)[:, None, None], (lengths > 0)[:, None]
    ends = (part.gather(1, last.expand(-1, 1, part.shape[2]))[:, 0] for part in found)
    return found[0], tuple(torch.where(some, end, old) for end, old in zip(ends, carry, strict=True))
