import math

import pytest

from allyouneed.training import train
from allyouneed.training.optim.schedule import Constant, Cosine, InverseSqrt, Paper, Schedule
from allyouneed.training.reporting.log import read_log
from micro_run import Listener, Make


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


@pytest.mark.parametrize("schedule", [Paper(), InverseSqrt(peak=0.01), Cosine(peak=0.01)])
def test_a_short_run_reaches_the_same_peak(schedule: Schedule):
    """In the middle, however short it is; runs that are long enough warm up as in the paper."""
    peak = schedule.rate(4000, 512, 100_000)
    for total in (1, 2, 7, 300, 7999, 8000, 50_000):
        rates = [schedule.rate(step, 512, total) for step in range(1, total + 1)]
        assert max(rates) == pytest.approx(peak)
        assert rates.index(max(rates)) + 1 == max(1, min(4000, total // 2))


def rates(make: Make) -> list[float]:
    return [entry["rate"] for entry in read_log(make().output / "log.jsonl")]


def test_the_warm_up_is_fixed_when_a_run_starts(make: Make, listener: Listener):
    paper = {"kind": "paper"}
    train(make(steps=4, schedule=paper), console=listener.console)
    assert "warm-up: 2 of 4 steps" in listener.text and "warning" not in listener.text
    train(make(steps=8, schedule=paper), console=listener.console)
    fixed = Paper().with_warmup(2, 16)
    assert rates(make) == [fixed.rate(step, 16, 8) for step in range(1, 9)]


def test_a_warm_up_longer_than_the_run_is_warned_of(make: Make, listener: Listener):
    train(make(steps=1, schedule={"kind": "paper", "warmup": 50}), console=listener.console)
    assert "warning: schedule.warmup: 50 of 1 steps, so the rate hardly reaches its peak" in listener.text


def test_a_run_of_an_earlier_version_keeps_its_warm_up(make: Make):
    """It recorded the default of then as if it had been set."""
    train(make(steps=2, schedule={"kind": "paper", "warmup": 4000}))
    train(make(steps=4, schedule={"kind": "paper"}))
    train(make(steps=5, schedule={"kind": "paper"}))
    assert rates(make) == [Paper(warmup=4000).rate(step, 16, 5) for step in range(1, 6)]
