"""As many threads as are fast; passes of several callers at once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from allyouneed.kernels.cpu import build as native
from allyouneed.runtime.cpu.executor import cpu_executor
from allyouneed.runtime.cpu.threads import LATE, SOON, TRIES, ThreadCount
from native_models import STARTS, decode, language_model


def run_passes(threads: ThreadCount, passes: int, seconds: dict[int, float]) -> Counter[int]:
    used: Counter[int] = Counter()
    for _ in range(passes):
        count = threads.current
        used[count] += 1
        threads.record(count, seconds[count])
    return used


def test_all_threads_are_used_where_they_are_faster() -> None:
    used = run_passes(ThreadCount(4), 10_000, {4: 1.0, 1: 1.5})
    assert used[4] > 9_000


def test_one_thread_is_used_where_several_slow_each_other_down() -> None:
    """The slower choice is tried rarely."""
    for seconds in (50.0, 1.1):
        assert run_passes(ThreadCount(4), 10_000, {4: seconds, 1: 1.0})[4] < 10


def test_the_thread_count_follows_the_load_of_the_machine() -> None:
    threads = ThreadCount(2)
    assert run_passes(threads, 1_000, {2: 1.0, 1: 1.5})[2] > 900
    assert run_passes(threads, 10_000, {2: 20.0, 1: 1.5})[2] < 20
    run_passes(threads, LATE, {2: 1.0, 1: 1.5})
    assert run_passes(threads, 1_000, {2: 1.0, 1: 1.5})[2] > 900


def test_one_stalled_pass_changes_nothing_and_two_go_back_to_one_thread() -> None:
    for passes in ([1.0, 1.0, 1.0, 1.4, 30.0], [30.0, 1.0], [1.0, 30.0]):
        threads = ThreadCount(2)
        run_passes(threads, TRIES, {1: 1.5})
        for seconds in passes:
            assert threads.current == 2
            threads.record(2, seconds)
        assert run_passes(threads, 20, {2: 1.0}) == {2: 20}
        threads.record(2, 30.0)
        assert threads.current == 1 and threads.left == SOON


@pytest.mark.parametrize(("stall", "every", "kept"), [(30.0, 70, True), (5.0, 25, True), (20.0, 20, False)])
def test_stalls_that_cost_less_than_threads_gain_are_tolerated(stall: float, every: int, kept: bool) -> None:
    """One in every trial in any case."""
    threads, used = ThreadCount(2), Counter[int]()
    for number in range(3_000):
        count = threads.current
        used[count] += 1
        threads.record(count, {1: 1.5, 2: stall if number % every == 4 else 1.0}[count])
    assert used[2] > 2_700 if kept else used[2] < 300


def test_all_threads_are_tried_again_after_stalls() -> None:
    """And the first slow pass ends the next trial."""
    threads = ThreadCount(2)
    run_passes(threads, TRIES, {1: 1.5})
    run_passes(threads, 2, {2: 30.0})
    assert run_passes(threads, SOON, {1: 1.5}) == {1: SOON} and threads.current == 2
    threads.record(2, 30.0)
    assert threads.current == 1 and threads.left == 2 * SOON


def test_a_limit_of_one_thread_is_kept() -> None:
    assert run_passes(ThreadCount(1), 100, {1: 1.0}) == {1: 100}


def test_concurrent_callers_get_the_numbers_of_a_single_one() -> None:
    """They share the threads of the interpreter: one uses them, the others compute alone meanwhile."""
    native.wait_for_build()
    models = [language_model() for _ in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def text(model: object) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [step for _ in range(5) for step in decode(cpu_executor(model), 3, STARTS)]

    try:
        alone = text(models[0])
        with ThreadPoolExecutor(3) as callers:
            for found in callers.map(text, models):
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))
    finally:
        torch.set_num_threads(before)
