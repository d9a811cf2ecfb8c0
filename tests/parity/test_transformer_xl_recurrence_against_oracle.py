"""Transformer-XL as a whole, segments with memory and stopped gradients, against the paper's equations (3.2 and 3.3)
written out. What they leave open (post-norm, ReLU, no biases in attention, embeddings times √width, memory seen by the
whole segment) is as in the authors' code, kimiyoung/transformer-xl."""

import math

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.segment_recurrence import run_segments
from attention_layers import TOLERANCE, max_difference, randomise_module
from shrink import shrink

VOCAB, WIDTH, HEADS = 13, 12, 3
LAYERS = 3


def sinusoid(distance, width):
    angles = [distance / 10000 ** (2 * n / width) for n in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def layer_by_the_paper(block, h, memory, same_length, clamp):
    """3.3, the three groups of equations, one pair of tokens at a time; `memory` is SG(h_τ)."""
    mixer, channel, norms = block.sublayers["mixer"], block.sublayers["channel"], block.wiring.norms
    heads, width = mixer.heads, mixer.head_width
    both = torch.cat((memory, h))  # h̃
    w_q, w_k, w_v = (w.unflatten(0, (heads, width)) for w in mixer.qkv.weight.chunk(3))
    w_r, u, v = (
        mixer.relative.far.weight.unflatten(0, (heads, width)),
        mixer.relative.biases.content[:, 0],
        mixer.relative.biases.place[:, 0],
    )
    rows = []
    for i in range(len(h)):
        own = len(memory) + i  # its number among all that there is
        first = max(0, own - same_length + 1) if same_length else 0
        found = []
        for n in range(heads):
            q = w_q[n] @ h[i]
            scores = []
            for j in range(first, own + 1):
                k = w_k[n] @ both[j]
                far = own - j if clamp is None else min(own - j, clamp)
                r = w_r[n] @ sinusoid(far, h.shape[1])
                scores.append(q @ k + q @ r + u[n] @ k + v[n] @ r)
            weights = (torch.stack(scores) / width**0.5).softmax(0)
            found.append(weights @ (both[first : own + 1] @ w_v[n].T))
        rows.append(mixer.out.weight @ torch.cat(found))
    o = normed(norms[0], h + torch.stack(rows))
    return normed(norms[1], o + channel.down(channel.up(o).relu()))


def normed(norm, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def by_the_paper(model, segments, memory_length, same_length=0, clamp=None):
    """Logits of each segment of one text; memories are constants of each layer's last hidden states."""
    blocks = list(model.decoder.blocks)
    memories = [torch.zeros(0, model.config.width) for _ in blocks]
    for segment in segments:
        h = model.embed.tokens.weight[segment] * model.config.width**0.5
        after = []
        for block, memory in zip(blocks, memories, strict=True):
            after.append(torch.cat((memory, h))[-memory_length:].detach())
            h = layer_by_the_paper(block, h, memory, same_length, clamp)
        memories = after
        yield h @ model.head.weight.T + (0 if model.head.bias is None else model.head.bias)


def build_mixer(pattern, clamp=None, cache="hidden"):
    positions = {"kind": "transformer-xl", "clamp": clamp}
    mixer = {"kind": "attention", "heads": HEADS, "pattern": pattern, "positions": positions, "bias": False}
    layer = {"repeat": LAYERS, "mixer": mixer | {"cache": cache}, "channel": {"kind": "ffn", "hidden": 17}}
    tree = {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "decoder": [layer], "head": {"bias": True}}
    return randomise_module(parse(Model, tree).build())


def differences(model, expected_of, length, times):
    """Largest over all segments of logits, and of the gradients of each segment's own loss."""
    vocab = model.config.vocab
    tokens = torch.randint(0, vocab, (2, length * times - 1), generator=torch.Generator().manual_seed(3))
    parameters = list(model.parameters())
    outputs, gradients = 0.0, 0.0
    references = [expected_of(row.split(length)) for row in tokens]
    for _, hidden in run_segments(model, tokens, length, model.start(2)):
        found, expected = model.head(hidden), torch.stack([next(one) for one in references])
        outputs = max(outputs, max_difference(found, expected))
        direction = torch.linspace(-1, 1, found.numel()).view_as(found)
        one, other = (
            torch.autograd.grad((logits * direction).sum(), parameters, materialize_grads=True)
            for logits in (found, expected)
        )
        gradients = max(gradients, *(max_difference(*pair) for pair in zip(one, other, strict=True)))
    return outputs, gradients


@pytest.mark.parametrize(
    ("pattern", "memory", "same_length", "clamp"),
    [
        ("causal & block-window(5, 2)", 5, 0, None),  # memory as long as a segment: as the authors train
        ("causal & block-window(5, 3)", 10, 0, None),
        ("causal & block-window(5, 2)", 5, 0, 3),
        ("causal & window(8)", 8, 8, None),  # as they evaluate, where all tokens see as many
        ("causal & window(8)", 8, 8, 6),
        ("causal & block(5)", 0, 0, None),  # no memory
    ],
)
def test_segments_with_memory(pattern, memory, same_length, clamp, record_difference):
    model = build_mixer(pattern, clamp)

    def reference(segments):
        return by_the_paper(model, segments, memory or -100, same_length, clamp)

    found = differences(model, reference, length=5, times=4)
    record_difference("Transformer-XL", "equations written out, segments with memory", *found)
    assert max(found) < TOLERANCE


def test_the_preset_made_small(record_difference):
    config = shrink(parse(Model, preset_tree("transformer-xl-base")))
    model = randomise_module(config.build())
    text = str(config.decoder[0].mixer.pattern)
    segment = int(text.split("(")[1].split(",")[0])
    found = differences(model, lambda segments: by_the_paper(model, segments, segment), length=segment, times=3)
    record_difference("Transformer-XL", "equations written out, segments with memory", *found)
    assert max(found) < TOLERANCE


def test_caching_keys_changes_gradients_only():
    """In evaluation hidden states projected again are the keys there were; in training their projection learns too."""
    hidden, keys = build_mixer("causal & block-window(5, 2)"), build_mixer("causal & block-window(5, 2)", cache="keys")
    keys.load_state_dict(hidden.state_dict())
    tokens = torch.randint(0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))
    results = []
    for model in (hidden, keys):
        *_, (_, last) = run_segments(model, tokens, 5, model.start(2))
        results.append(
            (last, torch.autograd.grad(last.sum(), model.decoder.blocks[0].sublayers["mixer"].qkv.weight)[0])
        )
    assert max_difference(results[0][0], results[1][0]) < 1e-6
    assert (results[0][1] - results[1][1]).abs().max() > 1e-3


def test_the_size_of_the_authors_model():
    """Table 1: 151M."""
    assert round(parse(Model, preset_tree("transformer-xl-base")).cost().parameters / 1e6) == 151
