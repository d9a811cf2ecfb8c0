"""Packed rows that stay packed, as on a GPU: every sentence gets the outputs and the gradients that it gets alone, and
nothing waits for the device."""

from typing import Any

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.moe import MoEModule
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention import attention, infini
from allyouneed.nn.ops import linear_attention, packed_convolution, retention, selective_scan, ssd, unpack, wkv
from allyouneed.nn.ops.attention import by_distance
from allyouneed.nn.ops.attention import select as attend
from allyouneed.nn.positions.adaptive_span import AdaptiveSpanModule
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


def selected_attention(pattern, queries, keys, score_mod, static=False):
    """On a GPU a kernel that searches no blocks on the host."""
    if score_mod.by_query is not None:
        return attend._general(pattern, queries, keys, score_mod)
    return attend.dense(pattern, queries, keys)


# These train packed rows without a CUDA graph: cuDNN has no resets; weights for each pair of positions are those of one
# sentence; LongNet is planned by FlexAttention on a GPU (test_longnet.py)
WAITING = {"lstm", "gru", "linformer", "tensorized", "spatial-mlp", "longnet"}
WAITING_PARTS = (MoEModule, AdaptiveSpanModule)  # without a kernel; the span is read from the weights


def can_wait(part, module):
    """A part from outside the package may; it then trains without a CUDA graph, too."""
    if not type(part).__module__.startswith("allyouneed."):
        return True
    return part.kind in WAITING or any(isinstance(one, WAITING_PARTS) for one in module.modules())


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_in_a_packed_row_gets_the_results_it_gets_alone(name, monkeypatch):
    """As on a GPU: recurrences that can restart get rows as they are (`unpack_rows(context, restarts=True)`)."""
    asked: list[Any] = []
    monkeypatch.setattr(unpack, "stays_packed", lambda layout: asked.append(layout) or True)
    for user in (infini, attention):
        monkeypatch.setattr(user, "select_attention", selected_attention)
    monkeypatch.setattr(by_distance, "has_kernels", lambda layout: True)
    for op in (retention, ssd, linear_attention):
        monkeypatch.setattr(op, "CHUNK", 4)
    monkeypatch.setattr(wkv, "SEGMENT", 4)
    monkeypatch.setattr(packed_convolution, "BLOCK", 4)
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

    def run():
        context = Context(layout)
        module.prepare(context, len(x))
        asked.clear()  # what is prepared for all layers need not be used
        found = module(x, context)
        loss = (found * slope * (segments > 0)[..., None]).sum()
        return found, torch.autograd.grad(loss, leaves, allow_unused=True)

    try:
        with NoHostSync():
            found, gradients = run()
        waits = False
    except AssertionError:
        found, gradients = run()
        waits = True
    if not (waits and any(isinstance(one, MoEModule) for one in module.modules())):  # experts wait without a kernel
        assert module.unpacks == bool(asked and not waits), (
            f"`unpacks` is {module.unpacks}, but the part {'asks' if asked else 'does not ask'} for rows that stay "
            f"packed, and {'waits' if waits else 'does not wait'} for the host"
        )
    assert not waits or can_wait(CASES[name], module), f"{name} waits for the host: no step with it is captured"
    assert found.isfinite().all()
    if getattr(CASES[name], "capacity", None) or getattr(CASES[name], "row_capacity", None):
        return  # sentences compete for the experts
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
