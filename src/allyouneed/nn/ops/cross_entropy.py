"""Cross-entropy of a linear map in chunks that never store all logits.

The logits of a batch over a large vocabulary would be the largest tensor of a training step. Here each chunk of tokens
computes logits, loss and gradients together, and the next chunk reuses the memory. Tests compare it with the plain
definition, `cross_entropy(x @ weight.T + bias, labels, label_smoothing, reduction="sum")`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels import cublaslt, usable
from allyouneed.nn.batch import IGNORE

CHUNK_BYTES = 1 << 24  # logits per chunk on CPU: fits the cache, large enough for all cores
GPU_SHARE, MIN_GPU_BYTES = 32, 1 << 30  # on GPU: this fraction of its memory, in fp32; stored in half of that
ROW_TILE = 256  # rows per tile of a GPU matmul
VOCAB_MULTIPLE = 64  # GPU matmuls are slow for odd row lengths: the vocabulary is padded to a multiple


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, smoothing: float, bias: Tensor | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """x (tokens, width), weight (vocab, width), labels (tokens,): summed smoothed loss and summed plain loss.

    With label smoothing ε the target is (1 − ε) on the label plus ε / vocab everywhere (the paper, 5.4; Szegedy et al.
    2015, 7). The plain loss is for reporting and has no gradient. `cap` c maps a logit z to c·tanh(z/c).
    """
    keep = labels != IGNORE
    if x.device.type == "cpu" and not bool(keep.all()):  # a GPU would have to synchronize for the count
        x, labels = x[keep], labels[keep]
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total, plain = _LinearCrossEntropy.apply(x, weight, bias, labels, smoothing, cap, training)
    return total, plain


def chunk_bytes(device: torch.device) -> int:
    """fp32 bytes of the logits of a chunk."""
    if device.type == "cpu":
        return CHUNK_BYTES
    return max(MIN_GPU_BYTES, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE)


def _chunk_rows(device: torch.device, tokens: int, vocab: int) -> int:
    """Tokens per chunk. GPU chunks have equal size in whole tiles, since a small last one would leave the GPU idle."""
    if device.type == "cpu":
        return max(1, chunk_bytes(device) // (4 * vocab))
    most = max(1024, chunk_bytes(device) // (4 * vocab))
    each = -(-tokens // max(1, -(-tokens // most)))
    return max(ROW_TILE, -(-each // ROW_TILE) * ROW_TILE)


def chunk_loss(
    logits: Tensor, labels: Tensor, bias: Tensor | None, smoothing: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For a chunk (rows, vocab): loss, plain loss, and gradients with respect to logits and bias. The same as
    `_run_eager` without in-place operations, for torch.compile."""
    kept = (labels != IGNORE).float()[:, None]
    scores = logits.float() if bias is None else logits.float() + bias.float()
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    here = torch.arange(logits.shape[1], device=logits.device) == labels.clamp(min=0)[:, None]
    log_sum = scores.logsumexp(-1, keepdim=True)
    nll = log_sum - scores.masked_fill(~here, 0.0).sum(-1, keepdim=True)
    plain = (nll * kept).sum()
    total = plain
    if smoothing:
        even = log_sum - scores.mean(-1, keepdim=True)
        total = (((1 - smoothing) * nll + smoothing * even) * kept).sum()
    gradient = (scores - log_sum).exp() - smoothing / logits.shape[1] - here * (1 - smoothing)
    gradient = gradient * kept
    if cap is not None:
        gradient = gradient * (1 - (scores / cap).square())
    return total, plain, gradient.to(logits.dtype), gradient.sum(0) if bias is not None else log_sum


@cache
def _compiled_chunk_loss() -> Any:
    return torch.compile(chunk_loss, dynamic=False)


class _Accumulator:
    """Accumulated losses and gradients. The matrix may have extra rows of zeros beyond the vocabulary."""

    def __init__(self, features: Tensor, matrix: Tensor, vocab: int, biased: bool, training: bool) -> None:
        self.features, self.matrix, self.vocab = features, matrix, vocab
        fp32: Any = {"dtype": torch.float32, "device": features.device}
        self.total, self.plain = torch.zeros((), **fp32), torch.zeros((), **fp32)
        self.x = torch.empty_like(features) if training else None
        empty = torch.empty if len(features) else torch.zeros
        self.weight = empty(matrix.shape, **fp32) if training else None
        self.bias = torch.zeros(vocab, **fp32) if training and biased else None

    def add(self, start: int, gradient: Tensor) -> None:
        """Add the gradient with respect to the logits of the rows from `start` on."""
        assert self.x is not None and self.weight is not None
        rows = slice(start, start + len(gradient))
        multiply_into(self.x[rows], gradient, self.matrix)
        add_product(self.weight, gradient.T, self.features[rows], first=start == 0)


def multiply_into(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into = a @ b"""
    turned = not b.is_contiguous()
    other = b.T if turned else b
    if cublaslt.usable(into, a, other):
        cublaslt.multiply(a, other, y_transposed=turned, out=into)
    else:
        torch.mm(a, b, out=into)


def add_product(into: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """into += a @ b, or into = a @ b if `first`. `into` is fp32; GPUs accumulate bf16 products into it directly."""
    if cublaslt.usable(a.T, b):
        cublaslt.multiply(a.T, b, x_transposed=True, addend=None if first else into, out=into, single=True)
    elif a.dtype == into.dtype:
        torch.addmm(into, a, b, beta=0 if first else 1, out=into)
    elif _supports_fp32_addmm(a.device, a.dtype):
        torch.addmm(into, a, b, into.dtype, beta=0 if first else 1, out=into)
    elif first:
        into.copy_(a @ b)
    else:
        into += a @ b


@cache
def _supports_fp32_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch supports addmm of this dtype into fp32 on this device."""
    into, few = torch.zeros(16, 16, device=device), torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(into, few, few, into.dtype, out=into)
    except (RuntimeError, TypeError):
        return False
    return True


def _run_triton(sums: _Accumulator, labels: Tensor, bias: Tensor | None, smoothing: float, cap: float | None) -> None:
    """One Triton kernel per chunk replaces the logits by their gradient."""
    from allyouneed.kernels.triton.cross_entropy import cross_entropy_rows

    tokens, wide = len(labels), len(sums.matrix)
    rows = min(tokens, _chunk_rows(labels.device, tokens, wide))
    logits = torch.empty(rows, wide, dtype=sums.features.dtype, device=labels.device)
    labels = labels.contiguous()
    losses = torch.empty(2, tokens, dtype=torch.float32, device=labels.device)
    for start in range(0, tokens, rows):
        part = slice(start, min(start + rows, tokens))
        here = logits[: part.stop - start]
        if sums.x is not None:
            multiply_into(here, sums.features[part], sums.matrix.T)
        else:  # batches of validation have many shapes
            torch.mm(sums.features[part], sums.matrix.T, out=here)
        total, plain = losses[0, part], losses[1, part]
        cross_entropy_rows(
            here, labels[part], IGNORE, bias, smoothing, cap, sums.vocab, total, plain, gradient=sums.x is not None
        )
        if sums.x is not None:
            sums.add(start, here)
        if sums.bias is not None:
            sums.bias += here[:, : sums.vocab].sum(0, dtype=torch.float32)
    sums.total, sums.plain = losses[0].sum(), losses[1].sum()


def _run_compiled(sums: _Accumulator, labels: Tensor, bias: Tensor | None, smoothing: float, cap: float | None) -> None:
    rows, compute = _chunk_rows(labels.device, len(labels), sums.vocab), _compiled_chunk_loss()
    for start in range(0, len(labels), rows):
        logits = sums.features[start : start + rows] @ sums.matrix.T
        total, plain, gradient, bias_gradient = compute(logits, labels[start : start + rows], bias, smoothing, cap)
        sums.total += total
        sums.plain += plain
        if sums.x is not None:
            sums.add(start, gradient)
        if sums.bias is not None:
            sums.bias += bias_gradient


def _run_eager(sums: _Accumulator, labels: Tensor, bias: Tensor | None, smoothing: float, cap: float | None) -> None:
    rows = _chunk_rows(labels.device, len(labels), sums.vocab)
    for start in range(0, len(labels), rows):
        label = labels[start : start + rows]
        kept = (label != IGNORE).float()
        index = label.clamp(min=0)[:, None]
        logits = (sums.features[start : start + rows] @ sums.matrix.T).float()  # (rows, vocab)
        if bias is not None:
            logits += bias.float()
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        slope = 1 - (logits / cap).square() if cap is not None and sums.x is not None else None
        log_sum = logits.logsumexp(-1)
        nll = log_sum - logits.gather(1, index).squeeze(1)
        sums.plain += (nll * kept).sum()
        if smoothing:
            even = log_sum - logits.mean(-1)
            sums.total += (((1 - smoothing) * nll + smoothing * even) * kept).sum()
        else:
            sums.total += (nll * kept).sum()
        if sums.x is None:
            continue
        # d loss / d logits = softmax − target, in place
        gradient = logits.sub_(log_sum[:, None]).exp_()
        if smoothing:
            gradient.sub_(smoothing / sums.vocab)
        gradient.scatter_add_(1, index, torch.full_like(index, smoothing - 1, dtype=torch.float32))
        gradient = gradient.mul_(kept[:, None])
        if slope is not None:
            gradient.mul_(slope)
        if sums.bias is not None:
            sums.bias += gradient.sum(0)
        sums.add(start, gradient.to(sums.features.dtype))


def _pad_vocab(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix in this dtype, padded with rows of zeros if the vocabulary is odd."""
    vocab, width = weight.shape
    if vocab % 8 == 0:
        return weight.to(dtype)
    matrix = weight.new_zeros(-(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, width, dtype=dtype)
    matrix[:vocab] = weight
    return matrix


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        cap: float | None,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        features, vocab = x.to(dtype), len(weight)
        kernel = len(x) > 0 and usable(features)
        matrix = _pad_vocab(weight, dtype) if kernel else weight.to(dtype)
        sums = _Accumulator(features, matrix, vocab, bias is not None, training)
        run = _run_triton if kernel else _run_compiled if x.is_cuda else _run_eager
        run(sums, labels, bias, smoothing, cap)
        ctx.save_for_backward(sums.x, None if sums.weight is None else sums.weight[:vocab], sums.bias)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(sums.plain)
        return sums.total, sums.plain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        found = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *found, None, None, None, None
