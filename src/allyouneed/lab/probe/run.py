"""Probes: every model on every task, at rates chosen by one rule, and controls beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.errors import UserError
from allyouneed.files import sha256
from allyouneed.lab.mixer_sizes import SkeletonSizes, mixers, tree
from allyouneed.lab.probe.task import HOME, ProbeTask, find
from allyouneed.lab.probe.train import Fit, Sample, fit, score
from allyouneed.lab.rates import RateCurve, RateRule, sweep
from allyouneed.lab.statistics import Control
from allyouneed.lab.store import Experiment, Result, ResultStore, finite, versions
from allyouneed.nn.models.base import Model

# a short convolution before every mixer shows each token those before it (Arora et al. 2024, Based, 5.1): without it,
# what is measured within minutes is how long attention takes to find the token before. Tasks that track a state go
# without, as their sources do: with it, an LSTM takes many times longer to learn parity
CONVOLUTION = {"wiring": "pre-norm", "mixer": {"kind": "convolution", "size": 3, "sees": "past", "separable": True}}
SIZES = SkeletonSizes(width=64, heads=4, layers=2, hidden=128, vocab=64, given=160, new=1, segment=16)
TEST_ROWS = 256
CONTROL_RATE = 1e-2


@dataclass(frozen=True)
class ProbeSize:
    """What a probe costs. `rule`: which rates are tried; `seeds`: runs at the best rate."""

    steps: int = 400
    rows: int = 32
    seeds: int = 1
    rule: RateRule = field(default_factory=RateRule)
    device: str = "cpu"


@cache
def known() -> tuple[str, ...]:
    """The mixers that are probed unless others are named."""
    return tuple(name for name in mixers(SIZES) if name != "identity")


def model_tree(name: str, convolved: bool = True) -> dict[str, Any]:
    """Two layers of a mixer, each behind a short convolution, or a model as it is: a preset or a YAML file."""
    if name in mixers(SIZES):
        layer = tree(SIZES, mixers(SIZES)[name])["decoder"][0] | {"repeat": 1}
        return tree(SIZES, {}) | {
            "decoder": [CONVOLUTION, layer] * SIZES.layers if convolved else [layer] * SIZES.layers
        }
    found: dict[str, Any] = tree_of(parse(Model, preset_tree(name), name))  # type: ignore[type-abstract]
    if found["kind"] != "decoder":
        raise UserError(
            f"{name}: a model of kind {found['kind']} cannot be probed; name a decoder or a mixer: {', '.join(known())}"
        )
    return found


def sample(task: ProbeTask, length: int | None = None) -> Sample:
    """Examples of one length, or of random trained ones, the same in a batch."""
    low, high = task.trained

    def make(dice: torch.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = int(torch.randint(low, high + 1, (), generator=dice)) if length is None else length
        return task.make(dice, rows, wanted)

    return make


def experiment(model: dict[str, Any], task: str, rate: float, seed: int, size: ProbeSize) -> Experiment:
    source = sha256(HOME / f"{task.replace('-', '_')}.py")
    how = {"rate": rate, "seed": seed, "steps": size.steps, "rows": size.rows}
    return {"probe": task, "source": source, "model": model | {"vocab": find(task).vocab}, **how, **versions()}


def run_one(one: Experiment, device: str = "cpu") -> Result:
    """Train a model on a task, and test it on the longest length of training and on longer examples."""
    task = find(one["probe"])
    torch.manual_seed(one["seed"])
    random.seed(one["seed"])
    net = parse(Model, dict(one["model"])).build()  # type: ignore[type-abstract]
    how = Fit(one["rate"], one["steps"], one["rows"], seed=one["seed"], device=device)
    longest = sample(task, task.trained[1])
    trained = fit(net, sample(task), how, longest)
    loss, accuracy = score(net, longest, TEST_ROWS)
    limit: int | None = getattr(net.config, "limit", None)
    fits = limit is None or task.make(torch.Generator(), 1, task.longer)[0].shape[1] <= limit
    longer = score(net, sample(task, task.longer), TEST_ROWS)[1] if fits else None
    return {
        "loss": finite(loss),
        "accuracy": accuracy,
        "longer": longer,
        "steps": trained.steps,
        "diverged": trained.diverged,
    }


@dataclass(frozen=True)
class ProbeCell:
    """A model on a task: accuracies at the best rate, one for each seed, and the curve over rates."""

    accuracy: tuple[float, ...]
    longer: tuple[float | None, ...]
    steps: tuple[int, ...]
    curve: RateCurve


def probe(
    models: Sequence[str],
    tasks: Sequence[str],
    store: ResultStore,
    size: ProbeSize,
    processes: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[tuple[str, str], ProbeCell]:
    """The cells of all models and tasks."""
    trees = {(name, task): model_tree(name, find(task).convolved) for name in models for task in tasks}
    cells = {f"{model} on {task}": (model, task) for task in tasks for model in models}
    runner = partial(run_one, device=size.device)

    def results(wanted: Sequence[tuple[str, float, int]]) -> list[Result]:
        found = [experiment(trees[cells[cell]], cells[cell][1], rate, seed, size) for cell, rate, seed in wanted]
        return store.run(found, runner, processes, report)

    def losses(wanted: list[tuple[str, float]]) -> dict[tuple[str, float], float | None]:
        found = results([(cell, rate, 0) for cell, rate in wanted])
        return {key: None if one["diverged"] else one["loss"] for key, one in zip(wanted, found, strict=True)}

    curves = sweep(list(cells), losses, size.rule)
    best = [
        (cell, curve.best, seed)
        for cell, curve in curves.items()
        if curve.best is not None
        for seed in range(size.seeds)
    ]
    by_cell: dict[str, list[Result]] = {cell: [] for cell in cells}
    for (cell, _, _), one in zip(best, results(best), strict=True):
        by_cell[cell].append(one)
    return {
        cells[cell]: ProbeCell(
            tuple(one["accuracy"] for one in runs),
            tuple(one["longer"] for one in runs),
            tuple(one["steps"] for one in runs),
            curves[cell],
        )
        for cell, runs in by_cell.items()
    }


def controls(store: ResultStore, size: ProbeSize) -> list[Control]:
    """What theory fixes: a recurrence that computes parity, one layer that cannot recall, and none that mixes."""
    layer = tree(SIZES, mixers(SIZES)["attention"])["decoder"][0] | {"repeat": 1}
    one_layer = tree(SIZES, {}) | {"decoder": [layer]}
    alone = tree(SIZES, {"kind": "identity"})
    lstm = tree(SIZES, {}) | {"decoder": [{"wiring": "pre-norm", "mixer": "lstm"}]}
    wanted = [(lstm, "parity"), (one_layer, "recall"), (alone, "recall"), (alone, "copy")]
    found = store.run(
        [experiment(model, task, CONTROL_RATE, 0, size) for model, task in wanted], partial(run_one, device=size.device)
    )
    parity, recall, nothing, copied = (one["accuracy"] for one in found)
    pairs = find("recall").trained[1]
    return [
        Control("LSTM, parity at the trained length", parity, 0.99),
        # one of the values that the text holds may be guessed
        Control("one attention layer, recall", recall, high=2 / pairs + 0.1),
        Control("no mixing, recall", nothing, high=find("recall").chance + 0.05),
        Control("no mixing, copy", copied, high=find("copy").chance + 0.05),
    ]
