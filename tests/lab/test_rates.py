import math

import pytest

from allyouneed.lab.rates import RateCurve, RateRule, grid, sweep


def bowl(best, diverges=math.inf):
    """Losses over rates with a minimum at `best`; from `diverges` on there are none."""
    return lambda rate: None if rate >= diverges else 2 + 0.1 * math.log10(rate / best) ** 2


def swept(losses, rule=None):
    rounds = []

    def train(wanted):
        rounds.append(wanted)
        return {(name, rate): losses[name](rate) for name, rate in wanted}

    return sweep(list(losses), train, rule), rounds


def test_every_model_is_trained_at_the_same_rates_first():
    curves, rounds = swept({"a": bowl(3e-3), "b": bowl(1e-2)})
    assert rounds[0] == [(name, rate) for name in ("a", "b") for rate in (1e-3, 3.2e-3, 1e-2)]
    assert curves["a"].best == 3.2e-3


def test_the_grid_grows_on_the_side_of_a_best_rate_at_its_edge():
    curves, rounds = swept({"a": bowl(3e-3), "b": bowl(2e-2)})
    assert rounds[1] == [("b", 3.2e-2)] and len(rounds) == 2 + (curves["b"].best == 3.2e-2)
    assert not curves["b"].at_edge and not curves["b"].warnings()


def test_a_best_rate_at_the_edge_of_the_largest_grid_is_reported():
    curves, rounds = swept({"a": bowl(1e3), "b": bowl(1e-9)})
    assert len(rounds) == 3
    assert curves["a"].best == RateRule().bounds[1] and curves["b"].best == RateRule().bounds[0]
    assert "highest" in curves["a"].warnings()[0] and "lowest" in curves["b"].warnings()[0]


def test_a_diverged_rate_bounds_the_sweep_and_is_never_the_best():
    curves, rounds = swept({"a": bowl(1.0, diverges=5e-3)})
    assert curves["a"].best == 3.2e-3 and curves["a"].diverged == (1e-2,)
    assert len(rounds) == 1 and not curves["a"].at_edge


def test_lower_rates_are_tried_where_all_diverge():
    curves, rounds = swept({"a": bowl(1e-4, diverges=5e-4), "b": lambda rate: None})
    assert curves["a"].best == 1e-4 and curves["a"].at_edge  # the lowest that may be tried
    assert curves["b"].best is None and "every rate" in curves["b"].warnings()[0]
    assert len(rounds) == 3


def test_the_width_of_the_valley_is_that_of_neighbours_as_good_as_the_best():
    curve = RateCurve({1e-4: 2.01, 1e-3: 2.5, 3e-3: 2.02, 1e-2: 2.0, 3e-2: None})
    assert curve.width == pytest.approx(1e-2 / 3e-3)  # not over the hill, nor over a divergence
    assert RateCurve({1e-3: None}).width == 0


def test_grids_are_rounded_and_the_same_everywhere():
    assert grid(1e-4, 1e-2) == (1e-4, 3.2e-4, 1e-3, 3.2e-3, 1e-2)
    assert RateRule().bounds == (1e-4, 1e-1)
