"""LSTM and GRU over whole rows with gradients, by the native library (rnn.h)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allyouneed.kernels.cpu.abi import CONSTANTS, Cell, RnnLayer
from allyouneed.kernels.cpu.build import native_library, wait_for_build

FEATURES = CONSTANTS["RNN_FEATURES"]
CELLS = {"lstm": Cell.LSTM_CELL, "gru": Cell.GRU_CELL, "gru-reset-first": Cell.GRU_RESET_FIRST}
FEW = 8  # tokens whose outputs alone are not worth rearranging the weights


def find_library(time: int, *given: Tensor | None) -> ctypes.CDLL | None:
    """The native library, if it is there and faster for `time` tokens. Training waits for its build: a run that began
    with torch would not be reproduced bit for bit."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return wait_for_build()
    return native_library() if time >= FEW else None


def rnn_layer(
    library: ctypes.CDLL, cell: str, seen: Tensor, weight: Tensor, bias: Tensor | None, carry: tuple[Tensor, ...],
    lengths: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """h, and c of an LSTM, after every token (rows, time, hidden), zero in padding, as `run_cells` (nn/ops/rnn.py) in
    float32."""
    h, c = carry if len(carry) > 1 else (carry[0], None)
    return _Layer.apply(library, CELLS[cell], None if lengths is None else lengths.int(), seen, weight, bias, h, c)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, library: Any, cell: Cell, lengths: Tensor | None, seen: Tensor, weight: Tensor, bias: Tensor | None,
        h: Tensor, c: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        given = {"seen": seen, "bias": bias, "h": h, "c": c}
        tensors = {name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}
        rows, time, _ = seen.shape
        tensors |= {"y": seen.new_empty(rows, time, h.shape[1]), "gates": seen.new_empty(rows, time, 4, h.shape[1])}
        if c is not None:
            tensors["cells"] = torch.empty_like(tensors["y"])
        # every gate's weights of a block of features, features last
        panels = _blocks(weight.unflatten(0, (-1, h.shape[1])).transpose(1, 2)).contiguous()
        _run(library, cell, lengths, tensors | {"weight": panels})
        del tensors["seen"]
        ctx.library, ctx.cell, ctx.lengths, ctx.names = library, cell, lengths, tuple(tensors)
        ctx.save_for_backward(weight, *tensors.values())
        ctx.set_materialize_grads(False)
        return (tensors["y"],) if c is None else (tensors["y"], tensors["cells"])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_cells: Tensor | None = None) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        tensors, cell = dict(zip(ctx.names, saved, strict=True)), ctx.cell
        y, gates, h, c = tensors["y"], tensors["gates"], tensors["h"], tensors.get("c")
        (rows, time, hidden), count = y.shape, len(weight)
        grads = {"dy": torch.zeros_like(y) if dy is None else dy.contiguous()}
        if d_cells is not None:
            grads["d_cells"] = d_cells.contiguous()
        found = {"d_seen": y.new_empty(rows, time, count), "d_h": torch.zeros_like(h)}
        if c is not None:
            found["d_c"] = torch.zeros_like(c)
        if cell == Cell.GRU_CELL:
            found["d_own"] = torch.empty_like(y)
        panels = _blocks(weight).contiguous()
        _run(ctx.library, cell, ctx.lengths, tensors | grads | found | {"weight": panels})
        before = torch.cat((h[:, None], y[:, :-1]), 1)[:, :time].flatten(0, 1)  # h before each token
        d_gates, d_bias = found["d_seen"].flatten(0, 1), None
        if cell == Cell.LSTM_CELL:
            d_weight = d_gates.T @ before
        else:  # n has products of its own
            if cell == Cell.GRU_CELL:
                own, of_n = found["d_own"].flatten(0, 1), before
                d_bias = own.sum(0) if "bias" in tensors else None
            else:
                own, of_n = d_gates[:, 2 * hidden :], gates[:, :, 3].flatten(0, 1)
            d_weight = torch.cat((d_gates[:, : 2 * hidden].T @ before, own.T @ of_n))
        return None, None, None, found["d_seen"], d_weight, d_bias, found["d_h"], found.get("d_c")


def _blocks(weight: Tensor) -> Tensor:
    """(…, outputs) in blocks of them, padded with zeros: (blocks, …, FEATURES)."""
    padded = nn.functional.pad(weight, (0, -weight.shape[-1] % FEATURES))
    return padded.unflatten(-1, (-1, FEATURES)).movedim(-2, 0)


def _run(library: Any, cell: Cell, lengths: Tensor | None, tensors: dict[str, Tensor]) -> None:
    rows, time, hidden = tensors["y"].shape
    sizes = {"rows": rows, "time": time, "hidden": hidden, "cell": int(cell), "threads": torch.get_num_threads()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if lengths is not None:
        pointers["lengths"] = lengths.data_ptr()
    library.rnn_layer(ctypes.byref(RnnLayer(**sizes, **pointers)))
