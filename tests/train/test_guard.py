import json
from collections.abc import Callable

import pytest
from torch import nn

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Loss
from allyouneed.tasks.translation import Translation
from allyouneed.train import Recipe, train
from allyouneed.train.log import read_log
from micro_run import Listener, Make

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
