import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.training import checkpoints as module
from allyouneed.training import train
from allyouneed.training.checkpoints import Checkpoints
from allyouneed.training.finish import average_weights
from allyouneed.training.reporting.log import read_log
from allyouneed.training.validate import Scorer
from micro_run import Listener, Make


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def test_a_checkpoint_is_a_model_folder_like_any_other(make: Make):
    recipe = make()
    train(recipe)
    folder = Folder.load(recipe.output / "checkpoints" / "step-00000012")
    last = json.loads((recipe.output / "checkpoints" / "last.json").read_text())
    assert last == {"step": 12, "folder": "step-00000012"}
    assert folder.max_tokens == 48


def test_the_last_ones_and_the_best_are_kept(make: Make):
    recipe = make(
        valid=True, steps=20, validate={"every": 3, "metric": "loss", "sentences": 0}, save={"every": 2, "keep": 3}
    )
    train(recipe)
    kept = names(recipe.output / "checkpoints")
    assert {"step-00000016", "step-00000018", "step-00000020"} <= set(kept)
    best = json.loads((recipe.output / "checkpoints" / "best.json").read_text())["folder"]
    assert best in kept and len(kept) <= 4


def test_saving_by_the_clock_changes_nothing(make: Make):
    """Checkpoints by the clock are to resume from, not to be averaged."""
    plain = train(make(steps=8, save={"every": 4, "keep": 3, "minutes": None}))
    expected = (plain.model / "model.safetensors").read_bytes()
    recipe = make(steps=8, save={"every": 4, "keep": 3, "minutes": 1e-9})
    assert train(recipe, fresh=True).model == plain.model
    saved = Checkpoints(recipe.output / "checkpoints", 3, print)
    assert names(saved.folder) == [f"step-0000000{n}" for n in (4, 7, 8)]  # 4 is on schedule, 7 one of the two newest
    assert [c.step for c in saved.regular()] == [4, 8]
    assert (plain.model / "model.safetensors").read_bytes() == expected
    only = make(steps=3, save={"every": None, "keep": 3, "minutes": 1e-9})
    train(only, fresh=True)
    assert [c.step for c in saved.regular()] == [1, 2, 3]
    assert make(save={}).save.minutes == 10


def test_the_best_is_the_best_that_was_saved(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    real = module.write_training

    def full(work: Path, model: object, optimiser: object, state: module.TrainState, *besides: Any) -> None:
        if state.step == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(work, model, optimiser, state, *besides)  # type: ignore[arg-type]

    scores = iter([5.0, 3.0, 4.0, 6.0, 6.0])  # steps 3, 6 and 9; single checkpoint and average
    monkeypatch.setattr(Scorer, "evaluate", lambda *_, **options: {"loss": next(scores)})
    monkeypatch.setattr(module, "write_training", full)
    recipe = make(valid=True, steps=9, validate={"every": 3, "metric": "loss"}, average=2)
    train(recipe, console=listener.console)
    assert "(loss: best 5.000 at step 3)" not in listener.text  # step 9 is better than step 3, the best on the disk
    assert json.loads((recipe.output / "result.json").read_text())["weights"] == "checkpoint of step 9"


def test_a_damaged_best_checkpoint_is_not_used(make: Make, listener: Listener):
    recipe = make(valid=True, steps=6, validate={"every": 3, "metric": "loss", "sentences": 0})
    train(recipe)
    best = recipe.output / "checkpoints" / "step-00000006" / "model.safetensors"
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    found = Checkpoints(recipe.output / "checkpoints", 3, listener.console.print)
    assert found.best(module.TrainState(best_step=6)) is None and "the best checkpoint cannot be used" in listener.text
    assert found.best(module.TrainState(best_step=4)) is not None


def test_leftovers_of_a_killed_save_are_removed(make: Make, tmp_path: Path):
    recipe = make()
    train(recipe)
    folder = recipe.output / "checkpoints"
    shutil.copytree(folder / "step-00000012", folder / ".writing-step-00000016")
    (folder / ".writing-step-00000016" / "config.json").unlink()
    found = Checkpoints(folder, 3, print)
    assert [c.step for c in found.all()] == [4, 8, 12]
    assert not (folder / ".writing-step-00000016").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "training/optimiser.safetensors", "training/trainer.json"])
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(make: Make, tmp_path: Path, name: str):
    straight = [e["loss"] for e in read_log(train_on(make, 12))]
    recipe = make(steps=8)
    train(recipe)
    shutil.copytree(recipe.output, tmp_path / "undamaged")
    for how in ("changed", "cut", "missing"):
        shutil.rmtree(recipe.output)
        shutil.copytree(tmp_path / "undamaged", recipe.output)
        file = recipe.output / "checkpoints" / "step-00000008" / name
        if how == "missing":
            file.unlink()
        else:
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw if how == "changed" else raw[: len(raw) // 2])
        listener = Listener()
        train(make(steps=12), console=listener.console)
        assert name.split("/")[-1] in listener.text and "trying the previous one" in listener.text, how
        assert "after step 4" in listener.text, how
        log = read_log(recipe.output / "log.jsonl")
        assert [e["step"] for e in log] == list(range(1, 13)), how
        assert [e["loss"] for e in log] == straight, how


def train_on(make: Make, steps: int) -> Path:
    recipe = make("output=other", steps=steps)
    recipe = recipe.model_copy(update={"output": make().output.parent / "other"})
    train(recipe)
    return recipe.output / "log.jsonl"


def test_a_full_disk_does_not_stop_the_run(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    real = module.write_training

    def full(
        work: Path, model: object, optimiser: object, standing: module.TrainState, regular: bool, *besides: Any
    ) -> None:
        if standing.step == 8:
            (work / "half").write_text("x")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(work, model, optimiser, standing, regular, *besides)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_training", full)
    recipe = make()
    train(recipe, console=listener.console)
    assert "step 8: saving the checkpoint failed (No space left on device)" in listener.text
    assert names(recipe.output / "checkpoints") == ["step-00000000", "step-00000004", "step-00000012"] or names(
        recipe.output / "checkpoints"
    ) == ["step-00000004", "step-00000012"]
    assert not list((recipe.output / "checkpoints").glob(".*"))
    assert [e["step"] for e in read_log(recipe.output / "log.jsonl")] == list(range(1, 13))


def test_a_disk_full_at_the_end_is_reported(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_training", full)
    with pytest.raises(UserError, match="free disk space and run it again"):
        train(make(), console=listener.console)
    monkeypatch.undo()
    assert train(make(), console=listener.console).steps == 12


def test_the_average_is_the_mean_of_every_weight(make: Make):
    from safetensors.torch import load_file

    recipe = make()
    train(recipe)
    saved = Checkpoints(recipe.output / "checkpoints", 3, print).all()
    files = [load_file(c.path / "model.safetensors") for c in saved]
    for name, mean in average_weights(saved).items():
        torch.testing.assert_close(mean, torch.stack([f[name] for f in files]).mean(0))
