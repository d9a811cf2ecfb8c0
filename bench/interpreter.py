"""Triton's interpreter on a CPU: what it lacks to run our kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

from allyouneed.kernels.triton import ternary


def prepare_interpreter() -> None:
    """Replace instructions of GPUs, and let tensors bound loops under numpy 2.4, too."""
    # the sum with 1.5 · 2^23 rounds half to even, as `rint` does
    known = {"rint": lambda x: (x + 12582912.0) - 12582912.0, "rcp_rn": lambda x: 1.0 / x}
    known |= {"add_rn": lambda x, y: x + y, "mul_rn": lambda x, y: x * y}
    ternary.libdevice = SimpleNamespace(**known)  # type: ignore[assignment]
    ternary._dot4 = dot4
    interpreter._patch_lang_tensor = patch_tensor


def dot4(digits: Any, codes: Any) -> Any:
    """The definition of `_dot4` in kernels/triton/ternary.py."""
    first, second = (digits & 255) * (codes << 24 >> 24), (digits >> 8 & 255) * (codes << 16 >> 24)
    return first + second + (digits >> 16 & 255) * (codes << 8 >> 24) + (digits >> 24 & 255) * (codes >> 24)


usual_patch = interpreter._patch_lang_tensor


def patch_tensor(tensor: Any, scope: Any) -> None:
    """A scalar is an array of one element there, of which numpy 2.4 makes no integer by itself."""
    usual_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
