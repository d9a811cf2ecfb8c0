"""linear_cross_entropy against its plain definition: values and gradients."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from allyouneed.nn.batch import IGNORE
from allyouneed.nn.ops import cross_entropy as crossentropy
from allyouneed.nn.ops.cross_entropy import chunk_loss, linear_cross_entropy


def drawn(tokens, vocab, width, ignored=0.0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    return x, weight, labels


def plain(x, weight, labels, smoothing):
    logits = x @ weight.T
    return cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")


def compare(x, weight, labels, smoothing, scale=1.0, atol=1e-5, rtol=1e-5):
    total, nll = linear_cross_entropy(x, weight, labels, smoothing)
    found = torch.autograd.grad(total * scale, [x, weight])
    expected = plain(x, weight, labels, smoothing)
    torch.testing.assert_close(total, expected.detach(), atol=atol, rtol=rtol)
    torch.testing.assert_close(nll, plain(x, weight, labels, 0.0).detach(), atol=atol, rtol=rtol)
    for one, other in zip(found, torch.autograd.grad(expected * scale, [x, weight]), strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 13 * 3, 1 << 24])  # one token a chunk, three, all
@given(st.sampled_from([1, 3, 10, 63, 100]), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 9))
def test_values_and_gradients_match_the_definition(smoothing, chunk_bytes, tokens, ignored, seed):
    original = crossentropy.CHUNK_BYTES
    crossentropy.CHUNK_BYTES = chunk_bytes
    try:
        compare(*drawn(tokens, 13, 5, ignored, seed), smoothing, scale=0.7)
    finally:
        crossentropy.CHUNK_BYTES = original


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bias_and_cap_match_the_definition(smoothing, cap):
    x, weight, labels = drawn(63, 13, 5, ignored=0.3)
    bias = torch.randn(13, generator=torch.Generator().manual_seed(3)).requires_grad_()
    logits = x @ weight.T + bias
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    total, _ = linear_cross_entropy(x, weight, labels, smoothing, bias, cap)
    torch.testing.assert_close(total, expected)
    wanted = torch.autograd.grad(expected, [x, weight, bias])
    for one, other in zip(torch.autograd.grad(total, [x, weight, bias]), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_all_labels_ignored_is_a_loss_of_zero_with_zero_gradients():
    x, weight, labels = drawn(7, 13, 5, ignored=1.1)
    total, nll = linear_cross_entropy(x, weight, labels, 0.1)
    gradients = torch.autograd.grad(total, [x, weight])
    assert total == 0 and nll == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_no_gradient_flows_from_the_plain_loss():
    x, weight, labels = drawn(7, 13, 5)
    _, nll = linear_cross_entropy(x, weight, labels, 0.1)
    assert not nll.requires_grad


def test_large_logits_do_not_overflow():
    x, weight, labels = drawn(9, 13, 5)
    with torch.no_grad():
        x *= 300
    compare(x, weight, labels, 0.1, atol=1e-3)  # losses are in the thousands: this is 1e-6 of them


def test_bfloat16_is_as_precise_as_the_definition():
    x, weight, labels = drawn(100, 50, 16, dtype=torch.bfloat16)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = cross_entropy(exact_x @ exact_weight.T, labels, label_smoothing=0.1, reduction="sum")
    truth = torch.autograd.grad(exact, [exact_x, exact_weight])
    total, _ = linear_cross_entropy(x, weight, labels, 0.1)
    found = torch.autograd.grad(total, [x, weight])
    reference = plain(x, weight, labels, 0.1)
    usual = torch.autograd.grad(reference, [x, weight])
    assert (total - exact).abs() <= 1.1 * (reference - exact).abs() + 1e-3 * exact.abs()
    for ours, theirs, true in zip(found, usual, truth, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - true).norm() <= 1.5 * (theirs - true).norm()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_computes_in_bfloat16_and_returns_weight_precision(smoothing):
    x, weight, labels = drawn(64, 50, 16, ignored=0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = linear_cross_entropy(x, weight, labels, smoothing)
        reference = plain(x, weight, labels, smoothing)
    found = torch.autograd.grad(total, [x, weight])
    usual = torch.autograd.grad(reference, [x, weight])
    full = torch.autograd.grad(plain(x, weight, labels, smoothing), [x, weight])
    torch.testing.assert_close(total, reference.detach(), rtol=1e-5, atol=1e-3)  # the same bfloat16 logits
    for ours, theirs, true in zip(found, usual, full, strict=True):
        assert ours.dtype == torch.float32
        assert 0 < (ours - true).norm() <= 1.5 * (theirs - true).norm()


def test_evaluation_computes_no_gradients():
    x, weight, labels = drawn(30, 50, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        linear_cross_entropy(x, weight, labels, 0.1)
    assert counter.get_total_flops() == 2 * 30 * 50 * 16


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
def test_the_compiled_chunk_loss_matches_the_definition(cap, smoothing, biased):
    logits, bias = torch.randn(13, 31, requires_grad=True), torch.randn(31, requires_grad=True)
    labels = torch.randint(0, 31, (13,)).index_fill(0, torch.tensor([3]), IGNORE)
    scores = logits + bias if biased else logits
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    expected = cross_entropy(scores, labels, label_smoothing=smoothing, reduction="sum")
    expected.backward()
    total, nll, slope, slant = chunk_loss(logits.detach(), labels, bias.detach() if biased else None, smoothing, cap)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(nll, cross_entropy(scores, labels, reduction="sum").detach())
    torch.testing.assert_close(slope, logits.grad)
    if biased:
        torch.testing.assert_close(slant, bias.grad)


def test_gpu_chunks_are_equal_whole_tiles(monkeypatch):
    gpu, memory = torch.device("cuda"), 139 << 30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    assert crossentropy._chunk_rows(gpu, 32768, 50304) == 16384 and crossentropy._chunk_rows(gpu, 24576, 32000) == 24576
    memory = 16 << 30
    assert crossentropy._chunk_rows(gpu, 32768, 50304) == 4864
    for tokens, vocab in ((1, 9), (1000, 50304), (33000, 50304), (20001, 250000)):
        rows = crossentropy._chunk_rows(gpu, tokens, vocab)
        chunks = -(-tokens // rows)
        assert rows % crossentropy.ROW_TILE == 0 and chunks * rows - tokens < chunks * crossentropy.ROW_TILE
        assert (rows - crossentropy.ROW_TILE) * 4 * vocab <= max(crossentropy.chunk_bytes(gpu), 1024 * 4 * vocab)


def judge_in_place(logits, labels, ignore, bias, smoothing, cap, vocab, totals, plains, gradient):
    """What our kernel does, one row at a time by the definition."""
    for row, label in enumerate(labels):
        total, plain, slope, _ = chunk_loss(logits[None, row, :vocab], label[None], bias, smoothing, cap)
        totals[row], plains[row] = total, plain
        if gradient:
            logits[row, :vocab], logits[row, vocab:] = slope[0], 0.0


@pytest.mark.parametrize("vocab", [13, 16, 70])  # two that are filled up, to 64 and to 128
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_kernel_path_matches_the_definition(monkeypatch, vocab, cap, biased, training):
    """The kernel itself is tried by bench/check/kernels.py."""
    widths = []

    def by_definition(logits, *given, gradient):
        widths.append(logits.shape[1])
        judge_in_place(logits, *given, gradient)

    monkeypatch.setitem(
        sys.modules, "allyouneed.kernels.triton.cross_entropy", SimpleNamespace(cross_entropy_rows=by_definition)
    )
    monkeypatch.setattr(crossentropy, "usable", lambda x: True)
    monkeypatch.setattr(crossentropy, "_chunk_rows", lambda device, tokens, vocab: 8)
    x, weight, labels = drawn(19, vocab, 5, ignored=0.3)
    leaves = [x, weight] + [torch.randn(vocab, requires_grad=True)] * biased
    scores = torch.nn.functional.linear(*leaves)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    expected = cross_entropy(scores, labels, label_smoothing=0.1, reduction="sum")
    bias = leaves[2] if biased else None
    total, nll = crossentropy._LinearCrossEntropy.apply(x, weight, bias, labels, 0.1, cap, training)
    assert widths == 3 * [{13: 64, 16: 16, 70: 128}[vocab]]
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(nll, cross_entropy(scores, labels, reduction="sum").detach())
    if training:
        wanted = torch.autograd.grad(expected * 0.7, leaves)
        for one, other in zip(torch.autograd.grad(total * 0.7, leaves), wanted, strict=True):
            assert one.is_contiguous()
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_product_assigns_first_and_then_adds(dtype):
    into, wanted = torch.full((3, 5), torch.nan), torch.zeros(3, 5)
    for number in range(3):
        a, b = torch.randn(4, 3).to(dtype), torch.randn(4, 5).to(dtype)
        crossentropy.add_product(into, a.T, b, first=number == 0)
        wanted += a.T @ b
    torch.testing.assert_close(into, wanted)
