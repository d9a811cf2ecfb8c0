import math

import pytest

from allyouneed.train.schedule import Constant, Cosine, InverseSqrt, Paper


def test_the_papers_schedule_is_equation_3():
    rate = Paper().rate
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        assert rate(step, 512, 0) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-12)
    assert max(range(1, 20_000), key=lambda step: rate(step, 512, 0)) == 4000


def test_inverse_sqrt_is_the_same_curve_by_its_peak():
    paper, peak = Paper(warmup=100), Paper(warmup=100).rate(100, 64, 0)
    for step in (1, 50, 100, 1000):
        assert InverseSqrt(peak=peak, warmup=100).rate(step, 1, 0) == pytest.approx(paper.rate(step, 64, 0))


def test_cosine_rises_to_its_peak_and_ends_on_its_floor():
    cosine = Cosine(peak=1.0, warmup=10, floor=0.1)
    assert cosine.rate(5, 1, 110) == 0.5
    assert cosine.rate(10, 1, 110) == 1.0
    assert cosine.rate(60, 1, 110) == pytest.approx(0.55)
    assert cosine.rate(110, 1, 110) == pytest.approx(0.1)
    assert cosine.rate(500, 1, 110) == pytest.approx(0.1)
    assert math.isfinite(Cosine(peak=1.0, warmup=10).rate(10, 1, 10))


def test_constant_is_level_after_warmup():
    assert [Constant(peak=2.0, warmup=4).rate(n, 1, 0) for n in (1, 4, 99)] == [0.5, 2.0, 2.0]
    assert Constant(peak=2.0).rate(1, 1, 0) == 2.0
