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
from allyouneed.train.prepare import Run
from allyouneed.train.validate import better, validation_loss


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


def card(facts: dict[str, Any], recipe_text: str) -> str:
    """The model card: what it is, what it was trained on, how good it is, and how it was made."""
    lines = [f"# {facts['name']}", ""]
    if facts["description"]:
        lines += [facts["description"], ""]
    lines += [
        f"A model of kind `{facts['kind']}` with {facts['parameters']:,} parameters, trained by allyouneed.",
        "",
        f"- licence: {facts['licence']}",
        *([f"- {facts['origin']}"] if facts["origin"] else []),
        f"- vocabulary: {facts['vocabulary']}",
        f"- task: {facts['task']}",
        *([f"- labels: {', '.join(facts['labels'])}"] if facts["labels"] else []),
        f"- trained on: {facts['examples']}, {facts['tokens']} in {facts['steps']:,} steps "
        f"({facts['epochs']} epochs begun), on {facts['machine']}",
        f"- weights: {facts['weights']}",
        "",
        "## Scores",
        "",
        "| set | " + " | ".join(facts["columns"]) + " |",
        "|---|" + "---|" * len(facts["columns"]),
    ]
    for name, row in facts["scores"].items():
        cells = [f"{row[column]:.2f}" if column in row else "" for column in facts["columns"]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if not facts["scores"]:
        lines.append("| none | " + " | ".join("" for _ in facts["columns"]) + " |")
    lines += ["", "## Data", ""]
    lines += [f"- `{name}` sha256 `{digest}`" for name, digest in facts["sha256"].items()]
    lines += ["", "## Recipe", "", "```yaml", _portable(recipe_text).rstrip(), "```", ""]
    return "\n".join(lines)


def _portable(text: str) -> str:
    """Paths as others may read them: a card is passed on with its model, and need not tell whose machine it was."""
    return text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")


def finish(trainer: Trainer, last: Checkpoint | None, run: Run, recipe_text: str) -> dict[str, dict[str, float]]:
    """Choose the weights, score them, and put the model folder in its place. result.json is written last."""
    say, recipe, standing = trainer.reporter.say, trainer.recipe, trainer.standing
    if last is None:
        raise UserError(f"{run.folder}: the end of training could not be saved; free some disk space and run it again")
    weights, found = _choose(trainer, last)
    scores = {"valid": found} if found else {}
    if trainer.prepared.test_examples:
        scores["test"] = _test(trainer)
    vocabularies = trainer.prepared.vocabularies
    sizes = {id(tokenizer): tokenizer.size for tokenizer in (vocabularies.source, vocabularies.target)}.values()
    facts = {
        "name": recipe.name or run.folder.name,
        "description": recipe.description,
        "kind": tree_of(trainer.config)["kind"],
        "parameters": trainer.config.cost().parameters,
        "licence": recipe.licence,
        "origin": "" if recipe.start is None else _started(recipe.start),
        "task": recipe.task_kind,
        "labels": trainer.prepared.labels,
        "vocabulary": f"{' and '.join(f'{n:,}' for n in sizes)} tokens ({_tokenizer(trainer)})",
        "examples": f"{trainer.prepared.examples:,} {recipe.task.file_type.examples}",
        "tokens": f"{standing.tokens:,} {recipe.task.loss_unit}",
        "steps": standing.step,
        "epochs": standing.place.epoch + (1 if standing.place.batch else 0),
        "machine": trainer.machine.why,
        "weights": weights,
        "columns": list(dict.fromkeys(name for row in scores.values() for name in row)),
        "scores": scores,
        "sha256": yaml.safe_load(recipe_text)["data"]["sha256"],
    }
    trainer.folder(card(facts, recipe_text)).save(run.model)
    result = {
        "steps": standing.step,
        "asked": {"steps": recipe.last_step, "epochs": recipe.epochs},
        "weights": weights,
        "tokens": standing.tokens,
        "training_seconds": standing.seconds,
        "scores": scores,
    }
    write_text(run.result, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    say(f"the model is in {run.model}")
    return scores


def _started(start: Path) -> str:
    """What it goes on from, and under which licence, if that model's card says it."""
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


def _test(trainer: Trainer) -> dict[str, float]:
    recipe, prepared = trainer.recipe, trainer.prepared
    judged = trainer.judge(prepared.test_examples, recipe.decoding.beam, resamples=RESAMPLES)
    if judged.figures:
        trainer.reporter.say(f"test\n{judged.text}")
        return judged.figures
    assert prepared.test is not None
    found = validation_loss(trainer.model, recipe.task, prepared.test, trainer.machine)
    trainer.reporter.say(f"test  {_row(found)}")
    return found


def _choose(trainer: Trainer, last: Checkpoint) -> tuple[str, dict[str, float]]:
    """Leave the better of best checkpoint and average in the model; what it is, and its scores."""
    recipe, say, metric = trainer.recipe, trainer.reporter.say, trainer.recipe.metric
    single = trainer.checkpoints.best() or last
    averaged = trainer.checkpoints.regular()[-recipe.average :] if recipe.average > 1 else []
    name = f"average of the {len(averaged)} checkpoints of steps {', '.join(str(c.step) for c in averaged)}"
    alone = f"checkpoint of step {single.step}"
    if trainer.prepared.valid is None:
        if len(averaged) > 1:
            set_weights(trainer.model, average_weights(averaged))
            return name + " (not compared: no validation set)", {}
        read_weights(trainer.model, last.path / WEIGHTS)
        return f"checkpoint of step {last.step}", {}
    read_weights(trainer.model, single.path / WEIGHTS)
    of_single = trainer.evaluate(recipe.decoding.beam)
    say(f"{alone}:  {_row(of_single)}")
    if len(averaged) < 2:
        return alone, of_single
    set_weights(trainer.model, average_weights(averaged))
    of_average = trainer.evaluate(recipe.decoding.beam)
    difference = of_average[metric] - of_single[metric]
    say(f"{name}:  {_row(of_average)}")
    if better(metric, recipe.task.metrics[metric], of_average, of_single):
        say(f"averaging changes {metric} by {difference:+.3f}: the average is kept")
        return name, of_average
    say(f"averaging changes {metric} by {difference:+.3f}: the single checkpoint is kept")
    read_weights(trainer.model, single.path / WEIGHTS)
    return alone, of_single


def _row(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
