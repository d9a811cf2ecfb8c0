import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from allyouneed.errors import UserError
from allyouneed.lab.store import ResultStore, plain

EXPERIMENTS = [{"model": name, "seed": seed} for name in ("a", "b") for seed in range(3)]


def runner(log, experiment, wait=0.0):
    with Path(log).open("a") as file:
        file.write(f"{experiment['model']}{experiment['seed']} {os.getpid()}\n")
    time.sleep(wait)
    return {"loss": 1 / (3 + experiment["seed"])}


def lines(log):
    return [line.split() for line in log.read_text().splitlines()]


def test_a_finished_experiment_is_not_run_again(tmp_path):
    log, store = tmp_path / "log", ResultStore(tmp_path / "results")
    first = store.run(EXPERIMENTS[:4], partial(runner, log))
    again = ResultStore(tmp_path / "results").run(EXPERIMENTS, partial(runner, log))
    assert [name for name, _ in lines(log)] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert again[:4] == first


def test_results_come_in_the_order_of_the_experiments(tmp_path):
    store = ResultStore(tmp_path)
    store.run(EXPERIMENTS[::-1], partial(runner, tmp_path / "log"))
    assert [one["loss"] for one in store.run(EXPERIMENTS, None)] == [1 / 3, 1 / 4, 1 / 5] * 2


def test_an_experiment_is_known_by_its_content_not_by_the_order_of_its_keys(tmp_path):
    store = ResultStore(tmp_path)
    store.put({"model": {"width": 8, "kind": "decoder"}, "rate": 0.001}, {"loss": 1.0})
    assert store.get({"rate": 0.001, "model": {"kind": "decoder", "width": 8}}) == {"loss": 1.0}
    assert store.get({"rate": 0.001, "model": {"kind": "decoder", "width": 16}}) is None


def test_what_another_process_runs_is_waited_for(tmp_path):
    store, one = ResultStore(tmp_path / "results"), EXPERIMENTS[0]
    with store.claim(one) as mine, store.claim(one) as second:
        assert mine and not second
    with store.claim(one) as mine:
        assert mine


@pytest.mark.slow
def test_processes_share_the_work_and_none_is_done_twice(tmp_path):
    log = tmp_path / "log"
    found = ResultStore(tmp_path / "results").run(EXPERIMENTS, partial(runner, log, wait=0.5), processes=2)
    assert [one["loss"] for one in found] == [1 / 3, 1 / 4, 1 / 5] * 2
    assert sorted(name for name, _ in lines(log)) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_an_experiment_of_a_killed_process_is_free_again(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from allyouneed.lab.store import ResultStore\n"
        f"with ResultStore(Path({str(tmp_path)!r})).claim({EXPERIMENTS[0]!r}) as mine:\n"
        "    print(mine, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "True"
        with ResultStore(tmp_path).claim(EXPERIMENTS[0]) as mine:
            assert not mine
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with ResultStore(tmp_path).claim(EXPERIMENTS[0]) as mine:
        assert mine


def test_a_damaged_result_is_named(tmp_path):
    store = ResultStore(tmp_path)
    store.put(EXPERIMENTS[0], {"loss": 1.0})
    path = store.path(EXPERIMENTS[0])
    assert json.loads(path.read_text())["experiment"] == EXPERIMENTS[0]
    path.write_text("{")
    with pytest.raises(UserError, match=f"{path.name}.*delete it"):
        store.get(EXPERIMENTS[0])


def test_a_result_that_is_not_finite_is_not_stored():
    with pytest.raises(ValueError, match="not finite"):
        plain({"loss": float("nan")})
    assert plain({"losses": (1, 2)}) == {"losses": [1, 2]}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        ResultStore(tmp_path / "file" / "results")
