"""Sound as rows of frames: the paper's two convolutions, any length, each sound independent of the others."""

import pytest
import torch
from torch.nn.functional import gelu, pad

from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.common import Common
from allyouneed.nn.embed.frames import FrameEmbed
from any_part import WIDTH, build, tree

MELS = 5
POSITIONS = {
    "closed": {"kind": "sinusoidal", "order": "halves", "closed": True},
    "learned": {"kind": "learned", "length": 8},
}
every_case = pytest.mark.parametrize("name", [*POSITIONS, "none"])


def listener(name):
    return build(tree(source_embed={"kind": "frames", "mels": MELS, "positions": POSITIONS.get(name, "none")}))


def frames(time, count=3):
    return torch.randn(count, MELS, time, generator=torch.Generator().manual_seed(1), dtype=torch.double)


def convolved(x, weight, bias, stride):
    """The definition, position by position: (batch, channels, time)."""
    x = pad(x, (1, 1))
    places = range(0, x.shape[2] - 2, stride)
    return torch.stack([torch.einsum("bct,oct->bo", x[:, :, p : p + 3], weight) + bias for p in places], 2)


@every_case
@pytest.mark.parametrize("time", [1, 2, 9, 16])
def test_matches_the_paper(name, time):
    embed, sound = listener(name).source_embed, frames(time)
    x = gelu(convolved(sound, embed.first.weight, embed.first.bias, 1))
    x = gelu(convolved(x, embed.second.weight, embed.second.bias, 2)).transpose(1, 2)
    places = embed.positions(torch.arange(x.shape[1])[None])
    expected = x if places is None else x + places
    given = Signal(sound)
    assert embed.layout(given).time == (time + 1) // 2
    torch.testing.assert_close(embed(given, embed.layout(given)), expected)


@every_case
def test_results_are_independent_of_the_batch(name):
    model, sound = listener(name), frames(11)
    together = model.encode(Signal(sound)).hidden
    for number in range(len(sound)):
        torch.testing.assert_close(model.encode(Signal(sound[number : number + 1])).hidden[0], together[number])


@every_case
def test_gradients_reach_all_parameters(name):
    model, sound = listener(name), frames(16).requires_grad_()
    texts = Rows(torch.tensor([[1, 4, 5]] * len(sound)))
    model.logits(Batch(target=texts, source=Signal(sound))).square().sum().backward()
    assert sound.grad.flatten(1).any(1).all()
    for parameter_name, parameter in model.source_embed.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), parameter_name


@every_case
def test_cost_matches_the_module(name):
    config = parse(FrameEmbed, {"mels": MELS, "positions": POSITIONS.get(name, "none")})
    built, cost = config.build(Common(width=WIDTH), None), config.cost(Common(width=WIDTH), None)
    assert cost.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert cost.flops == 2 * (2 * built.first.weight.numel() + built.second.weight.numel())


def test_wrong_input_shapes_are_refused():
    model = listener("learned")
    with pytest.raises(UserError, match="audio of 4×16 does not match the model's input of 5 mels × frames"):
        model.encode(Signal(torch.zeros(1, 4, 16, dtype=torch.double)))
    model.encode(Signal(frames(16)))
    with pytest.raises(UserError, match="audio of 17 frames exceeds the model's 16 frames; split it"):
        model.encode(Signal(frames(17)))
