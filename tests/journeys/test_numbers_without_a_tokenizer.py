"""A model folder without a tokenizer opens for every task: numbers go in and come out, texts are refused."""

from pathlib import Path

import pytest
import torch

import allyouneed as ayn
from allyouneed.config import parse, tree_of
from allyouneed.errors import UserError
from allyouneed.nn.models.base import Model
from allyouneed.tasks.task import Task
from toy_texts import MEDIA, RUNS

USES = {"translate": "translation", "fill": "span-corruption"}


def folder_of(run: str, path: Path) -> Path:
    """A model for this run, saved without a tokenizer."""
    keys = RUNS[run][1]
    task = parse(Task, keys["task"])  # type: ignore[type-abstract]
    tree = keys["model"] | {"vocab": 50}
    tree = tree if (head := task.head(tree, None)) is None else tree | {"head": head}
    torch.manual_seed(0)
    model = parse(Model, tree).build()  # type: ignore[type-abstract]
    labels = ["a", "b"][: tree_of(model.config)["head"].get("labels", 0)]
    return ayn.save(model, None, path, task=tree_of(task)["kind"], labels=labels)


@pytest.mark.parametrize("run", [run for run in RUNS if RUNS[run][0] not in MEDIA])
def test_a_folder_without_a_tokenizer_opens_and_gives_numbers(run: str, tmp_path: Path) -> None:
    model = ayn.load(folder_of(run, tmp_path / "model"))
    tokens = {"tokens": [[1, 7, 8, 2], [1, 9]]}
    targets = {"targets": [[1, 7], [1, 9]]} if model.model.config.kind == "encoder-decoder" else {}
    assert model.hidden(**tokens).shape == (2, 4, 32)
    assert torch.isfinite(model.logits(**tokens, **targets)).all()


@pytest.mark.parametrize("method", USES)
def test_texts_are_refused_when_they_are_given(method: str, tmp_path: Path) -> None:
    model = ayn.load(folder_of(USES[method], tmp_path / "model"))
    with pytest.raises(UserError, match="has no tokenizer; give it token ids instead of texts"):
        getattr(model, method)("a text")
