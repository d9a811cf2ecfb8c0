"""What only a GPU can show: FlexAttention on packed rows equals the dense mask, gradients included.

python bench/check_gpu.py
"""

from __future__ import annotations

import torch

from allyouneed.nn.attend import Dense, dense_mask, flex
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Facts
from allyouneed.nn.patterns import Causal, Full, Pattern, Window


def packed(lengths: list[list[int]], row: int) -> Facts:
    """Rows of sentences of these lengths, padded to `row`."""
    segments = torch.zeros(len(lengths), row, dtype=torch.long)
    for number, sentences in enumerate(lengths):
        at = 0
        for segment, length in enumerate(sentences, 1):
            segments[number, at : at + length] = segment
            at += length
    return Facts.of(Rows(segments.cuda(), segments=segments.cuda()))


def worst(pattern: Pattern, queries: Facts, keys: Facts, dtype: torch.dtype) -> dict[str, float]:
    """Largest difference between the two paths where the query is a real token, relative to the largest value."""
    torch.manual_seed(0)
    shapes = [(2, 4, queries.time, 64), (2, 4, keys.time, 64), (2, 4, keys.time, 64)]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    real = (queries.segments > 0)[:, None, :, None]
    found = []
    for execute in (flex(pattern, queries, keys), Dense(dense_mask(pattern, queries, keys))):
        out = execute(*inputs, 0.0).where(real, 0)
        found.append([out, *torch.autograd.grad((out.float() * out.float().cos()).sum(), inputs)])
    names = ("output", "grad q", "grad k", "grad v")
    return {name: float((a - b).abs().max() / b.abs().max()) for name, a, b in zip(names, *found, strict=True)}


def main() -> None:
    target = packed([[100, 27, 90], [33, 64, 100, 40]], 256)
    source = packed([[80, 50, 126], [20, 60, 100, 70]], 256)
    for dtype, limit in ((torch.float32, 5e-3), (torch.bfloat16, 2e-2)):  # fp32 products run in tf32 inside the kernel
        for pattern, queries, keys in (
            (Full(), source, source),
            (Causal(), target, target),
            (Causal() & Window(size=16), target, target),
            (Full(), target, source),
        ):
            differences = worst(pattern, queries, keys, dtype)
            verdict = "ok" if max(differences.values()) < limit else "DIFFERS"
            told = "  ".join(f"{name} {value:.1e}" for name, value in differences.items())
            print(f"{pattern!s:22s} {dtype!s:15s} {told}  {verdict}")


if __name__ == "__main__":
    main()
