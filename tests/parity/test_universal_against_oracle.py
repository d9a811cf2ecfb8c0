"""Universal Transformers (Dehghani et al. 2019) against their equations and the listing of appendix C.

Token by token and step by step: one sentence, no batch, no state.
"""

import math

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.conv_ffn import ConvolutionalFFN
from allyouneed.nn.models.base import Model
from any_part import build

HEADS = 2
PAIRS = [([3, 1, 4, 1, 5], [2, 7, 1, 8]), ([9, 2, 6, 5, 3, 5, 8], [2, 8]), ([1], [8, 2, 8, 1, 8, 2])]


def tree(result="blend", threshold=0.99):
    """The shipped preset, narrowed."""
    given = preset_tree("universal-transformer") | {"vocab": 11, "width": 8, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        (layer,) = given[side]
        halt = layer["halt"] | {"result": result, "threshold": threshold}
        mixers = {name: layer[name] | {"heads": HEADS} for name in ("mixer", "cross") if name in layer}
        given[side] = [layer | mixers | {"channel": layer["channel"] | {"hidden": 13}, "repeat": 5, "halt": halt}]
    return given


def norm(module, x):
    return nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-5)


def dense(module, x):
    return x @ module.weight.T + module.bias


def waves(place, width):
    """Vaswani et al. 2017, 3.5."""
    angles = [place / 10000 ** (2 * (i // 2) / width) for i in range(width)]
    found = [math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)]
    return torch.tensor(found).float().double()


def attention(module, x, memory=None, causal=False):
    if memory is None:
        q, k, v = dense(module.qkv, x).chunk(3, -1)
    else:
        q, (k, v) = dense(module.q, x), dense(module.kv, memory).chunk(2, -1)
    size, rows = q.shape[1] // HEADS, []
    for t in range(len(x)):
        seen = slice(0, t + 1) if causal else slice(None)
        own = [slice(head * size, (head + 1) * size) for head in range(HEADS)]
        rows.append(torch.cat([(k[seen, h] @ q[t, h] / math.sqrt(size)).softmax(0) @ v[seen, h] for h in own]))
    return dense(module.out, torch.stack(rows))


def transform(block, x, memory):
    """Eq. 2-3 and, for the decoder, attention to the encoder between them."""
    norms, parts = iter(block.wiring.norms), block.sublayers
    x = norm(next(norms), x + attention(parts["mixer"], x, causal=memory is not None))
    if memory is not None:
        x = norm(next(norms), x + attention(parts["cross"], x, memory))
    return norm(next(norms), x + dense(parts["channel"].down, dense(parts["channel"].up, x).relu()))


def universal(stack, x, memory, result, threshold, steps=5):
    """Appendix C. Returns the result, and for each token its number of steps and its remainder."""
    block, halting = stack.blocks[0], stack.recurrences["0"].halting
    time, width = x.shape
    spent, remainders, updates = [0.0] * time, [torch.zeros(())] * time, [0] * time
    halted, results = [False] * time, [torch.zeros(width)] * time
    for step in range(steps):
        x = torch.stack([x[t] + waves(t, width) + waves(step, width) for t in range(time)])
        chances = [torch.sigmoid(halting.unit.weight[0] @ x[t] + halting.bias[0]) for t in range(time)]
        if halting.config.per == "text":  # tensor2tensor, `act_type == "global"`: reduce_mean over positions
            chances = [sum(chances) / time] * time
        x = transform(block, x, memory)
        for t in range(time):
            if halted[t]:
                continue
            updates[t] += 1
            if spent[t] + chances[t] > threshold or (result == "sum" and step == steps - 1):
                weight = remainders[t] = 1 - spent[t] + torch.zeros(())
                halted[t] = True
            else:
                weight = chances[t]
                spent[t] = spent[t] + chances[t]
            before = results[t] if result == "sum" else (1 - weight) * results[t]
            results[t] = weight * x[t] + before
    return torch.stack(results), torch.tensor(updates), torch.stack(remainders)


def oracle(model, source, target, result, threshold):
    table = model.embed.tokens.weight
    scale = math.sqrt(table.shape[1])
    memory, *read = universal(model.encoder, table[source] * scale, None, result, threshold)
    hidden, *wrote = universal(model.decoder, table[target] * scale, memory, result, threshold)
    return hidden @ table.T, read, wrote


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("threshold", [0.99, 0.7])
@pytest.mark.parametrize("result", ["blend", "sum"])
def test_outputs_ponder_cost_and_gradients(result, threshold, record_difference):
    model = build(tree(result, threshold)).train()
    weights, losses = list(model.parameters()), []
    batch = Batch(Rows.of([t for _, t in PAIRS]), Rows.of([s for s, _ in PAIRS], side="left"))
    found = model.head(model(batch, losses))
    expected, read, wrote = zip(*(oracle(model, s, t, result, threshold) for s, t in PAIRS), strict=True)

    steps = torch.cat([updates for updates, _ in read + wrote])
    assert len(set(steps.tolist())) >= 3, "all tokens halt at once: nothing is tested"
    ponder = [0.01 * torch.cat([n + r for n, r in side]).mean() for side in (read, wrote)]
    outputs = max((found[i, : len(e)] - e).abs().max().item() for i, e in enumerate(expected))
    assert outputs < 1e-6
    torch.testing.assert_close(torch.stack(losses), torch.stack(ponder))

    own = sum(found[i, : len(e)].sin().sum() for i, e in enumerate(expected)) + 100 * sum(losses)
    theirs = sum(e.sin().sum() for e in expected) + 100 * sum(ponder)
    pairs = zip(torch.autograd.grad(own, weights), torch.autograd.grad(theirs, weights), strict=True)
    gradients = max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)
    assert gradients < 1e-6
    record_difference("Universal Transformer", "oracle from appendix C", outputs, gradients)


def test_halting_per_text(record_difference):
    """All tokens of a text halt at the same step, whatever stands beside it in the batch."""
    given = tree("blend", 0.9)
    given["encoder"][0]["halt"] |= {"per": "text", "bias": -0.5}
    model = build(given).train()
    with torch.no_grad():
        model.encoder.recurrences["0"].halting.unit.weight.mul_(8)
    batch = Batch(Rows.of([t for _, t in PAIRS]), Rows.of([s for s, _ in PAIRS], side="left"))
    found = model.head(model(batch))
    expected, read, _ = zip(*(oracle(model, s, t, "blend", 0.9) for s, t in PAIRS), strict=True)
    assert all(len(set(updates.tolist())) == 1 for updates, _ in read) and len({int(n[0]) for n, _ in read}) > 1
    outputs = max((found[i, : len(e)] - e).abs().max().item() for i, e in enumerate(expected))
    weights = list(model.parameters())
    own, theirs = (
        sum(one.sin().sum() for one in rows)
        for rows in ([f[: len(e)] for f, e in zip(found, expected, strict=True)], expected)
    )
    pairs = zip(torch.autograd.grad(own, weights), torch.autograd.grad(theirs, weights), strict=True)
    gradients = max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)
    record_difference("Universal Transformer", "oracle from tensor2tensor's act_type global", outputs, gradients)
    assert outputs < 1e-6 and gradients < 1e-6
    given["decoder"][0]["halt"] |= {"per": "text"}
    with pytest.raises(ConfigError, match="halt: a decoder must not look at later tokens"):
        parse(Model, given)


def sepconv(module, x, size, past):
    """tensor2tensor, `separable_conv`: a filter per feature, then a map of the features; zeros beyond the ends."""
    first, rows = -(size - 1) if past else -((size - 1) // 2), []
    for t in range(len(x)):
        seen = [(j, t + first + j) for j in range(size) if 0 <= t + first + j < len(x)]
        rows.append(sum(module.taps[:, j] * x[place] for j, place in seen))
    return dense(module.out, torch.stack(rows))


@pytest.mark.parametrize("sees", ["past", "around"])
def test_a_convolutional_transition(sees, record_difference):
    """`sepconv_relu_sepconv` of the authors' code, kernels of 3 and 5."""
    torch.manual_seed(0)
    layer = ConvolutionalFFN(hidden=13, sees=sees).build(Common(width=8))
    x = torch.randn(1, 9, 8)
    found = layer(x, Context(TokenLayout(torch.arange(9)[None], start=0)))[0]
    past = sees == "past"
    expected = sepconv(layer.down, sepconv(layer.up, x[0], 3, past).relu(), 5, past)
    pairs = zip(*(torch.autograd.grad(y.sin().sum(), list(layer.parameters())) for y in (found, expected)), strict=True)
    outputs, gradients = (found - expected).abs().max().item(), max((a - b).abs().max().item() for a, b in pairs)
    record_difference("Universal Transformer", "oracle from tensor2tensor's sepconv_relu_sepconv", outputs, gradients)
    assert outputs < 1e-12 and gradients < 1e-11


def test_the_preset_is_one_layer_a_side():
    config = parse(Model, preset_tree("universal-transformer"))
    with torch.device("meta"):
        model = config.build()
    for stack in (model.encoder, model.decoder):
        assert len(stack.blocks) == 12 and len(set(stack.blocks)) == 1
