"""DeiT: class scores with and without a teacher, hidden states and gradients of Hugging Face's DeiT."""

import pytest
import torch
from test_vit_against_transformers import CASES, images
from transformers import DeiTConfig, DeiTForImageClassification, DeiTForImageClassificationWithTeacher, DeiTModel

import parity
from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.nn.batch import Batch, Signal
from allyouneed.nn.models.base import Model


def theirs(name):
    return DeiTForImageClassificationWithTeacher(DeiTConfig(**CASES[name])).eval()


every_case = pytest.mark.parametrize("name", CASES)


@every_case
@pytest.mark.parametrize("kind", [DeiTForImageClassification, DeiTForImageClassificationWithTeacher])
def test_class_scores_and_gradients(kind, name, tmp_path, record_difference):
    theirs = kind(DeiTConfig(**CASES[name])).eval()
    parity.randomise(theirs)
    model, pixels = parity.ours(theirs, tmp_path), images(name)
    expected, found = theirs(pixel_values=pixels).logits, model.logits(Batch(Signal(pixels)))
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    worst = parity.difference(found, expected)
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = parity.gradient_difference(model, theirs, tmp_path, *losses)
    record_difference("DeiT", f"transformers {kind.__name__}", worst, gradients)
    assert worst < parity.TOLERANCE and gradients < parity.TOLERANCE


@every_case
def test_hidden_states_of_the_bare_model(name, tmp_path, record_difference):
    theirs = DeiTModel(DeiTConfig(**CASES[name])).eval()
    parity.randomise(theirs)
    model, pixels = parity.ours(theirs, tmp_path), images(name)
    with torch.no_grad():
        worst = parity.difference(model(Batch(Signal(pixels))), theirs(pixel_values=pixels).last_hidden_state)
    record_difference("DeiT", "transformers DeiTModel", worst)
    assert worst < parity.TOLERANCE


def test_size_matches_the_paper(tmp_path):
    theirs = DeiTForImageClassificationWithTeacher(DeiTConfig(**CASES["small"]))
    assert parity.ours(theirs, tmp_path).config.cost().parameters == sum(p.numel() for p in theirs.parameters())


def test_two_scores_need_two_tokens(tmp_path):
    theirs = DeiTForImageClassificationWithTeacher(DeiTConfig(**CASES["small"]))
    tree = tree_of(parity.ours(theirs, tmp_path).config)
    tree["embed"] |= {"distillation_token": False, "positions": {"kind": "learned", "length": 10}}
    with pytest.raises(ConfigError, match=r"head\.distilled: requires embed.distillation_token"):
        parse(Model, tree)
    tree["head"]["hidden"] = "tanh"
    with pytest.raises(ConfigError, match=r"head\.distilled: requires an image input"):
        parse(Model, tree)
