"""A text may have any number of labels, each with a probability of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.sharding import empty_like
from allyouneed.data.files.labels import LabelledFiles
from allyouneed.data.files.readers import Report
from allyouneed.metrics.answers import accuracy, label_figures, macro_f1
from allyouneed.tasks.task import Task
from allyouneed.training import Recipe
from allyouneed.training.prepare import PreparedData

Trained = Callable[[str], tuple[Path, str]]


def read(path: Path, report: Report | None = None, **keys: Any) -> list[Any]:
    return list(parse(LabelledFiles, {"path": str(path)} | keys, "x").read(report or Report()))


def test_labels_are_separated_in_tables_and_listed_in_json(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("one\ta|b\ntwo\t\nthree\t b | b|c\n", encoding="utf-8")
    rows = [{"text": "one", "label": ["a", "b"]}, {"text": "two", "label": []}, {"text": "three", "label": "b|c"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("x.tsv", "x.jsonl"):
        assert [one.labels for one in read(tmp_path / name, between="|")] == [("a", "b"), (), ("b", "c")]
    report = Report()
    assert [one.label for one in read(tmp_path / "x.jsonl", report)] == ["b|c"]
    assert "set task.several: true" in report.text()


def test_the_loss_is_the_mean_of_independent_cross_entropies(
    prepared: Callable[[str], tuple[Recipe, PreparedData]],
) -> None:
    made, data = prepared("classification several")
    model = made.model_for(data.vocabularies, data.labels).build().eval()
    batch = next(data.train.batches(0))
    assert batch.labels is not None and batch.labels.shape[1] == len(data.labels) == 5
    with torch.no_grad():
        loss, logits = made.task.loss(model, batch), model.logits(batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    torch.testing.assert_close(loss.total / loss.tokens, expected)
    assert int(loss.tokens) == len(batch.labels)
    empty = empty_like(batch)  # of a process without texts
    assert empty.labels is not None and empty.labels.shape == (0, 5)
    with torch.no_grad():
        assert float(made.task.loss(model, empty).total) == 0


def test_all_labels_above_the_threshold_are_given(trained: Trained, texts: Path) -> None:
    model = ayn.load(trained("classification several")[0] / "model")
    text = "the cat sees the sea. a dog likes the moon."
    (found,) = model.classify_full([text])
    assert found.labels == [label for label, score in found.scores.items() if score >= 0.5]
    assert model.classify(text) == found.labels and model.classify([text]) == [found.labels]
    model.folder.task["threshold"] = 0.999
    assert len(model.classify(text)) <= len(found.labels)
    result = ayn.evaluate(trained("classification several")[0] / "model", texts / "valid.several.tsv")
    assert set(result.figures) == {"accuracy", "macro-f1", "micro-f1"} and result.figures["micro-f1"] > 50


def test_figures_of_sets_by_hand() -> None:
    found, expected = [{"a", "b"}, set(), {"c"}], [{"a"}, {"b"}, {"c"}]
    # a: 2·1/(1+1), b: 0/(1+1), c: 2·1/(1+1)
    assert label_figures(found, expected) == pytest.approx(
        {"accuracy": 100 / 3, "macro-f1": 200 / 3, "micro-f1": 100 * 2 * 2 / (3 + 3)}
    )
    one, other = ["a", "a", "b", "c"], ["a", "b", "b", "b"]
    single = label_figures([{x} for x in one], [{x} for x in other])
    assert (single["accuracy"], single["macro-f1"]) == pytest.approx((accuracy(one, other), macro_f1(one, other)))
    assert single["micro-f1"] == single["accuracy"] and label_figures([set()], [set()])["micro-f1"] == 100


def test_smoothing_is_for_one_label_a_text() -> None:
    with pytest.raises(ConfigError, match="smoothing: only where a text has one label"):
        parse(Task, {"kind": "classification", "several": True, "smoothing": 0.1}, "task")  # type: ignore[type-abstract]
