"""Two towers: scaled cosines, inputs independent of each other, and a temperature with an upper bound."""

import math

import pytest
import torch

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.models.base import Model
from any_part import build

LAYERS = [{"repeat": 2, "wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 2}}]
PATCHES = {"kind": "patches", "image": 6, "patch": 3, "positions": {"kind": "learned", "length": 5}}


def tree(**changes):
    found = {
        "kind": "two-towers",
        "width": 6,
        "image": {"width": 10, "embed": PATCHES, "encoder": LAYERS, "head": {"kind": "pooled", "width": 6}},
        "text": {
            "width": 8,
            "vocab": 11,
            "embed": {"positions": "sinusoidal", "tied": False},
            "encoder": LAYERS,
            "head": {"kind": "pooled", "pool": "last", "width": 6},
        },
    }
    for path, value in changes.items():
        *steps, last = path.split("__")
        node = found
        for step in steps:
            node[step] = dict(node[step])
            node = node[step]
        node[last] = value
    return found


def given(count=3):
    pixels = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return Batch(target=Rows.of([[1, 2, 3, 4], [5], [6, 7]][:count]), source=Signal(pixels))


def test_logits_are_scaled_cosines_of_every_image_with_every_text():
    model, batch = build(tree()), given()
    with torch.no_grad():
        model.log_scale.fill_(1.3)
        images, texts = model.image.logits(Batch(batch.source)), model.text.logits(Batch(batch.target))
        found = model.logits(batch)
    assert found.shape == (3, 3)
    for i, image in enumerate(images):
        for t, text in enumerate(texts):
            expected = math.exp(1.3) * torch.dot(image, text) / (image.norm() * text.norm())
            torch.testing.assert_close(found[i, t], expected)


def test_results_are_independent_of_the_batch():
    model, batch = build(tree()), given()
    together = model.logits(batch)
    for number, tokens in enumerate([[1, 2, 3, 4], [5], [6, 7]]):
        one = Batch(target=Rows.of([tokens]), source=Signal(batch.source.values[number : number + 1]))
        torch.testing.assert_close(model.logits(one)[0, 0], together[number, number])


def test_gradients_reach_all_parameters():
    model = build(tree())
    (model.logits(given()) * torch.linspace(-1, 1, 9).view(3, 3)).sum().backward()
    assert not [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]


def test_temperature_initial_value_and_cap():
    model = parse(Model, tree(temperature=0.5, max_scale=7.0)).build()
    assert model.scale.item() == pytest.approx(2)
    with torch.no_grad():
        model.log_scale.fill_(math.log(50.0))
    assert model.scale.item() == pytest.approx(7)
    model.scale.backward()
    assert model.log_scale.grad.item() == pytest.approx(7), "the gradient passes, so that it can come back"


def test_cost_matches_the_built_model_without_decoding_state():
    config = parse(Model, tree())
    cost = config.cost()
    assert cost.parameters == sum(value.numel() for value in config.build().parameters())
    assert (cost.state_per_token, cost.state_constant, config.generates) == (0, 0, False)
    assert cost.flops > config.image.cost().flops + config.text.cost().flops
    assert parse(Model, tree_of(config)) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image__head": {"kind": "pooled", "width": 5}}, "image.head.width: must be 6, the width of the joint space"),
        ({"text__head": "pooled"}, "text.head.width: must be 6"),
        ({"text__head": "vocabulary"}, "text.head.kind: a tower needs head.kind: pooled"),
        ({"text__embed": PATCHES}, "text.embed.kind: the text tower needs embed.kind: tokens"),
        ({"dropout": 0.1}, "dropout: set it under `image` or `text`: each tower has its own"),
        ({"norm": "rms"}, "norm: set it under `image` or `text`"),
        ({"image__encoder": []}, "image.encoder: needs at least 1 layer"),
        ({"image__widht": 4}, "image.widht: unknown; did you mean 'width'?"),
    ],
)
def test_invalid_configs_are_refused_by_path(changes, said):
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree(**changes))
    assert said in str(caught.value) and len(caught.value.problems) == 1


def test_a_batch_without_images_is_an_error():
    with pytest.raises(AssertionError, match="need images"):
        build(tree()).logits(Batch(Rows.of([[1]])))
