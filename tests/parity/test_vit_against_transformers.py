"""ViT: class scores, hidden states and gradients of Hugging Face's ViTForImageClassification and ViTModel."""

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import allyouneed as ayn
import parity
from allyouneed.config import parse
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Signal
from allyouneed.nn.models.base import Model

CASES = {
    "small": dict(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        image_size=12,
        patch_size=4,
        num_labels=5,
    ),
    "wide, gray, relu, no bias": dict(
        hidden_size=20,
        num_hidden_layers=3,
        num_attention_heads=5,
        intermediate_size=33,
        image_size=(6, 10),
        patch_size=(3, 2),
        num_channels=1,
        num_labels=7,
        hidden_act="relu",
        qkv_bias=False,
        layer_norm_eps=1e-3,
    ),
}


def images(name):
    height, width = CASES[name]["image_size"] if isinstance(CASES[name]["image_size"], tuple) else (12, 12)
    return torch.randn(3, CASES[name].get("num_channels", 3), height, width, generator=torch.Generator().manual_seed(1))


def theirs(name):
    return ViTForImageClassification(ViTConfig(**CASES[name])).eval()


@pytest.mark.parametrize("name", CASES)
def test_class_scores_and_gradients(name, tmp_path, record_difference):
    theirs = ViTForImageClassification(ViTConfig(**CASES[name])).eval()
    parity.randomise(theirs)
    model, pixels = parity.ours(theirs, tmp_path), images(name)
    expected, found = theirs(pixel_values=pixels).logits, model.logits(Batch(Signal(pixels)))
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    worst = parity.difference(found, expected)
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = parity.gradient_difference(model, theirs, tmp_path, *losses)
    record_difference("ViT", "transformers ViTForImageClassification", worst, gradients)
    assert worst < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_of_the_bare_model(name, tmp_path, record_difference):
    theirs = ViTModel(ViTConfig(**CASES[name])).eval()
    parity.randomise(theirs)
    model, pixels = parity.ours(theirs, tmp_path), images(name)
    with torch.no_grad():
        expected, found = theirs(pixel_values=pixels).last_hidden_state, model(Batch(Signal(pixels)))
        worst = parity.difference(found, expected)
        assert torch.equal(model.logits(Batch(Signal(pixels))), found), "it has no head"
    record_difference("ViT", "transformers ViTModel", worst)
    assert worst < parity.TOLERANCE


def test_the_preset_is_the_model_of_the_reference():
    config = ViTConfig(num_labels=1000)  # whose other values are those of google/vit-base-patch16-224
    with torch.device("meta"):
        theirs = ViTForImageClassification(config)
    ours = ayn.model_config("vit-base-16")
    assert ours.cost().parameters == sum(p.numel() for p in theirs.parameters()) == 86_567_656
    read = parse(Model, FAMILIES["vit"].tree(config.to_dict() | {"classes": 1000}))
    assert read.model_copy(update={"init": ours.init, "dropout": ours.dropout}) == ours
