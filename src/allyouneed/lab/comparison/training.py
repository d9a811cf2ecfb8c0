"""Training runs of an experiment: the same data, tokenizer and batches for every model, without checkpoints. A run is
plain data in and plain data out, so that a store can keep it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from allyouneed.config import parse, tree_of
from allyouneed.data.batches.packing import PaddedBatches
from allyouneed.data.batches.store import InputHashes
from allyouneed.lab.comparison.speed import Energy, UpdateMemory, decoding_speeds, machine
from allyouneed.lab.store import Experiment, Result, finite, versions
from allyouneed.nn.batch import Batch
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.segment_memory import with_segment_memory
from allyouneed.runtime.process import evaluation_mode
from allyouneed.training.backend import Backend, choose_backend
from allyouneed.training.cuda.capture import CapturedUpdates
from allyouneed.training.optim.schedule import Cosine
from allyouneed.training.prefetch import DataPosition, Prefetcher, Update
from allyouneed.training.prepare import PreparedData, RunFolder, prepare, resolve
from allyouneed.training.random_state import seed_all
from allyouneed.training.recipe.file import load_recipe
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.step import PendingStep, fetch_results, run_update

UNITS = 200  # groups of validation examples, which intervals resample
HELD_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 17}  # of the validation data that are read
WARMUP = 0.1  # of a run
WORSE = 1.05  # times the loss before training, a run has diverged
POINTS = 200  # of a stored curve
COLLECT = 10  # updates between looks at their losses
TURNS, WARM = 5, 2  # updates that are timed, after these
KEYS = ("task", "batch", "optimiser", "clip", "accumulate", "precision", "compile")  # of a recipe, for every model
PLACES = ("path", "source", "target", "labels")  # of files, whose checksums count instead


@dataclass(frozen=True)
class Corpus:
    """Prepared data, and how every model is trained on it."""

    folder: Path
    recipe: Recipe
    prepared: PreparedData
    backend: Backend

    def facts(self) -> dict[str, Any]:
        """What determines a result beside the model, its rate, its seed and its steps."""
        tree = tree_of(self.recipe)
        with InputHashes(self.folder / "inputs.json") as hashes:
            sums = resolve(self.recipe, hashes)["data"]["sha256"]
        entries = [entry for split in ("train", "valid") for entry in tree["data"][split]]
        return {key: tree[key] for key in KEYS} | {
            "sha256": sorted(sums.values()),
            "entries": [{key: value for key, value in entry.items() if key not in PLACES} for entry in entries],
            "filters": tree["data"]["filters"],
            "tokenizer": None if self.prepared.vocabularies is None else self.prepared.vocabularies.hash,
            "tokens": self.recipe.max_tokens,
            "rows": self.prepared.rows,
            "device": self.backend.device.type,
            "bf16": self.backend.bf16,
            "versions": versions(),
        }

    def config(self, tree: dict[str, Any]) -> Any:
        return parse(Model, tree, "model")  # type: ignore[type-abstract]

    def updates(self, seed: int) -> Prefetcher:
        """Updates in the order of this seed: the same for every model."""
        recipe, items = self.recipe, self.prepared.train.items
        batches = recipe.task.batches(items, recipe.capacities, self.prepared.rows, seed)
        return Prefetcher(batches, DataPosition(0, 0), recipe.accumulate, self.backend.device)

    def held_out(self) -> Iterator[Batch]:
        """Validation data in groups of a few examples."""
        data = self.prepared.valid
        assert data is not None
        if self.recipe.task.has_memory or self.recipe.task.compares_batch:
            yield from data.batches(0)
            return
        lengths = data.items.lengths(0)
        longest, total = max(int(side.max()) for side in lengths), int(lengths[-1].sum())
        budget = max(longest, min(total, HELD_TOKENS[self.backend.device.type]) // UNITS)
        groups = PaddedBatches(data.items, budget)
        step = max(1, -(-groups.steps_per_epoch(0) // UNITS))
        yield from (batch for number, batch in enumerate(groups.batches(0)) if number % step == 0)


@lru_cache(maxsize=2)
def open_corpus(folder: str, loud: bool = False) -> Corpus:
    """The data of the folder's recipe.yaml, prepared on first use."""
    recipe = load_recipe(Path(folder) / "recipe.yaml")
    prepared = prepare(recipe, RunFolder(Path(folder) / "data"), Reporter(None if loud else Console(quiet=True)))
    return Corpus(Path(folder), recipe, prepared, choose_backend(recipe))


class TrainedModel:
    """A model in training: `update` does one step."""

    def __init__(self, corpus: Corpus, tree: dict[str, Any], rate: float, seed: int, steps: int) -> None:
        self.corpus, self.steps, self.step = corpus, steps, 0
        recipe, backend = corpus.recipe, corpus.backend
        seed_all(seed)
        self.model: Any = corpus.config(tree).build().train().to(backend.device)
        backend.compile_model(self.model)
        self.reader = with_segment_memory(self.model, recipe.task.has_memory)
        self.optimiser = recipe.optimiser.build(self.model)
        self.schedule = Cosine(peak=rate, warmup=max(1, round(WARMUP * steps)))
        self.captured = CapturedUpdates(
            self.reader, recipe.task, self.optimiser, recipe.clip, backend, report=lambda text: None
        )

    def update(self, update: Update) -> PendingStep:
        self.step += 1
        recipe = self.corpus.recipe
        rate = self.schedule.rate(self.step, self.model.config.width, self.steps)
        if self.captured.enabled:
            return self.captured.run(update, self.step, rate)
        return run_update(
            self.reader, recipe.task, self.optimiser, update, self.step, rate, recipe.clip, self.corpus.backend
        )

    @torch.no_grad()
    def losses(self) -> tuple[list[float], list[int]]:
        """The mean loss of each group of validation examples, and what it is averaged over."""
        backend, task = self.corpus.backend, self.corpus.recipe.task
        found, counts = [], []
        with backend.eager(), evaluation_mode(self.model):
            for batch in self.corpus.held_out():
                with backend.autocast():
                    loss = task.loss(self.reader, batch.to(backend.device))
                counts.append(int(loss.tokens))
                found.append(float(loss.plain) / max(1, counts[-1]))
        return found, counts


def train_model(experiment: Experiment, folder: str) -> Result:
    """Train and validate one model: the losses of groups of validation examples, or why it diverged."""
    corpus, steps = open_corpus(folder), experiment["steps"]
    torch.use_deterministic_algorithms(corpus.backend.device.type == "cpu", warn_only=True)
    trained = TrainedModel(corpus, experiment["model"], experiment["rate"], experiment["seed"], steps)
    began, curve, pending = time.perf_counter(), [], list[PendingStep]()
    tokens, diverged = 0, None
    with corpus.updates(experiment["seed"]) as updates:
        for number in range(1, steps + 1):
            update = next(updates)
            tokens += update.tokens
            pending.append(trained.update(update))
            if number % COLLECT and number < steps:
                continue
            results, pending = fetch_results(pending), []
            if bad := [one.step for one in results if not one.finite]:
                diverged = f"not finite at step {bad[0]}"
                break
            curve += [[one.step, one.plain] for one in results]
    seconds = time.perf_counter() - began
    losses, counts = ([], []) if diverged else trained.losses()
    mean = sum(x * n for x, n in zip(losses, counts, strict=True)) / max(1, sum(counts))
    if diverged is None and not mean <= WORSE * curve[0][1]:
        diverged = f"validation loss {mean:.3g} after {curve[0][1]:.3g} before training"
    group = max(1, -(-len(curve) // POINTS))
    means = [curve[at : at + group] for at in range(0, len(curve), group)]
    return {
        "loss": None if diverged else finite(mean),
        "diverged": diverged,
        "losses": [] if diverged else losses,
        "counts": [] if diverged else counts,
        "curve": [[part[-1][0], sum(loss for _, loss in part) / len(part)] for part in means],
        "tokens": tokens,
        "seconds": seconds,
    }


def measure_models(experiment: Experiment, folder: str) -> Result:
    """Seconds, memory and energy of an update of each model, and decoding speeds: taking turns."""
    corpus = open_corpus(folder)
    models = [TrainedModel(corpus, tree, 1e-4, 0, 100) for tree in experiment["models"]]
    found: list[dict[str, Any]] = [{"seconds": [], "joules": []} for _ in models]
    with corpus.updates(0) as updates:
        for turn in range(WARM + TURNS):
            update = next(updates)
            for one, figures in zip(models, found, strict=True):
                if turn == 0:  # hooks cost time, so this one is not timed
                    with UpdateMemory(one.model) as memory:
                        fetch_results([one.update(update)])
                    figures["memory"] = memory.bytes
                    continue
                energy, began = Energy(), time.perf_counter()
                fetch_results([one.update(update)])
                if turn < WARM:
                    continue
                figures["seconds"].append(time.perf_counter() - began)
                figures["joules"].append((energy.joules(), update.tokens))
                figures["tokens"] = update.tokens
    for one, figures in zip(models, found, strict=True):
        began = time.perf_counter()
        one.losses()
        figures["validation"] = time.perf_counter() - began
    speeds = decoding_speeds([one.model for one in models]) if experiment["decoding"] else [{} for _ in models]
    rows = []
    for figures, speed in zip(found, speeds, strict=True):
        used = [joules / tokens for joules, tokens in figures["joules"] if joules]
        rows.append(
            {
                "update": min(figures["seconds"]),
                "training": figures["tokens"] / min(figures["seconds"]),
                "validation": figures["validation"],
                "memory": figures["memory"],
                "joules": sorted(used)[len(used) // 2] if used else None,
                "decoding": speed,
            }
        )
    return {"models": rows, "machine": machine()}
