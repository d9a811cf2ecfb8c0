"""Every preset and every task, from a recipe to a model in use (journey.py): each step works or is refused by name, as
docs/journeys.md says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
import journeys_page
from allyouneed.config import parse, preset_names, preset_tree, tree_of
from allyouneed.errors import UserError
from allyouneed.interop.save import usual_task
from allyouneed.nn.models.base import Model
from allyouneed.training import Recipe, train
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from journey import KEYS, STEPS, Journey
from shrink import shrink
from toy_texts import ENCODER, RECIPE, RUNS, WITHOUT_TEXTS, Listener, recipe

# the plain run of every task; the others need a model to start from
TASKS = [run for run in RUNS if " " not in run and run != "dpo"]


@cache
def small(name: str) -> dict[str, Any]:
    """The model of a preset, made small; the data says how many classes there are."""
    tree: dict[str, Any] = tree_of(shrink(parse(Model, preset_tree(name))))  # type: ignore[type-abstract]
    tree.get("head", {}).pop("labels", None)
    return tree


@cache
def trains_here(name: str) -> bool:
    """A retrieval model needs an index, too (tests/training/test_retrieval.py)."""
    config: Any = parse(Model, preset_tree(name))  # type: ignore[type-abstract]
    return config.kind != "retro"


def given(folder: Path, texts: Path, task: str, preset: str, **keys: Any) -> Recipe:
    """The recipe of a task for a small model of a preset."""
    name, own, entry = RUNS[task]
    data = {"train": {"path": str(texts / f"train.{name}"), **entry}, "max_tokens": 24}
    if preset == "document-transformer" and task == "translation":  # it reads the sentences before the source
        keys["task"] = {"kind": task, "context": 1}
    tree = RECIPE | own | {"model": small(preset), "data": data, "output": folder / "run"} | keys
    if task in WITHOUT_TEXTS:
        del tree["tokenizer"], tree["data"]["max_tokens"]
    made: Recipe = parse(Recipe, tree, "recipe")
    made.model_for(None)
    return made


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunFolder]:
    """A run folder for each task and its options, whose tokenizer and data the presets share."""
    return cache(lambda task: RunFolder(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("preset", preset_names())
def test_a_task_trains_a_preset_or_refuses_it_before_anything_is_built(
    preset: str, run_of: Callable[[str], RunFolder], texts: Path, tmp_path: Path
) -> None:
    """One loss and its gradients, or one message."""
    trained = []
    for task in TASKS:
        try:
            made = given(tmp_path, texts, task, preset)
        except UserError as error:
            assert len(str(error).splitlines()) <= 20
            continue
        run = run_of(str(made.task))
        run.data.mkdir(exist_ok=True)
        data = prepare(made, run, Reporter(Listener().console))
        torch.manual_seed(0)
        model = made.model_for(data.vocabularies, data.labels).build().train()
        loss = made.task.loss(model, next(data.train.batches(0)))
        loss.total.backward()
        assert torch.isfinite(loss.total) and int(loss.tokens) > 0, task
        trained.append(task)
    assert bool(trained) == trains_here(preset)
    journeys_page.compare(f"tasks {preset}", dict.fromkeys(trained, ""))


def walk(task: str, preset: str, texts: Path, folder: Path, steps: Sequence[str] | None = None) -> dict[str, str]:
    """The steps of a small model of a preset, each with the message that refused it."""
    folder.mkdir(exist_ok=True)
    entries = {
        split: {"path": str(texts / f"{split}.{RUNS[task][0]}"), **RUNS[task][2]} for split in ("train", "valid")
    }
    made = given(folder, texts, task, preset, **KEYS, data=entries | {"max_tokens": 24})
    return Journey(made, Path(entries["valid"]["path"])).walk(steps)


TRAINED = [name for name in preset_names() if trains_here(name)]


def compare_with_page(preset: str, texts: Path, folder: Path, steps: Sequence[str]) -> None:
    task = usual_task(shrink(parse(Model, preset_tree(preset))))  # type: ignore[type-abstract]
    journeys_page.compare(f"{preset} {task}", walk(task, preset, texts, folder, steps))


@pytest.mark.parametrize("preset", TRAINED)
def test_a_preset_goes_the_steps_that_the_page_says(preset: str, texts: Path, tmp_path: Path) -> None:
    """Some of the later ones for each preset, all of them for all presets together."""
    first, later = ["train", "Python"], [name for name in STEPS if name not in ("train", "Python")]
    number = TRAINED.index(preset)
    steps = STEPS if journeys_page.records() else [*first, *(later[(number + n) % len(later)] for n in (0, 3))]
    compare_with_page(preset, texts, tmp_path, [*steps])


@pytest.mark.slow
@pytest.mark.parametrize("preset", TRAINED)
def test_a_preset_goes_every_step_that_the_page_says(preset: str, texts: Path, tmp_path: Path) -> None:
    compare_with_page(preset, texts, tmp_path, [*STEPS])


@pytest.mark.parametrize("run", RUNS)
def test_a_task_goes_every_step_that_the_page_says(run: str, texts: Path, tmp_path: Path) -> None:
    made = recipe(tmp_path, texts, run, **KEYS, output=str(tmp_path / "run"))
    found = Journey(made, texts / f"valid.{RUNS[run][0]}").walk()
    journeys_page.compare(f"- {run}", found)


@pytest.mark.slow
@pytest.mark.parametrize("preset", TRAINED)
def test_what_is_trained_for_any_task_can_be_loaded_and_used(preset: str, texts: Path, tmp_path: Path) -> None:
    for task in TASKS:
        try:
            given(tmp_path, texts, task, preset)
        except UserError:
            continue
        found = walk(task, preset, texts, tmp_path / task, ["train", "Python", "command", "evaluate", "HTTP"])
        assert not any(found.values()), found


@pytest.mark.parametrize("types", [1, 2, 3])
def test_a_pair_of_texts_fits_a_model_with_any_number_of_token_types(types: int, texts: Path, tmp_path: Path) -> None:
    """Two texts have the types 0 and 1; a model with one type, as RoBERTa, reads both with that."""
    rows = (texts / "train.pairs.tsv").read_text(encoding="utf-8").splitlines()
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{row}\t{number % 2}\n" for number, row in enumerate(rows)), encoding="utf-8")
    body = ENCODER | {"embed": {"positions": "sinusoidal", "types": types}}
    data = {"train": {"path": str(pairs), "columns": [0, 1, 2]}, "max_tokens": 48}
    result = train(
        recipe(tmp_path, texts, "classification", model=body, data=data, steps=2), console=Listener().console
    )
    model = ayn.load(result.model)
    framed = model.tokenizer.frame([5, 6], [7])
    assert framed == ([1, 5, 6, 2, 7, 2], [0, 0, 0, 0, min(types - 1, 1), min(types - 1, 1)])
    assert model.classify(("the cat", "猫")) in ("0", "1")
