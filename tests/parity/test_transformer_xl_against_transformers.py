"""Transformer-XL's relative positions against the paper's four terms and against XLNet of transformers."""

import math

import pytest
import torch

from allyouneed.nn.context import Context
from attention_layers import TOLERANCE, agreement, build_mixer, differences, max_difference, randomise_module, rows

LENGTHS = [13, 7, 1]


def sinusoid(distance, width):
    """R_{i−j}: all sines, then all cosines."""
    angles = [distance / 10000 ** (2 * n / width) for n in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def by_the_paper(module, x, causal):
    """3.3: the terms (a) to (d) of A^rel, one pair at a time; for one sentence."""
    heads, length = module.heads, len(x)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in module.qkv(x).chunk(3, -1))
    w_r, biases = module.relative.far.weight.unflatten(0, (heads, -1)), module.relative.biases
    out = []
    for i in range(length):
        seen = range(i + 1) if causal else range(length)
        together = []
        for h in range(heads):
            u, place = biases.content[h, 0], biases.place[h, 0]
            scores = []
            for j in seen:
                r = w_r[h] @ sinusoid(i - j, x.shape[-1])
                terms = [q[i, h] @ k[j, h], q[i, h] @ r, u @ k[j, h], place @ r]
                scores.append(sum(terms) / q.shape[-1] ** 0.5)
            together.append(torch.stack(scores).softmax(0) @ v[: len(seen), h])
        out.append(torch.cat(together))
    return module.out(torch.stack(out))


@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_the_papers_four_terms(causal, record_difference):
    keys = {"kind": "attention", "heads": 3, "positions": "transformer-xl", "pattern": "causal" if causal else "full"}
    module = randomise_module(build_mixer(12, keys))
    x, layout, _ = rows(LENGTHS, 12)
    parameters = list(module.parameters())
    found = module(x, Context(layout))
    for row, length in enumerate(LENGTHS):
        expected = by_the_paper(module, x[row, :length], causal)
        difference = agreement(found[row, :length], expected, parameters)
        record_difference("Transformer-XL positions", "equations written out", *difference)
        assert max(difference) < TOLERANCE


def test_an_xlnet_attention_layer(record_difference):
    from transformers import XLNetConfig, XLNetModel
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    width, heads = 24, 3
    config = XLNetConfig(d_model=width, n_head=heads, n_layer=1, d_inner=8, dropout=0, vocab_size=5, attn_type="bi")
    theirs = randomise_module(XLNetRelativeAttention(config))
    theirs.layer_norm = torch.nn.Identity()
    time = max(LENGTHS)
    distances = XLNetModel(config).relative_positional_encoding(time, time, len(LENGTHS))
    ours = build_mixer(width, {"kind": "attention", "heads": heads, "positions": "transformer-xl", "bias": False})
    _, _, real = rows(LENGTHS, width)

    def convert(get):
        """Theirs are (width, heads, head_width)."""
        return {
            "qkv.weight": torch.cat([get(part).flatten(1).T for part in "qkv"]),
            "out.weight": get("o").flatten(1),
            "relative.far.weight": get("r").flatten(1).T,
            "relative.biases.content": get("r_w_bias")[:, None],
            "relative.biases.place": get("r_r_bias")[:, None],
        }

    def run(x):
        """Theirs is time-first, masks with 1, and includes the residual, which is subtracted."""
        mask = (1 - real[..., 0].T)[None, :, :, None].expand(time, -1, -1, -1)
        out, _ = theirs(x.transpose(0, 1), None, mask, None, distances, None)
        return out.transpose(0, 1) - x

    found = differences(ours, theirs, convert, run, LENGTHS, width)
    record_difference("Transformer-XL positions", "transformers XLNetRelativeAttention", *found)
    assert max(found) < TOLERANCE


@pytest.mark.parametrize(("untied", "sets"), [(False, 1), (True, 3)])
def test_layers_of_a_stack_share_u_and_v_unless_untied(untied, sets):
    from allyouneed.config import parse
    from allyouneed.nn.models.base import Model

    mixer = {"kind": "attention", "heads": 2, "positions": {"kind": "transformer-xl", "untied": untied}}
    layer = {"repeat": 3, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 5}}
    config = parse(Model, {"kind": "encoder", "vocab": 9, "width": 8, "encoder": [layer]})
    model = config.build()
    relatives = [block.sublayers["mixer"].relative for block in model.encoder.blocks]
    assert len({id(relative.biases) for relative in relatives}) == sets
    assert len({id(relative.far) for relative in relatives}) == 3
    assert sum(p.numel() for p in model.parameters()) == config.cost().parameters


@pytest.mark.parametrize("queries", [1, 2, 40])
def test_the_order_of_products_does_not_matter(queries):
    """Few queries meet W_R first, many let it meet the distances."""
    keys = {"kind": "attention", "heads": 3, "positions": "transformer-xl", "pattern": "causal"}
    relative = randomise_module(build_mixer(12, keys)).double().relative
    looking = torch.randn(2, 3, queries, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    every = relative.sinusoids(torch.arange(50)).double()
    expected = torch.einsum("bhqd,hdw,nw->bhqn", looking, relative.far.weight.unflatten(0, (3, 4)), every)
    asked = []
    relative.far.register_forward_hook(lambda *_: asked.append(1))
    assert max_difference(relative.score_distances(looking, every), expected) < 1e-12
    assert len(asked) == (queries == 40)
