"""Cross-entropy of a linear map, in chunks that never keep the logits.

A vocabulary is wide and a batch is long: their logits would be the largest tensor of a training step. Here each chunk
of tokens gets its logits, its loss and its gradients in one go, and the next chunk reuses the memory. The plain
definition, `cross_entropy(x @ weight.T + bias, labels, label_smoothing, reduction="sum")`, is its judge in the tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.batch import IGNORE

CHUNK_BYTES = 1 << 24  # logits of one chunk: small enough to stay near the cores, large enough to feed them
GPU_CHUNK_BYTES = 1 << 31  # of fp32, though they are kept in the precision of the product
TILE = 256  # rows that a GPU's matrix product computes together


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """x (tokens, width), weight (vocab, width), labels (tokens,): summed smoothed loss and summed plain loss.

    With label smoothing ε the target is (1 − ε) on the label plus ε / vocab everywhere (the paper, 5.4; Szegedy et
    al. 2015, 7). The plain loss is for reporting: no gradient flows from it. `cap` c turns a logit z into c·tanh(z/c).
    """
    keep = labels != IGNORE
    if x.device.type == "cpu" and not bool(keep.all()):  # a GPU would have to wait for the count
        x, labels = x[keep], labels[keep]
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total, plain = _LinearCrossEntropy.apply(x, weight, bias, labels, smoothing, cap, training)
    return total, plain


def _rows(device: torch.device, tokens: int, vocab: int) -> int:
    """Tokens whose logits are computed together. On a GPU chunks are alike, and whole tiles: a small one at the end
    would leave most of it idle."""
    if device.type == "cpu":
        return max(1, CHUNK_BYTES // (4 * vocab))
    most = max(1024, GPU_CHUNK_BYTES // (4 * vocab))
    each = -(-tokens // max(1, -(-tokens // most)))
    return max(TILE, -(-each // TILE) * TILE)


def judged(
    logits: Tensor, labels: Tensor, bias: Tensor | None, smoothing: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a chunk (rows, vocab): the loss, the plain loss, and the loss's gradients by the logits and by the bias. The
    same as below without writing over anything: what a compiler makes a kernel or two of."""
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
def _compiled_judged() -> Any:
    return torch.compile(judged, dynamic=False)


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
        features, matrix = x.to(dtype), weight.to(dtype)
        vocab = weight.shape[0]
        rows = _rows(x.device, len(x), vocab)
        grad_x = torch.empty_like(features) if training else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if training else None
        grad_bias = torch.zeros(vocab, dtype=torch.float32, device=x.device) if training and bias is not None else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        plain = torch.zeros((), dtype=torch.float32, device=x.device)
        judge = _compiled_judged() if x.device.type == "cuda" else None
        for start in range(0, len(features), rows):
            part, label = features[start : start + rows], labels[start : start + rows]
            if judge is not None:
                loss, nothing_else, gradient, slant = judge(part @ matrix.T, label, bias, smoothing, cap)
                total += loss
                plain += nothing_else
                if grad_x is not None and grad_weight is not None:
                    torch.mm(gradient, matrix, out=grad_x[start : start + rows])
                    grad_weight += gradient.T @ part
                    if grad_bias is not None:
                        grad_bias += slant
                continue
            kept = (label != IGNORE).float()
            index = label.clamp(min=0)[:, None]
            logits = (part @ matrix.T).float()  # (rows, vocab)
            if bias is not None:
                logits += bias.float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            slope = 1 - (logits / cap).square() if cap is not None and training else None
            log_sum = logits.logsumexp(-1)
            nll = log_sum - logits.gather(1, index).squeeze(1)
            plain += (nll * kept).sum()
            if smoothing:
                even = log_sum - logits.mean(-1)
                total += (((1 - smoothing) * nll + smoothing * even) * kept).sum()
            else:
                total += (nll * kept).sum()
            if grad_x is not None and grad_weight is not None:
                # d loss / d logits = softmax − target, written over the logits
                gradient = logits.sub_(log_sum[:, None]).exp_()
                if smoothing:
                    gradient.sub_(smoothing / vocab)
                gradient.scatter_add_(1, index, torch.full_like(index, smoothing - 1, dtype=torch.float32))
                gradient = gradient.mul_(kept[:, None])
                if slope is not None:
                    gradient.mul_(slope)
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
                gradient = gradient.to(dtype)
                torch.mm(gradient, matrix, out=grad_x[start : start + rows])
                if dtype == torch.float32:  # added as it is made: this product is as large as all weights
                    torch.addmm(grad_weight, gradient.T, part, out=grad_weight)
                else:
                    grad_weight += gradient.T @ part
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        found = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *found, None, None, None, None
