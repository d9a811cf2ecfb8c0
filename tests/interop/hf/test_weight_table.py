"""The table in both directions, with a small family made for the test, and its errors for files that do not fit."""

import pytest
import torch
from test_bitnet_against_transformers import theirs as bitnet
from test_llama_against_transformers import theirs as llama
from transformers import GPT2Config, GPT2Model
from transformers.integrations.bitnet import pack_weights

import parity
from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.hf.config_table import ConfigTable
from allyouneed.interop.hf.transforms import grouped_qkv, merge_groups, split_groups
from allyouneed.interop.hf.weight_table import Family, TensorTransform
from allyouneed.nn.linear.bitlinear import quantize_ternary
from allyouneed.nn.models.base import Model

EXPERTS, WIDTH, HIDDEN = 3, 8, 5


FIELDS = """
kind: decoder
vocab: 11
width = width
embed: {scale: none}
embed.tied = tied
norm: {kind: rms}
decoder.repeat: 2
decoder.wiring: pre-norm
decoder.mixer: {kind: attention, heads: 4, kv_heads: 2, head_width: 3, pattern: causal, bias: false}
decoder.channel: {kind: moe, experts: 3, top: 2, expert: {kind: glu, hidden: 5}}
ignore groups
"""
LINES = """
embed.tokens.weight = words |T
head.weight = out
decoder.blocks.{n}.wiring.norms.{m}.weight = layer{n}.norm{m}
decoder.blocks.{n}.sublayers.mixer.qkv.weight = layer{n}.q + layer{n}.k |upside_down + layer{n}.v
decoder.blocks.{n}.sublayers.mixer.out.weight = layer{n}.o
decoder.blocks.{n}.sublayers.channel.router.linear.weight = layer{n}.router
decoder.blocks.{n}.sublayers.channel.experts.{e}.gate_up.weight = layer{n}.gate_up[{e}] |T
decoder.blocks.{n}.sublayers.channel.experts.{e}.down.weight = layer{n}.down[{e}]
decoder.end.weight = norm
"""


def flipped(tensor, config):
    return tensor.flip(0)


TOY = Family(
    "toy",
    ConfigTable(FIELDS),
    LINES,
    ignore=["*.mask"],
    transforms={"upside_down": TensorTransform(flipped, flipped)},
    preserve=["pooler"],
)


def files(tied=False):
    """The files of a toy model; no two numbers in them are equal."""
    shapes = {"words": (WIDTH, 11), "norm": (WIDTH,), "pooler": (2, 2), "layer0.mask": (3,)}
    shapes |= {} if tied else {"out": (11, WIDTH)}
    for n in range(2):
        layer = {"norm0": (WIDTH,), "norm1": (WIDTH,), "q": (12, WIDTH), "k": (6, WIDTH), "v": (6, WIDTH)}
        layer |= {"o": (WIDTH, 12), "router": (EXPERTS, WIDTH), "gate_up": (EXPERTS, WIDTH, 2 * HIDDEN)}
        layer |= {"down": (EXPERTS, WIDTH, HIDDEN)}
        shapes |= {f"layer{n}.{name}": shape for name, shape in layer.items()}
    dice = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}


def same(found, expected):
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("tied", [True, False])
def test_every_kind_of_line_round_trips(tied):
    """Unequal parts of one matrix, transposed and changed ones, entries of a stack, a head that is the embedding."""
    config, weights = {"width": WIDTH, "tied": tied}, files(tied)
    model, unused = TOY.convert(config, weights), TOY.unused(config, weights)
    assert model.decoder.blocks[1].sublayers["channel"].experts[2].down.weight.equal(weights["layer1.down"][2])
    assert model.decoder.blocks[0].sublayers["mixer"].qkv.weight[12:18].equal(weights["layer0.k"].flip(0))
    assert list(unused) == ["pooler"], "what says nothing is not kept"
    del weights["layer0.mask"]
    for theirs in (config, None):
        found, written = TOY.write(model, theirs, unused)
        assert {"model_type": "toy", **config} == {"model_type": "toy", **found} and same(written, weights)
        assert all(tensor.is_contiguous() for tensor in written.values())
    assert same(TOY.write(model)[1], {name: weights[name] for name in weights if name != "pooler"})


def test_a_config_that_no_longer_means_the_model_is_brought_up_to_date():
    model = TOY.convert({"width": WIDTH, "tied": True}, files(tied=True))
    found, weights = TOY.write(model, {"width": WIDTH, "tied": False, "bos_token_id": 7})
    assert found == {"model_type": "toy", "width": WIDTH, "tied": True, "bos_token_id": 7} and "out" not in weights


def test_all_that_does_not_fit_is_named_at_once():
    weights = files()
    del weights["layer1.q"], weights["norm"]
    weights |= {"layer0.o": torch.zeros(7, 12), "layer1.gate_up": torch.zeros(EXPERTS, 4), "words": torch.zeros(3, 11)}
    weights |= {"more": torch.zeros(2), "layer2.o": torch.zeros(WIDTH, 12), "layer0.v": torch.zeros(6, 9)}
    with pytest.raises(UserError) as refusal:
        TOY.convert({"width": WIDTH, "tied": False}, weights)
    lines = str(refusal.value).splitlines()
    assert lines[0] == "toy: the weights do not match the config"
    mixer = "decoder.blocks.{}.sublayers.mixer"
    for told in (
        f"layer1.q: missing (for our {mixer.format(1)}.qkv.weight)",
        "norm: missing (for our decoder.end.weight)",
        f"layer0.o: (7, 12), our {mixer.format(0)}.out.weight is (8, 12)",
        "words: (11, 3), our embed.tokens.weight is (11, 8)",
        f"layer0.q, layer0.k, layer0.v: (12, 8) + (6, 8) + (6, 9), our {mixer.format(0)}.qkv.weight is (24, 8)",
        "more: not used",
        "layer2.o: not used",
    ):
        assert f"  {told}" in lines, told
    assert sum("layer1.gate_up" in line for line in lines) == EXPERTS
    assert len(lines) == 1 + 7 + EXPERTS


def test_a_stacked_tensor_with_too_few_entries_is_reported():
    weights = files()
    weights["layer0.down"] = weights["layer0.down"][:2]
    with pytest.raises(UserError, match=r"layer0.down: \(2, 8, 5\), our .*experts.2.down.weight is \(8, 5\)"):
        TOY.convert({"width": WIDTH, "tied": False}, weights)


def test_real_files_are_reported_in_the_same_way(tmp_path):
    config, weights = parity.saved(llama("groups of queries"), tmp_path)
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(UserError) as refusal:
        FAMILIES["llama"].convert(config, weights)
    told = str(refusal.value)
    assert "model.norm.weight: missing" in told and "lm_head.weight: (30, 24), our head.weight is (31, 24)" in told
    assert "model.layers.7.mlp.up_proj.weight: not used" in told


def test_an_import_only_family_refuses_export():
    one = Family("one", TOY.tree, LINES)
    with pytest.raises(UserError, match="one: this family can be imported, but not exported"):
        one.write(parse(Model, TOY.tree({"width": WIDTH, "tied": True})).build())


@pytest.mark.parametrize("heads, groups", [(6, 6), (6, 1), (6, 2), (1, 1)])
@pytest.mark.parametrize("shape", [(5,), ()])
def test_grouped_rows_round_trip(heads, groups, shape):
    rows = torch.arange((heads + 2 * groups) * 4 * 5.0)[: (heads + 2 * groups) * 4].reshape(-1, *[1] * len(shape))
    rows = rows.expand(-1, *shape)
    assert merge_groups(split_groups(rows, heads, groups), heads, groups).equal(rows)
    assert split_groups(merge_groups(rows, heads, groups), heads, groups).equal(rows)
    change = grouped_qkv(lambda config: (heads, groups))
    assert change.to_hf(change.to_ours(rows, {}), {}).equal(rows)


def test_files_of_a_model_without_its_head_are_written_without_the_prefix(tmp_path):
    theirs = GPT2Model(GPT2Config(n_embd=12, n_head=2, n_layer=1, vocab_size=17, n_positions=9))
    config, weights = parity.saved(theirs, tmp_path)
    assert "h.0.ln_1.weight" in weights
    found, written = FAMILIES["gpt2"].write(FAMILIES["gpt2"].convert(config, weights), config)
    assert found == config and same(written, weights)


@pytest.mark.parametrize("kind", ["autobitlinear", "bitlinear"])
def test_ternary_weights_are_packed_again_as_they_were(kind, tmp_path):
    """Once one of them has changed, they are exported as latent weights, with a note."""
    config, weights = parity.saved(bitnet("groups of queries"), tmp_path)
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    for name in [name for name in weights if "_proj" in name]:
        ternary, step = quantize_ternary(weights[name], [len(weights[name])])
        weights |= {name: pack_weights(ternary), f"{name}_scale": step[:1] * 1.7}
    table = FAMILIES["bitnet"]
    model, unused = table.convert(config, weights), table.unused(config, weights)
    found, written = table.write(model, config, unused)
    assert found == config and same(written, weights)
    with torch.no_grad():
        changed = model.decoder.blocks[0].sublayers["mixer"].out.weight
        changed[0, 0] += 1
    found, written = table.write(model, config, unused)
    assert found["quantization_config"]["quantization_mode"] == "online"
    assert not any(name.endswith("_scale") for name in written)
    assert written["model.layers.0.self_attn.o_proj.weight"].equal(changed)
