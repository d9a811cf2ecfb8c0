import copy

import pytest
import torch
from torch import nn

from allyouneed.config import parse, preset_tree
from allyouneed.nn.models.base import Model
from allyouneed.training.optim.optimiser import (
    EMA,
    Adam,
    apply_update,
    averaged_weights,
    blocks_above,
    gradient_norm,
    groups,
    load_state_tensors,
    state_tensors,
)

GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 37), nn.LayerNorm(37), nn.Linear(37, 53), nn.Linear(53, 3))


def step(model: nn.Module, optimiser: torch.optim.Optimizer, seed: int, clip: float | None = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimiser.zero_grad()
    tokens = torch.randint(0, 11, (5, 4), generator=generator)
    model(tokens).square().sum().backward()
    apply_update(optimiser, 0.01, gradient_norm(model.parameters()), clip, GOOD)


def test_only_matrices_that_multiply_decay():
    model = net()
    decaying, others = groups(model, 0.1)
    assert [tuple(p.shape) for p in decaying["params"]] == [(53, 37), (3, 53)]
    assert decaying["weight_decay"] == 0.1 and others["weight_decay"] == 0
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_clipping_is_by_the_global_norm():
    model = net()
    reference = copy.deepcopy(model)
    ours, theirs = Adam().build(model), torch.optim.Adam(reference.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for seed in range(3):
        step(model, ours, seed, clip=0.5)
        theirs.zero_grad()
        reference(torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_updates_are_deterministic_and_resume_from_saved_state(threads: int):
    torch.set_num_threads(threads)
    straight = net()
    optimiser = Adam(weight_decay=0.1).build(straight)
    for seed in range(6):
        step(straight, optimiser, seed)
    stopped = net()
    optimiser = Adam(weight_decay=0.1).build(stopped)
    for seed in range(3):
        step(stopped, optimiser, seed)
    resumed = copy.deepcopy(stopped)
    saved = state_tensors(optimiser, stopped)
    optimiser = Adam(weight_decay=0.1).build(resumed)
    load_state_tensors(optimiser, resumed, saved)
    for seed in range(3, 6):
        step(resumed, optimiser, seed)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_bad_update_changes_nothing_at_all():
    model = net()
    optimiser = Adam().build(model)
    step(model, optimiser, 0)
    weights = [p.detach().clone() for p in model.parameters()]
    state = {name: tensor.clone() for name, tensor in state_tensors(optimiser, model).items()}
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(float("nan"))
    apply_update(optimiser, 0.01, gradient_norm(model.parameters()), 1.0, BAD)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    after = state_tensors(optimiser, model)
    assert state.keys() == after.keys() and all(torch.equal(state[name], after[name]) for name in state)


def test_a_moving_average_follows_the_weights_from_the_first_update_on():
    model = net()
    optimiser, means = Adam(ema=0.9).build(model), []
    for seed in range(4):
        step(model, optimiser, seed)
        weights = [p.detach().clone() for p in model.parameters()]
        means = [0.9 * m + 0.1 * w for m, w in zip(means, weights, strict=True)] if means else weights
    with averaged_weights(optimiser):
        torch.testing.assert_close(list(model.parameters()), means, check_stride=False, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)), "and back"
    assert any(name.startswith(f"{EMA}/") for name in state_tensors(optimiser, model)), "it is saved"


def test_a_moving_average_changes_no_update_and_no_average_is_the_default():
    one, other = net(), net()
    optimisers = Adam(ema=0.5).build(one), Adam().build(other)
    for seed in range(3):
        for model, optimiser in zip((one, other), optimisers, strict=True):
            step(model, optimiser, seed)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    with averaged_weights(optimisers[1]):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_lower_blocks_learn_more_slowly_with_layer_decay():
    """ELECTRA, appendix B: the rate of a block is that of the one above it times the decay; the head learns fully."""
    model = parse(Model, preset_tree("clip-tiny")).build()
    above = blocks_above(model)
    assert above["log_scale"] == above["image.head.project.weight"] == 0
    norm = "encoder.blocks.{}.wiring.norms.0.weight".format
    assert above[f"image.{norm(5)}"] == above[f"text.{norm(3)}"] == 1
    assert above[f"image.{norm(0)}"] == 6 and above["image.embed.project.weight"] == 7
    assert above["text.embed.tokens.weight"] == 5
    optimiser = Adam(layer_decay=0.5).build(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    apply_update(optimiser, 0.01, torch.tensor(1.0), None, GOOD)
    for name, p in model.named_parameters():
        moved = (before[name] - p.detach()).abs().mean().item()
        assert moved == pytest.approx(0.01 * 0.5 ** above[name], rel=1e-3), name
