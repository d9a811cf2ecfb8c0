"""Every token mixer is a matrix that gives its own output back; what is not linear says so."""

import pytest
import torch

from allyouneed.apps.inspect.inside import inside
from allyouneed.errors import UserError
from allyouneed.nn.batch import Rows
from inside_models import first_row, small, unlike_presets

BY_UNITS = ("retnet-1.3b", "performer", "linformer-base", "infini", "flash", "mamba-130m", "mamba2-130m", "s4")
NOT_LINEAR = {"convs2s", "evolved-transformer", "rnnsearch"}


def matrices(name, every=False):
    model, batch = small(name)
    run = inside(model, first_row(batch))
    chosen = run.mixers if every else dict.fromkeys((run.mixers[0], run.mixers[-1]))
    return run, {site: run.matrix(site) for site in chosen}


@pytest.mark.parametrize("name", unlike_presets("mixer", "cross"))
def test_the_matrix_of_every_mixer_gives_its_output_back(name):
    run, found = matrices(name, every=name in NOT_LINEAR)
    for site, mixing in found.items():
        assert mixing.weights.dim() == 3 and bool(mixing.weights.isfinite().all())
        assert (mixing.residual is None) == (mixing.how == "jacobian")
        assert mixing.residual is None or mixing.residual < 1e-5, site
    if name in NOT_LINEAR:
        assert "jacobian" in {mixing.how for mixing in found.values()}
    shares = run.rollout.values() if name in ("transformer-tiny", "lite-transformer", "yoco-3b") else ()
    for stack in shares:
        assert torch.allclose(sum(share.sum(-1) for share in stack.values()), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("name", BY_UNITS)
def test_matrices_of_linear_mixers_are_found_by_unit_values(name):
    _, found = matrices(name)
    assert {mixing.how for mixing in found.values()} == {"unit values"}


def test_a_retention_matrix_is_its_formula_and_decays_as_it_says():
    run, found = matrices("retnet-1.3b")
    site, mixing = next(iter(found.items()))
    q, k = run[f"{site}.q"][0], run[f"{site}.k"][0]
    gamma = 1 - 2.0 ** (-5 - torch.arange(len(q)))
    assert mixing.half_life == pytest.approx((torch.log(torch.tensor(0.5)) / gamma.log()).tolist(), rel=1e-3)
    time = torch.arange(q.shape[1])
    distance = (time[:, None] - time).clamp(min=0)
    scores = (q @ k.transpose(-1, -2)) * gamma[:, None, None] ** distance
    ratio = (mixing.weights / scores)[:, time[:, None] >= time]
    rows = [(mixing.weights[:, n, : n + 1] / scores[:, n, : n + 1]) for n in time]
    assert bool((ratio > 0).all())  # the normaliser is positive
    assert all(torch.allclose(row, row[:, :1].expand_as(row), rtol=1e-2) for row in rows)  # and one per query
    assert float(mixing.weights.triu(1).abs().max()) == 0


def test_a_jacobian_is_that_of_autograd():
    model, _ = small("rnnsearch")
    run = inside(model, Rows.of([[5, 6, 7, 8]]), [[1, 2]])
    mixing = run.matrix("encoder.0.mixer")
    call = run.recorder.calls["encoder.0.mixer"]
    exact = torch.autograd.functional.jacobian(lambda x: call.part(x, context=call.context)[0], call.x)[:, :, 0]
    norms = exact.square().sum((1, 3)).sqrt()  # (queries, keys)
    assert mixing.how == "jacobian" and not mixing.sampled
    assert torch.allclose(mixing.weights[0], norms, rtol=1e-3, atol=1e-6)


def test_an_unknown_mixer_or_head_is_refused():
    run, _ = matrices("gpt2")
    with pytest.raises(UserError, match=r"'decoder.9.mixer': no token mixer .*decoder.0.mixer"):
        run.matrix("decoder.9.mixer")
    with pytest.raises(UserError, match="head 7: expected 0 to 3"):
        run.matrix("decoder.0.mixer", [7])
