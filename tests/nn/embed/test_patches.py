"""Images as rows of patches: the paper's equation, whole images only, each image independent of the others."""

import pytest
import torch
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from allyouneed.config import ConfigError, parse
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.common import Common
from allyouneed.nn.embed.patches import PatchEmbed
from allyouneed.nn.models.base import Model
from any_part import WIDTH, build, tree

CASES = {
    "square": {"image": 8, "patch": 4, "positions": {"kind": "learned", "length": 5}},
    "wide, no class token": {"image": [4, 12], "patch": [2, 3], "channels": 1, "class_token": False},
    "CLIP": {"image": 6, "patch": 3, "bias": False, "norm": "layer", "positions": {"kind": "learned", "length": 5}},
    "2d": {"image": [4, 6], "patch": 2, "positions": {"kind": "learned-2d", "rows": 2, "columns": 3, "first": 1}},
    "sinusoidal": {"image": 4, "patch": 2, "positions": "sinusoidal"},
    "stem": {"image": [8, 16], "patch": [4, 8], "stem": [6, 8], "positions": "sinusoidal"},
    "DeiT": {"image": 8, "patch": 4, "distillation_token": True, "positions": {"kind": "learned", "length": 6}},
}
every_case = pytest.mark.parametrize("name", CASES)


def captioner(name):
    """An image in, a text out."""
    return build(tree(source_embed={"kind": "patches"} | CASES[name]))


def pixels(name, count=3):
    config = parse(PatchEmbed, CASES[name])
    height, width = config.image if isinstance(config.image, tuple) else (config.image, config.image)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, config.channels, height, width, generator=generator, dtype=torch.double)


@every_case
def test_matches_the_papers_equation(name):
    """z = [x_class; x¹E; …; xᴺE] + E_pos, with E written as the convolution it is usually taken for."""
    model = captioner(name)
    embed, images = model.source_embed, pixels(name)
    config = embed.config
    down, across = config.patch if isinstance(config.patch, tuple) else (config.patch, config.patch)
    seen = images
    if config.stem:
        seen, down, across = embed.stem(images), down // 4, across // 4
    kernel = embed.project.weight.view(WIDTH, seen.shape[1], down, across)
    expected = conv2d(seen, kernel, embed.project.bias, stride=(down, across)).flatten(2).transpose(1, 2)
    for token in (embed.distillation_token, embed.class_token):
        if token is not None:
            expected = torch.cat([token.weight[None].expand(len(images), -1, -1), expected], 1)
    places = embed.positions(torch.arange(expected.shape[1])[None])
    expected = expected if places is None else expected + places
    if config.norm is not None:
        expected = torch.nn.functional.layer_norm(expected, (WIDTH,), embed.norm.weight, embed.norm.bias)
    given = Signal(images)
    torch.testing.assert_close(embed(given, embed.layout(given)), expected)
    assert config.token_count == config.limit == expected.shape[1]


@every_case
def test_results_are_independent_of_the_batch(name):
    model, images = captioner(name), pixels(name)
    together = model.encode(Signal(images)).hidden
    for number in range(len(images)):
        torch.testing.assert_close(model.encode(Signal(images[number : number + 1])).hidden[0], together[number])


@every_case
def test_gradients_reach_all_parameters_and_pixels(name):
    model, images = captioner(name), pixels(name).requires_grad_()
    texts = Rows(torch.tensor([[1, 4, 5]] * len(images)))
    model.logits(Batch(target=texts, source=Signal(images))).square().sum().backward()
    assert images.grad.flatten(1).any(1).all()
    for parameter_name, parameter in model.source_embed.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), parameter_name


@every_case
def test_decoding_equals_the_whole_pass(name):
    model, images = captioner(name), pixels(name)
    tokens = torch.tensor([[1, 4, 5, 2], [1, 3, 3, 3], [7, 8, 9, 10]])
    with torch.no_grad():
        whole = model.logits(Batch(target=Rows(tokens), source=Signal(images)))
        states = model.start(Signal(images))
        steps = [model.head(model.advance(Rows(tokens[:, t : t + 1]), states)) for t in range(4)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@every_case
def test_cost_matches_the_module(name):
    config, common = parse(PatchEmbed, CASES[name]), Common(width=WIDTH)
    built = config.build(common, None)
    cost = config.cost(common, None)
    assert cost.parameters == sum(parameter.numel() for parameter in built.parameters())
    with FlopCounterMode(display=False) as counter:
        cut = built.project(built.cut(pixels(name).float()))
    assert cost.flops == counter.get_total_flops() / (cut.shape[0] * cut.shape[1])


@pytest.mark.parametrize("shape", [(3, 8, 9), (1, 8, 8), (3, 4, 4)])
def test_wrong_image_sizes_are_refused(shape):
    model = captioner("square")
    with pytest.raises(UserError) as caught:
        model.encode(Signal(torch.zeros(2, *shape, dtype=torch.double)))
    said = "×".join(map(str, shape))
    assert f"image of {said} does not match the model's input 3×8×8" in str(caught.value)
    assert "resize or crop" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patch": 3}, "source_embed.patch: image 8×8 is not divisible into patches of 3×3"),
        ({"positions": {"kind": "learned", "length": 4}}, "4 positions, but the 4 patches and the class token need 5"),
        ({"image": [8, 8, 8]}, "source_embed.image"),
        ({"image": "big"}, "source_embed.image"),
        ({"patch": 0}, "source_embed.patch"),
    ],
)
def test_invalid_configs_are_refused_by_path(change, said):
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree(source_embed={"kind": "patches"} | CASES["square"] | change))
    assert said in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_a_decoder_needs_a_token_embedding(kind):
    keys = tree(embed={"kind": "patches"} | CASES["square"]) | {"kind": kind}
    if kind == "decoder":
        del keys["encoder"], keys["decoder"][0]["cross"]
    with pytest.raises(ConfigError, match=r"embed.kind: a generative model needs embed.kind: tokens"):
        parse(Model, keys)


def test_a_stem_halves_the_image_and_its_norm_is_of_one_image():
    """Convolutions, norm and GELU, one after another (Xiao et al. 2021, 3), written out."""
    model, images = captioner("stem").double(), pixels("stem")
    stem, x = model.source_embed.stem, images
    for convolution, norm in zip(stem.convolutions, stem.norms, strict=True):
        x = conv2d(x, convolution.weight, stride=2, padding=1)
        mean, variance = x.mean((1, 2, 3), keepdim=True), x.var((1, 2, 3), unbiased=False, keepdim=True)
        x = (x - mean) / (variance + norm.eps).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]
        x = torch.nn.functional.gelu(x)
    torch.testing.assert_close(stem(images), x)
    assert stem(images).shape[2:] == (2, 4)


def test_a_patch_must_be_divisible_by_the_stem():
    with pytest.raises(ConfigError, match=r"embed\.stem: halves a patch 2 times, but 6×6 is not divisible by 4"):
        parse(Model, tree_of_vit(image=12, patch=6, stem=[4, 4]))


def tree_of_vit(**embed):
    layer = {"mixer": {"kind": "attention", "heads": 2}}
    return {"kind": "encoder", "width": 8, "embed": {"kind": "patches", **embed}, "encoder": [layer], "head": "none"}
