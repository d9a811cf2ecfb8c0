"""The end of a run: write the model folder, average the last checkpoints, keep the average if better, score, write the
card. Scoring runs on a model that is already written: whatever happens to it, the model is there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from allyouneed.config import tree_of
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.files import write_text
from allyouneed.folder import CARD, WEIGHTS, read_card, read_weights
from allyouneed.infer.predictors.base import evenly_spaced
from allyouneed.metrics.baselines import MOST_EXAMPLES, Baseline, baselines
from allyouneed.metrics.translation import RESAMPLES
from allyouneed.training.checkpoints import Checkpoint
from allyouneed.training.loop import Trainer
from allyouneed.training.planning.memory import format_bytes, memory_in_use
from allyouneed.training.prepare import RunFolder
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.reporting.page import CURVES, PAGE, RunFacts, write_page
from allyouneed.training.reporting.progress import clock
from allyouneed.training.validate import LOSS_METRICS, is_better, validation_loss

SHOWN = 3  # generated examples on the report, where scoring needs none
Baselines = dict[str, list[Baseline]]  # by set
Scores = dict[str, dict[str, float]]  # by set: valid, test; empty: not scored


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
        *([f"- vocabulary: {fields['vocabulary']}"] if fields["vocabulary"] else []),
        f"- task: {fields['task']}",
        *([f"- labels: {', '.join(fields['labels'])}"] if fields["labels"] else []),
        f"- trained on: {fields['examples']}, {fields['tokens']} in {fields['steps']:,} steps "
        f"({fields['epochs']} epochs begun), on {fields['machine']}",
        f"- weights: {fields['weights']}",
        *(
            [f"- report of the run: [{PAGE}](../{PAGE}), curves: [{CURVES}](../{CURVES})"]
            if fields.get("baselines") is not None
            else []
        ),
        "",
        "## Scores",
        "",
        _table_row("set", fields["unit"], *fields["columns"]),
        "|" + "---|" * (2 + len(fields["columns"])),
    ]
    for name, row in fields["scores"].items():
        cells = [f"{row[column]:.2f}" if column in row else "" for column in fields["columns"]]
        lines.append(_table_row(name, f"{fields['scored'][name]:,}" if row else "not scored", *cells))
        for one in fields.get("baselines", {}).get(name, []):
            cells = [f"{one.figures[column]:.2f}" if column in one.figures else "" for column in fields["columns"]]
            lines.append(_table_row(f"{name}, baseline: {one.name}".replace("|", "\\|"), "", *cells))
    if not fields["scores"]:
        lines.append(_table_row("none", "", *("" for _ in fields["columns"])))
    lines += ["", "## Data", ""]
    lines += [f"- `{name}` sha256 `{digest}`" for name, digest in fields["sha256"].items()]
    lines += ["", "## Recipe", "", "```yaml", _portable(recipe_text).rstrip(), "```", ""]
    return "\n".join(lines)


def _table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _portable(text: str) -> str:
    """The text without local folders: a card is published with its model."""
    return text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")


def finish(trainer: Trainer, last: Checkpoint | None, run: RunFolder, recipe_text: str) -> dict[str, dict[str, float]]:
    """Write the model folder, then score it. A set that cannot be scored is reported and left out of the scores; the
    model is complete without them. result.json is written last."""
    report, recipe, state, prepared = trainer.reporter.print, trainer.recipe, trainer.state, trainer.prepared
    if last is None:
        raise UserError(f"{run.folder}: the final checkpoint could not be saved; free disk space and run it again")

    stated: Baselines = {}

    def card(weights: str, scores: Scores) -> str:
        fields = _card_fields(trainer, run, recipe_text, weights, scores) | {"baselines": stated}
        return model_card(fields, recipe_text)

    def save(text: str) -> None:
        folder = trainer.folder(text)
        replace(folder, model=recipe.task.finished(folder.model)).save(run.model)

    single = trainer.checkpoints.best(state) or last
    weights = _load_first_choice(trainer, single)
    save(card(weights, {}))
    scores: Scores = {}
    if prepared.valid is not None:
        before = weights
        weights, scores["valid"] = _compare_with_average(trainer, single, weights)
        if weights != before:
            save(card(weights, scores))
    if prepared.test_examples:
        scores["test"] = _score_test_set(trainer)
    for split, row in scores.items():
        if not row or (split == "valid" and recipe.metric not in row):
            report(f"to score the {split} data later:\n  {score_commands(run.model, recipe, split)}")
    with trainer.scorer.warn_on_failure("computing the baselines"):
        stated |= _baselines(trainer, [split for split, row in scores.items() if row])
    write_text(run.model / CARD, card(weights, scores))
    with trainer.scorer.warn_on_failure("writing the report"):
        report(f"a report is in {_write_page(trainer, run, recipe_text, weights, scores, stated)}")
    result = {
        "steps": state.step,
        "asked": {"steps": recipe.last_step, "epochs": recipe.epochs},
        "weights": weights,
        "tokens": state.tokens,
        "training_seconds": state.seconds,
        "scores": {name: row or None for name, row in scores.items()},
        "examples": {name: len(getattr(prepared, f"{name}_examples")) for name in scores},  # scored, of each set
        "baselines": {name: [one.to_tree() for one in found] for name, found in stated.items()},
    }
    write_text(run.result, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    report(f"the model is in {run.model}")
    return {name: row for name, row in scores.items() if row}


def _baselines(trainer: Trainer, splits: Sequence[str]) -> Baselines:
    """What needs no model, on the same examples, printed beside the scores."""
    recipe, prepared, report = trainer.recipe, trainer.prepared, trainer.reporter.print
    if prepared.examples > MOST_EXAMPLES:
        report(f"baselines: left out, as there are more than {MOST_EXAMPLES:,} training examples")
        return {}
    train = [example for entry in recipe.data.train for example in entry.read(Report())]
    tokenizer = None if prepared.vocabularies is None else prepared.vocabularies.target
    found: Baselines = {}
    for split in splits:
        found[split] = []
        for one in baselines(train, getattr(prepared, f"{split}_examples"), tokenizer):
            if figures := {name: value for name, value in one.figures.items() if name in recipe.task.metrics}:
                found[split].append(replace(one, figures=figures))
                report(f"{split} baseline, {found[split][-1].text}")
    return found


def _write_page(
    trainer: Trainer, run: RunFolder, recipe_text: str, weights: str, scores: Scores, stated: Baselines
) -> Path:
    """The report, with the examples of the last set that was predicted; a few are generated where none was."""
    recipe, state, prepared = trainer.recipe, trainer.state, trainer.prepared
    fields = _card_fields(trainer, run, recipe_text, weights, scores)
    if not (samples := trainer.scorer.samples) and recipe.metric in LOSS_METRICS:
        few = evenly_spaced(prepared.test_examples or prepared.valid_examples, SHOWN)
        samples = trainer.scorer.score(few, recipe.decoding.beam, SHOWN).samples if few else []
    rows = [(split, "", row) for split, row in scores.items()]
    rows += [(split, one.name, one.figures) for split, found in stated.items() for one in found]
    memory = memory_in_use(trainer.backend.device)
    facts = {
        "task": recipe.task_kind,
        "model": f"{fields['kind']}, {fields['vocabulary']}",
        "parameters": f"{fields['parameters']:,}",
        "trained": f"{fields['examples']}, {fields['tokens']}, {state.step:,} steps, {fields['epochs']} epochs begun",
        "weights": weights,
        "machine": fields["machine"],
        "training time": clock(state.seconds),
        "throughput": f"{state.tokens / max(state.seconds, 1e-9):,.0f} {recipe.task.loss_unit}/s",
        **({} if memory is None else {"memory": format_bytes(memory)}),
    }
    return write_page(
        run.folder,
        RunFacts(
            title=fields["name"],
            facts=facts,
            columns=list(dict.fromkeys([recipe.metric, *fields["columns"]])),
            higher=dict(recipe.task.metrics),
            scores=[row for split in scores for row in rows if row[0] == split],
            samples=samples,
            labels=prepared.labels,
            data=prepared.report,
            recipe=_portable(recipe_text),
        ),
    )


def score_commands(model: Path, recipe: Recipe, split: str) -> str:
    """The commands that score a model folder on the files of a split, one per line."""
    lines = []
    for entry in getattr(recipe.data, split):
        files = entry.files()
        tags = [("--to", getattr(entry, "to", None)), ("--from", getattr(entry, "from_", None))]
        options = ["--model", str(model), *(word for name, tag in tags if tag for word in (name, tag))]
        if entry.portion is not None:
            options += ["--portion", ",".join(f"{bound:g}" for bound in entry.portion)]
        if getattr(entry, "source", None) is not None:  # aligned files: source, target, source, target, …
            given = [["--source", str(a), "--target", str(b)] for a, b in zip(files[::2], files[1::2], strict=True)]
        else:
            given = [[str(path)] for path in getattr(entry, "path", files)]
        lines += [shlex.join(["allyouneed", "evaluate", *words, *options]) for words in given]
    return "\n  ".join(lines)


def _card_fields(trainer: Trainer, run: RunFolder, recipe_text: str, weights: str, scores: Scores) -> dict[str, Any]:
    recipe, state, prepared = trainer.recipe, trainer.state, trainer.prepared
    return {
        "name": recipe.name or run.folder.name,
        "description": recipe.description,
        "kind": tree_of(trainer.config)["kind"],
        "parameters": trainer.config.cost().parameters,
        "licence": recipe.licence,
        "origin": "" if recipe.start is None else origin_line(recipe.start),
        "task": recipe.task_kind,
        "labels": prepared.labels,
        "vocabulary": _vocabulary(trainer),
        "examples": f"{prepared.examples:,} {recipe.task.file_type.examples}",
        "tokens": f"{state.tokens:,} {recipe.task.loss_unit}",
        "steps": state.step,
        "epochs": state.position.epoch + (1 if state.position.batch else 0),
        "machine": trainer.backend.summary,
        "weights": weights,
        "unit": recipe.task.file_type.examples,
        "columns": list(dict.fromkeys(name for row in scores.values() for name in row)),
        "scores": scores,
        "scored": {name: len(getattr(prepared, f"{name}_examples")) for name in scores},
        "sha256": yaml.safe_load(recipe_text)["data"]["sha256"],
    }


def origin_line(start: Path) -> str:
    """The start model and its licence, from its card."""
    try:
        head = read_card(start).split("\n## ")[0]
    except UserError:
        head = ""
    title = re.search(r"^# (.+)$", head, re.MULTILINE)
    licence = re.search(r"^(?:- )?licen[cs]e[^:\n]*:[ ]*(\S.*)$", head, re.MULTILINE | re.IGNORECASE)
    name = title[1].strip() if title else start.name
    return f"started from {name} (licence {licence[1].strip() if licence else 'not stated'})"


def _vocabulary(trainer: Trainer) -> str:
    """Sizes and kind of the tokenizers; empty for a model without."""
    recipe, vocabularies = trainer.recipe, trainer.prepared.vocabularies
    if vocabularies is None:
        return ""
    sizes = {id(tokenizer): tokenizer.size for tokenizer in (vocabularies.source, vocabularies.target)}.values()
    made: str = recipe.tokenizer.kind if recipe.start is None else "that of the model it started from"
    if not vocabularies.joint:
        made = f"{made}, one for each side"
    elif recipe.task.sides == 2:
        made = f"{made}, shared by both sides"
    return f"{' and '.join(f'{n:,}' for n in sizes)} tokens ({made})"


def _score_test_set(trainer: Trainer) -> dict[str, float]:
    """Empty if scoring failed."""
    recipe, prepared, found = trainer.recipe, trainer.prepared, dict[str, float]()
    with trainer.scorer.warn_on_failure("scoring the test data"):
        show = 0 if recipe.metric in LOSS_METRICS else len(prepared.test_examples)
        judged = trainer.scorer.score(prepared.test_examples, recipe.decoding.beam, show, RESAMPLES)
        trainer.scorer.samples = judged.samples or trainer.scorer.samples
        found, text = judged.figures, f"\n{judged.text}"
        if not found:
            assert prepared.test is not None
            found = validation_loss(trainer.model, recipe.task, prepared.test, trainer.backend)
            text = f"  {_row(found)}"
        trainer.reporter.print(f"test ({len(prepared.test_examples):,} {recipe.task.file_type.examples}){text}")
    return found


def _load_first_choice(trainer: Trainer, single: Checkpoint) -> str:
    """Load the weights that need no scores to choose: the best checkpoint of the validations, or without any the
    average. Returns their description."""
    averaged = _averaged(trainer)
    if trainer.prepared.valid is None and len(averaged) > 1:
        set_weights(trainer.model, average_weights(averaged))
        return f"{_average_name(averaged)} (not compared: no validation set)"
    return _load_single(trainer, single)


def _load_single(trainer: Trainer, single: Checkpoint) -> str:
    """Load a checkpoint, or the moving average in it. Returns its description."""
    read_weights(trainer.model, single.path / WEIGHTS)
    means = single.moving_average()
    set_weights(trainer.model, means)
    return f"{'moving average' if means else 'checkpoint'} of step {single.step}"


def _compare_with_average(trainer: Trainer, single: Checkpoint, weights: str) -> tuple[str, dict[str, float]]:
    """Load the average if it is better than `single`, which is loaded and described by `weights`, on `validate.limit`
    examples. The description of the weights, and their scores on all examples."""
    recipe, report, metric = trainer.recipe, trainer.reporter.print, trainer.recipe.metric
    limit, averaged, chosen = recipe.validation.limit, _averaged(trainer), weights
    found = trainer.scorer.evaluate(recipe.decoding.beam, limit=limit)
    samples = trainer.scorer.samples
    report(f"{chosen}:  {_row(found)}{trainer.scorer.limit_text(limit)}")
    if len(averaged) > 1:
        set_weights(trainer.model, average_weights(averaged))
        of_average = trainer.scorer.evaluate(recipe.decoding.beam, limit=limit)
        report(f"{_average_name(averaged)}:  {_row(of_average)}{trainer.scorer.limit_text(limit)}")
        better = metric in found and is_better(metric, recipe.task.metrics[metric], of_average, found)
        if metric in found and metric in of_average:
            words = "average" if better else "single checkpoint"
            report(f"averaging changes {metric} by {of_average[metric] - found[metric]:+.3f}: using the {words}")
        if better:
            chosen, found = _average_name(averaged), of_average
        else:
            _load_single(trainer, single)
            trainer.scorer.samples = samples
    if trainer.scorer.limit_text(limit):
        found = trainer.scorer.evaluate(recipe.decoding.beam)
        report(f"{chosen}:  {_row(found)}  (all {len(trainer.prepared.valid_examples):,})")
    return chosen, found


def _averaged(trainer: Trainer) -> list[Checkpoint]:
    """The checkpoints to be averaged; none where training kept a moving average."""
    several = trainer.recipe.average > 1 and trainer.recipe.optimiser.ema is None
    return trainer.checkpoints.regular()[-trainer.recipe.average :] if several else []


def _average_name(averaged: Sequence[Checkpoint]) -> str:
    return f"average of the {len(averaged)} checkpoints of steps {', '.join(str(c.step) for c in averaged)}"


def _row(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in scores.items()) or "not scored"
