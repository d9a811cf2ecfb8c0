"""Models compared on one corpus: the same tokens in the same order, matched in one thing, each at the rate that one
rule finds for it, with several seeds, judged by paired intervals over the same validation examples.

Half of the groups of validation examples choose the rate, the other half judge. Whatever diverged, cannot see its text
or has its best rate at the edge of what was tried, is said, and never averaged in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.lab.comparison.sizes import FAR, Match, Sized, matched, sizes_text, words_text
from allyouneed.lab.comparison.speed import CONTEXTS, machine
from allyouneed.lab.comparison.training import Corpus, measure_models, open_corpus, train_model
from allyouneed.lab.rates import RateCurve, RateRule, sweep
from allyouneed.lab.statistics import ConfidenceInterval, difference, interval, verdict
from allyouneed.lab.store import Result, ResultStore
from allyouneed.nn.models.sight import blind_pool

LEAST_SEEDS, LEAST_STEPS = 3, 100
STEPS = {"cpu": 600, "cuda": 3000}  # without a budget
SIZES = {"cpu": (128, 4), "cuda": (512, 8)}  # width and blocks
DROPOUT = (2.0, 0.1)  # passes over the data from which on there is dropout, and how much
STARTING = 2.0  # seconds of a run beside its updates
EQUAL = 0.02  # of the loss: a difference that does not matter
FASTER = 1.1  # a lead that counts where quality does not decide
RESERVE = 1.15  # the plan's allowance for what it does not know


@dataclass(frozen=True)
class ComparisonSettings:
    """How to compare. None: as the device and the budget allow."""

    match: Match = "parameters"
    seeds: int = LEAST_SEEDS
    steps: int | None = None
    budget: float | None = None  # seconds
    width: int | None = None
    blocks: int | None = None
    processes: int = 1
    rule: RateRule = field(default_factory=RateRule)


@dataclass(frozen=True)
class ComparisonPlan:
    """What is run. `left_out`: models and why; `seconds`: what it is expected to take."""

    steps: dict[str, int]
    left_out: dict[str, str]
    seconds: float


@dataclass
class Contender:
    """A model of the comparison and everything found about it."""

    sized: Sized
    steps: int = 0
    curve: RateCurve | None = None
    runs: list[Result] = field(default_factory=list)  # of each seed, at its rate
    costs: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.sized.name

    @property
    def finished(self) -> dict[int, Result]:
        """Runs that did not diverge, by seed."""
        return {seed: run for seed, run in enumerate(self.runs, 1) if run["loss"] is not None}

    def table(self, seeds: Sequence[int]) -> np.ndarray[Any, Any]:
        """Losses (seeds, groups) of the judging half."""
        return np.array([self.runs[seed - 1]["losses"][1::2] for seed in seeds])

    def weights(self) -> np.ndarray[Any, Any]:
        return np.array(next(iter(self.finished.values()))["counts"][1::2], float)


@dataclass(frozen=True)
class Standing:
    """A model beside the one with the lowest loss. `behind`: how much higher its loss is; None for the first."""

    name: str
    loss: ConfidenceInterval
    behind: ConfidenceInterval | None
    verdict: str  # best, worse, inconclusive


@dataclass(frozen=True)
class ModelComparison:
    """Everything that a report says."""

    settings: ComparisonSettings
    corpus: Corpus
    contenders: list[Contender]
    standings: list[Standing]
    left_out: dict[str, str]
    machine: str

    def contender(self, name: str) -> Contender:
        return next(one for one in self.contenders if one.name == name)

    @property
    def tied(self) -> list[Standing]:
        """The best and those that cannot be told from it."""
        return [one for one in self.standings if one.verdict != "worse"]

    @property
    def recommended(self) -> str | None:
        """The best; of models that are as good (`equals`), one that is clearly faster (`faster`)."""
        if not self.standings or self.guesses:
            return None
        best = self.standings[0].name
        found = max([best, *self.equals], key=self.pace)
        return found if self.faster(found, best) else best

    @property
    def guesses(self) -> bool:
        """Whether even the best is no better than a guess between the labels."""
        labels = len(self.corpus.prepared.labels)
        return labels > 1 and bool(self.standings) and self.standings[0].loss.high >= math.log(labels)

    @property
    def equals(self) -> list[str]:
        """Models that cannot be told from the best, and whose interval leaves no room for a loss that matters. A wide
        interval is no sign of equality."""
        room = EQUAL * abs(self.standings[0].loss.mean)
        return [one.name for one in self.tied if one.behind is not None and one.behind.high <= room]

    def pace(self, name: str) -> tuple[float, float]:
        """Decoded tokens per second after the longest context that is known, 0 if it cannot; trained ones."""
        costs = self.contender(name).costs
        decoded = costs["decoding"].get(str(CONTEXTS[-1]))
        return decoded if isinstance(decoded, float) else 0.0, costs["training"]

    def faster(self, name: str, other: str) -> bool:
        """Whether it is faster by more than speeds vary: in decoding, or in training where neither decodes."""
        (mine, trained), (theirs, other_trained) = self.pace(name), self.pace(other)
        return mine > FASTER * theirs if mine or theirs else trained > FASTER * other_trained


def fitted(corpus: Corpus, models: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The models with the head and vocabulary of the task, and why others cannot take part."""
    recipe, prepared = corpus.recipe, corpus.prepared
    found, refused = {}, {}
    for name, tree in models.items():
        own = recipe.model_copy(update={"model": dict(tree), "set_": (), "start": None})
        try:
            found[name] = tree_of(own.model_for(prepared.vocabularies, prepared.labels))
        except UserError as error:
            refused[name] = str(error)
    return found, refused


def compare(
    models: Mapping[str, Mapping[str, Any]],
    folder: Path,
    settings: ComparisonSettings,
    report: Callable[[str], None] = lambda text: None,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> ModelComparison:
    """Compare models on the data of the recipe in this folder; what has run before is not run again. `count`: finished
    runs of those that are known to be needed."""
    if settings.seeds < LEAST_SEEDS:
        raise UserError(f"--seeds {settings.seeds}: at least {LEAST_SEEDS}; fewer say nothing about chance")
    corpus, store = open_corpus(str(folder), loud=True), ResultStore(folder / "results")
    if corpus.prepared.valid is None:
        raise UserError(f"{folder / 'recipe.yaml'}: has no validation data (data.valid), which models are judged by")
    trees, left_out = fitted(corpus, models)
    if len(trees) < 2:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise UserError(f"at least two models are needed for a comparison{reasons}")
    width, blocks = SIZES[corpus.backend.device.type]
    width, blocks = settings.width or width, settings.blocks or blocks
    facts = corpus.facts()
    passes = _passes(corpus, settings.steps or STEPS[corpus.backend.device.type])
    dropout = DROPOUT[1] if passes > DROPOUT[0] else 0.0
    sized = matched(trees, settings.match, width, blocks, corpus.recipe.max_tokens, dropout)
    for one in sized:
        report(f"{one.name}: {sizes_text(one.model)}; {one.model.cost().parameters:,} parameters, {one.ratio:.3f}")
    report("measuring speeds")
    decoding = not any(one.model.kind == "encoder" for one in sized)
    speeds = {
        "kind": "speed",
        "models": [one.tree for one in sized],
        "decoding": decoding,
        "machine": machine(),
    } | facts
    (measured,) = store.run([speeds], partial(measure_models, folder=str(folder)))
    costs = dict(zip((one.name for one in sized), measured["models"], strict=True))
    plan = _stored_plan(store, sized, costs, settings, corpus, speeds)
    left_out |= plan.left_out
    contenders = [
        Contender(one, plan.steps[one.name], costs=costs[one.name], warnings=_warnings(one, corpus))
        for one in sized
        if one.name in plan.steps
    ]
    counts = sorted(set(plan.steps.values()))
    report(
        f"{len(contenders)} models, {' to '.join(f'{n:,}' for n in (counts[0], counts[-1])[: len(counts)])} steps, "
        f"about {plan.seconds / 60:.1f} minutes"
    )

    def experiment(one: Contender, rate: float, seed: int) -> dict[str, Any]:
        return {"kind": "training", "model": one.sized.tree, "rate": rate, "seed": seed, "steps": one.steps} | facts

    def run(wanted: Sequence[tuple[Contender, float, int]]) -> list[Result]:
        experiments = [experiment(*one) for one in wanted]
        runner = partial(train_model, folder=str(folder))
        return store.run(experiments, runner, settings.processes, count)

    by_name = {one.name: one for one in contenders}

    def train(wanted: list[tuple[str, float]]) -> dict[tuple[str, float], float | None]:
        found = run([(by_name[name], rate, 1) for name, rate in wanted])
        return {key: _choosing_loss(result) for key, result in zip(wanted, found, strict=True)}

    for name, curve in sweep(list(by_name), train, settings.rule).items():
        by_name[name].curve = curve
        by_name[name].warnings += curve.warnings()
    rated = [(one, one.curve.best) for one in contenders if one.curve is not None and one.curve.best is not None]
    wanted = [(one, rate, seed) for one, rate in rated for seed in range(1, settings.seeds + 1)]
    for (model, _, seed), result in zip(wanted, run(wanted), strict=True):
        model.runs.append(result)
        if result["diverged"]:
            model.warnings.append(f"seed {seed} diverged ({result['diverged']}) and is not in its mean")
    return ModelComparison(settings, corpus, contenders, standings(contenders), left_out, measured["machine"])


def _choosing_loss(result: Result) -> float | None:
    """The loss of the half that chooses rates."""
    if result["loss"] is None:
        return None
    losses, counts = np.array(result["losses"][::2]), np.array(result["counts"][::2])
    return float((losses * counts).sum() / counts.sum())


def standings(contenders: Sequence[Contender]) -> list[Standing]:
    """The models by their loss, each judged beside the first on the seeds that both have."""
    able = [one for one in contenders if len(one.finished) >= 2]
    losses = {one.name: interval(one.table(list(one.finished)), one.weights()) for one in able}
    ordered = sorted(able, key=lambda one: losses[one.name].mean)
    found: list[Standing] = []
    for one in ordered:
        if one is ordered[0]:
            found.append(Standing(one.name, losses[one.name], None, "best"))
            continue
        seeds = sorted(set(one.finished) & set(ordered[0].finished))
        behind = difference(one.table(seeds), ordered[0].table(seeds), one.weights())
        word = "worse" if len(seeds) > 1 and verdict(behind) == "higher" else "inconclusive"
        found.append(Standing(one.name, losses[one.name], behind, word))
    return found


def _warnings(one: Sized, corpus: Corpus) -> list[str]:
    found = [one.warning] if one.warning else []
    blind = blind_pool(one.model, corpus.recipe.max_tokens)
    return [*found, *([blind] if blind else [])]


def _passes(corpus: Corpus, steps: int) -> float:
    """How often a run reads the training data."""
    return steps * corpus.recipe.accumulate / max(1, corpus.prepared.train.steps_per_epoch(0))


def _stored_plan(
    store: ResultStore,
    sized: Sequence[Sized],
    costs: Mapping[str, Mapping[str, Any]],
    settings: ComparisonSettings,
    corpus: Corpus,
    speeds: Mapping[str, Any],
) -> ComparisonPlan:
    """The plan is made once and kept: a comparison that is resumed, even on a slower day, stays the same."""
    asked = {
        "kind": "plan", "match": settings.match, "seeds": settings.seeds, "steps": settings.steps,
        "budget": settings.budget, "processes": settings.processes, "rates": list(settings.rule.rates),
        "speeds": store.path(speeds).stem,
    }  # fmt: skip

    def made(_: Any) -> Result:
        found = plan([one.name for one in sized], costs, settings, STEPS[corpus.backend.device.type])
        return {"steps": found.steps, "left_out": found.left_out, "seconds": found.seconds}

    (found,) = store.run([asked], made)
    return ComparisonPlan(**found)


def plan(
    names: Sequence[str],
    costs: Mapping[str, Mapping[str, Any]],
    settings: ComparisonSettings,
    usual_steps: int = STEPS["cpu"],
) -> ComparisonPlan:
    """How many steps fit into the budget. Fewer steps come first; where fewer would teach nothing, models are left out,
    the slowest first, but never the first that was named."""
    runs = len(settings.rule.rates) + 1 + settings.seeds - 1  # one extension of the grid is expected

    def steps_of(kept: Sequence[str], steps: int) -> dict[str, int]:
        if settings.match != "time":
            return dict.fromkeys(kept, steps)
        seconds = steps * costs[kept[0]]["update"]  # the first model's time, for all
        return {name: max(1, round(seconds / costs[name]["update"])) for name in kept}

    def seconds_of(steps: Mapping[str, int]) -> float:
        each = (n * costs[name]["update"] + costs[name]["validation"] + STARTING for name, n in steps.items())
        return RESERVE * runs * sum(each) / _parallel(settings.processes)

    kept = list(names)
    left_out: dict[str, str] = {}
    while True:
        if settings.budget is None or settings.steps is not None:
            steps = settings.steps or usual_steps
        else:
            one, more = seconds_of(steps_of(kept, 100)), seconds_of(steps_of(kept, 200))
            fixed, slope = 2 * one - more, (more - one) / 100
            steps = min(usual_steps, int((settings.budget - fixed) / max(slope, 1e-9)))
        found = steps_of(kept, max(1, steps))
        if settings.budget is None or (steps >= LEAST_STEPS and seconds_of(found) <= settings.budget * 1.01):
            return ComparisonPlan(found, left_out, seconds_of(found))
        if len(kept) == 2:
            needed = seconds_of(steps_of(kept, settings.steps or LEAST_STEPS))
            raise UserError(
                f"--budget: two models with {runs} runs of {settings.steps or LEAST_STEPS} steps take about "
                f"{needed / 60:.0f} minutes here; allow as many, or use a smaller --width"
            )
        slowest = max(kept[1:], key=lambda name: costs[name]["update"])
        kept.remove(slowest)
        left_out[slowest] = (
            f"the budget of {settings.budget / 60:g} minutes is too short for all: it was the slowest, "
            f"{1000 * costs[slowest]['update']:.0f} ms an update"
        )


def _parallel(processes: int) -> float:
    """How much faster several processes are: as many times as there are GPUs for them; the cores of a CPU are shared
    either way."""
    import torch

    return float(min(processes, torch.cuda.device_count())) if torch.cuda.is_available() else 1.0


def sized_facts(one: Contender, length: int) -> dict[str, Any]:
    """What a model is and costs by its config."""
    model = one.sized.model
    cost, longest = model.cost(length), model.limit or CONTEXTS[-1]
    return {
        "words": words_text(model),
        "sizes": sizes_text(model),
        "parameters": cost.parameters,
        "flops": cost.flops,
        "state": {str(n): model.cost(n).state_bytes(n, 4) for n in CONTEXTS if model.generates and n <= longest},
        "ratio": one.sized.ratio,
        "far": abs(one.sized.ratio - 1) > FAR,
    }
