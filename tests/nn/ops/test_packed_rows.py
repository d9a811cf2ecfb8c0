"""Packed rows that stay packed, as on a GPU: every sentence gets the outputs and the gradients that it gets alone, and
nothing waits for the device. Every mixer that can restart within a row is tested."""

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention import attention, infini
from allyouneed.nn.ops import linear_attention, retention, selective_scan, ssd, unpack, wkv
from allyouneed.nn.ops.attention.select import dense
from allyouneed.nn.sublayer import Channel, Mixer
from any_part import WIDTH, describe_part, variants
from host_sync import NoHostSync

COMMON = Common(width=WIDTH)
LENGTHS = ((3, 1, 13, 5), (1, 9, 8))  # of the sentences of two rows, which begin and end within chunks and span some
TIME, GAP = 25, 2  # padding behind the second sentence, and at the end


def packed_rows():
    """Segments of both rows, and the place of each sentence."""
    segments, places = torch.zeros(len(LENGTHS), TIME, dtype=torch.long), []
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for number, length in enumerate(lengths):
            places.append((row, slice(at, at + length)))
            segments[places[-1]] = number + 1
            at += length + (GAP if number == 1 else 0)
    return segments, places


PARTS = [part for part in variants(Mixer) if part.supports_self] + variants(Channel)
CASES = {describe_part(part): part for part in PARTS if not part.problems(COMMON)}
# experts without a kernel read their tokens on the host
RESTARTING = [name for name, part in CASES.items() if part.build(COMMON).unpacks and "moe" not in name]


def dense_attention(pattern, queries, keys, score_mod, static=False):
    """On a GPU a kernel that searches no blocks on the host."""
    return dense(pattern, queries, keys)


@pytest.mark.parametrize("name", RESTARTING, ids=str)
def test_a_sentence_in_a_packed_row_gets_the_results_it_gets_alone(name, monkeypatch):
    monkeypatch.setattr(unpack, "stays_packed", lambda layout: True)
    for user in (infini, attention):
        monkeypatch.setattr(user, "select_attention", dense_attention)
    for op in (retention, ssd, linear_attention):
        monkeypatch.setattr(op, "CHUNK", 4)
    monkeypatch.setattr(wkv, "SEGMENT", 4)
    monkeypatch.setattr(selective_scan, "CACHED", 1)
    torch.manual_seed(0)
    module = (
        CASES[name].build(COMMON).double().eval()
    )  # a performer that redraws its features counts passes on the host
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    segments, places = packed_rows()
    x = torch.randn(*segments.shape, WIDTH, dtype=torch.double, requires_grad=True)
    slope = torch.randn(*segments.shape, CASES[name].outputs(COMMON), dtype=torch.double)
    leaves = [x, *module.parameters()]
    layout = TokenLayout.of(Rows(torch.zeros_like(segments), segments=segments))
    with NoHostSync():
        context = Context(layout)
        module.prepare(context, len(x))
        found = module(x, context)
        loss = (found * slope * (segments > 0)[..., None]).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert found.isfinite().all()
    apart = 0.0
    for place in places:
        alone = x[place][None]
        expected = module(alone, Context(TokenLayout.of(Rows(torch.zeros(alone.shape[:2], dtype=torch.long)))))
        torch.testing.assert_close(found[place][None], expected, atol=1e-9, rtol=1e-9)
        apart = apart + (expected * slope[place]).sum()
    for one, other in zip(gradients, torch.autograd.grad(apart, leaves, allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_the_kinds_that_restart():
    """A list, so that none is lost by mistake."""
    found = {CASES[name].kind for name in RESTARTING}
    recurrent = {"retention", "gated-retention", "rwkv", "mamba", "mamba2", "performer", "infini", "mixed-chunk"}
    sliding = {"convolution", "lightweight-convolution", "dynamic-convolution", "pooling", "conv-ffn"}
    assert found == recurrent | sliding | {"lsra", "branches"}  # those hold convolutions
