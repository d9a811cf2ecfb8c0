"""Longformer attention against its definition in loops; padded, packed and without any chosen token."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention.longformer import Longformer
from allyouneed.nn.models.base import Model
from any_part import build

HEADS, WIDTH = 3, 12


def module_of(**keys):
    common = parse(
        Model, {"kind": "encoder", "vocab": 5, "width": WIDTH, "encoder": [{"channel": {"kind": "ffn", "hidden": 4}}]}
    )
    torch.manual_seed(0)
    module = Longformer(**({"heads": HEADS, "window": 4} | keys)).build(common).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


@torch.no_grad()
def by_hand(module, x, chosen, side, dilation=1):
    """One sentence. Chosen tokens: their own projections over everything; others: window and chosen tokens, once."""
    size = WIDTH // HEADS
    q, k, v = module.qkv(x).chunk(3, -1)
    global_q, (global_k, global_v) = module.global_q(x), module.global_kv(x).chunk(2, -1)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        near = [t + step * dilation for step in range(-side, side + 1)]
        keys = [n for n in range(len(x)) if chosen[t] or n in near or chosen[n]]
        for head in range(HEADS):
            part = slice(size * head, size * head + size)
            here, there, brought = (global_q, global_k, global_v) if chosen[t] else (q, k, v)
            weights = (there[keys][:, part] @ here[t, part] / size**0.5).softmax(0)
            out[t, part] = weights @ brought[keys][:, part]
    return module.out(out)


def run(module, x, **said):
    with torch.no_grad():
        return module(x, Context(TokenLayout.of(Rows(torch.zeros(x.shape[:2], dtype=torch.long), **said))))


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("time", [1, 7, 20])
def test_matches_the_definition(time, dilation):
    module = module_of(dilation=dilation)
    x = torch.randn(3, time, WIDTH, dtype=torch.double)
    chosen = torch.rand(3, time) < 0.2
    chosen[0], chosen[1, 0] = False, True
    found = run(module, x, chosen=chosen)
    for row in range(3):
        expected = by_hand(module, x[row], chosen[row].tolist(), 2, dilation)
        torch.testing.assert_close(found[row], expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(run(module, x[:1]), found[:1], atol=1e-9, rtol=1e-9)


def test_padding_and_packing_do_not_change_results():
    module = module_of()
    sizes = [9, 4, 14]
    texts = [torch.randn(size, WIDTH, dtype=torch.double) for size in sizes]
    marks = [torch.rand(size) < 0.3 for size in sizes]
    marks[1][:] = False
    alone = [by_hand(module, x, chosen.tolist(), 2) for x, chosen in zip(texts, marks, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    noise = 9 * torch.ones(3, 14, WIDTH, dtype=torch.double)
    inside = torch.arange(14)[None] < torch.tensor(sizes)[:, None]
    x = torch.where(inside[..., None], pad(texts, batch_first=True), noise)
    chosen = pad(marks, batch_first=True) | ~inside  # padding that says it is chosen is padding all the same
    found = run(module, x, lengths=torch.tensor(sizes), chosen=chosen)
    for row, size in enumerate(sizes):
        torch.testing.assert_close(found[row, :size], alone[row], atol=1e-9, rtol=1e-9)
    segments = torch.tensor([[1] * 9 + [2] * 4 + [0] * 2 + [3] * 14])
    gap = torch.ones(2, WIDTH, dtype=torch.double)
    packed = torch.cat([texts[0], texts[1], gap, texts[2]])[None]
    chosen = torch.cat([marks[0], marks[1], torch.ones(2, dtype=torch.bool), marks[2]])[None]
    found = run(module, packed, segments=segments, chosen=chosen)[0]
    for place, expected in zip((slice(0, 9), slice(9, 13), slice(15, 29)), alone, strict=True):
        torch.testing.assert_close(found[place], expected, atol=1e-9, rtol=1e-9)


def test_gradients_reach_both_kinds_of_projections():
    module = module_of()
    x = torch.randn(1, 8, WIDTH, dtype=torch.double, requires_grad=True)
    chosen = torch.zeros(1, 8, dtype=torch.bool)
    chosen[0, 2] = True
    layout = TokenLayout.of(Rows(torch.zeros(1, 8, dtype=torch.long), chosen=chosen))
    assert torch.autograd.gradcheck(lambda x: module(x, Context(layout)), [x])
    module(x, Context(layout)).square().sum().backward()
    for name in ("qkv", "global_q", "global_kv"):
        assert getattr(module, name).weight.grad.abs().sum() > 0


def test_recorded_weights_of_global_tokens():
    layer = {"mixer": {"kind": "longformer", "heads": 3, "window": 2}}
    model = build({"kind": "encoder", "vocab": 11, "width": 12, "encoder": [layer]})
    chosen = torch.tensor([[False, True, False, False, False]])
    weights = model.attention(Batch(Rows(torch.tensor([[1, 2, 3, 4, 5]]), chosen=chosen)))[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3, 5, dtype=torch.double))
    assert (weights[0, 0] > 0).int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1],
        [0, 1, 1, 1, 0],
        [0, 1, 1, 1, 1],
        [0, 1, 0, 1, 1],
    ]
    module = model.encoder.blocks[0].sublayers["mixer"]
    x = model.embed(Rows(torch.tensor([[1, 2, 3, 4, 5]])), TokenLayout.of(Rows(torch.tensor([[1, 2, 3, 4, 5]]))))
    keys = module.global_kv(x).chunk(2, -1)[0]
    scores = (module.split(keys)[0, :] @ module.split(module.global_q(x))[0, :, 1, :, None])[..., 0] / 2
    torch.testing.assert_close(weights[0, :, 1], scores.softmax(-1))


def test_an_odd_window_and_a_decoder_are_refused():
    layer = {"mixer": {"kind": "longformer", "heads": 3, "window": 5}}
    with pytest.raises(ConfigError, match="5 is odd; it must be even"):
        parse(Model, {"kind": "encoder", "vocab": 11, "width": 12, "encoder": [layer]})
    layer["mixer"]["window"] = 4
    with pytest.raises(ConfigError, match="the longformer window covers both sides"):
        parse(Model, {"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]})
