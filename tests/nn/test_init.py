"""Initial weights: what each paper prescribes for each matrix, measured on large ones."""

import math

import pytest
import torch
from torch import nn

from allyouneed.config import parse
from allyouneed.nn.common import Common
from allyouneed.nn.init import GPT2, T5, DeepNormInit, Init, Normal, Small
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Layer
from allyouneed.nn.models.stack import Stack
from any_part import tree

WIDTH, HIDDEN, LAYERS = 128, 256, 3
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 16
INNER, KV = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH


def model(init, channel=None, mixer=None, seed=0, **layer):
    """A decoder with cross-attention between an embedding and a linear head, as inits see models."""
    torch.manual_seed(seed)
    attention = {"kind": "attention", "heads": HEADS, "head_width": HEAD_WIDTH}
    own = attention | {"kv_heads": KV_HEADS, "pattern": "causal"} | (mixer or {})
    keys = {
        "repeat": LAYERS,
        "mixer": own,
        "cross": attention,
        "channel": channel or {"kind": "ffn", "hidden": HIDDEN},
    }
    whole = nn.ModuleDict(
        {
            "embed": nn.Embedding(500, WIDTH),
            "stack": Stack([Layer(**(keys | layer))], Common(width=WIDTH), Depth(5, LAYERS, "decoder")),
            "head": nn.Linear(WIDTH, 300),
        }
    )
    for parameter in whole.parameters():
        nn.init.constant_(parameter, 77.0)
    init.apply(whole, WIDTH)
    return whole


def parts(whole):
    block = whole["stack"].blocks[1]
    own, cross, channel = (block.sublayers[name] for name in ("mixer", "cross", "channel"))
    q, k, v = own.qkv.weight.split([INNER, KV, KV])
    cross_k, cross_v = cross.kv.weight.split([INNER, INNER])
    found = {"q": q, "k": k, "v": v, "out": own.out.weight}
    found |= {"cross q": cross.q.weight, "cross k": cross_k, "cross v": cross_v, "cross out": cross.out.weight}
    return found | {
        "up": channel.up.weight,
        "down": channel.down.weight,
        "embed": whole["embed"].weight,
        "head": whole["head"].weight,
    }


def check(whole, expected):
    for name, weight in parts(whole).items():
        assert weight.std().item() == pytest.approx(expected[name], rel=0.05), name
        assert abs(weight.mean().item()) < 0.05 * expected[name], name
    check_the_rest(whole)


def check_the_rest(whole):
    for name, parameter in whole.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norms" in name:
            assert parameter.eq(1).all(), name


EVERY = ["q", "k", "v", "out", "cross q", "cross k", "cross v", "cross out", "up", "down", "embed", "head"]


def test_normal_init_has_the_given_deviation():
    check(model(Normal()), dict.fromkeys(EVERY, 0.02))
    check(model(Normal(std=0.3)), dict.fromkeys(EVERY, 0.3))


def test_truncated_normal_is_cut_at_two_deviations():
    whole = model(Normal(truncated=True))
    for weight in parts(whole).values():
        assert 0.035 < weight.abs().max() <= 0.04
    check_the_rest(whole)


def test_gpt2_scales_output_projections_by_depth():
    expected = dict.fromkeys(EVERY, 0.02)
    check(model(GPT2()), expected | dict.fromkeys(["out", "cross out", "down"], 0.02 / math.sqrt(3 * LAYERS)))
    whole = model(GPT2(), cross=None)
    found = whole["stack"].blocks[0].sublayers["mixer"].out.weight.std().item()
    assert found == pytest.approx(0.02 / math.sqrt(2 * LAYERS), rel=0.05)


def test_small_init_has_the_papers_deviation():
    expected = dict.fromkeys(EVERY, math.sqrt(2 / (5 * WIDTH)))
    check(model(Small()), expected | {"embed": WIDTH**-0.5})


def test_t5_init_has_the_papers_deviations():
    q, out = (WIDTH * HEAD_WIDTH) ** -0.5, INNER**-0.5
    expected = dict.fromkeys(EVERY, WIDTH**-0.5) | {"q": q, "cross q": q, "out": out, "cross out": out}
    check(model(T5()), expected | {"down": HIDDEN**-0.5, "embed": 1.0})


def test_t5_position_bias_tables_have_their_own_deviation():
    whole = model(T5())
    whole["stack"].blocks[0].sublayers["mixer"].table = nn.Embedding(32, 400)
    T5().apply(whole, WIDTH)
    found = whole["stack"].blocks[0].sublayers["mixer"].table.weight.std().item()
    assert found == pytest.approx(WIDTH**-0.5, rel=0.05)


def xavier(rows, columns, gain=1.0):
    return gain * math.sqrt(2 / (rows + columns))


@pytest.mark.parametrize("given", [None, 0.3])
def test_deepnorm_init_scales_by_depth(given):
    beta = given or (12 * LAYERS) ** -0.25
    expected = {
        "q": xavier(INNER, WIDTH),
        "k": xavier(KV, WIDTH),
        "v": xavier(KV, WIDTH, beta),
        "out": xavier(INNER, WIDTH, beta),
        "cross q": xavier(INNER, WIDTH),
        "cross k": xavier(INNER, WIDTH),
        "cross v": xavier(INNER, WIDTH, beta),
        "cross out": xavier(INNER, WIDTH, beta),
        "up": xavier(HIDDEN, WIDTH, beta),
        "down": xavier(HIDDEN, WIDTH, beta),
        "embed": WIDTH**-0.5,
        "head": xavier(300, WIDTH),
    }
    check(model(DeepNormInit(beta=given), wiring="deepnorm"), expected)


def test_gate_up_is_initialised_as_two_matrices():
    whole = model(DeepNormInit(beta=1.0), {"kind": "glu", "hidden": HIDDEN})
    found = whole["stack"].blocks[0].sublayers["channel"].gate_up.weight.std().item()
    assert found == pytest.approx(xavier(HIDDEN, WIDTH), rel=0.05)


def test_experts_are_initialised_independently_like_single_layers():
    whole = model(GPT2(), {"kind": "moe", "experts": 3, "expert": {"kind": "ffn", "hidden": HIDDEN}})
    moe = whole["stack"].blocks[0].sublayers["channel"]
    for expert in moe.experts:
        assert expert.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert expert.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(3 * LAYERS), rel=0.05)
    assert not torch.equal(moe.experts[0].up.weight, moe.experts[1].up.weight)
    assert moe.router.linear.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_inits_keep_the_initial_values_of_norms():
    keys = tree(norm={"kind": "rms", "offset": 1}, wiring={"kind": "pre-norm", "layer_scale": 0.5}, init="normal")
    for name, parameter in parse(Model, keys).build().named_parameters():
        if "norms" in name:
            assert parameter.eq(0).all()
        if "scales" in name:
            assert parameter.eq(0.5).all()


def test_a_tied_head_is_initialised_as_an_embedding():
    tied, untied = (
        parse(Model, tree(width=48, vocab=4000, init="t5", embed={"positions": "none", "tied": tied})).build()
        for tied in (True, False)
    )
    assert tied.head.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert untied.head.weight.std().item() == pytest.approx(48**-0.5, rel=0.05)


@pytest.mark.parametrize("kind", Init.registry)
def test_every_init_is_reproducible(kind):
    def started():
        torch.manual_seed(3)
        return parse(Model, tree(init=kind)).build().state_dict()

    first, second = started(), started()
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)


def test_a_merged_matrix_with_wrong_row_count_is_refused():
    whole = model(Normal())
    whole["stack"].blocks[0].sublayers["mixer"].kv_heads = 3
    with pytest.raises(ValueError, match="qkv has 128 rows"):
        T5().apply(whole, WIDTH)
