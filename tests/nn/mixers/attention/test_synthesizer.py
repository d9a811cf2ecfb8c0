"""What a Synthesizer promises besides its equations (tests/parity)."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.mixers.attention.synthesizer import Synthesizer
from allyouneed.nn.models.base import Model
from any_part import build


def decoder(**keys):
    mixer = {"kind": "synthesizer", "heads": 2, "length": 20, "pattern": "causal"} | keys
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": mixer}
    return {"kind": "decoder", "vocab": 11, "width": 8, "embed": {"positions": "sinusoidal"}, "decoder": [layer]}


def count(**keys):
    """Parameters of scores alone, of one head without biases, as table 1 counts them."""
    layer = {"channel": {"kind": "ffn", "hidden": 4}}
    common = parse(Model, {"kind": "encoder", "vocab": 5, "width": 32, "encoder": [layer]})
    config = Synthesizer(heads=4, length=36, bias=False, **keys)
    module = config.build(common)
    others = sum(p.numel() for part in (module.v, module.out) for p in part.parameters())
    total = sum(p.numel() for p in module.parameters())
    assert config.cost(common, 10).parameters == total
    return total - others


def test_parameters_are_those_of_table_1():
    d, n, heads = 32, 36, 4
    assert count(synthesis="dense") == d * d + d * n
    assert count(synthesis="random") == heads * n * n
    assert count(synthesis="factorised-random", rank=5) == heads * 2 * n * 5
    assert count(synthesis="factorised-dense", columns=4) == d * d + d * (9 + 4)
    assert count(synthesis="random", fixed=True) == 0


@pytest.mark.parametrize("synthesis", ["random", "factorised-random"])
def test_fixed_scores_are_buffers(synthesis):
    torch.manual_seed(0)
    model = parse(Model, decoder(synthesis=synthesis, fixed=True)).build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "synthesis" in name}
    assert before and all(tensor.std() > 0.3 for tensor in before.values())
    optimiser = torch.optim.SGD(model.parameters(), 1.0)
    model.logits(Batch(Rows(torch.tensor([[1, 2, 3, 4]])))).cos().sum().backward()
    optimiser.step()
    assert all((tensor == before[name]).all() for name, tensor in model.state_dict().items() if name in before)


def test_only_random_scores_can_be_fixed():
    with pytest.raises(ConfigError, match=r"decoder\[0\].mixer.fixed"):
        parse(Model, decoder(synthesis="dense", fixed=True))


@pytest.mark.parametrize("synthesis", ["dense", "random", "factorised-dense", "factorised-random"])
def test_weights_do_not_depend_on_other_tokens(synthesis):
    """Dense weights depend on the token alone, random weights on none."""
    model = build(decoder(synthesis=synthesis))
    first, second = (model.attention(Batch(Rows(torch.tensor([tokens])))) for tokens in ([1, 2, 3, 4], [5, 6, 3, 8]))
    same = (first[0] - second[0]).abs().amax((0, 1, 3))  # by query, in the first layer
    assert same[2] < 1e-12
    assert (same[1] < 1e-12) == ("random" in synthesis)


def test_a_synthesizer_decodes_up_to_its_length():
    model = build(decoder(synthesis="factorised-dense", columns=6, dot=True))
    tokens = torch.randint(1, 11, (2, 20), generator=torch.Generator().manual_seed(0))
    states, found = model.start(2), []
    with torch.no_grad():
        for part in tokens.split([7, 1, 1, 11], 1):
            found.append(model.head(model.advance(Rows(part), states)))
        torch.testing.assert_close(torch.cat(found, 1), model.logits(Batch(Rows(tokens))), atol=1e-9, rtol=0)
        with pytest.raises(UserError, match="sentence of 21 tokens exceeds the synthesizer's length 20"):
            model.advance(Rows(tokens[:, :1]), states)


def test_the_cache_stores_values_only():
    model = build(decoder())
    states = model.start(1)
    model.advance(Rows(torch.tensor([[1, 2, 3]])), states)
    assert states.bytes == 2 * 3 * 8 * 8  # layers, tokens, width, bytes of a number
