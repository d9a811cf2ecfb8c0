"""Convolutions against torch's, inside one sentence and never beyond it."""

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.convolution import Convolution, RecentTokens
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.window import MAX_TRIM
from any_part import build, pack, tree

WIDTH = 6
COMMON = Common(width=WIDTH)


def made(**keys):
    torch.manual_seed(0)
    module = Convolution(**keys).build(COMMON).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def kernel(module):
    """As torch has it: (outputs, inputs, size)."""
    if module.taps is not None:
        return module.out.weight[:, :, None] * module.taps[None]
    return module.out.weight.unflatten(1, (WIDTH, -1))


def context(time):
    return Context(TokenLayout.of(Rows(torch.ones(1, time, dtype=torch.long))))


@pytest.mark.parametrize("separable", [False, True])
@pytest.mark.parametrize("sees", ["around", "past"])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 11])
def test_outputs_and_gradients_match_torch(size, sees, separable):
    module = made(size=size, sees=sees, separable=separable, width=4, activation="relu")
    left = size - 1 if sees == "past" else (size - 1) // 2
    x = torch.randn(1, 5, WIDTH, dtype=torch.double, requires_grad=True)
    weights = [x, *module.parameters()]
    found = module(x, context(5))
    padded = nn.functional.pad(x.transpose(1, 2), (left, size - 1 - left))
    expected = nn.functional.conv1d(padded, kernel(module), module.out.bias).transpose(1, 2).relu()
    torch.testing.assert_close(found, expected)
    own = torch.autograd.grad(found.sin().sum(), weights)
    torch.testing.assert_close(own, torch.autograd.grad(expected.sin().sum(), weights))


def test_the_gate_matches_the_equation():
    """Dauphin et al. 2017, eq. 1; the Evolved Transformer's gated linear unit has size 1."""
    module = made(size=1, gated=True, activation="sigmoid", width=5)
    x = torch.randn(1, 3, WIDTH, dtype=torch.double)
    w, v = module.out.weight.chunk(2)
    b, c = module.out.bias.chunk(2)
    torch.testing.assert_close(module(x, context(3)), (x @ w.T + b) * (x @ v.T + c).sigmoid())


@pytest.mark.parametrize("sees", ["around", "past"])
@pytest.mark.parametrize("separable", [False, True])
def test_packed_sentences_are_convolved_separately(sees, separable):
    module = made(size=5, sees=sees, separable=separable)
    sentences, lines = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 12]], [0, 0, 0, 1, 1]
    rows, places = pack(sentences, lines, [0, 2, 0, 1, 0])
    x = torch.randn(*rows.tokens.shape, WIDTH, dtype=torch.double, requires_grad=True)
    found = module(x, Context(TokenLayout.of(rows)))
    alone = [module(x[row, span][None], context(span.stop - span.start))[0] for row, span in places]
    own = [found[row, span] for row, span in places]
    torch.testing.assert_close(own, alone)
    weights = [x, *module.parameters()]
    gradients = torch.autograd.grad(sum(y.sin().sum() for y in own), weights)
    torch.testing.assert_close(gradients, torch.autograd.grad(sum(y.sin().sum() for y in alone), weights))


def test_state_stores_inputs_only_if_size_exceeds_one():
    assert made(size=1).new_state() is None
    assert isinstance(made(size=2, sees="past").new_state(), RecentTokens)
    with pytest.raises(ValueError, match="over later tokens cannot decode"):
        made(size=2).new_state()
    assert not Convolution(size=2).causal and Convolution(size=1).causal and Convolution(size=9, sees="past").causal


@pytest.mark.parametrize("separable", [False, True])
def test_initial_outputs_keep_the_input_variance(separable):
    torch.manual_seed(0)
    width = 256
    given = tree(encoder_mixer={"kind": "convolution", "size": 9, "separable": separable}) | {"width": width}
    for layer in (given["encoder"][0], given["decoder"][0]):
        layer |= {name: {"kind": "attention", "heads": 4, "pattern": "causal"} for name in ("cross",) if name in layer}
    given["decoder"][0]["mixer"] = {"kind": "attention", "heads": 4, "pattern": "causal"}
    module = parse(Model, given).build().encoder.blocks[0].sublayers["mixer"]
    y = module(torch.randn(1, 200, width), context(200))
    assert 0.25 < y.square().mean() < 2


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        ({"size": 3}, 3 * 6 * 6 + 6),
        ({"size": 3, "width": 4, "bias": False}, 3 * 6 * 4),
        ({"size": 9, "separable": True}, 9 * 6 + 6 * 6 + 6),
        ({"size": 9, "separable": True, "gated": True, "width": 5}, 9 * 6 + (6 + 1) * 10),
    ],
)
def test_parameters_are_counted(keys, parameters):
    assert Convolution(**keys).cost(COMMON, 7).parameters == parameters
    assert sum(value.numel() for value in made(**keys).parameters()) == parameters


def test_lookahead_and_width_changes_are_refused():
    with pytest.raises(ConfigError, match=r"decoder\[0\]\.mixer: a decoder must not attend to later tokens"):
        parse(Model, tree(mixer={"kind": "convolution", "size": 3}))
    with pytest.raises(ConfigError, match=r"encoder\[0\]\.mixer: gives 9 features where the model has 12"):
        parse(Model, tree(encoder_mixer={"kind": "convolution", "size": 3, "width": 9}))
    with pytest.raises(ConfigError, match=r"decoder\[0\]\.cross\.kind: does not support cross-attention"):
        parse(Model, tree(cross={"kind": "convolution", "size": 3}))


def test_a_gated_separable_convolution_decodes():
    keys = {"kind": "convolution", "size": 4, "sees": "past", "gated": True, "separable": True, "activation": "silu"}
    model, target = build(tree(mixer=keys)), [3, 1, 4, 1, 5, 9, 2]
    source = Rows.of([[1, 2]])
    with torch.no_grad():
        states = model.start(source)
        chunks = [target[:3], target[3:4], target[4:]]
        found = torch.cat([model.head(model.advance(Rows.of([chunk]), states)) for chunk in chunks], 1)
        whole = model.head(model.decode(Rows.of([target]), model.encode(source)))
    torch.testing.assert_close(found, whole)


def test_state_size_is_constant_and_trimming_is_limited():
    """Long sentences, rows of unequal lengths: some tokens can be taken back, not all."""
    model = build(tree(mixer={"kind": "convolution", "size": 3, "sees": "past"}))
    source, target = (
        Rows.of([[1, 2], [3, 4]]),
        torch.randint(1, 11, (2, 150), generator=torch.Generator().manual_seed(0)),
    )

    def rest(states, start):
        with torch.no_grad():
            return torch.cat([model.advance(Rows(target[:, t : t + 1]), states) for t in range(start, 150)], 1)

    with torch.no_grad():
        whole = model.decode(Rows(target), model.encode(source))
        states = model.start(source)
        model.advance(Rows(target[:, :100], lengths=torch.tensor([100, 97])), states)
        model.advance(Rows(target[:, 97:150], lengths=torch.tensor([0, 43])), states)
        assert states.lengths == [100, 140]
    own = [layer["mixer"] for layer in states.layers]
    assert {state.bytes for state in own} == {8 * 2 * 12 * (2 + MAX_TRIM)}
    with pytest.raises(ValueError, match=f"can trim at most {MAX_TRIM} tokens"):
        states.trim(140 - MAX_TRIM - 1)
    states.trim(140 - MAX_TRIM)
    assert states.lengths == [76, 76]
    torch.testing.assert_close(rest(states, 76), whole[:, 76:])
    states.trim(149)
    states.trim(150 - MAX_TRIM)
    torch.testing.assert_close(rest(states, 150 - MAX_TRIM), whole[:, 150 - MAX_TRIM :])
