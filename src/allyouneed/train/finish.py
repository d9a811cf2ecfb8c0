"""The end of a run: average the last checkpoints, keep the average if better, score the test set, write the card."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.evaluate.translation import RESAMPLES
from allyouneed.files import write_text
from allyouneed.folder import CARD, WEIGHTS, read_weights
from allyouneed.train.checkpoints import Checkpoint
from allyouneed.train.loop import Trainer
from allyouneed.train.prepare import RunFolder
from allyouneed.train.validate import is_better, validation_loss


def average_weights(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """The mean of every weight over these checkpoints (the paper, 6.1)."""
    from safetensors.torch import load_file

    total: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        for name, tensor in load_file(checkpoint.path / WEIGHTS).items():
            wide = tensor.double() if tensor.is_floating_point() else tensor
            total[name] = total[name] + wide if name in total and tensor.is_floating_point() else wide
    return {
        name: (tensor / len(checkpoints)).float() if tensor.is_floating_point() else tensor
        for name, tensor in total.items()
    }


def set_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    known = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            if name not in known:
                raise UserError(f"{name}: not a weight of this model")
            known[name].copy_(tensor)


def model_card(fields: dict[str, Any], recipe_text: str) -> str:
    """The model card: description, training data, scores, recipe."""
    lines = [f"# {fields['name']}", ""]
    if fields["description"]:
        lines += [fields["description"], ""]
    lines += [
        f"A model of kind `{fields['kind']}` with {fields['parameters']:,} parameters, trained by allyouneed.",
        "",
        f"- licence: {fields['licence']}",
        *([f"- {fields['origin']}"] if fields["origin"] else []),
        f"- vocabulary: {fields['vocabulary']}",
        f"- task: {fields['task']}",
        *([f"- labels: {', '.join(fields['labels'])}"] if fields["labels"] else []),
        f"- trained on: {fields['examples']}, {fields['tokens']} in {fields['steps']:,} steps "
        f"({fields['epochs']} epochs begun), on {fields['machine']}",
        f"- weights: {fields['weights']}",
        "",
        "## Scores",
        "",
        "| set | " + " | ".join(fields["columns"]) + " |",
        "|---|" + "---|" * len(fields["columns"]),
    ]
    for name, row in fields["scores"].items():
        cells = [f"{row[column]:.2f}" if column in row else "" for column in fields["columns"]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if not fields["scores"]:
        lines.append("| none | " + " | ".join("" for _ in fields["columns"]) + " |")
    lines += ["", "## Data", ""]
    lines += [f"- `{name}` sha256 `{digest}`" for name, digest in fields["sha256"].items()]
    lines += ["", "## Recipe", "", "```yaml", _portable(recipe_text).rstrip(), "```", ""]
    return "\n".join(lines)


def _portable(text: str) -> str:
    """Without local folders: a card is published with its model."""
    return text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")


def finish(trainer: Trainer, last: Checkpoint | None, run: RunFolder, recipe_text: str) -> dict[str, dict[str, float]]:
    """Choose the weights, score them, and write the model folder. result.json is written last."""
    report, recipe, state = trainer.reporter.print, trainer.recipe, trainer.state
    if last is None:
        raise UserError(f"{run.folder}: the final checkpoint could not be saved; free disk space and run it again")
    weights, found = _choose_weights(trainer, last)
    scores = {"valid": found} if found else {}
    if trainer.prepared.test_examples:
        scores["test"] = _score_test_set(trainer)
    vocabularies = trainer.prepared.vocabularies
    sizes = {id(tokenizer): tokenizer.size for tokenizer in (vocabularies.source, vocabularies.target)}.values()
    fields = {
        "name": recipe.name or run.folder.name,
        "description": recipe.description,
        "kind": tree_of(trainer.config)["kind"],
        "parameters": trainer.config.cost().parameters,
        "licence": recipe.licence,
        "origin": "" if recipe.start is None else _origin_line(recipe.start),
        "task": recipe.task_kind,
        "labels": trainer.prepared.labels,
        "vocabulary": f"{' and '.join(f'{n:,}' for n in sizes)} tokens ({_tokenizer(trainer)})",
        "examples": f"{trainer.prepared.examples:,} {recipe.task.file_type.examples}",
        "tokens": f"{state.tokens:,} {recipe.task.loss_unit}",
        "steps": state.step,
        "epochs": state.position.epoch + (1 if state.position.batch else 0),
        "machine": trainer.backend.summary,
        "weights": weights,
        "columns": list(dict.fromkeys(name for row in scores.values() for name in row)),
        "scores": scores,
        "sha256": yaml.safe_load(recipe_text)["data"]["sha256"],
    }
    trainer.folder(model_card(fields, recipe_text)).save(run.model)
    result = {
        "steps": state.step,
        "asked": {"steps": recipe.last_step, "epochs": recipe.epochs},
        "weights": weights,
        "tokens": state.tokens,
        "training_seconds": state.seconds,
        "scores": scores,
    }
    write_text(run.result, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    report(f"the model is in {run.model}")
    return scores


def _origin_line(start: Path) -> str:
    """The start model and its licence, from its card."""
    try:
        head = (start / CARD).read_text(encoding="utf-8").split("\n## ")[0]
    except (OSError, UnicodeDecodeError):
        head = ""
    title = re.search(r"^# (.+)$", head, re.MULTILINE)
    licence = re.search(r"^(?:- )?licen[cs]e[^:\n]*:[ ]*(\S.*)$", head, re.MULTILINE | re.IGNORECASE)
    name = title[1].strip() if title else start.name
    return f"started from {name} (licence {licence[1].strip() if licence else 'not stated'})"


def _tokenizer(trainer: Trainer) -> str:
    recipe, vocabularies = trainer.recipe, trainer.prepared.vocabularies
    made = recipe.tokenizer.kind if recipe.start is None else "that of the model it started from"
    if not vocabularies.joint:
        return f"{made}, one for each side"
    return f"{made}, shared by both sides" if recipe.task.sides == 2 else made


def _score_test_set(trainer: Trainer) -> dict[str, float]:
    recipe, prepared = trainer.recipe, trainer.prepared
    judged = trainer.score(prepared.test_examples, recipe.decoding.beam, resamples=RESAMPLES)
    if judged.figures:
        trainer.reporter.print(f"test\n{judged.text}")
        return judged.figures
    assert prepared.test is not None
    found = validation_loss(trainer.model, recipe.task, prepared.test, trainer.backend)
    trainer.reporter.print(f"test  {_row(found)}")
    return found


def _choose_weights(trainer: Trainer, last: Checkpoint) -> tuple[str, dict[str, float]]:
    """Load the better of best checkpoint and average into the model; its description and scores."""
    recipe, report, metric = trainer.recipe, trainer.reporter.print, trainer.recipe.metric
    single = trainer.checkpoints.best() or last
    averaged = trainer.checkpoints.regular()[-recipe.average :] if recipe.average > 1 else []
    name = f"average of the {len(averaged)} checkpoints of steps {', '.join(str(c.step) for c in averaged)}"
    one = f"checkpoint of step {single.step}"
    if trainer.prepared.valid is None:
        if len(averaged) > 1:
            set_weights(trainer.model, average_weights(averaged))
            return name + " (not compared: no validation set)", {}
        read_weights(trainer.model, last.path / WEIGHTS)
        return f"checkpoint of step {last.step}", {}
    read_weights(trainer.model, single.path / WEIGHTS)
    of_single = trainer.evaluate(recipe.decoding.beam)
    report(f"{one}:  {_row(of_single)}")
    if len(averaged) < 2:
        return one, of_single
    set_weights(trainer.model, average_weights(averaged))
    of_average = trainer.evaluate(recipe.decoding.beam)
    difference = of_average[metric] - of_single[metric]
    report(f"{name}:  {_row(of_average)}")
    if is_better(metric, recipe.task.metrics[metric], of_average, of_single):
        report(f"averaging changes {metric} by {difference:+.3f}: using the average")
        return name, of_average
    report(f"averaging changes {metric} by {difference:+.3f}: using the single checkpoint")
    read_weights(trainer.model, single.path / WEIGHTS)
    return one, of_single


def _row(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
