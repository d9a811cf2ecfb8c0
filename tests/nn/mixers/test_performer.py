"""What a Performer promises besides its equations (tests/parity): linear time, features that stay, errors that fall.

performer-pytorch, given the same features and with its stabilisers (an ε on features and sums) set to zero, differs
from these layers by rounding; as published it masks padded values but not their weights, which these do.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.performer import Performer, orthogonal_features
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.linear_attention import CHUNK, prefix_sums
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.training.finish import average_weights
from any_part import build


def common(width):
    layer = {"channel": {"kind": "ffn", "hidden": 4}}
    return parse(Model, {"kind": "encoder", "vocab": 5, "width": width, "encoder": [layer]})


def row(time):
    return Context(TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long))))


@pytest.mark.parametrize("time", [1, CHUNK - 1, CHUNK, 100, 3 * CHUNK])
def test_chunked_prefix_sums_match_the_recurrence(time):
    q, k = (torch.rand(2, 3, time, 5, dtype=torch.double, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 3, time, 4, dtype=torch.double, requires_grad=True)
    before = torch.randn(2, 3, 5, 4, dtype=torch.double, requires_grad=True)
    found, after = prefix_sums(q, k, v, before)
    sums, rows = before, []
    for t in range(time):
        sums = sums + k[:, :, t, :, None] * v[:, :, t, None]
        rows.append((q[:, :, t, None] @ sums)[:, :, 0])
    for one, other in [(found, torch.stack(rows, 2)), (after, sums)]:
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    given = [q, k, v, before]
    ours = torch.autograd.grad(found.cos().sum() + after.sin().sum(), given)
    theirs = torch.autograd.grad(torch.stack(rows, 2).cos().sum() + sums.sin().sum(), given)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_prefix_sums_with_products_in_half_precision():
    """As a GPU trains: sums between chunks stay in single precision, outputs and gradients within bf16's rounding."""
    torch.manual_seed(0)
    q, k = (torch.rand(1, 2, 150, 16, requires_grad=True) for _ in range(2))
    v, before = torch.randn(1, 2, 150, 5, requires_grad=True), torch.randn(1, 2, 16, 5, requires_grad=True)
    results = []
    for dtype in (None, torch.bfloat16):
        found, after = prefix_sums(q, k, v, before, dtype)
        assert found.dtype == after.dtype == torch.float32
        assert found.shape == v.shape and after.shape == before.shape
        results.append((found, after, *torch.autograd.grad(found.square().sum() + after.sum(), (q, k, v, before))))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 1e-2 * one.norm()


def test_features_are_orthogonal_with_gaussian_norms():
    torch.manual_seed(0)
    features = orthogonal_features(20, 8).double()
    for block in features.split(8):
        products = block @ block.T
        assert (products - products.diag().diag()).abs().max() < 1e-4
    many = orthogonal_features(8000, 8)
    assert many.square().sum(1).mean().item() == pytest.approx(8, rel=0.05)
    assert (many.T @ many / 8000 - torch.eye(8)).abs().max() < 0.05


def softmax_error(features, draws=6, width=16, time=48):
    """Mean difference from softmax attention with the same weights, relative to what that gives."""
    errors = []
    for seed in range(draws):
        torch.manual_seed(seed)
        module = Performer(heads=1, features=features, sees="around").build(common(width))
        x = torch.randn(1, time, width)
        q, k, v = module.project(x)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        found = module.queries(q) @ module.sum_features(k, v, None)
        found = found[..., :-1] / found[..., -1:]
        errors.append((found - exact).norm() / exact.norm())
    return torch.stack(errors).mean().item()


def test_the_error_against_softmax_falls_as_features_grow():
    errors = [softmax_error(features) for features in (8, 64, 512, 4096)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.15 * errors[0]  # as features^-1/2, or better


def test_causal_equals_bidirectional_for_the_last_token():
    torch.manual_seed(0)
    past = Performer(heads=2, features=9).build(common(8)).double()
    around = Performer(heads=2, features=9, sees="around").build(common(8)).double()
    around.load_state_dict(past.state_dict())
    x = torch.randn(1, 130, 8, dtype=torch.double)
    torch.testing.assert_close(past(x, row(130))[:, -1], around(x, row(130))[:, -1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_large_and_small_keys_are_finite(scale):
    """Features are exponentials: each query and each row of keys is measured by its own largest."""
    torch.manual_seed(0)
    module = Performer(heads=1, features=64).build(common(16))
    x = torch.randn(1, 70, 16) * scale
    found = module(x, row(70))
    found.sum().backward()
    assert found.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


def decoder(**keys):
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": {"kind": "performer", "heads": 2, "features": 6} | keys}
    return {"kind": "decoder", "vocab": 11, "width": 8, "embed": {"positions": "sinusoidal"}, "decoder": [layer]}


def test_a_performer_decodes_in_constant_memory():
    model = build(decoder())
    tokens = torch.randint(1, 11, (1, 400), generator=torch.Generator().manual_seed(0))
    states, sizes, found = model.start(1), [], []
    with torch.no_grad():
        for part in tokens.split([150, 1, 1, 97, 1, 150], 1):
            found.append(model.head(model.advance(Rows(part), states)))
            sizes.append(states.bytes)
        states.trim(400 - MAX_TRIM)
        again = model.head(model.advance(Rows(tokens[:, -MAX_TRIM:]), states))
        expected = model.logits(Batch(Rows(tokens)))
    assert len(set(sizes)) == 1
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(again, expected[:, -MAX_TRIM:], atol=1e-9, rtol=0)


# --- features are kept, or drawn anew ---------------------------------------------------------------------------------


def steps(model, count, optimiser):
    losses = []
    for _ in range(count):
        tokens = torch.randint(1, 11, (3, 9))
        loss = model.logits(Batch(Rows(tokens))).logsumexp(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_draws_the_same_features_at_the_same_steps():
    config = parse(Model, decoder(redraw=3))
    torch.manual_seed(0)
    model = config.build().train()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    mixer = model.decoder.blocks[0].sublayers["mixer"]
    seen = [mixer.features.clone()]
    for _ in range(4):
        steps(model, 1, optimiser)
        seen.append(mixer.features.clone())
    assert [bool((one == other).all()) for one, other in pairwise(seen)] == [True, True, False, True]
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    expected = steps(model, 6, optimiser)
    torch.manual_seed(99)
    resumed = config.build().train()
    resumed.load_state_dict(saved)
    torch.set_rng_state(random)
    assert steps(resumed, 6, torch.optim.SGD(resumed.parameters(), 0.1)) == expected


def test_features_are_redrawn_only_on_schedule_in_training():
    torch.manual_seed(0)
    for keys, mode in [({}, True), ({"redraw": 1}, False)]:
        model = parse(Model, decoder(**keys)).build().train(mode)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.logits(Batch(Rows(torch.tensor([[1, 2, 3]]))))
        assert all((tensor == before[name]).all() for name, tensor in model.state_dict().items())


def test_features_survive_half_precision_and_the_mean_of_checkpoints(tmp_path):
    torch.manual_seed(0)
    models = [parse(Model, decoder()).build() for _ in range(2)]
    checkpoints = []
    for number, model in enumerate(models):
        path = tmp_path / str(number)
        path.mkdir()
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
        checkpoints.append(SimpleNamespace(path=path))
    averaged = average_weights(checkpoints)
    models[0].load_state_dict(averaged)
    first, last = (model.decoder.blocks[0].sublayers["mixer"].features for model in models)
    assert (first == last).all()
    kept = first.clone()
    assert (models[0].bfloat16().decoder.blocks[0].sublayers["mixer"].features == kept).all()


def test_padding_has_no_weight():
    """If padding were only left out of the values, not of the weights, every result would be smaller."""
    torch.manual_seed(0)
    module = Performer(heads=2, features=9, sees="around").build(common(8)).double()
    x = torch.randn(1, 6, 8, dtype=torch.double)
    padded = torch.cat([x, 50 * torch.randn(1, 4, 8, dtype=torch.double)], 1)
    layout = TokenLayout.of(Rows(torch.zeros(1, 10, dtype=torch.long), lengths=torch.tensor([6])))
    torch.testing.assert_close(module(padded, Context(layout))[:, :6], module(x, row(6)), atol=1e-9, rtol=0)
