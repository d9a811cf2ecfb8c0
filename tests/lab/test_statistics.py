import math

import numpy as np
import pytest

from allyouneed.errors import UserError
from allyouneed.lab.statistics import Control, difference, interval, require_controls, student, verdict


def results(generator, seeds, examples, mean, of_seeds=0.05, of_examples=0.5, shared=None):
    """Skewed losses: an example is as hard for every seed, a seed is as lucky for every example."""
    hard = generator.gamma(2.0, of_examples, examples) - 2 * of_examples if shared is None else shared
    lucky = generator.normal(0, of_seeds, (seeds, 1))
    return mean + hard + lucky + generator.normal(0, 0.1, (seeds, examples))


@pytest.mark.parametrize(("seeds", "of_seeds"), [(1, 0.0), (3, 0.0), (3, 0.02), (3, 0.3), (8, 0.1)])
def test_intervals_cover_the_true_mean_as_often_as_they_say(seeds, of_seeds):
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        found = interval(results(generator, seeds, 80, 2.0, of_seeds))
        covered += found.low <= 2.0 <= found.high
    assert 0.92 <= covered / 300 <= 0.99


def test_an_interval_from_one_seed_covers_too_seldom_where_seeds_differ():
    generator = np.random.default_rng(0)
    found = [interval(results(generator, 1, 80, 2.0, of_seeds=0.3)) for _ in range(200)]
    assert np.mean([one.low <= 2.0 <= one.high for one in found]) < 0.7


def test_intervals_of_differences_cover_the_true_difference():
    generator, covered = np.random.default_rng(1), 0
    for _ in range(300):
        hard = generator.gamma(2.0, 0.5, 60)
        one, other = (results(generator, 3, 60, mean, shared=hard) for mean in (2.1, 2.0))
        found = difference(one, other)
        covered += found.low <= 0.1 <= found.high
    assert 0.92 <= covered / 300 <= 0.99


def test_equal_models_are_seldom_told_apart():
    generator = np.random.default_rng(2)
    found = [verdict(difference(results(generator, 3, 60, 2.0), results(generator, 3, 60, 2.0))) for _ in range(300)]
    assert sum(one != "inconclusive" for one in found) <= 0.08 * 300


def test_pairing_over_examples_narrows_the_interval():
    generator = np.random.default_rng(3)
    hard = generator.gamma(2.0, 0.5, 200)
    one, other = (results(generator, 3, 200, mean, of_seeds=0.001, shared=hard) for mean in (2.1, 2.0))
    paired = difference(one, other)
    shuffled = difference(one, other[:, generator.permutation(200)])
    assert verdict(paired) == "higher" and verdict(difference(other, one)) == "lower"
    assert paired.width < shuffled.width / 3


def test_a_difference_smaller_than_the_margin_is_inconclusive():
    found = difference(np.full((3, 10), 2.01), np.full((3, 10), 2.0))
    assert verdict(found) == "higher"
    assert verdict(found, margin=0.05) == "inconclusive"


def test_weights_make_the_mean_that_of_tokens():
    figures, tokens = [[1.0, 3.0]], [30, 10]
    assert interval(figures, tokens).mean == 1.5
    generator = np.random.default_rng(4)
    table, weights = generator.normal(size=(2, 50)), generator.integers(1, 9, 50)
    repeated = np.repeat(table, weights, axis=1)  # an example of three tokens counts as three
    assert interval(table, weights).mean == pytest.approx(interval(repeated).mean)


def test_the_same_results_give_the_same_interval():
    table = np.random.default_rng(5).normal(size=(3, 40))
    assert interval(table) == interval(table)
    assert interval(table) != interval(table, seed=1)


def test_results_that_are_not_paired_or_not_finite_are_refused():
    with pytest.raises(ValueError, match="not paired"):
        difference(np.zeros((3, 4)), np.zeros((3, 5)))
    with pytest.raises(ValueError, match="diverged"):
        interval([[1.0, math.nan]])
    with pytest.raises(ValueError, match="weights"):
        interval([[1.0, 2.0]], [1.0])
    with pytest.raises(ValueError, match="shape"):
        interval(np.zeros((0, 3)))


@pytest.mark.parametrize(
    ("freedom", "level", "expected"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (4, 0.95, 2.776), (7, 0.95, 2.365), (30, 0.95, 2.042), (2, 0.99, 9.925)],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom, level, expected):
    assert student(freedom, level) == pytest.approx(expected, abs=1e-3)


def test_results_are_not_shown_beside_a_control_that_does_not_land():
    good = Control("LSTM on parity", 1.0, low=0.99)
    require_controls([good])
    with pytest.raises(UserError, match=r"1 of 2 controls.*\n  no mixing: 0.8, expected at most 0.6"):
        require_controls([good, Control("no mixing", 0.8, high=0.6)])
    with pytest.raises(UserError, match=r"expected 0\.4 to 0\.6"):
        require_controls([Control("chance", math.nan, 0.4, 0.6)])
