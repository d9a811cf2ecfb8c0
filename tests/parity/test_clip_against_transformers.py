"""CLIP: the matrix of scaled cosines, both towers' vectors and gradients of Hugging Face's CLIPModel."""

import pytest
import torch
from transformers import CLIPConfig, CLIPModel

import allyouneed as ayn
import parity
from allyouneed.config import parse
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.models.base import Model
from allyouneed.tasks.contrastive import info_nce

END = 28
CASES = {
    "small": dict(
        projection_dim=14,
        text_config=dict(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=40,
            vocab_size=29,
            max_position_embeddings=9,
        ),
        vision_config=dict(
            hidden_size=20,
            num_hidden_layers=2,
            num_attention_heads=5,
            intermediate_size=33,
            image_size=12,
            patch_size=4,
        ),
    ),
    "uneven, gelu": dict(
        projection_dim=8,
        text_config=dict(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=17,
            vocab_size=29,
            max_position_embeddings=7,
            hidden_act="gelu",
            layer_norm_eps=1e-3,
        ),
        vision_config=dict(
            hidden_size=36,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=20,
            image_size=10,
            patch_size=5,
            num_channels=1,
            layer_norm_eps=1e-4,
        ),
    ),
}
TEXTS = [[26, 5, 7, 9, 3, 2, END], [26, 4, END], [26, 8, 8, 1, END]]


def theirs(name):
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in CASES[name].items()}
    tree["text_config"] |= {"eos_token_id": END, "bos_token_id": 26, "pad_token_id": 0}
    return CLIPModel(CLIPConfig(**tree)).eval()


def both(name, folder):
    model = theirs(name)
    parity.randomise(model)
    vision = model.config.vision_config
    size = (3, vision.num_channels, vision.image_size, vision.image_size)
    pixels = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return model, parity.ours(model, folder), pixels


@pytest.mark.parametrize("name", CASES)
def test_cosines_and_gradients(name, tmp_path, record_difference):
    theirs, model, pixels = both(name, tmp_path)
    rows = Rows.of(TEXTS)
    real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
    expected = theirs(input_ids=rows.tokens, attention_mask=real.long(), pixel_values=pixels).logits_per_image
    found = model.logits(Batch(target=rows, source=Signal(pixels)))
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    worst = parity.difference(found, expected)
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = parity.gradient_difference(model, theirs, tmp_path, *losses)
    record_difference("CLIP", "transformers CLIPModel", worst, gradients)
    assert worst < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_the_vectors_of_each_tower(name, tmp_path):
    theirs, model, pixels = both(name, tmp_path)
    rows = Rows.of(TEXTS)
    with torch.no_grad():
        there = theirs(input_ids=rows.tokens, pixel_values=pixels)
        assert parity.difference(model.vectors("image", Signal(pixels)), there.image_embeds) < parity.TOLERANCE
        assert parity.difference(model.vectors("text", rows), there.text_embeds) < parity.TOLERANCE


@pytest.mark.parametrize(("end", "pad"), [(27, 27), (27, 0), (2, 0)])
def test_without_lengths_a_text_ends_where_theirs_does(end, pad, tmp_path):
    """At the first `eos_token_id`; with the id 2 of the first release, at the largest id of the row."""
    theirs = CLIPModel(
        CLIPConfig(**CASES["small"] | {"text_config": CASES["small"]["text_config"] | {"eos_token_id": end}})
    )
    parity.randomise(theirs)
    config, weights = parity.saved(theirs.eval(), tmp_path)
    model = FAMILIES["clip"].convert(config, weights)
    rows = torch.tensor([[26, 5, 27, 9, 3, pad, pad], [26, 4, 27, pad, pad, pad, pad], [26, 8, 8, 1, 2, 27, pad]])
    pixels = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=rows, pixel_values=pixels).logits_per_image
        assert parity.difference(model(pixels, rows), expected) < parity.TOLERANCE
    written, _ = FAMILIES["clip"].write(model)
    assert written["text_config"]["eos_token_id"] == end


def test_the_loss(tmp_path):
    """Figure 3: which text belongs to an image, and which image to a text, the mean of both."""
    theirs, model, pixels = both("small", tmp_path)
    rows = Rows.of(TEXTS)
    with torch.no_grad():
        expected = theirs(input_ids=rows.tokens, pixel_values=pixels, return_loss=True).loss
        loss = info_nce(model.logits(Batch(target=rows, source=Signal(pixels))))
    assert parity.difference(loss.total / loss.tokens, expected) < parity.TOLERANCE


def test_the_preset_is_the_model_of_the_reference():
    config = CLIPConfig(text_config={}, vision_config={})  # whose values are those of openai/clip-vit-base-patch32
    with torch.device("meta"):
        theirs = CLIPModel(config)
    ours = ayn.model_config("clip-vit-b-32")
    assert ours.cost().parameters == sum(p.numel() for p in theirs.parameters()) == 151_277_313
    read = parse(Model, FAMILIES["clip"].tree(config.to_dict()))
    for tower in ("image", "text"):
        found, written = getattr(read, tower), getattr(ours, tower)
        assert found.model_copy(update={"init": written.init}) == written
    assert (read.width, read.temperature, read.max_scale) == (ours.width, ours.temperature, ours.max_scale)
