"""Matrix products by cuBLASLt: with an epilogue, and by the fastest of its algorithms.

torch takes the algorithm that the library ranks first. On an H200 another one of its first eight is up to 1.2 times as
fast at the sizes of a training step, so each product is timed once and the fastest is kept (`choose`). Epilogues do
while the result is written what would be another pass over it; torch offers two of them (a bias, and an activation
whose input is lost); training also needs an activation that keeps its input, and a residual that is added.

The library is the one that torch has loaded. Numbers of enumerations are those of its header, cublasLt.h, which have
been the same since CUDA 12.

Matrices here are row-major. cuBLASLt counts by columns: to it a row-major (rows, columns) is a (columns, rows), so that
out = x y is computed as outᵀ = yᵀ xᵀ.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

BF16, FP32, COMPUTE_FP32 = 14, 0, 68  # cudaDataType_t, cublasComputeType_t
ALIGNMENT = 256  # bytes: what cuBLASLt assumes of addresses when it ranks algorithms; torch allocates so
MULTIPLE = 8  # features of a row: its kernels load 16 bytes at once
WORKSPACE = 32 << 20  # bytes, at most
CANDIDATES, ROUNDS = 8, 7  # algorithms that are timed, and how often
MOST = 256  # products that are timed: a run has a few dozen, unless the shapes of its batches never repeat
MARGIN = 0.98  # of the first one's time, which another one must stay below


class Epilogue(IntEnum):
    """cublasLtEpilogue_t"""

    NONE = 1
    BIAS = 4
    RELU_BIAS = 2 | 4
    GELU_BIAS = 32 | 128 | 4  # GELU by tanh; writes its input to `aux`


class Product(NamedTuple):
    """x (rows, inner) times y (inner, columns), and how both lie in memory."""

    rows: int
    columns: int
    inner: int
    x_transposed: bool  # stored as (inner, rows)
    y_transposed: bool  # stored as (columns, inner)
    epilogue: Epilogue
    single: bool  # the result is fp32, otherwise bf16
    adds: bool  # to another matrix


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    ]  # fmt: skip


class CublasError(RuntimeError):
    pass


def usable(*tensors: Tensor | None) -> bool:
    """Whether these are operands of a product here: bf16 on an NVIDIA GPU with bf16 matrix units, contiguous, with
    widths and addresses that its kernels can load."""
    given = [x for x in tensors if x is not None]
    return (
        all(x.is_cuda and x.dtype is torch.bfloat16 and x.is_contiguous() for x in given)
        and library() is not None
        and torch.cuda.get_device_capability(given[0].device) >= (8, 0)
        and all(x.numel() > 0 and x.shape[-1] % MULTIPLE == 0 and x.data_ptr() % ALIGNMENT == 0 for x in given)
    )


def multiply(
    x: Tensor, y: Tensor, epilogue: Epilogue = Epilogue.NONE, *, x_transposed: bool = False, y_transposed: bool = False,
    bias: Tensor | None = None, aux: Tensor | None = None, addend: Tensor | None = None, out: Tensor | None = None,
    single: bool = False,
) -> Tensor:  # fmt: skip
    """x (rows, inner), or transposed, times y (inner, columns), or transposed, plus `addend` (rows, columns), which may
    be `out`. `bias` (columns,) and `aux` (rows, columns) belong to the epilogue. `single`: in fp32."""
    rows, inner = x.shape[::-1] if x_transposed else x.shape
    columns = y.shape[0] if y_transposed else y.shape[1]
    product = Product(rows, columns, inner, x_transposed, y_transposed, epilogue, single, addend is not None)
    if out is None:
        out = torch.empty(rows, columns, device=x.device, dtype=torch.float32 if single else x.dtype)
    factors, results = (x, y), (out, out if addend is None else addend)
    with torch.cuda.device(x.get_device()), _LOCK:
        descriptors = _descriptors(product)
        descriptors.point(bias, aux)

        def trial(one: Algorithm) -> None:
            spare = torch.empty_like(out) if addend is out else out  # so that nothing is added
            descriptors.run(one, *factors, spare, results[1])

        descriptors.run(choose(descriptors, x.get_device(), trial), *factors, *results)
    return out


def choose(descriptors: Descriptors, device: int, run: Callable[[Algorithm], None]) -> Algorithm:
    """The fastest algorithm, timed at its first use; the library's first choice while a graph is captured, when nothing
    can be timed, and where torch is set to deterministic algorithms: times differ from run to run."""
    key = device, descriptors.product
    if key in _CHOSEN:
        return _CHOSEN[key]
    found = descriptors.algorithms(device)
    if not found:
        raise CublasError(f"cuBLASLt has no algorithm for {descriptors.product}")
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
        return found[0]
    best = _fastest([lambda one=one: run(one) for one in found]) if len(_CHOSEN) < MOST else 0  # type: ignore[misc]
    _CHOSEN[key] = found[best]
    return found[best]


def _fastest(calls: list[Callable[[], None]]) -> int:
    """The number of the fastest call, in turns, by its shortest time, for others may use the GPU; the first one's
    unless another is clearly faster."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS + 1):  # the first is not counted
        for call, seen in zip(calls, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn:
                seen.append(begin.elapsed_time(end))
    least = [min(seen) for seen in times]
    best = min(range(len(least)), key=least.__getitem__)
    return best if least[best] < MARGIN * least[0] else 0


class Descriptors:
    """The cuBLASLt descriptors of one product, made once and never freed."""

    def __init__(self, product: Product) -> None:
        self.product, self.desc, self.layouts = product, c_void_p(), [c_void_p() for _ in range(3)]
        _call("cublasLtMatmulDescCreate", byref(self.desc), c_int(COMPUTE_FP32), c_int(FP32))
        self._set(_Attribute.TRANSA, c_int32(product.y_transposed))
        self._set(_Attribute.TRANSB, c_int32(product.x_transposed))
        self._set(_Attribute.EPILOGUE, c_uint32(product.epilogue))
        rows, columns, inner = product[:3]
        y = (inner, columns) if product.y_transposed else (columns, inner)
        x = (rows, inner) if product.x_transposed else (inner, rows)
        out = FP32 if product.single else BF16
        for layout, (height, width), kind in zip(self.layouts, (y, x, (columns, rows)), (BF16, BF16, out), strict=True):
            sizes = c_uint64(height), c_uint64(width), c_int64(height)
            _call("cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), *sizes)

    def point(self, bias: Tensor | None, aux: Tensor | None) -> None:
        """Set the addresses, also before algorithms are ranked, which depends on them."""
        if bias is not None:
            self._set(_Attribute.BIAS_POINTER, c_void_p(bias.data_ptr()))
        if aux is not None:
            self._set(_Attribute.AUX_POINTER, c_void_p(aux.data_ptr()))
            self._set(_Attribute.AUX_LD, c_int64(self.product.columns))

    def _set(self, attribute: _Attribute, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.desc, c_int(attribute), byref(value), size)

    def algorithms(self, device: int) -> list[Algorithm]:
        """The algorithms that cuBLASLt expects to be the fastest, best first."""
        preference, size, handle = c_void_p(), c_size_t(WORKSPACE), _handle(device)
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        _call("cublasLtMatmulPreferenceSetAttribute", preference, c_int(MAX_WORKSPACE), byref(size), c_size_t(8))
        found, count, (a, b, d) = (Algorithm * CANDIDATES)(), c_int(), self.layouts
        wanted = preference, c_int(CANDIDATES), found, byref(count)
        _call("cublasLtMatmulAlgoGetHeuristic", handle, self.desc, a, b, d, d, *wanted)
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return list(found[: count.value])

    def run(self, algorithm: Algorithm, x: Tensor, y: Tensor, out: Tensor, addend: Tensor) -> None:
        work = torch.empty(algorithm.workspace, dtype=torch.uint8, device=x.device)
        one, added, (a, b, d) = c_float(1), c_float(self.product.adds), self.layouts
        factors = byref(one), _address(y), a, _address(x), b
        results = byref(added), _address(addend), d, _address(out), d
        where = _address(work), c_size_t(len(work)), c_void_p(torch.cuda.current_stream().cuda_stream)
        _call("cublasLtMatmul", _handle(x.get_device()), self.desc, *factors, *results, byref(algorithm), *where)


class _Attribute(IntEnum):
    """cublasLtMatmulDescAttributes_t"""

    TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 4, 7, 8, 11, 12


MAX_WORKSPACE = 1  # of cublasLtMatmulPreferenceAttributes_t
_CHOSEN: dict[tuple[int, Product], Algorithm] = {}
_LOCK = threading.Lock()  # autograd runs in a thread of its own, and descriptors hold the addresses of one call


@cache
def _descriptors(product: Product) -> Descriptors:
    return Descriptors(product)


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where torch has no cuBLASLt."""
    if torch.version.cuda is None or torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def version() -> str | None:
    """The version of the library; None where it is missing."""
    found = library()
    if found is None:
        return None
    found.cublasLtGetVersion.restype = c_size_t
    number = int(found.cublasLtGetVersion())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(library(), name)(*arguments):
        raise CublasError(f"{name} failed with cublasStatus_t {status}")


def _address(x: Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())
