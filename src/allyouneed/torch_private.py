"""The private torch APIs this package uses, each behind a function with a plain-torch fallback where there is one.

No other module may use `torch._…` or `torch.ops.…`; tests/test_torch_private.py enforces it and verifies every function
on the installed torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])

# --- compiler -------------------------------------------------------------------------------------------------------


def compiler_is_loaded() -> bool:
    """Whether torch.compile's front end has been imported, which takes seconds; nothing is compiled without it."""
    return "torch._dynamo" in sys.modules


def constant_to_the_compiler(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import the compiler, and with it create the folder of its
    cache, also where nothing is compiled."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- attention ------------------------------------------------------------------------------------------------------


@cache
def _aten(name: str) -> Any:
    """An operator of torch.ops.aten; None if this torch has none of that name."""
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else packet.default


def cpu_flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention on (batch, heads, time, head_width) with an additive mask: (output, log-sum-exp of the scores). The
    public API does not return the latter, which joining attention over several key blocks needs."""
    operator = _aten("_scaled_dot_product_flash_attention_for_cpu")
    if operator is None:
        return plain_attention(q, k, v, mask, scale)
    return operator(q, k, v, attn_mask=mask, scale=scale)


def cpu_flash_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from an `out` and `lse` that may cover more keys than these."""
    operator = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")
    if operator is None:
        return plain_attention_backward(gradient, q, k, v, out, lse, mask, scale)
    return operator(gradient, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The definition of `cpu_flash_attention`."""
    k, v = _like_heads(k, q), _like_heads(v, q)
    scores = _scores(q, k, mask, scale)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def plain_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `cpu_flash_attention_backward` (Dao et al. 2022, B.2: dS = P ∘ (dP − rowsum(dO ∘ O)))."""
    weights = (_scores(q, k, mask, scale) - lse[..., None]).exp()  # (batch, heads, queries, keys)
    rows = (gradient.float() * out.float()).sum(-1, keepdim=True)
    changes = (weights * (gradient.float() @ v.float().mT - rows) * scale).to(q.dtype)
    return changes @ k, changes.mT @ q, weights.to(v.dtype).mT @ gradient


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q.float() @ k.float().mT) * scale
    return scores if mask is None else scores + mask.float()


def _like_heads(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


# --- 8-bit matrix products ------------------------------------------------------------------------------------------


def int8_matmul(x: Tensor, y: Tensor) -> Tensor:
    """(rows, inputs) int8 @ (inputs, outputs) int8 -> int32, exact."""
    multiply = getattr(torch, "_int_mm", None)
    return x.int() @ y.int() if multiply is None else multiply(x, y)


def scaled_matmul(
    x: Tensor, y: Tensor, x_step: Tensor, y_step: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """x (rows, inputs) times the transposed y (outputs, inputs), float8 codes with one step each, plus bias. Both are
    contiguous, so that no layout is copied. `fast`: sums of fewer bits between steps of the matrix units."""
    if x.is_cuda:
        bias = None if bias is None else bias.to(dtype)
        return torch._scaled_mm(x, y.t(), x_step, y_step, bias, out_dtype=dtype, use_fast_accum=fast)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        product = (x.to(wide) @ y.to(wide).t()) * (x_step * y_step).to(wide)
        return (product if bias is None else product + bias.to(wide)).to(dtype)


@cache
def has_vnni() -> bool:
    """Whether the CPU multiplies 8-bit numbers in 512 bits (AVX-512 VNNI)."""
    known = getattr(torch.cpu, "_is_vnni_supported", None)
    if known is not None:
        return bool(known())
    try:
        return "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@cache
def has_fbgemm() -> bool:
    """Whether 8-bit linear maps can be packed for FBGEMM; there is no fallback here, callers compute in float."""
    names = ("linear_prepack", "linear_dynamic", "linear_with_input_q_dq_qweight_dq_output_fp32")
    return (
        "fbgemm" in torch.backends.quantized.supported_engines
        and hasattr(torch, "_make_per_channel_quantized_tensor")
        and all(hasattr(torch.ops.quantized, name) for name in names)
    )


def pack_linear(codes: Tensor, step: Tensor, biases: Sequence[Tensor | None]) -> list[Any]:
    """int8 weights (outputs, inputs) with a step per output in FBGEMM's layout, once for each of the biases."""
    zeros = torch.zeros(len(codes), dtype=torch.long)
    with catch_warnings():  # torch plans to drop quantized tensors; there is no other way to FBGEMM yet
        filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        weight = torch._make_per_channel_quantized_tensor(codes, step.double(), zeros, 0)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        return [torch.ops.quantized.linear_prepack(weight, bias) for bias in biases]
    finally:
        torch.backends.quantized.engine = before


def quantized_operator(name: str) -> Callable[..., Tensor]:
    """`torch.ops.quantized.<name>` without Python's dispatch overhead, a sixth of a small product's time."""
    overload = getattr(torch.ops.quantized, name).default
    return getattr(overload, "_op", overload)


# --- recurrent networks ----------------------------------------------------------------------------------------------


def settle_rnn_weights(rnn: nn.RNNBase) -> None:
    """Let a network know weights that have been replaced. It lists them, and moves them into one piece on a GPU: by
    itself only in its next forward pass, where a captured graph would go on to read them where they were."""
    rnn._apply(lambda tensor: tensor)


# --- many tensors at once, compilation --------------------------------------------------------------------------------


def tensor_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in few kernels."""
    fused = getattr(torch, "_foreach_norm", None)
    return [torch.linalg.vector_norm(tensor) for tensor in tensors] if fused is None else list(fused(list(tensors)))


def move_towards(tensors: Sequence[Tensor], others: Sequence[Tensor], share: float) -> None:
    """Move each tensor in place by this share of the way to the other, in few kernels."""
    fused = getattr(torch, "_foreach_lerp_", None)
    if fused is not None:
        fused(list(tensors), list(others), share)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.lerp_(other, share)


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """End the allocation of CUDA memory from the pool of a capture, if the failed capture did not."""
    with suppress(AttributeError, RuntimeError):  # it did, or this torch has no CUDA
        torch._C._cuda_endAllocateToPool(device, pool)


def raise_recompile_limit(count: int) -> None:
    """Compile up to `count` variants of a function; above the limit torch silently runs it eagerly."""
    import torch._dynamo.config as dynamo

    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, name, max(getattr(dynamo, name), count))
