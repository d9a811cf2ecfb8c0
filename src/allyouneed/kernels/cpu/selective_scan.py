"""The selective scan of whole rows with gradients, by the native library (selective_scan.h)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allyouneed.kernels.cpu.abi import CONSTANTS, SelectiveScan
from allyouneed.kernels.cpu.build import native_library, wait_for_build

FEATURES, SEGMENT = CONSTANTS["SCAN_FEATURES"], CONSTANTS["SCAN_SEGMENT"]
INPUTS = ("x", "steps", "bias", "a", "b", "c", "skip", "state")


def selective_scan(
    x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """`selective_ssm` (nn/ops/selective_scan.py) in float32; None without a native library. Training waits for its
    build: a run that began with torch would not be reproduced bit for bit."""
    if not x.numel():
        return x, state
    given = (x, steps, bias, a, b, c, skip, state)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    library = wait_for_build() if trained else native_library()
    if library is None:
        return None
    y, last = _NativeScan.apply(library, None if lengths is None else lengths.int(), trained, *given)
    return y, last


class _NativeScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: Any, lengths: Tensor | None, trained: bool, *given: Tensor) -> tuple[Tensor, Tensor]:
        tensors = dict(zip(INPUTS, (tensor.contiguous() for tensor in given), strict=True))
        x, state = tensors["x"], tensors["state"]
        segments = -(-x.shape[1] // SEGMENT) if trained else 0
        starts = x.new_empty(segments, *state.shape)
        y, last = torch.empty_like(x), torch.empty_like(state)
        _run(library, lengths, tensors | {"y": y, "last": last} | ({"starts": starts} if trained else {}))
        ctx.library, ctx.lengths = library, lengths
        ctx.save_for_backward(*tensors.values(), starts)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        *given, starts = ctx.saved_tensors
        tensors = dict(zip(INPUTS, given, strict=True))
        x, state, b = tensors["x"], tensors["state"], tensors["b"]
        rows, _, width = x.shape
        blocks = -(-width // FEATURES)
        found = {"dx": torch.empty_like(x), "d_steps": torch.empty_like(x), "d_bias": x.new_empty(rows, width)}
        found |= {"d_a": torch.empty_like(state), "d_b": b.new_empty(blocks, *b.shape)}
        found |= {"d_c": b.new_empty(blocks, *b.shape), "d_skip": x.new_empty(rows, width)}
        found["d_state"] = torch.empty_like(state)
        grads = {"dy": dy.contiguous(), "d_last": d_last.contiguous()}
        _run(ctx.library, ctx.lengths, tensors | {"starts": starts} | grads | found)
        dx, d_steps, d_bias, d_a, d_b, d_c, d_skip, d_state = found.values()
        sums = (part.sum(0) for part in (d_bias, d_a, d_b, d_c, d_skip))
        return None, None, None, dx, d_steps, *sums, d_state


def _run(library: Any, lengths: Tensor | None, tensors: dict[str, Tensor]) -> None:
    x, state = tensors["x"], tensors["state"]
    rows, time, width = x.shape
    sizes = {"rows": rows, "time": time, "width": width, "states": state.shape[1]}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if lengths is not None:
        pointers["lengths"] = lengths.data_ptr()
    library.selective_scan(ctypes.byref(SelectiveScan(threads=torch.get_num_threads(), **sizes, **pointers)))
