"""T5's buckets against transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.positions.t5_bias import bucket
from attention_layers import TOLERANCE, build_mixer, differences, hidden, max_difference, randomise_module, rows

LENGTHS = [40, 17, 1]


@given(st.sampled_from([4, 6, 8, 32, 64]), st.integers(33, 500), st.booleans())
def test_every_distance_falls_into_the_same_bucket(buckets, farthest, both):
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = torch.arange(-700, 701)
    expected = T5Attention._relative_position_bucket(ahead, both, buckets, farthest)
    assert torch.equal(bucket(-ahead, buckets, farthest, both), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20)])
def test_a_t5_attention_layer(causal, buckets, distance, record_difference):
    """Heads wider than width / heads, no biases, no scale."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    width, heads, head_width = 20, 3, 8
    config = T5Config(
        d_model=width,
        num_heads=heads,
        d_kv=head_width,
        dropout_rate=0,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        is_decoder=causal,
    )
    config._attn_implementation = "eager"
    theirs = randomise_module(T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=causal))
    ours = build_mixer(
        width,
        {
            "kind": "attention",
            "heads": heads,
            "head_width": head_width,
            "bias": False,
            "scores": "dot",
            "pattern": "causal" if causal else "full",
            "positions": {"kind": "buckets", "buckets": buckets, "distance": distance},
        },
    )
    _, _, real = rows(LENGTHS, width)

    def convert(get):
        return {
            "qkv.weight": torch.cat([get(f"{part}.weight") for part in "qkv"]),
            "out.weight": get("o.weight"),
            "relative.table.weight": get("relative_attention_bias.weight"),
        }

    def run(x):
        return theirs(x, hidden(real, causal))[0]

    found = differences(ours, theirs, convert, run, LENGTHS, width)
    record_difference("T5 buckets", "transformers T5Attention", *found)
    assert max(found) < TOLERANCE


def encoder(**positions):
    layer = {
        "repeat": 3,
        "mixer": {"kind": "attention", "heads": 2, "positions": {"kind": "buckets"} | positions},
        "channel": {"kind": "ffn", "hidden": 5},
    }
    return parse(Model, {"kind": "encoder", "vocab": 9, "width": 8, "encoder": [layer]})


def test_layers_of_a_stack_share_one_table_unless_untied():
    for untied, tables in ((False, 1), (True, 3)):
        config = encoder(untied=untied)
        model = config.build()
        assert len({id(block.sublayers["mixer"].relative.table) for block in model.encoder.blocks}) == tables
        assert sum(p.numel() for p in model.parameters()) == config.cost().parameters


def test_a_shared_table_learns_from_all_layers():
    """Its gradient is the sum of what separate tables with the same numbers would get."""
    torch.manual_seed(0)
    together, apart_ = encoder().build(), encoder(untied=True).build()
    apart_.load_state_dict(together.state_dict())
    tokens = Rows.of([[1, 2, 3, 4, 5, 6], [7, 8]])
    for model in (together, apart_):
        model.encode(tokens).hidden.square().sum().backward()

    def gradients(model):
        return {id(b.sublayers["mixer"].relative.table): b.sublayers["mixer"].relative.table.weight.grad for b in model}

    (one,) = gradients(together.encoder.blocks).values()
    three = gradients(apart_.encoder.blocks).values()
    assert len(three) == 3
    difference = max_difference(one, sum(three))
    assert difference < TOLERANCE
