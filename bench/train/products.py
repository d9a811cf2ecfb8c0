"""Matrix products of a training step by cuBLASLt's fastest algorithm (kernels/cublaslt.py) against torch's, in turns,
on a GPU. `error`: against double precision.

    python bench/train/products.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from allyouneed.runtime.cuda import products
from allyouneed.runtime.cuda.bias_gradients import ACTIVATIONS

CALLS, TURNS = 10, 9
BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}


def captured(work: Callable[[], object]) -> Callable[[], float]:
    """Microseconds of one call, of several in a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS

    return timed


def compare(name: str, flops: float, plain: Callable[[], Any], ours: Callable[[], Any], exact: Tensor) -> list[float]:
    turns = [captured(plain), captured(ours)]
    times = [[timed() for timed in turns] for _ in range(TURNS)]
    before, after = (statistics.median(column) for column in zip(*times, strict=True))
    found = ours()
    found = (found[0] if isinstance(found, tuple) else found).double()
    error = float((found - exact).norm() / exact.norm())
    print(f"{name:14s} {before:8.1f} {after:8.1f} µs  ×{before / after:.2f}  {flops / after / 1e6:4.0f} TFLOP/s  "
          f"error {error:.1e}", flush=True)  # fmt: skip
    return [before, after]


def layer(name: str, tokens: int, inputs: int, outputs: int) -> list[list[float]]:
    x, gradient = torch.randn(tokens, inputs, **BF16), torch.randn(tokens, outputs, **BF16)
    weight, bias = torch.randn(outputs, inputs, **BF16) / inputs**0.5, torch.randn(outputs, **BF16)
    flops = 2.0 * tokens * inputs * outputs
    return [
        compare(f"{name} forward", flops, lambda: functional.linear(x, weight, bias),
                lambda: products.matmul(x, weight, y_transposed=True, bias=bias),
                functional.linear(x.double(), weight.double(), bias.double())),
        compare(f"{name} dx", flops, lambda: gradient @ weight, lambda: products.matmul(gradient, weight),
                gradient.double() @ weight.double()),
        compare(f"{name} dW", flops, lambda: (gradient.t() @ x).float(),
                lambda: products.weight_gradient(gradient, x, torch.float32), gradient.double().t() @ x.double()),
    ]  # fmt: skip


def gelu(tokens: int, width: int, inner: int) -> list[list[float]]:
    x, residual, hidden = (torch.randn(tokens, size, **BF16) for size in (width, width, inner))
    up, down = torch.randn(inner, width, **BF16) / width**0.5, torch.randn(width, inner, **BF16) / inner**0.5
    bias, flops = torch.randn(inner, **BF16), 2.0 * tokens * width * inner
    value = torch.compile(ACTIVATIONS["gelu-tanh"].value)
    exact = functional.linear(x.double(), up.double(), bias.double())
    return [
        compare("gelu forward", flops, lambda: value(functional.linear(x, up, bias)),
                lambda: products.linear_gelu(x, up, bias), functional.gelu(exact, approximate="tanh")),
        compare("down, residual", flops, lambda: residual + functional.linear(hidden, down),
                lambda: products.matmul(hidden, down, y_transposed=True, addend=residual),
                residual.double() + functional.linear(hidden.double(), down.double())),
    ]  # fmt: skip


def relu(tokens: int, width: int, hidden: int) -> list[list[float]]:
    x, up, bias = torch.randn(tokens, width, **BF16), torch.randn(hidden, width, **BF16), torch.randn(hidden, **BF16)
    exact = functional.linear(x.double(), up.double(), bias.double()).relu()
    return [
        compare("relu forward", 2.0 * tokens * width * hidden, lambda: functional.linear(x, up, bias).relu_(),
                lambda: products.linear_relu(x, up, bias), exact),
    ]  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU: torch finds none")
    torch.manual_seed(0)
    for name, tokens, width, activation in (
        ("GPT-2", 32 * 1024, 768, gelu),
        ("transformer-base", 192 * 128, 512, relu),
    ):
        hidden = 4 * width
        print(f"\n{name}, a layer of {tokens:,} tokens: torch, ours")
        rows = layer("qkv", tokens, width, 3 * width) + layer("out", tokens, width, width)
        rows += layer("up", tokens, width, hidden) + layer("down", tokens, hidden, width)
        before, after = (sum(column) for column in zip(*rows, strict=True))
        print(f"{'all':14s} {before:8.1f} {after:8.1f} µs  ×{before / after:.2f}")
        activation(tokens, width, hidden)


if __name__ == "__main__":
    main()
