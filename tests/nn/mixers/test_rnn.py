"""Recurrent mixers against torch.nn.LSTM and torch.nn.GRU called plainly, and against the equations."""

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.rnn import GRU, LSTM
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.recurrent import TAIL
from allyouneed.nn.states.window import MAX_TRIM
from any_part import build, pack, tree

WIDTH = 6
COMMON = Common(width=WIDTH)
KINDS = {"lstm": (LSTM, nn.LSTM), "gru": (GRU, nn.GRU)}


def context(time):
    return Context(TokenLayout.of(Rows(torch.ones(1, time, dtype=torch.long))))


def both(name, **keys):
    """Ours, and torch's with the same weights."""
    torch.manual_seed(0)
    config, theirs = KINDS[name]
    module = config(**keys).build(COMMON).double()
    reference = theirs(WIDTH, module.hidden, batch_first=True, bidirectional=keys.get("bidirectional", False)).double()
    reference.load_state_dict(module.rnn.state_dict())
    return module, reference


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("time", [1, 63, 100])
def test_outputs_and_gradients_match_torch(name, bidirectional, time):
    module, reference = both(name, hidden=5, bidirectional=bidirectional)
    x = torch.randn(3, time, WIDTH, dtype=torch.double, requires_grad=True)
    found, (expected, _) = module(x, context(time)), reference(x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    own = torch.autograd.grad(found.sin().sum(), [x, *module.rnn.parameters()])
    other = torch.autograd.grad(expected.sin().sum(), [x, *reference.parameters()])
    torch.testing.assert_close(own, other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sentences_run_separately(name, bidirectional):
    module, reference = both(name, hidden=5, bidirectional=bidirectional)
    rows, places = pack([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 12]], [0, 0, 0, 1, 1], [0, 2, 0, 1, 0])
    x = torch.randn(*rows.tokens.shape, WIDTH, dtype=torch.double, requires_grad=True)
    found = module(x, Context(TokenLayout.of(rows)))
    own, alone = (
        [found[row, span] for row, span in places],
        [reference(x[row, span][None])[0][0] for row, span in places],
    )
    torch.testing.assert_close(own, alone)
    gradients = torch.autograd.grad(sum(y.sin().sum() for y in own), x)
    torch.testing.assert_close(gradients, torch.autograd.grad(sum(y.sin().sum() for y in alone), x))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_reset_before_matches_the_paper(bidirectional):
    """Cho et al. 2014, eq. 5–8 (their z is how much stays), sentence by sentence, from either end."""
    torch.manual_seed(0)
    module = GRU(hidden=5, bidirectional=bidirectional, reset="before").build(COMMON).double()
    rows = Rows.of([[1, 2, 3, 4], [5, 6], [7]])
    x = torch.randn(3, 4, WIDTH, dtype=torch.double)
    found = module(x, Context(TokenLayout.of(rows)))

    def read(tokens, which):
        w, u, b, c = (getattr(module.rnn, f"{n}_l0{which}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        (wr, wz, w), (ur, uz, u), (br, bz, b) = w.chunk(3), u.chunk(3), (b + c).chunk(3)
        h, states = torch.zeros(5, dtype=torch.double), []
        for token in tokens:
            r, z = torch.sigmoid(wr @ token + ur @ h + br), torch.sigmoid(wz @ token + uz @ h + bz)
            h = z * h + (1 - z) * torch.tanh(w @ token + u @ (r * h) + b)
            states.append(h)
        return torch.stack(states)

    for row, length in enumerate((4, 2, 1)):
        expected = read(x[row, :length], "")
        if bidirectional:
            expected = torch.cat((expected, read(x[row, :length].flip(0), "_reverse").flip(0)), -1)
        torch.testing.assert_close(found[row, :length], expected)


@pytest.mark.parametrize("mixer", ["lstm", "gru", {"kind": "gru", "reset": "before"}])
def test_state_size_is_constant_and_trimming_is_limited(mixer):
    model = build(tree(mixer=mixer))
    dice = torch.Generator().manual_seed(0)
    source, target = Rows.of([[1, 2], [3, 4]]), torch.randint(1, 11, (2, 300), generator=dice)
    with torch.no_grad():
        whole = model.decode(Rows(target), model.encode(source))
        states = model.start(source)
        model.advance(Rows(target[:, :150], lengths=torch.tensor([150, 140])), states)
        model.advance(Rows(target[:, 140:300], lengths=torch.tensor([0, 160])), states)
    carries = 2 if mixer == "lstm" else 1
    assert {layer["mixer"].bytes for layer in states.layers} == {8 * 2 * 12 * (2 * carries + TAIL)}
    states.select([1])
    with pytest.raises(ValueError, match=f"can trim at most {MAX_TRIM} tokens"):
        states.trim(100)
    states.trim(300 - MAX_TRIM)
    with torch.no_grad():
        rest = model.advance(Rows(target[1:, 300 - MAX_TRIM :]), states)
    torch.testing.assert_close(rest, whole[1:, 300 - MAX_TRIM :])


def test_bidirectional_cannot_decode_and_keeps_the_width():
    with pytest.raises(
        ConfigError, match=r"decoder\[0\]\.mixer: a decoder must not attend to later tokens, but its backward half"
    ):
        parse(Model, tree(mixer={"kind": "lstm", "bidirectional": True}))
    with pytest.raises(ConfigError, match=r"encoder\[0\]\.mixer: gives 18 features where the model has 12"):
        parse(Model, tree(encoder_mixer={"kind": "gru", "bidirectional": True, "hidden": 9}))


def test_a_row_of_padding_only_is_finite():
    for bidirectional in (False, True):
        module, _ = both("gru", hidden=3, bidirectional=bidirectional)
        layout = TokenLayout.of(Rows(torch.ones(2, 3, dtype=torch.long), segments=torch.zeros(2, 3, dtype=torch.long)))
        assert not module(torch.randn(2, 3, WIDTH, dtype=torch.double), Context(layout)).any()
