import copy

import pytest
import torch
from torch import nn

from allyouneed.training.optim.optimiser import (
    Adam,
    apply_update,
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
