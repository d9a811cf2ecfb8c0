"""KOSMOS-1 against transformers' Kosmos-2, which has its architecture with absolute positions: the same random weights,
images among the tokens of a batch; and the Perceiver resampler against Flamingo's figure 5, written out."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Media, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.resampler import Perceiver
from attention_layers import TOLERANCE, max_difference, randomise_module
from parity import difference, randomise

SLOTS, VOCAB, WIDTH, HEADS = 3, 40, 32, 4
PATCHES = {"kind": "patches", "image": 8, "patch": 4, "bias": False, "norm": "layer"}


def their_model():
    transformers = pytest.importorskip("transformers")
    text = {"vocab_size": VOCAB, "embed_dim": WIDTH, "layers": 2, "ffn_dim": 48, "attention_heads": HEADS}
    text |= {"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0}
    image = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    image |= {"image_size": 8, "patch_size": 4}
    config = transformers.Kosmos2Config(text_config=text, vision_config=image, latent_query_num=SLOTS)
    config._attn_implementation = "eager"  # sdpa would mask the resampler's keys causally
    theirs = transformers.Kosmos2ForConditionalGeneration(config).eval()
    randomise(theirs)
    return theirs


def our_model():
    """The preset with Kosmos-2's positions, made small."""
    tree = preset_tree("kosmos-1") | {"vocab": VOCAB, "width": WIDTH, "dropout": 0.0}
    tree["embed"] = {"positions": {"kind": "sinusoidal", "order": "halves", "closed": True, "offset": 2}}
    layer, tower = tree["decoder"][0], tree["image"]
    layer |= {"repeat": 2, "channel": layer["channel"] | {"hidden": 48}}
    layer["mixer"] = layer["mixer"] | {"heads": HEADS, "positions": "none", "dropout": 0.0}
    tower["encoder"] |= {"width": 24, "embed": PATCHES | {"positions": {"kind": "learned", "length": 5}}}
    inside = tower["encoder"]["encoder"][0]
    inside |= {"repeat": 2, "mixer": {"kind": "attention", "heads": 3}}
    inside["channel"] = inside["channel"] | {"hidden": 40}
    tower["resampler"] |= {"slots": SLOTS, "heads": HEADS}
    return parse(Model, tree).build()


def pairs(ours, theirs):
    """(our parameter, theirs in our shape); theirs may be a function, so that gradients can be read the same way."""
    mine = dict(ours.named_parameters())

    def attention(name, other, merged=("q", "k", "v")):
        for part in ("weight", "bias"):
            joined = [f"{other}.{one}_proj.{part}" for one in merged]
            yield f"{name}.{''.join(merged)}.{part}", joined
            yield f"{name}.out.{part}", [f"{other}.out_proj.{part}"]

    def both(name, other):
        for part in ("weight", "bias"):
            yield f"{name}.{part}", [f"{other}.{part}"]

    def lines():
        yield "embed.tokens.weight", ["text_model.model.embed_tokens.weight"]
        yield from both("decoder.end", "text_model.model.layer_norm")
        for n in range(2):
            block, layer = f"decoder.blocks.{n}", f"text_model.model.layers.{n}"
            yield from attention(f"{block}.sublayers.mixer", f"{layer}.self_attn")
            yield from both(f"{block}.sublayers.mixer.sub_norm", f"{layer}.self_attn.inner_attn_ln")
            yield from both(f"{block}.sublayers.channel.up", f"{layer}.ffn.fc1")
            yield from both(f"{block}.sublayers.channel.norm", f"{layer}.ffn.ffn_layernorm")
            yield from both(f"{block}.sublayers.channel.down", f"{layer}.ffn.fc2")
            yield from both(f"{block}.wiring.norms.0", f"{layer}.self_attn_layer_norm")
            yield from both(f"{block}.wiring.norms.1", f"{layer}.final_layer_norm")
        image, vision = "towers.image.encoder", "vision_model.model"
        yield f"{image}.embed.class_token.weight", [f"{vision}.embeddings.class_embedding"]
        yield f"{image}.embed.project.weight", [f"{vision}.embeddings.patch_embedding.weight"]
        yield f"{image}.embed.positions.weight", [f"{vision}.embeddings.position_embedding.weight"]
        yield from both(f"{image}.embed.norm", f"{vision}.pre_layrnorm")
        yield from both(f"{image}.encoder.end", f"{vision}.post_layernorm")
        for n in range(2):
            block, layer = f"{image}.encoder.blocks.{n}", f"{vision}.encoder.layers.{n}"
            yield from attention(f"{block}.sublayers.mixer", f"{layer}.self_attn")
            yield from both(f"{block}.sublayers.channel.up", f"{layer}.mlp.fc1")
            yield from both(f"{block}.sublayers.channel.down", f"{layer}.mlp.fc2")
            yield from both(f"{block}.wiring.norms.0", f"{layer}.layer_norm1")
            yield from both(f"{block}.wiring.norms.1", f"{layer}.layer_norm2")
        resampler, projection = "towers.image.resampler", "image_to_text_projection"
        yield from both(f"{resampler}.project", f"{projection}.dense")
        yield f"{resampler}.latents.weight", [f"{projection}.latent_query"]
        yield from both(f"{resampler}.attention.q", f"{projection}.x_attn.q_proj")
        yield from attention(f"{resampler}.attention", f"{projection}.x_attn", ("k", "v"))

    other = dict(theirs.named_parameters())
    named = dict(lines())
    assert set(named) == set(mine)
    used = {name for names in named.values() for name in names}
    assert used == set(other)
    return [(mine[name], [other[one] for one in names]) for name, names in named.items()]


def test_images_among_tokens(record_difference):
    theirs, ours = their_model(), our_model().eval()
    both = pairs(ours, theirs)
    with torch.no_grad():
        for own, given in both:
            own.copy_(torch.cat(list(given)).reshape(own.shape))
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB, (2, 11), generator=dice)
    pixels = torch.randn(2, 3, 8, 8, generator=dice)
    slots = torch.zeros_like(tokens)
    slots[0, 1 : 1 + SLOTS] = slots[1, 5 : 5 + SLOTS] = 1
    found = ours.logits(Batch(Rows(tokens, slots=slots), Media(image=pixels)))
    expected = theirs(pixel_values=pixels, input_ids=tokens, image_embeds_position_mask=slots).logits
    outputs = difference(found, expected)
    direction = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    gradients = max(
        difference(own.grad, torch.cat([one.grad for one in given]).reshape(own.shape)) for own, given in both
    )
    record_difference("KOSMOS-1", "transformers' Kosmos-2", outputs, gradients)
    assert max(outputs, gradients) < TOLERANCE


def by_figure_5(module, x):
    """One image at a time, one head at a time (the authors' pseudocode)."""
    found = []
    for vectors in module.project(x):
        h = module.latents.weight
        for layer in module.layers:
            of_x, of_h, before = ((norm.weight, norm.bias) for norm in layer.norms)
            queries = layer_norm(h, h.shape[-1:], *of_h)
            seen = torch.cat([layer_norm(vectors, h.shape[-1:], *of_x), queries])
            keys, values = (seen @ layer.attention.kv.weight.T).chunk(2, -1)
            queries = queries @ layer.attention.q.weight.T
            width, heads = layer.attention.head_width, []
            for n in range(layer.attention.heads):
                q, k, v = (part[:, n * width : (n + 1) * width] for part in (queries, keys, values))
                heads.append((q @ k.T / width**0.5).softmax(-1) @ v)
            h = h + torch.cat(heads, -1) @ layer.attention.out.weight.T
            inner = gelu(layer_norm(h, h.shape[-1:], *before) @ layer.channel.up.weight.T)
            h = h + inner @ layer.channel.down.weight.T
        found.append(layer_norm(h, h.shape[-1:], module.norm.weight, module.norm.bias))
    return torch.stack(found)


def test_perceiver_resampler(record_difference):
    config = Perceiver(slots=3, heads=2, layers=2, hidden=20)
    module = randomise_module(config.build(Common(width=12), 7))
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2))
    found, expected = module(x), by_figure_5(module, x)
    direction = torch.linspace(-1, 1, found.numel()).view_as(found)
    parameters = list(module.parameters())
    one, other = (torch.autograd.grad((y * direction).sum(), parameters) for y in (found, expected))
    gradients = max(max_difference(*pair) for pair in zip(one, other, strict=True))
    outputs = max_difference(found, expected)
    record_difference("Perceiver resampler", "equations written out", outputs, gradients)
    assert max(outputs, gradients) < TOLERANCE
