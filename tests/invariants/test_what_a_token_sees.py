"""Every part declares what its tokens read; gradients measure it. A new part joins by existing."""

import pytest
import torch

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.sight import seen_by
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.sublayer import Channel, Mixer
from allyouneed.tasks.classification import Classification
from allyouneed.training.recipe.fit import fitted
from any_part import VOCAB, WIDTH, build, describe_part, variants

TIME = 9
# what a token reads depends on what the tokens are, or on the batch; the declaration bounds it
BOUNDED = {"lsh", "moe", "gau", "mixed-chunk"}


def config_of(**parts) -> Model | None:
    layer = {"wiring": "pre-norm", **{slot: tree_of(part) for slot, part in parts.items()}}
    tree = {"kind": "encoder", "vocab": VOCAB, "width": WIDTH, "encoder": [layer], "head": "none"}
    try:
        return parse(Model, tree)
    except ConfigError:
        return None


def cases() -> dict[str, Model]:
    found = {}
    for slot, kind in (("mixer", Mixer), ("channel", Channel)):
        for part in variants(kind):
            if getattr(part, "supports_self", True) and (config := config_of(**{slot: part})) is not None:
                found[f"{slot} {describe_part(part)}"] = config
    return found


CASES = cases()


def measured(config: Model, time: int = TIME) -> torch.Tensor:
    """(time, time) bool: where an output changes with an input, for any of three random inputs."""
    model, found = build(config), torch.zeros(time, time, dtype=torch.bool)
    rows = Rows(torch.ones(1, time, dtype=torch.long))
    for seed in range(3):
        dice = torch.Generator().manual_seed(seed)
        x = torch.randn(1, time, WIDTH, dtype=torch.double, generator=dice, requires_grad=True)
        y = model.encoder(x, Context(model.embed.layout(rows)))
        weights = torch.randn(WIDTH, dtype=torch.double, generator=dice)
        for place in range(time):
            (grad,) = torch.autograd.grad(y[0, place] @ weights, x, retain_graph=True)
            found[place] |= grad[0].abs().amax(-1) > 1e-12 * grad.abs().max()  # an FFT rounds zeros
    return found


def declared(config: Model, time: int = TIME) -> torch.Tensor:
    position = torch.arange(time)
    tokens = TokenFields(position, torch.ones_like(position))
    return torch.stack([seen_by(config.encoder, tokens, place) for place in range(time)])


@pytest.mark.parametrize("name", CASES)
def test_what_a_part_declares_to_read_is_what_it_reads(name: str) -> None:
    config = CASES[name]
    found, said = measured(config), declared(config)
    assert not (found & ~said).any(), f"it reads more than it declares\n{found}\n{said}"
    if name.split()[1] not in BOUNDED:
        assert torch.equal(found, said), f"it reads less than it declares\n{found}\n{said}"


@pytest.mark.parametrize(
    "name", ["mixer attention heads=3 pattern=window(3)", "mixer convolution size=3", "mixer identity"]
)
def test_layers_see_farther_together(name: str) -> None:
    config = CASES[name]
    layers = [config.encoder[0].model_copy(update={"repeat": 3})] * 2
    config = config.model_copy(update={"encoder": tuple(layers)})
    assert torch.equal(measured(config, 16), declared(config, 16))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("mixer")])
def test_the_default_pooling_sees_the_whole_text_under_every_mixer(name: str) -> None:
    """In a stack of two layers, what a classifier pools depends on every token."""
    tree = tree_of(CASES[name])
    tree |= {"encoder": [tree["encoder"][0] | {"repeat": 2}]}
    model = fitted(Classification(), {key: part for key, part in tree.items() if key != "head"}, None, (), TIME)
    seen = measured(model)
    pool = model.head.pool
    if name.split()[1] not in BOUNDED:
        assert bool((seen.any(0) if pool == "mean" else seen[0 if pool == "first" else -1]).all()), pool
    blind = tree | {"head": {"kind": "classes", "pool": "first"}}
    if not declared(model)[0].all():
        with pytest.raises(
            ConfigError, match=r"head\.pool: the first token sees \d of 9 tokens .* set it to (last|mean)"
        ):
            fitted(Classification(), blind, None, (), TIME)
