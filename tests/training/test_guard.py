import json
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Loss
from allyouneed.tasks.translation.translation import Translation
from allyouneed.training import Recipe, train
from allyouneed.training.checkpoints import Checkpoints, TrainState
from allyouneed.training.reporting.log import read_log
from allyouneed.training.validate import Scorer
from micro_run import MODEL, Listener, Make

REAL = Translation.loss


def poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool], gradient_only: bool = False) -> None:
    """Make the loss (or only its gradient) not a number at the calls chosen; call 0 is the trial before the start."""
    calls = iter(range(10**9))

    def loss(self: Translation, model: nn.Module, batch: Batch) -> Loss:
        found = REAL(self, model, batch)
        if not is_bad(next(calls)):
            return found
        bad = found.total * float("nan")
        return found._replace(total=found.total + (bad - bad.detach()) if gradient_only else bad)

    monkeypatch.setattr(Translation, "loss", loss)


def bad_batches(recipe: Recipe) -> list[dict[str, object]]:
    return [json.loads(line) for line in (recipe.output / "bad-batches.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_bad_batch_is_reported_recorded_and_skipped(
    make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch, gradient_only: bool
):
    poison(monkeypatch, lambda call: call == 6, gradient_only)
    recipe = make()
    train(recipe, console=listener.console)
    assert "step 6: the" in listener.text and "is not finite; the update is skipped" in listener.text
    (entry,) = bad_batches(recipe)
    assert entry["step"] == 6 and entry["epoch"] == 0 and entry["batches"] == [5]
    assert isinstance(entry["sentences"], list) and len(entry["sentences"]) > 3
    assert entry["first"][0].keys() == {"number", "source", "target"}  # type: ignore[index]
    log = read_log(recipe.output / "log.jsonl")
    assert [e["step"] for e in log] == list(range(1, 13))
    assert [e["step"] for e in log if e["loss"] is None] == [6]
    assert all(p.isfinite().all() for p in Folder.load(recipe.output / "model").model.parameters())


def test_three_bad_updates_in_a_row_rewind(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, lambda call: call in (6, 7, 8))
    recipe = make()
    train(recipe, console=listener.console)
    assert "3 in a row: rewinding to the checkpoint of step 4" in listener.text
    log = read_log(recipe.output / "log.jsonl")
    assert [e["step"] for e in log] == list(range(1, 13)) and all(e["loss"] is not None for e in log)
    assert [e["batches"] for e in bad_batches(recipe)] == [[5], [6], [7]]


def test_repeated_rewinds_stop_the_run(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, lambda call: call > 6)
    with pytest.raises(UserError, match="lower the learning rate"):
        train(make(), console=listener.console)


def saved_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which checkpoints are saved."""
    found: list[int] = []
    real = Checkpoints.save

    def save(self: Checkpoints, folder: Folder, optimiser: Any, state: TrainState, *rest: Any) -> Any:
        found.append(state.step)
        return real(self, folder, optimiser, state, *rest)

    monkeypatch.setattr(Checkpoints, "save", save)
    return found


def test_saving_and_validating_wait_for_the_end_of_a_streak(make: Make, monkeypatch: pytest.MonkeyPatch):
    saved = saved_steps(monkeypatch)
    recipe = make(
        valid=True, save={"every": 4, "keep": 3}, validate={"every": 3, "metric": "loss", "sentences": 0}, steps=11
    )
    poison(monkeypatch, lambda call: call in (3, 4, 8))
    monkeypatch.setattr(Scorer, "evaluate", lambda *_, **options: {"loss": 9.0})  # never better
    train(recipe)
    assert [step for step in saved if step] == [5, 9, 11]  # the first is the best
    log = read_log(recipe.output / "log.jsonl")
    assert [e["step"] for e in log if "valid" in e] == [5, 6, 9, 11]
    assert [c.step for c in Checkpoints(recipe.output / "checkpoints", 3, print).regular()] == [5, 9, 11]


def test_a_rate_that_is_too_high_leaves_a_good_checkpoint(make: Make, listener: Listener):
    """The first update ruins the weights while its loss is still finite, so the ruined weights are saved."""
    recipe = make(save={"every": 1, "keep": 1}, average=0, schedule={"kind": "constant", "peak": 1e30})
    with pytest.raises(UserError, match="lower the learning rate"):
        train(recipe, console=listener.console)
    assert "the checkpoint of step 1 leads to non-finite losses; renamed it" in listener.text
    left = Checkpoints(recipe.output / "checkpoints", 1, print).all()
    assert [c.step for c in left] == [0]
    weights = Folder.load(left[0].path).model.parameters()
    assert all(parameter.abs().max() < 10 for parameter in weights)


def test_saving_does_not_reset_the_count_of_rewinds_at_once(
    make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch
):
    """One good update after every three bad ones does not count as a recovery, although each is saved."""
    poison(monkeypatch, lambda call: call % 4 > 0)
    with pytest.raises(UserError, match="even after 3 rewinds"):
        train(make(save={"every": 1, "keep": 3}), console=listener.console)


def test_a_recovered_run_may_rewind_again(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, lambda call: call in {start + n for start in (5, 12, 19, 50) for n in range(3)})
    train(make(steps=50, save={"every": 2, "keep": 3}), console=listener.console)
    assert listener.text.count("3 in a row: rewinding") == 4


def test_a_run_does_not_end_in_a_streak(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, lambda call: call == 12)
    recipe = make()
    train(recipe, console=listener.console)
    assert "the run would end with skipped updates: rewinding to the checkpoint of step 8" in listener.text
    log = read_log(recipe.output / "log.jsonl")
    assert [e["step"] for e in log] == list(range(1, 13)) and all(e["loss"] is not None for e in log)


@pytest.mark.parametrize("balanced", [True, False])
def test_a_first_loss_far_above_equal_probabilities_is_reported(make: Make, listener: Listener, balanced: bool):
    embed = {"positions": "sinusoidal", "scale": "none"}
    model = MODEL | {"embed": embed, "init": {"kind": "t5", "factor": 3.0, "balanced": balanced}}
    train(make(model=model, steps=1, average=0), console=listener.console)
    assert ("warning: the first loss" in listener.text) != balanced, listener.text
    assert balanced or "is far above 5.7, that of equal probabilities" in listener.text


def test_an_init_that_presets_name_since_then_does_not_stop_a_resume(make: Make, listener: Listener):
    train(make(steps=4), console=listener.console)
    named = make(steps=8, model=MODEL | {"init": {"kind": "xavier", "balanced": False}})
    train(named, console=listener.console)
    assert "resuming the run" in listener.text
    with pytest.raises(UserError, match=r"model\.init\.kind: 'xavier' before, 'small' now"):
        train(make(steps=9, model=MODEL | {"init": "small"}), console=listener.console)
