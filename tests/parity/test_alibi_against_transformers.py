"""ALiBi against BLOOM and MPT of transformers."""

import pytest
import torch

from allyouneed.nn.common import Common
from allyouneed.nn.positions.alibi import slopes
from allyouneed.nn.positions.relative import Heads, Relative
from attention_layers import TOLERANCE, build_mixer, differences, hidden, max_difference, randomise_module, rows

LENGTHS = [13, 7, 1]
HEADS = [1, 2, 3, 4, 6, 7, 8, 12, 16, 20]


def bias(heads, queries, keys, **options):
    part = Relative.choose({"kind": "alibi"} | options)
    module = part.build(Heads(heads, heads, 4, causal=True), Common(width=8))
    return module.bias(torch.zeros(1, heads, queries.shape[1], 4), queries, keys, 1.0)


@pytest.mark.parametrize("heads", HEADS)
def test_biases_are_those_of_bloom_and_mpt_shifted(heads):
    """A softmax does not see what is added to a whole row: theirs begin at 0 on the left or end at 0 on the right."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    time = 9
    places = torch.arange(time)[None]
    ours = bias(heads, places, places)[0]  # (heads, queries, keys)
    bloom = build_alibi_tensor(torch.ones(1, time), heads, torch.float32)  # (heads, 1, keys)
    mpt = build_mpt_alibi_tensor(heads, time)
    for theirs in (bloom, mpt):
        difference = max_difference(ours - ours[..., :1], (theirs - theirs[..., :1]).expand_as(ours))
        assert difference < 1e-6
    assert ours.diagonal(dim1=1, dim2=2).abs().max() == 0


@pytest.mark.parametrize("octaves", [4.0, 8.0])
def test_slopes_are_the_papers(octaves):
    """3: "for n heads, our set of slopes is the geometric sequence that starts at 2^(-8/n) and uses that same value as
    its ratio"."""
    for heads in (1, 2, 4, 8, 16):
        assert slopes(heads, octaves) == pytest.approx([2 ** (-octaves / heads * (n + 1)) for n in range(heads)])


def test_a_bloom_attention_layer(record_difference):
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    width, heads = 24, 6
    config = BloomConfig(hidden_size=width, n_head=heads, hidden_dropout=0, attention_dropout=0)
    theirs = randomise_module(BloomAttention(config, 0))
    ours = build_mixer(width, {"kind": "attention", "heads": heads, "pattern": "causal", "positions": "alibi"})
    _, _, real = rows(LENGTHS, width)
    alibi = build_alibi_tensor(real[..., 0], heads, torch.float32)

    def convert(get):
        """Theirs has q, k and v of a head side by side."""
        found = {}
        for kind in ("weight", "bias"):
            each = get(f"query_key_value.{kind}").unflatten(0, (heads, 3, width // heads))
            found[f"qkv.{kind}"] = each.transpose(0, 1).flatten(0, 2)
            found[f"out.{kind}"] = get(f"dense.{kind}")
        return found

    def run(x):
        return theirs(x, torch.zeros_like(x), alibi, hidden(real, causal=True))[0]

    found = differences(ours, theirs, convert, run, LENGTHS, width)
    record_difference("ALiBi", "transformers BloomAttention", *found)
    assert max(found) < TOLERANCE


def test_an_mpt_attention_layer(record_difference):
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    width, heads = 24, 3
    theirs = randomise_module(MptAttention(MptConfig(d_model=width, n_heads=heads), 0))
    keys = {"kind": "attention", "heads": heads, "pattern": "causal", "positions": "alibi", "bias": False}
    _, _, real = rows(LENGTHS, width)
    alibi = build_mpt_alibi_tensor(heads, max(LENGTHS))

    def convert(get):
        return {"qkv.weight": get("Wqkv.weight"), "out.weight": get("out_proj.weight")}

    def run(x):
        return theirs(x, alibi, attention_mask=hidden(real, causal=True) < 0)[0]

    found = differences(build_mixer(width, keys), theirs, convert, run, LENGTHS, width)
    record_difference("ALiBi", "transformers MptAttention", *found)
    assert max(found) < TOLERANCE


def test_the_symmetric_form_is_the_same_on_both_sides():
    places = torch.tensor([[4, 0, 9]])
    found = bias(5, places, places, symmetric=True)
    expected = [[[-m * abs(q - k) for k in (4, 0, 9)] for q in (4, 0, 9)] for m in slopes(5)]
    torch.testing.assert_close(found, torch.tensor([expected]))
