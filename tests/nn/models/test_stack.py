"""Stacks of many kinds of layers: shared weights, changing wirings, one state for each application."""

import pytest
import torch
from torch import nn

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import STACKS, Model
from allyouneed.nn.models.stack import changes
from allyouneed.nn.wiring.residual import DeepNorm, ParallelResidual, PostNorm, PreNorm, ResiDual, Sandwich
from any_part import WIDTH, build, tree

BATCH = Batch(Rows.of([[1, 2, 3], [4]]), Rows.of([[5, 6], [7, 8]]))


def layers(*keys):
    """A model whose stacks are these changes of one layer."""
    given = tree()
    return given | {side: [given[side][0] | {"repeat": 1} | each for each in keys] for side in STACKS}


# --- shared weights (ALBERT: Lan et al. 2020, 3.1) --------------------------------------------------------------------


def test_shared_layers_use_one_module():
    """Against as many layers of their own that happen to have the same weights; gradients are the sum of theirs."""
    shared, apart = build(layers({"repeat": 3, "share": True})), build(layers({"repeat": 3}))
    assert len(set(shared.decoder.blocks)) == 1 and len(set(apart.decoder.blocks)) == 3
    with torch.no_grad():
        for name, value in apart.state_dict().items():
            value.copy_(shared.state_dict()[name])
    found, expected = shared.logits(BATCH), apart.logits(BATCH)
    torch.testing.assert_close(found, expected)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for side in STACKS:
        blocks = getattr(apart, side).blocks
        for name, parameter in getattr(shared, side).blocks[0].named_parameters():
            together = sum(dict(block.named_parameters())[name].grad for block in blocks)
            torch.testing.assert_close(parameter.grad, together)


def test_shared_layers_count_parameters_once_and_flops_per_layer():
    shared, apart = (parse(Model, layers({"repeat": 3, "share": share})).cost(7) for share in (True, False))
    one = parse(Model, layers({})).cost(7)
    assert shared.parameters == one.parameters < apart.parameters
    assert (shared.flops, shared.state_per_token) == (apart.flops, apart.state_per_token)
    assert shared.state_constant == apart.state_constant == 3 * one.state_constant


def test_shared_layers_have_separate_states():
    model = build(layers({"repeat": 3, "share": True}))
    states = model.start(BATCH.source)
    kept = [state for layer in states.layers for state in layer.values()]
    assert len(states.layers) == 3 and len(set(map(id, kept))) == 6
    with torch.no_grad():
        model.advance(BATCH.target, states)
    keys = [layer["mixer"].keys for layer in states.layers]
    assert not torch.allclose(keys[0], keys[1]) and not torch.allclose(keys[1], keys[2])


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_attention_of_a_shared_layer_is_recorded_per_application(part):
    """As many layers of their own with the same weights show the same."""
    shared, apart = build(layers({"repeat": 3, "share": True}, {})), build(layers({"repeat": 3}, {}))
    with torch.no_grad():
        for name, value in apart.state_dict().items():
            value.copy_(shared.state_dict()[name])
    found, expected = shared.attention(BATCH, part), apart.attention(BATCH, part)
    assert list(found) == [0, 1, 2, 3]
    for number in found:
        torch.testing.assert_close(found[number], expected[number])
    (one,) = shared.attention(BATCH, part, layers=[1], heads=[2]).values()
    torch.testing.assert_close(one, found[1][:, 2:3])
    assert not torch.allclose(found[0], found[1])


# --- wirings ----------------------------------------------------------------------------------------------------------


def norm(module, x):
    return nn.functional.layer_norm(x, (WIDTH,), module.weight, module.bias, 1e-5)


def by_hand(stack, x, context):
    """post-norm, ResiDual, pre-norm, parallel, post-norm, written out."""

    def calls(number):
        return [lambda x, f=f: f(x, context) for f in stack.blocks[number].sublayers.values()]

    def norms(number):
        return [lambda x, n=n: norm(n, x) for n in stack.blocks[number].wiring.norms]

    for f, n in zip(calls(0), norms(0), strict=True):
        x = n(x + f(x))
    dual = x
    for f, n in zip(calls(1), norms(1), strict=True):
        y = f(x)
        x, dual = n(x + y), dual + y
    x = x + norm(stack.joints["1"].norm, dual)
    for f, n in zip(calls(2), norms(2), strict=True):
        x = x + f(n(x))
    (n,) = norms(3)
    x = x + sum(f(n(x)) for f in calls(3))
    x = norm(stack.joints["3"], x)
    for f, n in zip(calls(4), norms(4), strict=True):
        x = n(x + f(x))
    return x


def test_mixed_wirings_pass_the_stream():
    words = ("post-norm", "resi-dual", "pre-norm", "parallel", "post-norm")
    model = build(layers(*({"wiring": word} for word in words)))
    layout = TokenLayout.of(BATCH.source)
    x = torch.randn(2, 2, WIDTH, dtype=torch.double)
    found, expected = model.encoder(x, Context(layout)), by_hand(model.encoder, x, Context(layout))
    torch.testing.assert_close(found, expected)
    assert list(model.encoder.joints) == ["1", "3"] and model.encoder.end is None
    weights = list(model.encoder.parameters())
    own = torch.autograd.grad(found.sin().sum(), weights)
    torch.testing.assert_close(own, torch.autograd.grad(expected.sin().sum(), weights))


def test_which_wirings_share_a_stream():
    assert not changes(PreNorm(), PreNorm()) and not changes(PostNorm(), PostNorm())
    assert not changes(PreNorm(), ParallelResidual()) and not changes(Sandwich(), PreNorm(final=False))
    for pair in [(PreNorm(), PostNorm()), (PostNorm(), PreNorm()), (PostNorm(), DeepNorm()), (ResiDual(), PreNorm())]:
        assert changes(*pair)


@pytest.mark.parametrize("words", [("pre-norm", "post-norm"), ("pre-norm", "parallel"), ("resi-dual", "sandwich")])
def test_mixed_wirings_count_all_their_parameters(words):
    config = parse(Model, layers(*({"wiring": word, "repeat": 2} for word in words)))
    assert config.cost().parameters == sum(value.numel() for value in config.build().parameters())


def test_a_stack_of_one_kind_has_no_joints():
    stack = build(layers({"repeat": 2}, {"channel": {"kind": "ffn", "hidden": 5}})).encoder
    assert not stack.joints and not stack.recurrences and stack.spans == [range(2), range(2, 3)]
