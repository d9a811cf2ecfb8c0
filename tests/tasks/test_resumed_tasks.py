"""A run that is stopped and resumed has the losses of one that is not, whatever a task draws at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allyouneed.training import train
from allyouneed.training.reporting.log import read_log
from toy_texts import Listener, recipe

RUNS = ["summarisation", "seq2seq decoder", "question-answering", "reranking", "denoising", "classification several"]


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_has_the_same_losses(run: str, texts: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 6, "save": {"every": 3, "keep": 2}, "validate": {"every": 6, "sentences": 1}}
    losses = []
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
        if name == "halves":
            train(recipe(tmp_path / name, texts, run, **keys | {"steps": 3}), console=Listener().console)
        folder = train(recipe(tmp_path / name, texts, run, **keys), console=Listener().console).model.parent
        losses.append([entry["loss"] for entry in read_log(folder / "log.jsonl") if "loss" in entry])
    assert len(losses[0]) == 6 and losses[0] == losses[1]
