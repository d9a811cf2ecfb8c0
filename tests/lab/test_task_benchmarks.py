"""bench/tasks: the table of experiments on public data, and the page of their results."""

import argparse
import json
from pathlib import Path

import pytest

from allyouneed.config import parse
from allyouneed.training.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def given(folder, **changes):
    settings = {"data": folder, "weights": folder, "output": folder / "runs", "device": "cpu", "tiny": False}
    return argparse.Namespace(**settings | {"results": folder / "tasks.json", "minutes": None, "together": 2} | changes)


@pytest.mark.parametrize("tiny", [False, True])
def test_every_experiment_is_a_valid_recipe_with_metrics_of_its_task(tiny, tmp_path):
    from bench.tasks.run import jobs, load_table, placed, scoring

    table = load_table()
    found = list(jobs(table, [], [1]))
    assert {job.experiment for job in found} == {name for name, one in table.items() if one["runs"]}
    for job in found:
        if not job.trains:
            assert scoring(job, given(tmp_path, tiny=tiny))[0] == "evaluate"
            continue
        tree = placed(job, given(tmp_path, tiny=tiny))
        if tree.pop("start", None):  # its weights are no part of the repository
            tree |= {"model": "bert-base"}
        recipe = parse(Recipe, tree)
        recipe.model_for(None)
        experiment = table[job.experiment]
        assert set(experiment["metrics"]) <= set(recipe.task.metrics)
        assert recipe.metric == experiment["metrics"][0], "what is reported is what the checkpoint is chosen for"
        assert recipe.data.valid and recipe.data.test
        train = {(str(path), entry.portion) for entry in recipe.data.train for path in entry.path}
        for split in (recipe.data.valid, recipe.data.test):
            assert not train & {(str(path), entry.portion) for entry in split for path in entry.path}
        for one in experiment["published"]:
            assert len(one["figures"]) <= len(experiment["metrics"]) and one["source"]


def test_what_has_run_is_not_run_again_and_a_changed_recipe_is(tmp_path, monkeypatch):
    """The training command is replaced by one that writes a result."""
    from bench.tasks import run

    settings = given(tmp_path)
    started = []

    class Ended:
        returncode = 0

        def poll(self):
            return 0

    def start(job, _):
        started.append((job.name, job.seed))
        place = run.folder(job, settings)
        place.mkdir(parents=True, exist_ok=True)
        place.with_suffix(".log").write_text("CPU, 1 threads; bf16\n")
        result = {"steps": 4, "weights": "average", "training_seconds": 60.0, "examples": {"test": 100}}
        scores = {"test": {"exact": 50.0 + job.seed}}
        (place / "result.json").write_text(json.dumps(result | {"scores": scores, "baselines": {}}))
        return Ended()

    monkeypatch.setattr(run, "start", start)
    monkeypatch.setattr(run.time, "sleep", lambda _: None)
    table = run.load_table()
    wanted = list(run.jobs(table, ["scan-simple"], [1, 2]))
    assert run.run_all(wanted, settings) == 0 and len(started) == 2
    assert run.run_all(wanted, settings) == 0 and len(started) == 2, "what has run is not run again"
    table["scan-simple"]["runs"]["transformer"]["epochs"] += 1
    (changed,) = run.jobs(table, ["scan-simple"], [1])
    assert run.run_all([changed], settings) == 0 and len(started) == 3, "another recipe is another experiment"
    records = run.read_results(settings.results)
    assert [one["key"][2] for one in records] == [2, 1] and records[1]["key"][4] == changed.fingerprint


def test_the_page_shows_mean_and_interval_over_seeds_and_what_has_not_run(tmp_path):
    from bench.tasks.page import figure, section, write_page
    from bench.tasks.run import load_table

    def record(seed, value, **more):
        scores = {"test": {"accuracy": value}}
        key = ["rt-polarity", "minilm", seed, "cpu", "x"]
        return {
            "key": key,
            "scores": scores,
            "examples": {"test": 1000},
            "training_seconds": 60,
            "steps": 4,
            "baselines": {},
            "machine": "CPU; bf16",
        } | more

    assert figure([record(1, 80.0), record(2, 82.0), record(3, 84.0)], "accuracy") == "82.00 ± 4.97"  # 4.30 · 2 / √3
    assert figure([record(1, 80.0)], "accuracy") == "80.00 ± 2.48"  # of a share of 1,000 texts
    assert figure([record(1, 80.0)], "loss") == "–"
    table = load_table()
    shown = section("rt-polarity", table["rt-polarity"], [record(1, 80.0)])
    assert "| **ours, minilm** | **80.00 ± 2.48** | 1 seed, CPU, 1 min each |" in shown
    assert "| ours, scratch | not run yet |" in shown and "81.5" in shown and "°" in shown
    write_page(table, [], tmp_path / "tasks.md")
    assert (tmp_path / "tasks.md").read_text("utf-8").count("\n## ") == len(table)


def test_the_committed_page_is_that_of_the_committed_results(tmp_path):
    from bench.tasks.page import PAGE, write_page
    from bench.tasks.run import RESULTS, current, load_table, read_results

    table = load_table()
    write_page(table, current(table, read_results(RESULTS)), tmp_path / "tasks.md")
    assert PAGE.read_text("utf-8") == (tmp_path / "tasks.md").read_text("utf-8")
