"""The Recurrent Memory Transformer preset made small, against Bulatov et al. 2022, 3.2, written out: one text, one pair
of tokens at a time, each segment as one pass over [memory, tokens, memory] with the mask of the authors' code
(`mem_at_end`: tokens of each copy of the memory see each other)."""

import math

import pytest
import torch

from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from attention_layers import TOLERANCE, max_difference, randomise_module
from shrink import shrink


def sinusoid(distance, width):
    angles = [distance / 10000 ** (2 * n / width) for n in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def layer(block, h, seen):
    """Post-norm, attention with Transformer-XL's four terms (Dai et al. 2019, 3.3), feed-forward."""
    mixer, channel, norms = block.sublayers["mixer"], block.sublayers["channel"], block.wiring.norms
    heads, width = mixer.heads, mixer.head_width
    w_q, w_k, w_v = (w.unflatten(0, (heads, width)) for w in mixer.qkv.weight.chunk(3))
    w_r = mixer.relative.far.weight.unflatten(0, (heads, width))
    u, v = mixer.relative.biases.content[:, 0], mixer.relative.biases.place[:, 0]
    rows = []
    for i in range(len(h)):
        keys = [j for j in range(len(h)) if seen(i, j)]
        far = torch.stack([sinusoid(i - j, h.shape[1]) for j in keys])
        found = []
        for n in range(heads):
            q, k, r = w_q[n] @ h[i], h[keys] @ w_k[n].T, far @ w_r[n].T
            weights = ((k @ (q + u[n]) + r @ (q + v[n])) / width**0.5).softmax(0)
            found.append(weights @ (h[keys] @ w_v[n].T))
        rows.append(mixer.out.weight @ torch.cat(found))
    o = norm(norms[0], h + torch.stack(rows))
    return norm(norms[1], o + channel.down(channel.up(o).relu()))


def norm(module, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias)


def by_the_paper(model, text, bptt, blocks_see_each_other):
    memory, m, found = model.memory, model.config.memory, []
    for number, segment in enumerate(text.split(model.config.segment)):
        if bptt is not None and number % bptt == 0 and number:
            memory = memory.detach()
        tokens = model.embed.tokens.weight[segment] * model.config.width**0.5
        h, end = torch.cat((memory, tokens, memory)), m + len(segment)

        def seen(i, j, end=end):
            return j <= i or (blocks_see_each_other and (max(i, j) < m or min(i, j) >= end))

        for block in model.decoder.blocks:
            h = layer(block, h, seen)
        found.append(h[m:end])
        memory = h[end:]
    return model.head(torch.cat(found)[None])[0]


@pytest.mark.parametrize(("pattern", "bptt"), [("causal | prompt", None), ("causal | prompt", 2), ("causal", None)])
def test_segments_with_memory_tokens(pattern, bptt, record_difference):
    tree = tree_of(shrink(parse(Model, preset_tree("rmt")))) | {"segment": 4, "memory": 2, "bptt": bptt}
    tree["decoder"][0]["mixer"]["pattern"] = pattern
    model = randomise_module(parse(Model, tree).build())
    texts = [torch.randint(0, model.config.vocab, (n,), generator=torch.Generator().manual_seed(n)) for n in (14, 7)]
    found = model.logits(Batch(Rows.of([text.tolist() for text in texts])))
    found = torch.cat([row[: len(text)] for row, text in zip(found, texts, strict=True)])
    expected = torch.cat([by_the_paper(model, text, bptt, pattern != "causal") for text in texts])
    direction = torch.linspace(-1, 1, found.numel()).view_as(found)
    parameters = list(model.parameters())
    one, other = (torch.autograd.grad((x * direction).sum(), parameters) for x in (found, expected))
    gradients = max(max_difference(*pair) for pair in zip(one, other, strict=True))
    outputs = max_difference(found, expected)
    record_difference("Recurrent Memory Transformer", "equations written out", outputs, gradients)
    assert max(outputs, gradients) < TOLERANCE
