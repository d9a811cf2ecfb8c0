"""The same weights in torch.nn.Transformer and in ours: the same logits and the same gradients."""

import pytest
import torch
from torch import nn

from allyouneed.config import parse
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from parity import difference

VOCAB = 17
CASES = [
    # width, heads, hidden, encoder and decoder layers
    (12, 3, 20, 1, 1),
    (10, 1, 7, 2, 3),
    (35, 5, 33, 3, 2),
    (64, 8, 128, 2, 2),
]
SOURCES = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 2], [12], [13, 14, 15, 16, 2]]
TARGETS = [[1, 3, 5], [1, 4, 6, 8, 10, 12], [1, 7, 9, 11], [1]]


def ours(width, heads, hidden, layers, activation, wiring, eps=1e-5):
    attention = {"kind": "attention", "heads": heads}
    channel = {"kind": "ffn", "hidden": hidden, "activation": activation}
    encoder, decoder = layers
    tree = {
        "kind": "encoder-decoder",
        "vocab": VOCAB,
        "width": width,
        "norm": {"kind": "layer", "eps": eps},
        "embed": {"positions": "sinusoidal"},
        "encoder": [{"repeat": encoder, "wiring": wiring, "mixer": attention, "channel": channel}],
        "decoder": [
            {
                "repeat": decoder,
                "wiring": wiring,
                "mixer": attention | {"pattern": "causal"},
                "cross": attention,
                "channel": channel,
            }
        ],
    }
    return parse(Model, tree).build()


def torchs(width, heads, hidden, layers, activation, wiring, eps=1e-5):
    """nn.Transformer adds a norm after the last layer whatever the wiring; the paper has none after post-norm."""
    first = wiring == "pre-norm"
    keys = {"activation": activation, "dropout": 0.0, "batch_first": True, "norm_first": first, "layer_norm_eps": eps}
    last = [nn.LayerNorm(width, eps) if first else None for _ in range(2)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, heads, hidden, **keys), layers[0], last[0], enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, hidden, **keys), layers[1], last[1])
    return nn.Transformer(width, heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)


def pairs_of_weights(model, reference):
    """(ours, theirs) for every parameter of both but the embedding; theirs may be pieces of one of ours."""

    def attention(part, other):
        yield part.out.weight, other.out_proj.weight, slice(None)
        yield part.out.bias, other.out_proj.bias, slice(None)
        if hasattr(part, "qkv"):
            yield part.qkv.weight, other.in_proj_weight, slice(None)
            yield part.qkv.bias, other.in_proj_bias, slice(None)
        else:
            width = part.q.weight.shape[0]
            for name in ("weight", "bias"):
                stacked = getattr(other, f"in_proj_{name}")
                yield getattr(part.q, name), stacked, slice(0, width)
                yield getattr(part.kv, name), stacked, slice(width, None)

    def plain(part, other):
        yield part.weight, other.weight, slice(None)
        yield part.bias, other.bias, slice(None)

    for stack, other_stack in ((model.encoder, reference.encoder), (model.decoder, reference.decoder)):
        for block, other in zip(stack.blocks, other_stack.layers, strict=True):
            yield from attention(block.sublayers["mixer"], other.self_attn)
            if "cross" in block.sublayers:
                yield from attention(block.sublayers["cross"], other.multihead_attn)
            yield from plain(block.sublayers["channel"].up, other.linear1)
            yield from plain(block.sublayers["channel"].down, other.linear2)
            for number, norm in enumerate(block.wiring.norms, 1):
                yield from plain(norm, getattr(other, f"norm{number}"))
        if other_stack.norm is not None:
            yield from plain(stack.end, other_stack.norm)


def same_weights(model, reference):
    """Draw all weights of theirs at random and copy them into ours; every parameter of both must take part."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(noise * 0.1 + 1.0)
        found = list(pairs_of_weights(model, reference))
        for own, other, part in found:
            own.copy_(other[part])
    assert {id(own) for own, _, _ in found} == {id(p) for p in model.parameters()} - {id(model.embed.tokens.weight)}
    assert {id(other) for _, other, _ in found} == {id(p) for p in reference.parameters()}
    return found


def padding(rows):
    return torch.arange(rows.tokens.shape[1])[None] >= rows.lengths[:, None]


def near(found, expected):
    """1e-5 of the tensor's own scale: a gradient is a sum over all tokens, its small entries cancel."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("wiring", ["post-norm", "pre-norm"])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_logits_and_gradients_are_those_of_nn_transformer(sizes, wiring, activation, record_difference):
    width, heads, hidden, *layers = sizes
    model = ours(width, heads, hidden, layers, activation, wiring)
    reference = torchs(width, heads, hidden, layers, activation, wiring)
    weights = same_weights(model, reference)
    source, target = Rows.of(SOURCES), Rows.of(TARGETS)
    labels = torch.where(padding(target), IGNORE, target.tokens.roll(-1, 1))

    logits = model.logits(Batch(target, source))
    loss, plain = model.head.loss(model(Batch(target, source)), labels, 0.1)

    table = model.embed.tokens.weight.detach().clone().requires_grad_()
    angles = torch.arange(9.0)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
    positions = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]

    def embedded(rows):
        return nn.functional.embedding(rows.tokens, table) * width**0.5 + positions[: rows.tokens.shape[1]]

    hidden_states = reference(
        embedded(source),
        embedded(target),
        tgt_mask=torch.ones(target.tokens.shape[1], target.tokens.shape[1]).triu(1).bool(),
        src_key_padding_mask=padding(source),
        tgt_key_padding_mask=padding(target),
        memory_key_padding_mask=padding(source),
    )
    expected = hidden_states @ table.T
    expected_loss = nn.functional.cross_entropy(
        expected.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum"
    )
    real = ~padding(target)
    near(logits[real], expected[real])
    near(loss, expected_loss)
    near(plain, nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum"))

    loss.backward()
    expected_loss.backward()
    near(model.embed.tokens.weight.grad, table.grad)
    for own, other, part in weights:
        near(own.grad, other.grad[part])
    gradients = max(difference(own.grad, other.grad[part]) for own, other, part in weights)
    outputs = difference(logits[real], expected[real])
    record_difference("Transformer", "torch.nn.Transformer", outputs, gradients)


def test_the_reference_can_disagree():
    """The comparison notices one weight out of place."""
    model, reference = (make(12, 3, 20, (1, 1), "relu", "post-norm") for make in (ours, torchs))
    same_weights(model, reference)
    source, target = Rows(torch.tensor([[3, 4]])), Rows(torch.tensor([[1, 5]]))
    before = model.logits(Batch(target, source))
    with torch.no_grad():
        model.decoder.blocks[0].sublayers["cross"].kv.bias[-1] += 1e-2
    assert (model.logits(Batch(target, source)) - before).abs().max() > 1e-4
