"""Batches follow the size of the data, and a length that leaves almost nothing stops the run."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from allyouneed.errors import UserError
from allyouneed.training import train
from allyouneed.training.planning.data_size import MOST_EPOCHS, Duration, choose_duration, plan
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.recipe.file import load_recipe
from allyouneed.training.reporting.log import read_log
from allyouneed.training.reporting.progress import Reporter
from micro_run import MODEL, Listener, Make
from toy_texts import translated

SMALL: dict[str, Any] = {"model": MODEL, "tokenizer": {"vocab": 300}, "precision": "fp32", "device": "cpu"}


def recipe(folder: Path, lines: str, *changes: str, **keys: Any):
    (folder / "train.tsv").write_text(lines, encoding="utf-8")
    tree = SMALL | {"data": {"train": "train.tsv"}} | keys
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_recipe(folder / "recipe.yaml", changes)


def prepared(folder: Path, lines: str, *changes: str, **keys: Any):
    listener = Listener()
    run = RunFolder(folder / "run")
    run.data.mkdir(parents=True, exist_ok=True)
    return prepare(recipe(folder, lines, *changes, **keys), run, Reporter(listener.console)), listener


def pairs(count: int) -> str:
    return translated(count, random.Random(3))


@pytest.mark.parametrize(("count", "rows"), [(300, 1), (6000, 3), (30000, 8)])
def test_small_data_gets_small_batches(count: int, rows: int, tmp_path: Path) -> None:
    data, listener = prepared(tmp_path, pairs(count))
    assert data.rows == rows
    assert (f"batch.rows: {rows}, for {data.train.steps_per_epoch(0)} batches an epoch" in listener.text) == (rows < 8)
    assert rows == 1 or data.train.steps_per_epoch(0) >= 40


def test_a_number_of_rows_that_was_set_is_kept(tmp_path: Path) -> None:
    data, listener = prepared(tmp_path, pairs(300), "batch.rows=8")
    assert data.rows == 8 and "batch.rows" not in listener.text


def test_a_batch_has_a_row_for_each_process(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.data.mkdir(parents=True)
    assert prepare(recipe(tmp_path, pairs(300)), run, Reporter(Listener().console), processes=4).rows == 4


def test_a_run_keeps_its_rows_when_it_is_resumed(
    make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of an earlier version, which had 8 whatever the data."""
    batch = {"row": 64}
    made = make(steps=4, batch=batch)
    train(made, console=listener.console)
    recorded = yaml.safe_load((made.output / "recipe.yaml").read_text())
    assert isinstance(rows := recorded["batch"]["rows"], int) and rows < 8
    train(make(steps=8, batch=batch), console=listener.console)
    assert "resuming the run" in listener.text
    (made.output / "recipe.yaml").write_text(yaml.safe_dump(recorded | {"batch": recorded["batch"] | {"rows": 8}}))
    train(make(steps=12, batch=batch), console=listener.console)
    assert yaml.safe_load((made.output / "recipe.yaml").read_text())["batch"]["rows"] == 8
    labels = [entry["tokens"] for entry in read_log(made.output / "log.jsonl")]
    assert sum(labels[8:]) > 1.5 * sum(labels[4:8])


def test_a_run_of_small_data_without_a_length_ends_after_some_passes(tmp_path: Path) -> None:
    said: list[str] = []
    made = recipe(tmp_path, pairs(300), data={"train": "train.tsv", "valid": "train.tsv"})
    assert choose_duration(made, 40, said.append) == Duration(40 * MOST_EPOCHS, every=40, patience=10)
    assert said == ["steps: 2,000, 50 passes over the data, fewer when 10 validations bring no improvement; set steps "
                    "or epochs to change it"]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "epoch", "expected"),
    [
        (("steps=70",), 40, Duration(70)),
        (("epochs=3", "validate.every=9"), 40, Duration(None, every=9)),
        (("validate.patience=2",), 40, Duration(2000, every=40, patience=2)),
        ((), 2000, Duration(100_000)),
        ((), 3000, Duration(100_000)),
    ],
)
def test_a_length_of_the_recipe_or_of_much_data_is_kept(
    changes: tuple[str, ...], epoch: int, expected: Duration, tmp_path: Path
) -> None:
    assert choose_duration(recipe(tmp_path, pairs(300), *changes), epoch, lambda text: None) == expected


def test_a_run_trains_as_long_as_its_data_suggest(
    make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allyouneed.training.planning.data_size.MOST_EPOCHS", 1)
    made = make(steps=None, batch={"row": 64})
    result = train(made, console=listener.console)
    assert 0 < result.steps < 200 and f"steps: {result.steps:,}, 1 passes" in listener.text


LONG = "".join(f"{'the cat sees the sea and ' * 40}{n}\t{'猫看见大海' * 40}\n" for n in range(90)) + pairs(10)


def test_a_length_that_leaves_out_almost_everything_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"data.max_tokens: 128 leaves out 90 of 100 examples, .* raise it \(a row holds 512"
    ):
        prepared(tmp_path, LONG, "tokenizer.vocab=262")


def test_a_length_that_was_set_leaves_out_what_it_does_with_a_warning(tmp_path: Path) -> None:
    data, listener = prepared(tmp_path, LONG, "tokenizer.vocab=262", "data.max_tokens=128")
    assert data.examples == 10 and "warning: data.max_tokens: 128 leaves out 90 of 100" in listener.text


def test_less_data_is_read_more_often_and_with_more_dropout() -> None:
    small, middle, large = (plan(count, 20 * count, 512) for count in (1_000, 50_000, 5_000_000))
    assert small.epochs == 30 and small.dropout == 0.3 and small.every == 39
    assert middle.epochs == 10 and middle.dropout == 0.1 and middle.every == 244
    assert large.epochs == 3 and large.dropout == 0.1 and large.every == 500
    assert "30 epochs at most, dropout 0.3" in small.text(1_000)
