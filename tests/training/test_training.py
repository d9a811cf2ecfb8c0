"""From a recipe to a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from allyouneed.apps.translate.translator import Translator
from allyouneed.cli import main
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.training import loop, step, train
from allyouneed.training.backend import choose_backend, cpu_supports_bf16
from allyouneed.training.reporting.log import Log, read_log
from allyouneed.training.validate import is_better
from micro_run import Listener, Make


def test_a_recipe_becomes_a_model_that_translates(make: Make, listener: Listener):
    recipe = make(
        valid=True,
        test=True,
        steps=24,
        validate={"every": 8, "metric": "bleu", "sentences": 2, "limit": 10},
        name="Dates",
        licence="CC0-1.0",
        decoding={"beam": 2},
    )
    result = train(recipe, console=listener.console)
    said = listener.text
    assert "hypothesis" in said and "reference" in said and "averaging changes bleu by" in said
    assert "memory: about" in said and "fp32 (set by the recipe)" in said
    assert result.scores["test"].keys() == {"bleu", "chrf", "exact"}
    assert {"loss", "perplexity", "bleu"} <= result.scores["valid"].keys()
    folder = Folder.load(result.model)
    assert folder.decoding == {"beam": 2}
    assert isinstance(Translator(folder).translate("1 May 1999"), str)
    for fact in ("# Dates", "CC0-1.0", "sha256", "| test |", "warmup: 10"):
        assert fact in folder.card
    log = read_log(recipe.output / "log.jsonl")
    assert [e["step"] for e in log if "loss" in e] == list(range(1, 25))
    assert [e["step"] for e in log if "valid" in e] == [8, 16, 24]


def test_the_whole_validation_set_is_scored_at_the_end(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    """`validate.limit` is for validations during training; result.json and the card say on how many examples."""
    counts: list[int] = []
    real = Translator.judge

    def counted(self: Translator, examples: Any, *rest: Any) -> Any:
        counts.append(len(examples))
        return real(self, examples, *rest)

    monkeypatch.setattr(Translator, "judge", counted)
    limited = {"every": 4, "metric": "bleu", "sentences": 0, "limit": 5}
    recipe = make(valid=True, test=True, steps=8, validate=limited, decoding={"beam": 1})
    result = train(recipe, console=listener.console)
    assert counts == [5, 5, 5, 5, 20, 10]  # two validations, single and average, the better one, the test set
    assert "(5 of 20 pairs)" in listener.text
    assert json.loads((recipe.output / "result.json").read_text())["examples"] == {"valid": 20, "test": 10}
    card = Folder.load(result.model).card
    assert "| set | pairs | loss |" in card and "| valid | 20 | " in card and "| test | 10 | " in card


def test_a_failing_scorer_loses_no_model(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch):
    """Neither a validation nor the final scores: the model is written first, and can be scored later."""
    recipe = make(valid=True, test=True, steps=4, validate={"every": 2, "metric": "bleu"}, decoding={"beam": 1})
    folders: list[bool] = []

    def failing(self: Translator, *rest: Any) -> Any:
        folders.append((recipe.output / "model" / "config.json").exists())
        raise TypeError("don't know how to coerce\nfloat and float32")

    monkeypatch.setattr(Translator, "judge", failing)
    result = train(recipe, console=listener.console)
    said = listener.text
    assert folders == [False, False, True, True]  # two validations, the checkpoint, the test set
    assert "warning: scoring the test data failed (TypeError: don't know how to coerce float and float32)" in said
    assert result.steps == 4 and result.scores.keys() == {"valid"} and "bleu" not in result.scores["valid"]
    written = json.loads((recipe.output / "result.json").read_text())
    assert written["scores"]["test"] is None and written["weights"] == "checkpoint of step 4"
    assert "| test | not scored |" in Folder.load(result.model).card
    monkeypatch.undo()
    commands = [line.split() for line in said.splitlines() if line.startswith("  allyouneed evaluate ")]
    assert [Path(words[2]).name for words in commands] == ["valid.tsv", "test.tsv"]
    with pytest.raises(SystemExit) as ended:
        main(commands[1][1:])
    assert not ended.value.code


def test_the_loss_falls(make: Make):
    recipe = make(
        steps=150, save={"every": 150, "keep": 5}, schedule={"kind": "inverse-sqrt", "peak": 0.02, "warmup": 20}
    )
    train(recipe)
    losses = [e["loss"] for e in read_log(recipe.output / "log.jsonl")]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_validating_saving_and_trying_change_no_step(make: Make, monkeypatch: pytest.MonkeyPatch):
    busy = make(valid=True, validate={"every": 2, "metric": "exact", "sentences": 1}, save={"every": 3, "keep": 3})
    train(busy)
    noted = [e["loss"] for e in read_log(busy.output / "log.jsonl") if "loss" in e]
    monkeypatch.setattr("allyouneed.training.start.dry_run", lambda trainer: None)
    quiet = make(save={"every": 100, "keep": 3})
    train(quiet, fresh=True)
    assert [e["loss"] for e in read_log(quiet.output / "log.jsonl")] == noted


def test_epochs_end_where_the_data_ends(make: Make):
    recipe = make(epochs=2, steps=None)
    train(recipe)
    log = read_log(recipe.output / "log.jsonl")
    assert {e["epoch"] for e in log} == {0, 1}
    result = json.loads((recipe.output / "result.json").read_text())
    assert result["tokens"] == sum(e["tokens"] for e in log)


def test_patience_ends_a_run_that_gets_no_better(make: Make, listener: Listener):
    still = {"kind": "constant", "peak": 1e-12}
    recipe = make(valid=True, steps=100, schedule=still, validate={"every": 2, "patience": 2, "metric": "exact"})
    assert train(recipe, console=listener.console).steps == 6
    assert "no better exact for 2 validations: stopping early" in listener.text


def test_running_out_of_memory_is_reported_before_training(make: Make, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("allyouneed.training.planning.dry_run.accumulate_gradients", explode)
    recipe = make()
    with pytest.raises(UserError, match=r"batch\.rows: 2 with accumulate: 2"):
        train(recipe)
    assert not (recipe.output / "log.jsonl").exists()


def test_tensorboard_is_optional(make: Make):
    pytest.importorskip("tensorboard")
    train(make(steps=4, valid=True))
    assert not (make().output / "tensorboard").exists()
    train(make(steps=4, valid=True, tensorboard=True), fresh=True)
    assert list((make().output / "tensorboard").glob("events*"))


def test_a_gpu_that_lags_behind_loses_no_step(make: Make, monkeypatch: pytest.MonkeyPatch):
    """On a GPU numbers are fetched every few updates; the log must not show it."""
    train(make(valid=True))
    straight = read_log(make().output / "log.jsonl")
    monkeypatch.setattr(loop.Trainer, "_lag", 5)
    fetched: list[int] = []
    real = step.fetch_results
    monkeypatch.setattr(loop, "fetch_results", lambda pending: fetched.append(len(pending)) or real(pending))
    train(make(valid=True), fresh=True)
    assert read_log(make().output / "log.jsonl") == straight
    assert max(fetched) > 1


def test_precision_follows_the_hardware_and_is_reported(make: Make):
    chosen = choose_backend(make(precision="auto"))
    assert chosen.bf16 == cpu_supports_bf16() and not chosen.compiled
    assert ("bf16" if chosen.bf16 else "fp32") in chosen.summary
    assert choose_backend(make(precision="bf16")).bf16


def test_a_run_in_fp8_trains_validates_and_resumes(make: Make):
    """On a CPU the 8-bit products are emulated; the loss is near that of bf16, and nothing of it is in the folder."""
    chosen = choose_backend(make(precision="fp8"))
    assert chosen.fp8 and chosen.bf16 and "fp8 (emulated" in chosen.summary
    still = "model.dropout=0.0"
    losses: dict[str, list[float]] = {}
    for precision in ("bf16", "fp8"):
        train(make(still, valid=True, steps=6, precision=precision), fresh=True)
        losses[precision] = [e["loss"] for e in read_log(make().output / "log.jsonl") if "loss" in e]
    assert losses["fp8"] != losses["bf16"] and losses["fp8"] == pytest.approx(losses["bf16"], rel=0.01)
    train(make(still, valid=True, steps=4, precision="fp8"), fresh=True)
    train(make(still, valid=True, steps=6, precision="fp8"))
    assert [e["loss"] for e in read_log(make().output / "log.jsonl") if "loss" in e] == losses["fp8"]
    with pytest.raises(UserError, match=r"precision: fp8 does not support parallel\.tensor above 1"):
        make("parallel.tensor=2", precision="fp8")


def test_a_compiled_run_trains_and_validates(make: Make, monkeypatch: pytest.MonkeyPatch):
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: real(self, backend="eager", **options))
    still = "model.dropout=0.0"  # a compiled block throws other dice
    train(make(still, valid=True, steps=4))
    plain = [e["loss"] for e in read_log(make().output / "log.jsonl") if "loss" in e]
    train(make(still, valid=True, steps=4, compile="on"), fresh=True)
    compiled = [e["loss"] for e in read_log(make().output / "log.jsonl") if "loss" in e]
    assert compiled == pytest.approx(plain, rel=1e-5)


def test_updates_are_captured_unless_compile_is_blocks(make: Make, monkeypatch: pytest.MonkeyPatch):
    def compile_nothing(self: torch.nn.Module, **options: Any) -> None:
        self._compiled_call_impl = self._call_impl

    monkeypatch.setattr(torch.nn.Module, "compile", compile_nothing)
    asked: list[bool] = []

    class Spy(loop.CapturedUpdates):
        def __init__(self, *given: Any) -> None:
            asked.append(given[-1])
            super().__init__(*given)

    monkeypatch.setattr(loop, "CapturedUpdates", Spy)
    for word in ("auto", "on", "blocks"):
        recipe = make(steps=1, compile=word)
        assert choose_backend(recipe).compiled == (word != "auto")  # which compiles on a GPU only
        train(recipe, fresh=True)
    assert asked == [True, True, False]


def test_the_log_drops_later_steps_and_a_partial_line(tmp_path: object, make: Make):
    path = make().output.parent / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    Log(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    log = Log(path, 2)
    log.write({"step": 3, "loss": 0.1})
    log.flush()
    assert read_log(path)[-1] == {"step": 3, "loss": 0.1}


def test_a_tie_goes_to_the_lower_loss():
    assert is_better("bleu", True, {"bleu": 0.0, "loss": 6.6}, {"bleu": 0.0, "loss": 6.7})
    assert not is_better("bleu", True, {"bleu": 0.0, "loss": 6.7}, {"bleu": 0.0, "loss": 6.6})
    assert not is_better("bleu", True, {"bleu": 1.0, "loss": 1.0}, {"bleu": 2.0, "loss": 9.0})
    assert is_better("loss", False, {"loss": 1.0}, {"loss": 2.0})
    assert is_better("bleu", True, {"bleu": 0.0, "loss": 6.7}, None)
    # the trace of BLEU that long nonsense gets is shown as 0.000, and is no more than the 0 of short right answers
    assert is_better("bleu", True, {"bleu": 0.0, "loss": 0.1}, {"bleu": 0.0004, "loss": 6.7})
    assert not is_better("bleu", True, {"bleu": 0.0004, "loss": 6.7}, {"bleu": 0.0, "loss": 0.1})
    assert is_better("bleu", True, {"bleu": 0.002, "loss": 6.7}, {"bleu": 0.0, "loss": 0.1})
    assert not is_better("bleu", True, {"bleu": float("nan"), "loss": 1.0}, None)


def test_broken_lines_of_the_test_set_are_reported(make: Make, listener: Listener, tmp_path: Path):
    test = tmp_path / "test.tsv"
    test.write_text("1. Mai 1999\t1999-05-01\nno tab here\n", encoding="utf-8")
    train(make(steps=1, data={"train": "", "max_tokens": 48, "test": str(test)}), console=listener.console)
    assert f"{test}:2" in listener.text


def test_the_model_card_contains_no_local_paths(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    recipe = make(steps=2)
    assert str(tmp_path) in str(recipe.output)
    card = Folder.load(train(recipe).model).card
    assert str(tmp_path) not in card
    assert "output: " in card


def test_an_update_larger_than_an_epoch_is_reported(make: Make, capsys: pytest.CaptureFixture[str]):
    train(make(steps=1, accumulate=500), fresh=True)
    assert "so updates have no more, although accumulate is 500" in " ".join(capsys.readouterr().err.split())


def test_the_result_stands_beside_its_baselines(make: Make, listener: Listener) -> None:
    """In the output, on the card and in result.json, on the same examples."""
    recipe = make(valid=True, test=True, steps=2, validate={"every": 2, "metric": "bleu"}, decoding={"beam": 1})
    result = train(recipe, console=listener.console)
    written = json.loads((recipe.output / "result.json").read_text())["baselines"]
    assert [one["name"] for one in written["test"]] == ["the source, unchanged", "nothing"]
    assert written["valid"][0]["figures"].keys() == {"bleu", "chrf", "exact"}
    assert "test baseline, the source, unchanged:  bleu" in listener.text
    assert "| valid, baseline: nothing |  | " in Folder.load(result.model).card


def test_a_failing_baseline_loses_no_result(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("no words")

    monkeypatch.setattr("allyouneed.training.finish.baselines", failing)
    recipe = make(valid=True, steps=2, validate={"every": 2, "metric": "bleu"}, decoding={"beam": 1})
    assert train(recipe, console=listener.console).scores["valid"]["bleu"] >= 0
    assert "warning: computing the baselines failed (ZeroDivisionError: no words)" in listener.text


def test_baselines_of_much_data_are_left_out(make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allyouneed.training.finish.MOST_EXAMPLES", 5)
    train(make(valid=True, steps=2), console=listener.console)
    assert "baselines: left out, as there are more than 5 training examples" in listener.text
