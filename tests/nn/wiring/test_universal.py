"""Recurrence in depth: coordinates, and tokens that halt. Numbers: parity/test_universal_against_oracle.py."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.init import Init
from allyouneed.nn.models.base import STACKS, Model
from allyouneed.nn.positions.absolute import NoPositions, Sinusoidal
from allyouneed.nn.wiring.universal import ACT, Recurrence
from any_part import WIDTH, build, plain, reference_logits, tree


def universal(**keys):
    given = tree()
    return given | {side: [given[side][0] | {"repeat": 6, "share": True, "halt": "act"} | keys] for side in STACKS}


def halting(p, ponder=0.01, result="blend"):
    """A unit that returns p for any input."""
    unit = ACT(ponder=ponder, result=result).build(1).double()
    with torch.no_grad():
        unit.unit.weight.zero_()
        unit.bias.fill_(torch.tensor(p, dtype=torch.double).logit())
    return unit


def run(unit, steps=5, rows=None, whole=False, losses=None):
    """Step n turns everything into 10^n, so that digits are weights."""
    rows = rows or Rows.of([[1]])
    calls = []

    def step(number, x):
        calls.append(number)
        return torch.full_like(x, 10.0**number)

    context = Context(TokenLayout.of(rows), losses=losses)
    x = torch.zeros(*rows.tokens.shape, 1, dtype=torch.double)
    made = [lambda x, n=n: step(n, x) for n in range(steps)]
    return unit(x, lambda x, number: x, made, context, whole), len(calls)


@pytest.mark.parametrize("whole", [False, True])
def test_halting_weights_are_probabilities_then_the_remainder(whole):
    found, calls = run(halting(0.4, result="sum"), whole=whole)
    torch.testing.assert_close(found, torch.full_like(found, 0.4 + 4 + 20))
    assert calls == (5 if whole else 3)
    found, _ = run(halting(0.4), whole=whole)
    torch.testing.assert_close(found, torch.full_like(found, (0.4 * 0.6 + 4) * 0.8 + 20))


def test_tokens_that_never_halt_use_every_step():
    found, calls = run(halting(0.1, result="sum"), steps=3)
    torch.testing.assert_close(found, torch.full_like(found, 0.1 + 1 + 80))
    found, _ = run(halting(0.1), steps=3)
    torch.testing.assert_close(found, torch.full_like(found, (0.1 * 0.9 + 1) * 0.9 + 10))
    assert calls == 3


def test_ponder_cost_is_a_mean_over_real_tokens():
    for rows in (Rows.of([[1]]), Rows.of([[1, 2, 3], [4]]), Rows.of([[1, 2, 3], [4]], side="left")):
        losses = []
        run(halting(0.4, ponder=0.5).train(), rows=rows, losses=losses)
        torch.testing.assert_close(torch.stack(losses), torch.tensor([0.5 * (3 + 0.2)], dtype=torch.double))
    for unit in (halting(0.4).eval(), halting(0.4, ponder=0.0).train()):
        losses = []
        run(unit, losses=losses)
        assert not losses


def test_padding_never_runs():
    """A unit that halts at once for tokens and never for padding."""
    unit = halting(0.999)
    rows = Rows.of([[1, 2, 3], [4]])

    def locate(x, number):
        return x - 100.0 * (torch.tensor([[0, 0, 0], [0, 1, 1]])[..., None])

    with torch.no_grad():
        unit.unit.weight.fill_(1.0)
    calls = []
    steps = [lambda x, n=n: calls.append(n) or x for n in range(4)]
    unit(torch.zeros(2, 3, 1, dtype=torch.double), locate, steps, Context(TokenLayout.of(rows)), False)
    assert calls == [0]


def test_coordinates_encode_positions_and_steps():
    recurrence = Recurrence(Sinusoidal(), None, 4)
    rows = Rows(torch.zeros(1, 6, dtype=torch.long), segments=torch.tensor([[1, 1, 2, 2, 2, 0]]))
    seen = []
    recurrence(torch.zeros(1, 6, 4), [lambda x: seen.append(x) or x * 0] * 3, Context(TokenLayout.of(rows)), False)
    table = Sinusoidal().build(4)(torch.arange(6))
    for step, x in enumerate(seen):
        torch.testing.assert_close(x[0], table[torch.tensor([0, 1, 0, 1, 2, 0])] + table[step])
    nowhere = Recurrence(NoPositions(), None, 4)
    assert not nowhere(torch.zeros(1, 6, 4), [lambda x: x] * 3, Context(TokenLayout.of(rows)), False).any()


def test_stopping_early_does_not_change_results(monkeypatch):
    model = build(universal(coordinates="sinusoidal"), seed=1)
    counts = []
    block = model.encoder.blocks[0]
    monkeypatch.setattr(block, "forward", lambda *a, f=block.forward, **k: counts.append(1) or f(*a, **k))
    early = [reference_logits(model, ([1, 2, token], [4, 5, 6])) for token in range(1, 9)]
    assert len(counts) < 8 * 6, "no sentence stopped early: nothing is tested"
    for found, token in zip(early, range(1, 9), strict=True):
        batch = Batch(Rows.of([[4, 5, 6]]), Rows.of([[1, 2, token]]))
        assert len(model.attention(batch, "encoder")) == 6  # watched, it takes all steps
        with torch.no_grad():
            states = model.start(batch.source)
            torch.testing.assert_close(model.head(model.advance(batch.target, states))[0], found)


@pytest.mark.parametrize("init", Init.registry)
def test_the_bias_of_the_halting_unit_survives_every_init(init):
    torch.manual_seed(0)
    keys = universal(halt={"kind": "act", "bias": -2.5}) | {"init": plain(Init.registry[init]).model_dump()}
    model = parse(Model, keys).build()
    for stack in (model.encoder, model.decoder):
        unit = stack.recurrences["0"].halting
        assert unit.bias.tolist() == [-2.5] and 0 < unit.unit.weight.abs().max() < 3


def test_gradients_reach_the_halting_unit():
    model = build(universal()).train()
    losses = []
    model(Batch(Rows.of([[4, 5, 6]]), Rows.of([[1, 2]])), losses).sum().backward()
    assert len(losses) == 2
    for stack in (model.encoder, model.decoder):
        assert stack.recurrences["0"].halting.unit.weight.grad.abs().max() > 1e-6


def test_half_precision_runs():
    model = build(universal(coordinates="sinusoidal")).to(torch.bfloat16)
    assert model.logits(Batch(Rows.of([[4, 5, 6]]), Rows.of([[1, 2]]))).isfinite().all()


def test_cost_of_the_recurrence():
    given, universals = parse(Model, tree()), parse(Model, universal(coordinates="sinusoidal"))
    shared = [layer.model_copy(update={"repeat": 6, "share": True}) for layer in given.encoder]
    block = shared[0].cost(given, 7)
    found = universals.encoder[0].cost(universals, 7)
    assert found.parameters == block.parameters + WIDTH + 1
    assert found.flops == block.flops + 6 * 2 * WIDTH


@pytest.mark.parametrize("keys", [{"halt": "act"}, {"halt": None, "coordinates": "sinusoidal"}])
def test_a_stream_of_two_tensors_is_refused(keys):
    with pytest.raises(ConfigError, match=r"encoder\[0\]\.wiring: coordinates and halt work on one stream of tokens"):
        parse(Model, universal(wiring="resi-dual", **keys))


def test_coordinates_with_a_limit_are_refused():
    with pytest.raises(ConfigError, match=r"decoder\[0\]\.coordinates: .* sinusoidal has none"):
        parse(Model, universal(coordinates={"kind": "learned", "length": 9}))


def test_invalid_halting_configs_are_refused():
    with pytest.raises(ConfigError, match=r"encoder\[0\]\.halt\.kind: unknown halting 'atc'; did you mean 'act'\?"):
        parse(Model, universal(halt="atc"))
    with pytest.raises(ConfigError, match=r"halt\.threshold"):
        parse(Model, universal(halt={"kind": "act", "threshold": 1.0}))
