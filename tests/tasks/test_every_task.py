"""Invariants of all tasks: they learn, they report scores, and packing does not change losses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from allyouneed.config import parse
from allyouneed.data.batches.packing import PaddedBatches
from allyouneed.folder import Folder
from allyouneed.infer.predictors.registry import TASKS
from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Task
from allyouneed.training import Recipe
from allyouneed.training.prefetch import count_labels
from allyouneed.training.prepare import PreparedData, RunFolder, prepare
from allyouneed.training.reporting.log import read_log
from allyouneed.training.reporting.progress import Reporter
from toy_texts import ENCODER, RUNS, Listener, recipe

Trained = Callable[[str], tuple[Path, str]]
Prepared = Callable[[str], tuple[Recipe, PreparedData]]
# a run's last loss must be under this part of its first
FALLS = {
    "similarity": 0.3,
    "image-text": 0.7,
    "contrastive": 0.6,
    "span-corruption": 0.6,
    "masked-lm": 0.6,
    "masked-lm words": 0.6,
    "masked-lm next sentence": 0.6,
    "masked-lm order": 0.6,
    "replaced-token": 0.6,
}
FALLS |= {"question-answering": 0.6, "permutation-lm": 0.6, "translation-lm": 0.6}
FALLS |= {"reranking": 0.95}  # which words mean the same takes longer than this

# it draws its own data in a loop of its own, and leaves a chat model behind: tests/training/test_ppo.py
OWN_LOOP = {"ppo"}


def test_every_task_is_tried_and_has_a_use() -> None:
    tried = {run.split()[0] for run in RUNS}
    assert tried == set(Task.registry) - OWN_LOOP == set(TASKS)


@pytest.mark.parametrize("run", RUNS)
def test_training_lowers_the_loss(run: str, trained: Trained) -> None:
    folder, said = trained(run)
    losses = [entry["loss"] for entry in read_log(folder / "log.jsonl") if "loss" in entry]
    assert sum(losses[-5:]) < FALLS.get(run, 0.4) * sum(losses[:5]), losses
    task = parse(Task, Folder.load(folder / "model").task)  # type: ignore[type-abstract]
    metric = next(iter(task.metrics))
    assert f"({metric}: best so far)" in said
    valid = json.loads((folder / "result.json").read_text())["scores"]["valid"]
    assert {metric, "loss"} <= valid.keys() and ("perplexity" in valid) == task.has_perplexity
    assert ("ppl" in said) == task.has_perplexity
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    assert f"300 {task.file_type.examples}" in card and task.loss_unit in card and f"- task: {run.split()[0]}" in card


# their loss depends on who is in the batch, or has a part that is a mean over the batch (tests/parity compares those)
BY_BATCH = ("contrastive", "image-text", "masked-lm next sentence", "masked-lm order", "replaced-token")


@pytest.mark.parametrize("run", [name for name in RUNS if name not in BY_BATCH])
def test_packed_and_padded_batches_have_the_same_loss(run: str, prepared: Prepared) -> None:
    given, data = prepared(run)
    model = given.model_for(data.vocabularies, data.labels).build().eval()
    padded = PaddedBatches(data.train.items, 512, given.seed)
    totals = []
    for batches in (data.train, padded):
        with torch.no_grad():
            losses = [given.task.loss(model, batch) for batch in batches.batches(1)]
        assert int(sum(loss.tokens for loss in losses)) == sum(map(count_labels, batches.batches(1)))
        totals.append((sum(loss.total for loss in losses), sum(loss.plain for loss in losses)))
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", RUNS)
def test_batches_are_a_function_of_seed_epoch_and_number(run: str, prepared: Prepared) -> None:
    _, data = prepared(run)
    whole = list(data.train.batches(2))
    later = next(data.spare.batches(2, start_step=len(whole) - 1))
    compared = list[tuple[torch.Tensor, torch.Tensor]]()
    for one, other in ((later.target, whole[-1].target), (later.source, whole[-1].source)):
        for name, value in vars(one).items() if one is not None else ():
            if isinstance(value, torch.Tensor):
                compared.append((value, getattr(other, name)))
    assert compared and all(torch.equal(one, other) for one, other in compared)
    assert later.labels is not None and whole[-1].labels is not None and torch.equal(later.labels, whole[-1].labels)


def test_auxiliary_losses_are_added(texts: Path, tmp_path: Path) -> None:
    layer = ENCODER["encoder"][0] | {"channel": {"kind": "moe", "experts": 4, "expert": {"kind": "ffn", "hidden": 16}}}
    for run in ("masked-lm", "classification", "similarity"):
        given = recipe(tmp_path, texts, run, model=ENCODER | {"encoder": [layer]})
        prepared = prepare(given, RunFolder(tmp_path / run), Reporter(Listener().console))
        model = given.model_for(prepared.vocabularies, prepared.labels).build().train()  # there is no dropout
        batch = next(prepared.train.batches(0))
        loss = given.task.loss(model, batch)
        sides = [batch.target] if batch.source is None else [batch.source, batch.target]
        added: list[torch.Tensor] = []
        for side in sides:
            model.run(Batch(side), added)
        assert added and float(sum(added).detach()) > 0
        torch.testing.assert_close(loss.total, loss.plain + sum(added) / len(sides) * loss.tokens)
