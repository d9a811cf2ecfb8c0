"""Vectors trained with `widths` may be cut: their beginnings learn the same (Matryoshka)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Task
from allyouneed.training import Recipe
from allyouneed.training.prepare import PreparedData
from toy_texts import recipe

Trained = Callable[[str], tuple[Path, str]]


@pytest.mark.parametrize("run", ["contrastive", "similarity"])
def test_the_loss_is_the_mean_of_those_of_all_widths(
    run: str, prepared: Callable[[str], tuple[Recipe, PreparedData]]
) -> None:
    made, data = prepared(run)
    model = made.model_for(data.vocabularies, data.labels).build().eval()
    batch = next(data.train.batches(0))
    task: Any = made.task
    assert batch.source is not None and batch.labels is not None
    with torch.no_grad():
        first, second = (model.head(*model.run(Batch(side), [])) for side in (batch.source, batch.target))
        parts = [task.compare(first[:, :w], second[:, :w], batch.labels) for w in (32, 8, 16)]
        found = task.model_copy(update={"widths": (8, 16)}).loss(model, batch)
    torch.testing.assert_close(found.total, sum(part.total for part in parts) / 3)
    torch.testing.assert_close(found.plain, sum(part.plain for part in parts) / 3)
    assert int(found.tokens) == int(parts[0].tokens)


def test_widths_must_be_smaller_than_the_vectors(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.widths: the vectors of the model have 32 numbers"):
        recipe(tmp_path, texts, "contrastive", task={"kind": "contrastive", "widths": [16, 32]})
    task: Any = parse(Task, {"kind": "contrastive", "widths": [64]}, "task")  # type: ignore[type-abstract]
    assert task.for_model({"width": 32, "head": {"kind": "pooled", "width": 128}}).widths == (64,)


def test_vectors_are_cut(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, said = trained("contrastive")[0] / "model", ["the cat", "a dog"]
    model = ayn.load(folder)
    whole = model.embed(said)
    torch.testing.assert_close(model.embed(said, width=8), whole[:, :8])
    assert model.embed(said[0], width=8).shape == (8,) and model.embed([], width=8).shape == (0, 8)
    with pytest.raises(UserError, match="width=33: the vectors have 32 numbers"):
        model.embed(said, width=33)
    with pytest.raises(SystemExit) as stopped:
        main(["embed", "--model", str(folder), "--width", "8", "--output", str(tmp_path / "x.npy"), *said])
    assert not stopped.value.code
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), whole[:, :8].numpy(), atol=1e-6)
