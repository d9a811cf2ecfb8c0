import numpy as np
import pytest

from allyouneed import model_config
from allyouneed.errors import UserError
from allyouneed.lab.flops import counted_by_torch, training_lines
from allyouneed.lab.scaling import Ladder, Rung, ScalingLaw, budget_rows, fit, page, text, undetermined, widths_of

TRUE = ScalingLaw(400.0, 400.0, 1.7, 0.34, 0.28)
SIZES, TOKENS = np.geomspace(1e5, 3e6, 5), np.geomspace(1e6, 3e7, 4)


def points(noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    return [(n, d, TRUE.loss(n, d) * float(np.exp(generator.normal(0, noise)))) for n in SIZES for d in TOKENS]


def test_runs_that_follow_a_law_give_it_back():
    found = fit(points(), resamples=2)
    assert found.residual < 1e-4
    assert (found.law.alpha, found.law.beta, found.law.e) == pytest.approx((0.34, 0.28, 1.7), rel=0.02)


def test_the_best_size_for_a_budget_has_the_lowest_loss():
    best = TRUE.best_size(1e15)
    losses = [TRUE.loss(size, 1e15 / (6 * size)) for size in (best, best * 1.1, best / 1.1)]
    assert min(losses) == losses[0]


def test_intervals_of_the_best_size_cover_the_true_one():
    covered = 0
    for seed in range(8):
        low, high = fit(points(0.003, seed), resamples=60).interval(lambda law: law.best_size(1e13))
        covered += low <= TRUE.best_size(1e13) <= high
    assert covered >= 6


def test_runs_that_do_not_determine_the_law_are_said_to_be_inconclusive():
    assert not undetermined(fit(points(0.001), resamples=40))
    wild = fit(points(0.1, seed=1), resamples=40)
    assert any("inconclusive" in line for line in undetermined(wild))
    for found, rows in ((fit(points(0.001), resamples=40), 1), (wild, 0)):
        ladder = Ladder("a", [Rung(10**5, 10**6, 3.0, 1e12, "width 8", 1e-3)], found, undetermined(found), (1e12,))
        assert len(budget_rows(ladder)) == rows
        assert ("Inconclusive" in page(ladder, "allyouneed scaling <a>")) == (not rows) == ("1e+12" not in text(ladder))


def test_too_few_runs_are_refused():
    with pytest.raises(UserError, match=r"at least 6"):
        fit(points()[:4])
    with pytest.raises(UserError, match="several sizes"):
        fit([(1e5, d, 3.0) for d in range(1, 9)])


def test_rungs_grow_by_the_same_factor():
    assert widths_of(32, 4) == (32, 48, 64, 88)


@pytest.mark.parametrize("name", ["gpt2", "retnet-1.3b", "rwkv-4-169m"])
def test_the_parts_count_what_torch_counts(name):
    """Torch counts the whole square of causal attention, of which the parts count the half that is needed."""
    config = model_config(name)
    parts = 3 * config.cost(256).flops
    assert counted_by_torch(config, 256) / parts == pytest.approx(1, abs=0.05)


def test_what_training_costs_is_said_for_a_named_device():
    lines = "\n".join(training_lines(model_config("gpt2"), 1024, 1e9, "a100", price=2.0))
    assert "6·N·D        7.466e+17" in lines and "one a100" in lines and "2 an hour" in lines
    with pytest.raises(UserError, match="known: h200"):
        list(training_lines(model_config("gpt2"), 1024, device="abacus"))
