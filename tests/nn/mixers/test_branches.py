"""Two parts side by side, against the formula; the Evolved Transformer's own: parity/test_evolved_against_oracle.py."""

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse, to_yaml, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.branches import Branches
from allyouneed.nn.models.base import Model
from any_part import build, reference_logits, tree

COMMON = Common(width=6)
CONTEXT = Context(TokenLayout.of(Rows.of([[1, 2, 3, 4]])))
WIDE = {"kind": "convolution", "size": 3, "width": 9, "activation": "relu"}
NARROW = {"kind": "convolution", "size": 1, "width": 4}
FFN = {"kind": "ffn", "hidden": 14}
BUCKETS = {"kind": "attention", "heads": 3, "pattern": "causal", "positions": "buckets"}


def made(**keys):
    torch.manual_seed(0)
    module = Branches(**keys).build(COMMON).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module, torch.randn(1, 4, 6, dtype=torch.double)


@pytest.mark.parametrize("join", ["sum", "product", "concat"])
@pytest.mark.parametrize("norm", [True, False])
def test_branches_equal_their_formula(join, norm):
    module, x = made(left=WIDE, right=NARROW, join=join, norm=norm, then={"kind": "convolution", "size": 3, "width": 5})
    left, right, then = (module.pieces[name] for name in ("left", "right", "then"))
    a, b = left(x, CONTEXT), right(x, CONTEXT)
    assert (a.shape[2], b.shape[2]) == (9, 4)
    if join == "concat":
        y = torch.cat([a, b], 2)
    elif join == "sum":
        y = torch.cat([a[..., :4] + b, a[..., 4:]], 2)
    else:
        y = torch.cat([a[..., :4] * b, a[..., 4:]], 2)
    if norm:
        y = nn.functional.layer_norm(y, y.shape[2:], module.norm.weight, module.norm.bias)
    expected = torch.cat([then(y, CONTEXT), torch.zeros(1, 4, 1)], 2)
    torch.testing.assert_close(module(x, CONTEXT), expected)


def test_a_single_branch_and_a_channel_are_allowed():
    module, x = made(left=FFN, norm=False)
    torch.testing.assert_close(module(x, CONTEXT), module.pieces["left"](x, CONTEXT))
    assert module.new_state() is None


def test_dropout_applies_to_each_branch():
    config = Branches(left={"kind": "convolution", "size": 1}, right={"kind": "convolution", "size": 1}, norm=False)
    module = config.build(Common(width=6, dropout=0.5)).train()
    for piece in module.pieces.values():
        nn.init.zeros_(piece.out.weight)
        nn.init.ones_(piece.out.bias)
    torch.manual_seed(0)
    y = module(torch.zeros(1, 400, 6), Context(TokenLayout.of(Rows(torch.ones(1, 400, dtype=torch.long)))))
    assert sorted(set(y.round().flatten().tolist())) == [0.0, 2.0, 4.0]


def test_branches_decode_if_all_their_mixers_do():
    past, around = {"kind": "convolution", "size": 3, "sees": "past"}, {"kind": "convolution", "size": 3}
    assert Branches(left=past, right=FFN).causal and Branches(left=past, then=past).causal
    assert not Branches(left=past, right=around).causal
    with pytest.raises(ConfigError, match=r"decoder\[0\]\.mixer: a decoder must not attend to later tokens"):
        parse(Model, tree(mixer={"kind": "branches", "left": past, "right": around}))
    state = Branches(left=past, right=FFN, then=past).build(COMMON).new_state()
    assert list(state.parts) == ["left", "then"]


def test_shared_modules_are_shared_inside_branches():
    """T5's table of biases, beside a convolution in one layer and alone in another."""
    mixed = {"kind": "branches", "left": BUCKETS, "right": {"kind": "convolution", "size": 2, "sees": "past"}}
    given = tree()
    layers = [given["decoder"][0] | {"mixer": mixer, "repeat": 2} for mixer in (mixed, BUCKETS)]
    config = parse(Model, given | {"decoder": layers})
    model = config.build()
    blocks = [block.sublayers["mixer"] for block in model.decoder.blocks]
    attentions = [block.pieces["left"] for block in blocks[:2]] + blocks[2:]
    assert len({id(attention.relative) for attention in attentions}) == 1
    assert config.cost().parameters == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"left": WIDE | {"width": 19}}, "join: outputs 19 features, more than the width 12"),
        ({"left": FFN, "then": WIDE | {"width": 13}}, "then: outputs 13 features, more than the width 12"),
        (
            {"left": FFN, "right": {"kind": "attention", "heads": 5}},
            "right.heads: width 12 is not divisible by 5 heads",
        ),
        ({"left": {"kind": "fnn", "hidden": 3}}, "left.kind: unknown token mixer 'fnn'"),
        ({"left": {"kind": "ffn", "hiden": 3}}, "left.hiden: unknown; did you mean 'hidden'?"),
        ({}, "left: is required"),
    ],
)
def test_problems_of_nested_parts_are_reported_by_path(keys, said):
    with pytest.raises(ConfigError) as error:
        parse(Model, tree(encoder_mixer={"kind": "branches"} | keys))
    assert any(problem.startswith(f"encoder[0].mixer.{said}") for problem in error.value.problems)


@pytest.mark.parametrize("full", [True, False])
def test_yaml_round_trip(full):
    keys = {"kind": "branches", "left": WIDE, "right": FFN, "then": {"kind": "branches", "left": FFN, "norm": False}}
    config = parse(Model, tree(encoder_mixer=keys | {"then": NARROW}))
    assert parse(Model, tree_of(config, full)) == config
    assert "kind: ffn" in to_yaml(config, full)


def test_recording_skips_nested_attention():
    model = build(tree(mixer={"kind": "branches", "left": BUCKETS | {"positions": "none"}, "right": FFN}))
    batch = Batch(Rows.of([[1, 2]]), Rows.of([[3]]))
    assert model.attention(batch, "decoder") == {} and len(model.attention(batch, "cross")) == 2
    assert reference_logits(model, ([1], [2])).isfinite().all()
