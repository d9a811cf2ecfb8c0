"""Beyond the equations (tests/parity): state size, packed sources, and valid uses."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.wiring.residual import Wiring
from any_part import WIDTH, build, tree
from wired import wired

LAYERS = {"decoder": [{"wiring": "plain", "cross": {"kind": "attentive-gru", "hidden": 7, "aligned": 5}}]}


def test_state_size_is_constant_and_trimming_is_limited():
    model = build(tree() | LAYERS)
    dice = torch.Generator().manual_seed(0)
    source, target = Rows.of([[1, 2, 3], [4, 5]]), torch.randint(1, 11, (2, 150), generator=dice)
    with torch.no_grad():
        whole = model.decode(Rows(target), model.encode(source))
        states = model.start(source)
        model.advance(Rows(target[:, :100], lengths=torch.tensor([100, 97])), states)
        model.advance(Rows(target[:, 97:150], lengths=torch.tensor([0, 53])), states)
    assert states.bytes == 8 * 2 * (7 * (1 + MAX_TRIM) + 5 * 3)
    with pytest.raises(ValueError, match=f"can trim at most {MAX_TRIM} tokens"):
        states.trim(150 - MAX_TRIM - 1)
    states.select([1])  # a source goes, and its keys with it
    states.trim(150 - MAX_TRIM)
    with torch.no_grad():
        rest = model.advance(Rows(target[1:, 150 - MAX_TRIM :]), states)
    torch.testing.assert_close(rest, whole[1:, 150 - MAX_TRIM :])
    assert states.bytes == 8 * (7 * (1 + MAX_TRIM) + 5 * 3)


def test_recorded_weights_sum_to_one():
    model = build(tree() | LAYERS)
    batch = Batch(Rows.of([[1, 2, 3, 4], [5, 6]]), Rows.of([[1, 2, 3], [4, 5, 6, 7, 8]]))
    weights = model.attention(batch)[0]
    assert weights.shape == (2, 1, 4, 5) and not weights[0, ..., 3:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 4, dtype=torch.double))


@pytest.mark.parametrize("kind", ["attentive-gru", "multi-step"])
def test_an_attentive_gru_requires_an_encoder(kind):
    for keys in ({"mixer": kind}, {"encoder_mixer": kind}):
        with pytest.raises(ConfigError, match=r"coder\[0\]\.mixer\.kind: needs an encoder"):
            parse(Model, tree(**keys))
    with pytest.raises(ConfigError, match=r"mixer\.left\.kind: needs an encoder"):
        parse(Model, tree(mixer={"kind": "branches", "left": kind}))


def test_a_packed_target_needs_a_packed_source():
    model = build(tree() | LAYERS)
    packed = Rows(torch.tensor([[1, 2, 3]]), segments=torch.tensor([[1, 2, 2]]))
    with pytest.raises(ValueError, match="pack both or neither"):
        model(Batch(packed, Rows.of([[4, 5]])))


def test_maxout_takes_the_larger_of_each_pair():
    model = build(tree(head={"kind": "vocabulary", "maxout": WIDTH, "bias": True}))
    x = torch.randn(2, 3, WIDTH, dtype=torch.double)
    y = x @ model.head.maxout.weight.T + model.head.maxout.bias
    expected = torch.maximum(y[..., ::2], y[..., 1::2]) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model.head(x), expected)
    assert model.config.cost().parameters == sum(p.numel() for p in model.parameters())
    untied = build(tree(head={"kind": "vocabulary", "maxout": 5}, embed={"tied": False}))
    assert untied.head.weight.shape[1] == 5
    assert untied.config.cost().parameters == sum(p.numel() for p in untied.parameters())
    with pytest.raises(ConfigError, match=r"head\.maxout: must be 12, the width of the tied token vectors"):
        parse(Model, tree(head={"kind": "vocabulary", "maxout": 5}))
    with pytest.raises(ConfigError, match=r"head\.maxout: maxout and transform are exclusive"):
        parse(Model, tree(head={"kind": "vocabulary", "maxout": 12, "transform": {}}))


@pytest.mark.parametrize(
    ("wiring", "formula"),
    [
        ("scaled-residual", lambda x: (x + 2 * x + (2 * x) ** 2) / 2**0.5),
        ("plain", lambda x: (2 * x) ** 2),
    ],
)
def test_a_wiring_without_norms_is_its_formula(wiring, formula):
    """(x + y + cross(y)) √½, y = mixer(x); or cross(mixer(x))."""
    x, context = torch.randn(2, 3, 4), Context(TokenLayout(torch.arange(3)[None], start=0))
    module = Wiring.registry[wiring]().build(Common(width=4), 2, Depth(1, 1, "decoder"))
    found = wired(module, [lambda y: 2 * y, torch.square])(x, context)
    torch.testing.assert_close(found, formula(x))
