"""Recorded and replayed updates equal the original ones. The recorder of a GPU is stood in for by one that does the
work again, with what its inputs hold then: what goes in and out of a recording is tried here."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from allyouneed.config import parse
from allyouneed.nn.models.base import Model
from allyouneed.training.backend import choose_backend
from allyouneed.training.cuda import capture
from allyouneed.training.cuda.capture import WARMUP_UPDATES, CapturedUpdates
from allyouneed.training.prefetch import DataPosition, Update, updates
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.step import fetch_results, run_update
from micro_run import MODEL, Make

SLEEPING = {"mixer": {"kind": "retention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 8}}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a recording was made."""
    made: list[int] = []

    def record(work: Any, device: torch.device) -> Any:
        made.append(1)
        place = torch.zeros(3)

        def replay() -> torch.Tensor:
            return place.copy_(work())

        return replay

    monkeypatch.setattr(capture, "_capture_graph", record)
    monkeypatch.setattr(capture, "_is_memory_tight", lambda device: False)
    for name in ("_side_stream", "forbid_cuda_sync"):
        monkeypatch.setattr(capture, name, nullcontext)
    return made


def given(make: Make, rows: int = 4) -> tuple[Any, Any, list[Update]]:
    """A recipe, its model and some updates of two batches; the last of an epoch has one."""
    recipe = make(model=MODEL, batch={"rows": rows, "row": 64})
    prepared = prepare(recipe, RunFolder(recipe.output), Reporter())
    torch.manual_seed(1)
    model = recipe.model_for(prepared.vocabularies).build().train()
    count = -(-prepared.train.steps_per_epoch(0) // 2)  # the first epoch and a little of the second
    some = [update for update, _ in zip(updates(prepared.train, DataPosition(0, 0), 2), range(count + 2), strict=False)]
    return recipe, model, some


def test_replayed_updates_equal_eager_ones(make: Make, recorded: list[int]):
    """Batches, rates (of few bits: on the device they have 32) and counts differ from update to update; dropout goes
    on; one update has fewer batches."""
    found = []
    for by_recording in (False, True):
        recipe, model, some = given(make, rows=7)
        assert len({len(update.batches) for update in some}) == 2 and len({update.tokens for update in some}) > 2
        optimiser, machine = recipe.optimiser.build(model), choose_backend(recipe)
        runs = CapturedUpdates(model, recipe.task, optimiser, 0.5, machine)
        assert not runs.enabled  # nothing is recorded on a CPU
        runs.enabled = by_recording
        torch.manual_seed(2)
        pending = [runs.run(update, step, 2.0 ** -(6 + step % 3)) for step, update in enumerate(some, start=1)]
        found.append(
            ([p.numbers.tolist() for p in pending], [m.loss for m in fetch_results(pending)], model.state_dict())
        )
    assert recorded == [1]
    assert found[0][:2] == found[1][:2] and len(set(found[0][1])) == len(some) > WARMUP_UPDATES + 3
    for name, tensor in found[0][2].items():
        assert torch.equal(tensor, found[1][2][name]), name


def test_a_rewind_captures_again(make: Make, recorded: list[int]):
    recipe, model, some = given(make)
    runs = CapturedUpdates(model, recipe.task, recipe.optimiser.build(model), None, choose_backend(recipe))
    runs.enabled = True
    for step in range(WARMUP_UPDATES + 2):
        runs.run(some[0], step, 0.01)
    runs.reset()
    for step in range(WARMUP_UPDATES):
        runs.run(some[0], step, 0.01)
    assert recorded == [1]
    runs.run(some[0], 9, 0.01)
    assert recorded == [1, 1]


def test_updates_that_synchronise_are_not_captured(make: Make, recorded: list[int], monkeypatch: pytest.MonkeyPatch):
    recipe, model, some = given(make)
    runs = CapturedUpdates(model, recipe.task, recipe.optimiser.build(model), None, choose_backend(recipe))
    runs.enabled = True
    real, calls = run_update, []

    def waits(*args: Any) -> Any:
        calls.append(args[4])
        if len(calls) == WARMUP_UPDATES:
            raise RuntimeError("called a synchronizing CUDA operation")
        return real(*args)

    monkeypatch.setattr(capture, "run_update", waits)
    for step in range(WARMUP_UPDATES + 3):
        runs.run(some[0], step, 0.01)
    assert not recorded and not runs.enabled and calls.count(WARMUP_UPDATES - 1) == 2


@pytest.mark.parametrize("where", ["before", "forward", "backward", "optimiser"])
def test_a_failed_capture_loses_nothing(make: Make, recorded: list[int], monkeypatch: pytest.MonkeyPatch, where: str):
    """It may fail anywhere: gradients exist by halves, random numbers are drawn, the optimiser is prepared. As on a
    GPU, where kernels are only recorded, the stand-in changes no weight. Updates go on, equal to those of a run that
    never captured."""

    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def record(work: Any, device: torch.device) -> Any:
        recorded.append(1)
        with pytest.MonkeyPatch.context() as inside:
            if where == "before":
                fails()
            if where == "forward":
                inside.setattr(type(recipe.task), "loss", fails)
                torch.rand(3)
            if where == "backward":
                inside.setattr("allyouneed.training.step.gradient_norm", fails)
            if where == "optimiser":
                inside.setattr(torch.optim.AdamW, "step", fails)
            return work()

    def run(attempt: bool) -> tuple[list[Any], dict[str, torch.Tensor], list[Any], list[str]]:
        nonlocal recipe
        recipe, model, some = given(make)
        optimiser, said = recipe.optimiser.build(model), list[str]()
        runs = CapturedUpdates(model, recipe.task, optimiser, 0.5, choose_backend(recipe), report=said.append)
        runs.enabled = attempt
        torch.manual_seed(2)
        pending = []
        for step, update in enumerate(some[:6], start=1):
            pending.append(runs.run(update, step, 0.01))
            assert not any(group["capturable"] or torch.is_tensor(group["lr"]) for group in optimiser.param_groups)
        assert not runs.enabled
        steps = [state["step"].item() for state in optimiser.state.values()]
        return [p.numbers.tolist() for p in pending], model.state_dict(), steps, said

    recipe: Any = None
    monkeypatch.setattr(capture, "_capture_graph", record)
    plain, captured = run(False), run(True)
    assert recorded == [1] and plain[0] == captured[0] and plain[2] == captured[2]
    assert all(torch.equal(tensor, captured[1][name]) for name, tensor in plain[1].items())
    (warning,) = captured[3]
    assert "operation not permitted when stream is capturing); continuing without" in warning and "more" not in warning


def test_sequence_labels_are_never_captured(make: Make, recorded: list[int]):
    recipe, model, some = given(make)
    runs = CapturedUpdates(model, recipe.task, recipe.optimiser.build(model), None, choose_backend(recipe))
    runs.enabled, seen = True, []
    runs._run_eager = lambda *args: seen.append(1)  # type: ignore[method-assign, assignment, return-value]
    flat = replace(some[0], batches=[replace(some[0].batches[0], labels=torch.zeros(3))])
    for step in range(WARMUP_UPDATES + 2):
        runs.run(flat, step, 0.01)
    assert not recorded and len(seen) == WARMUP_UPDATES + 2


def test_only_static_models_are_captured():
    plain = parse(Model, MODEL | {"vocab": 9})  # type: ignore[type-abstract]
    other = parse(Model, MODEL | {"vocab": 9, "encoder": [SLEEPING]})  # type: ignore[type-abstract]
    assert capture._what_varies(plain.build()) is None
    assert "branches on data" in str(capture._what_varies(other.build()))
    assert "object" in str(capture._what_varies(object()))
    transforms = parse(Model, MODEL | {"vocab": 9, "encoder": [SLEEPING | {"mixer": "s4"}]})  # type: ignore[type-abstract]
    assert capture._what_varies(transforms.build()) is None  # captured, though not compiled
