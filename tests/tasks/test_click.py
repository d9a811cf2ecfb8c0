"""Recommendation: click logs, the errors in them, and models that predict and rank."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.logs import ImpressionEncoding
from allyouneed.data.files.logs import LogFiles
from allyouneed.data.files.readers import Report
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig
from allyouneed.data.tokenizers.values import train_values
from allyouneed.errors import UserError
from allyouneed.infer.predictors.click_predictor import ClickPredictor
from allyouneed.metrics.ranking import auc, log_loss
from allyouneed.nn.positions.time_gaps import TimeGaps
from toy_texts import PLACES, recipe

Trained = Callable[[str], tuple[Path, str]]
COLUMNS: dict[str, Any] = {
    "sequence": {"item": "items", "category": "categories"},
    "times": "times",
    "time": "time",
    "features": ["user", "device"],
}
ROW = {"items": "7,3 9", "categories": "x|y|x", "times": "50 90 20", "time": 100.5, "item": 4, "category": "z"}
ROW |= {"user": "Anna Smith", "device": None, "click": "yes"}


def log(**keys: Any) -> LogFiles:
    return parse(LogFiles, COLUMNS | keys | {"path": "log.csv"})


def test_a_row_is_read_oldest_first() -> None:
    found = log().impression(ROW)
    assert not isinstance(found, str)
    assert found.items == (
        ("item=9", "item=7", "item=3", "item=4"),
        ("category=x", "category=x", "category=y", "category=z"),
    )
    assert found.ages == (80, 50, 10, 0) and found.features == ("user=Anna Smith", "device=") and found.click
    plain = parse(LogFiles, {"path": "x"}).impression({"items": [7, 3], "item": 4, "click": 0})
    assert not isinstance(plain, str) and plain.ages == (2, 1, 0) and not plain.click


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"categories": "x"}, "the columns of the sequence differ in length: 3 in 'items', 1 in 'categories'"),
        ({"times": "1 2"}, "2 in 'times', but 3 in 'items'"),
        ({"times": "50 90 200"}, "an item in 'times' is later than 'time'"),
        ({"times": "50 90 soon"}, "'times' is not a list of times (a number, or ISO 8601)"),
        ({"time": "2024-13-01"}, "'time' is not a time"),
        ({"item": ""}, "'item' is not an item"),
        ({"items": {"a": 1}}, "'items' is not a list of items"),
        ({"user": ["a"]}, "'user' is not a text or a number"),
        ({"click": 2}, "'click' is neither 1 nor 0: 2"),
    ],
)
def test_problems_of_a_row_are_named(change: dict[str, Any], said: str) -> None:
    found = log().impression(ROW | change)
    assert isinstance(found, str) and said in found


def test_mistakes_in_files_are_named(tmp_path: Path) -> None:
    file, report = tmp_path / "log.jsonl", Report()
    when = {"times": ["2024-01-01T00:00", "2023-12-31T23:59:00Z", 1704067200], "time": "2024-01-01T01:00:00+01:00"}
    lines = [ROW | when, ROW | {"click": "perhaps"}, {"items": []}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (only,) = log().model_copy(update={"path": (file,)}).read(report)
    assert only.ages == (60, 0, 0, 0) and only.line == 1
    assert report.broken == 2 and "log.jsonl:3: no key 'categories'" in report.text()
    table = tmp_path / "log.tsv"
    table.write_text("history\titem\tclick\na b\tc\t1\n")
    with pytest.raises(UserError, match=r"no column 'items' .*\(columns: history, item, click\); name yours with 'seq"):
        list(parse(LogFiles, {"path": str(table)}).read(Report()))
    (renamed,) = parse(LogFiles, {"path": str(table), "sequence": {"item": "history"}}).read(Report())
    assert renamed.items == (("item=a", "item=b", "item=c"),)
    for keys, said in (({"times": None}, "belong together"), ({"features": ["user", "item"]}, "'item' is named twice")):
        with pytest.raises(ConfigError, match=said):
            log(**keys)


def test_rare_values_are_unknown_and_long_sequences_are_cut(tmp_path: Path) -> None:
    words = ["item=a"] * 3 + ["item=New York"] * 2 + ["item=once"]
    train_values(TokenizerConfig(), words).save(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode_batch(["item=a", "item=New York", "item=once", "x"]) == [[4], [5], [3], [3]]
    assert train_values(TokenizerConfig(vocab=5), words).size == 5
    found = parse(LogFiles, {"path": "x"}).impression({"items": list("xxaxa"), "item": "a", "click": 1})
    assert not isinstance(found, str)
    assert ImpressionEncoding(tokenizer, 2).row(found) == [[3, 4, 4], (2, 1, 0), [], [], [1]]


def test_metrics_are_those_of_their_definitions() -> None:
    dice = random.Random(1)
    scores, clicks = [dice.randrange(9) / 9 for _ in range(60)], [dice.random() < 0.3 for _ in range(60)]
    pairs = [(a, b) for a, x in zip(scores, clicks, strict=True) for b, y in zip(scores, clicks, strict=True) if x > y]
    assert auc(scores, clicks) == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs))
    assert log_loss([0.9, 0.2], [True, False]) == pytest.approx(-(torch.tensor([0.9, 0.8]).log().mean().item()))
    assert auc([0.1], [True]) != auc([0.1], [True])  # NaN: nothing to compare with


def test_times_fall_into_logarithmic_buckets() -> None:
    module: Any = TimeGaps(buckets=6).build(1)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0)[:, None])
    gaps = torch.tensor([-3, 0, 1, 2, 3, 6, 7, 14, 15, 30, 31, 10**9])
    assert module(gaps).flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    module.base = 1.0
    assert module(gaps).flatten().tolist() == [0, 0, 1, 2, 3, 5, 5, 5, 5, 5, 5, 5]


def run_command(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


def test_a_trained_model_predicts_and_ranks(
    trained: Trained, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("click")[0] / "model"
    model = ayn.load(folder, task="click")
    assert isinstance(model, ClickPredictor)
    user = {"items": ["a", "b"], "place": PLACES[0]}
    ranked = model.rank(user, list("abcdefgh"), top=4)
    assert {one.item for one in ranked} == set("aceg") and ranked[0].probability > 0.9
    rows = [user | {"item": "a"}, {"items": "", "item": "b", "place": "elsewhere"}]
    found = model.predict_click(rows)
    assert model.predict_click(rows[1]) == pytest.approx(found[1], abs=1e-6)  # alone or padded
    with pytest.raises(UserError, match=r"row 0: no 'place' \(columns: items, item, place\)"):
        model.predict_click({"items": [], "item": "a"})
    capsys.readouterr()

    assert run_command(["predict-click", "--model", str(folder), *map(json.dumps, rows)]) == 0
    assert capsys.readouterr().out.split() == [f"{one:.4f}" for one in found]
    table = tmp_path / "new.csv"
    table.write_text(f"place,items,item\n{PLACES[0]},a b,a\nelsewhere,,b\n", encoding="utf-8")
    assert run_command(["predict-click", "--model", str(folder), "--input", str(table)]) == 0
    assert capsys.readouterr().out.split() == [f"{one:.4f}" for one in found]
    for wrong, said in (("[1]", "expected a JSON object"), ("{", "not JSON"), ('{"items": []}', "no 'item'")):
        assert run_command(["predict-click", "--model", str(folder), wrong]) == 2
        assert said in capsys.readouterr().err
    assert run_command(["evaluate", str(texts / "valid.log.csv"), "--model", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "AUC" in shown and "log loss" in shown and "of 30 impressions" in shown


def test_sizes_come_from_the_columns(texts: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path, texts, "click", "data.train.features=[place, items2]")
    config: Any = given.model_for(None)
    assert config.head.features == 2 and config.embed.sides == 0
    columns = [{"path": "a.csv", "features": ["place"]}, {"path": "b.csv"}]
    with pytest.raises(UserError, match="all files need the same columns"):
        recipe(tmp_path, texts, "click", data={"train": columns, "max_tokens": 48})
