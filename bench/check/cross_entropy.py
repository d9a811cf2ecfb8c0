"""Cross-entropy, of logits and of a whole head, against the definition in double precision; a part of kernels.py."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from allyouneed.kernels.triton import cross_entropy as crossentropy
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.ops import cross_entropy as chunked
from bench.check.report import LIMITS, Check, Sizes

# rows, width of the logits, number of scores in it
ENTROPIES = [(1, 37, 37), (7, 37, 37), (3, 64, 50), (2, 16000, 16000), (5, 50304, 50304), (4, 50304, 50257)]
LARGE_ENTROPIES = [(1000, 16000, 16000), (700, 50304, 50257), (33, 250112, 250100)]
# tokens, vocab, width of the whole, from vectors to gradients
HEADS = [(9, 37, 8), (300, 50, 16), (5, 1001, 12)]
LARGE_HEADS = [(9000, 50257, 768)]


def check_cross_entropy(
    check: Check, sizes: Sizes, dtype: torch.dtype, smoothing: float, cap: float | None, biased: bool
) -> None:
    rows, width, vocab = sizes
    torch.manual_seed(rows)
    logits = 4 * torch.randn(rows, width)
    logits[:1] *= 60  # where e to the power of a score over the label's overflows
    logits = logits.to(check.device, dtype)
    bias = torch.randn(vocab, device=check.device) if biased else None
    labels = torch.randint(0, vocab, (rows,), device=check.device)
    labels[2::5] = IGNORE
    labels[-1] = vocab - 1
    exact = logits[:, :vocab].double().requires_grad_()
    scores = exact if bias is None else exact + bias.double()
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    options = {"ignore_index": IGNORE, "reduction": "none"}
    losses = cross_entropy(scores, labels, label_smoothing=smoothing, **options)
    (grad,) = torch.autograd.grad(losses.sum(), [exact])
    grad = torch.nn.functional.pad(grad, (0, width - vocab))
    found = torch.full((2, rows), torch.nan, device=check.device)
    quiet = logits.clone()
    crossentropy.cross_entropy_rows(quiet, labels, IGNORE, bias, smoothing, cap, vocab, *found, gradient=False)
    assert torch.equal(quiet, logits), "logits are written over though no gradient is asked for"
    alone = found.clone()
    crossentropy.cross_entropy_rows(logits, labels, IGNORE, bias, smoothing, cap, vocab, *found.fill_(torch.nan))
    assert torch.equal(found, alone) and not logits[labels == IGNORE].any() and not logits[:, vocab:].any()
    plain = cross_entropy(scores, labels, **options)
    kind = f"{smoothing or ''} {'capped ' if cap else ''}{'biased' if biased else ''}"
    name = f"cross-entropy {tuple(sizes)} {str(dtype)[6:]} {kind}"
    check.report(name, found, [losses, plain], LIMITS[torch.float32])
    check.report(f"{name}, gradient", [logits], [grad], LIMITS[dtype])


def check_head(check: Check, sizes: Sizes, dtype: torch.dtype, smoothing: float, biased: bool) -> None:
    """The loss and gradients of a head on vectors, through all chunks."""
    tokens, vocab, width = sizes
    torch.manual_seed(tokens)
    given = [torch.randn(tokens, width), torch.randn(vocab, width) / width**0.5, torch.randn(vocab)]
    given = [x.to(dtype) for x in given[: 2 + biased]]
    labels = torch.randint(0, vocab, (tokens,), device=check.device)
    labels[1::7] = IGNORE
    exact = [check.leaf(x, torch.float64) for x in given]
    scores = torch.nn.functional.linear(*exact)
    wanted = [cross_entropy(scores, labels, label_smoothing=e, reduction="sum") for e in (smoothing, 0.0)]
    wanted += torch.autograd.grad(wanted[0] * 0.5, exact)
    own = [check.leaf(x, dtype) for x in given]
    found = list(chunked.linear_cross_entropy(own[0], own[1], labels, smoothing, *own[2:]))
    found += torch.autograd.grad(found[0] * 0.5, own)
    check.report(f"head {tuple(sizes)} {str(dtype)[6:]} {smoothing or ''}", found, wanted, LIMITS[dtype])


def entropies(check: Check, cuda: bool) -> None:
    print("losses, plain losses; gradient by the logits; a whole head with gradients of vectors, weights and bias")
    for sizes in ENTROPIES + (LARGE_ENTROPIES if cuda else []):
        for smoothing, cap, biased in ((0.0, None, False), (0.1, None, False), (0.1, 5.0, True), (0.0, 30.0, False)):
            for dtype in (torch.float32, torch.bfloat16):
                check_cross_entropy(check, sizes, dtype, smoothing, cap, biased)
    if not cuda:
        chunked.usable = lambda x: True  # type: ignore[assignment]
        chunked._rows = lambda device, tokens, vocab: 128
    for sizes in HEADS + (LARGE_HEADS if cuda else []):
        for smoothing, biased in ((0.0, False), (0.1, True)):
            for dtype in (torch.float32, torch.bfloat16):
                check_head(check, sizes, dtype, smoothing, biased)
