"""Triton's interpreter on a CPU: what it lacks to run our kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from allyouneed.kernels.triton import ternary


def prepare_interpreter() -> None:
    """Replace instructions of GPUs, and let tensors bound loops under numpy 2.4, too."""
    known = {"add_rn": lambda x, y: x + y, "mul_rn": lambda x, y: x * y, "rcp_rn": lambda x: 1.0 / x}
    ternary.libdevice = SimpleNamespace(**known)  # type: ignore[assignment]
    ternary._dot4, ternary._lowest, ternary._next = dot4, lowest, next_weight
    interpreter._patch_lang_tensor = patch_tensor


def dot4(digits: Any, codes: Any) -> Any:
    """The definition of `_dot4`."""
    first, second = (digits & 255) * (codes << 24 >> 24), (digits >> 8 & 255) * (codes << 16 >> 24)
    return first + second + (digits >> 16 & 255) * (codes << 8 >> 24) + (digits >> 24 & 255) * (codes >> 24)


def lowest(tile: Any) -> Any:
    """The definition of `_lowest`."""
    return (tile & 3).to(tl.int8) - 1


def next_weight(tile: Any) -> Any:
    """The definition of `_next`."""
    return tile >> 2


usual_patch = interpreter._patch_lang_tensor


def patch_tensor(tensor: Any, scope: Any) -> None:
    """A scalar is an array of one element there, which numpy 2.4 does not convert to an integer."""
    usual_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
