"""Every preset is read, written, built and run."""

import pytest
import torch
import yaml

from allyouneed.config import override, parse, preset_names, preset_tree, to_yaml, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.model import Model

every_preset = pytest.mark.parametrize("name", preset_names())


@every_preset
@pytest.mark.parametrize("full", [True, False])
def test_yaml_to_config_and_back_loses_nothing(name, full):
    config = parse(Model, preset_tree(name))
    assert parse(Model, tree_of(config, full)) == config
    text = to_yaml(config, full)
    assert parse(Model, yaml.safe_load(text)) == config
    assert to_yaml(parse(Model, yaml.safe_load(text)), full) == text


@every_preset
def test_a_module_keeps_the_config_it_was_built_from(name):
    config = parse(Model, preset_tree(name))
    with torch.device("meta"):
        assert config.build().config == config


@every_preset
def test_what_the_yaml_says_is_what_is_built(name):
    """Count in the module what a reader of the YAML would count."""
    tree = preset_tree(name)
    with torch.device("meta"):
        model = parse(Model, tree).build()
    sublayers = {"encoder": ["mixer", "channel"], "decoder": ["mixer", "cross", "channel"]}
    for side in ("encoder", "decoder"):
        assert len(getattr(model, side).blocks) == sum(layer["repeat"] for layer in tree[side])
        for block in getattr(model, side).blocks:
            assert list(block.sublayers) == sublayers[side]
            assert block.sublayers["mixer"].heads == tree[side][0]["mixer"]["heads"]
            assert block.sublayers["channel"].up.weight.shape == (tree[side][0]["channel"]["hidden"], tree["width"])
            assert block.wiring.dropout.p == tree["dropout"]
    assert model.embed.tokens.weight.shape == (tree["vocab"], tree["width"])
    assert model.head.weight is model.embed.tokens.weight


@every_preset
def test_a_preset_trains_a_step(name):
    """Two layers of it; the loss of a batch it is trained on goes down."""
    tree = override(preset_tree(name), ["vocab=50", "encoder[0].repeat=1", "decoder[0].repeat=1", "dropout=0"])
    torch.manual_seed(0)
    model = parse(Model, tree).build()
    batch = Batch(Rows.of([[1, 5, 6, 7], [1, 9]]), Rows.of([[4, 5], [8, 7, 6]]))
    labels = torch.tensor([[5, 6, 7, 2], [9, 2, -100, -100]])
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss, _ = model.head.loss(model(batch), labels, 0.1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_the_design_page_shows_the_base_model():
    """docs and preset say the same: the YAML a person would write first is the paper's base model without dropout."""
    text = """
kind: encoder-decoder
vocab: 37000
width: 512
embed: {positions: {kind: sinusoidal}, scale: sqrt-width, tied: true}
encoder:
  - repeat: 6
    wiring: post-norm
    mixer: {kind: attention, heads: 8}
    channel: {kind: ffn, hidden: 2048, activation: relu}
decoder:
  - repeat: 6
    wiring: post-norm
    mixer: {kind: attention, heads: 8, pattern: causal}
    cross: {kind: attention, heads: 8}
    channel: {kind: ffn, hidden: 2048, activation: relu}
"""
    written = parse(Model, yaml.safe_load(text))
    assert written == parse(Model, override(preset_tree("transformer-base"), ["dropout=0"]))
