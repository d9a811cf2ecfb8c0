"""A checkpoint holds everything: a run killed anywhere and resumed has bit-equal losses."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import kill_points as kill_points_module
import toy_texts as toytexts
import warm_python
from allyouneed.errors import UserError
from allyouneed.training import Recipe, loop, train
from allyouneed.training.prepare import RunFolder
from allyouneed.training.reporting.log import read_log
from allyouneed.training.signals import Interrupted
from micro_run import Listener, Make
from toy_texts import write_all
from waiting import until

# The steps of a micro model are too short to be met by a signal: one of them lasts until it is asked to stop.
SCRIPT = """
import sys, time
from allyouneed.training import load_recipe, loop, train
recipe, long_step, heeds = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
requests, update = [], loop.Trainer._update
class Request(loop.StopRequest):
    def __enter__(self):
        requests.append(self)
        return super().__enter__()
def lasting(self, given):
    update(self, given)
    if self.state.step == long_step:
        print("in the long step", file=sys.stderr, flush=True)
        while not (heeds and requests[-1].requested):
            time.sleep(0.005)
loop.StopRequest, loop.Trainer._update = Request, lasting
train(load_recipe(recipe))
"""


def saved_to(recipe: Recipe, output: Path) -> Path:
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe.resolved() | {"output": str(output)}))
    return path


class Run:
    """A process that trains by this recipe. `long_step` lasts until the process is asked to stop, unless it does not
    heed that."""

    def __init__(self, recipe: Path, long_step: int = 0, heeds: bool = True) -> None:
        self.stderr = recipe.with_suffix(".stderr")
        command = [sys.executable, "-c", SCRIPT, str(recipe), str(long_step), str(heeds)]
        with self.stderr.open("w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = warm_python.Popen(command, stderr=file, env=environment)
        if long_step:
            self.wait_until_said("in the long step")

    def wait_until_said(self, words: str) -> None:
        until(lambda: words in self.stderr.read_text() or self.process.poll() is not None)
        assert words in self.stderr.read_text(), self.stderr.read_text()

    def end(self) -> tuple[int, str]:
        return self.process.wait(), self.stderr.read_text()


def losses(log: Path) -> dict[str, str]:
    """Every number of every step, exactly; no step twice, none missing."""
    steps = [entry for entry in read_log(log) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, len(steps) + 1))
    return {entry["step"]: f"{entry['loss'].hex()} {entry['norm'].hex()} {entry['rate'].hex()}" for entry in steps}


@pytest.mark.slow  # the fast suite kills at file events, below
def test_killed_at_any_step_and_resumed_the_losses_are_bit_equal(make: Make, tmp_path: Path):
    recipe = make(valid=True, steps=40, save={"every": 7, "keep": 3}, accumulate=2, precision="auto")
    killed_equals_straight(recipe, tmp_path, 2)


@pytest.mark.parametrize("task", [pytest.param("causal-lm", marks=pytest.mark.slow), "masked-lm words"])
def test_random_choices_of_each_epoch_resume_bit_for_bit(task: str, tmp_path: Path):
    """Documents in pieces, and tokens hidden by chance: a run that was killed sees what it would have seen."""
    texts = write_all(tmp_path)
    recipe = toytexts.recipe(
        tmp_path, texts, task, steps=40, save={"every": 7, "keep": 3}, batch={"rows": 32, "row": 64}
    )
    killed_equals_straight(recipe, tmp_path, 1)
    epochs = {entry.get("epoch") for entry in read_log(tmp_path / "killed" / "log.jsonl")}
    assert len(epochs) > 2


def killed_equals_straight(recipe: Recipe, tmp_path: Path, times: int) -> None:
    straight, killed = saved_to(recipe, tmp_path / "straight"), saved_to(recipe, tmp_path / "killed")
    whole = Run(straight)
    chance = random.Random(time.time_ns())
    kills = sorted(chance.sample(range(2, 40), times))
    for step in kills:
        run = Run(killed, long_step=step)
        run.process.kill()
        assert run.end()[0] == -signal.SIGKILL
    code, said = Run(killed).end()
    assert code == 0, said
    assert "resuming the run" in said
    code, said = whole.end()
    assert code == 0, said
    expected = losses(tmp_path / "straight" / "log.jsonl")
    assert len(expected) == 40
    assert losses(tmp_path / "killed" / "log.jsonl") == expected, f"killed at {kills}"
    weights = [tmp_path / run / "model" / "model.safetensors" for run in ("straight", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def kill_points(make: Make, tmp_path: Path, plans: list[list[Any]]) -> dict[str, Any]:
    """Kill a run at each chain of file events and resume it (kill_points.py). The best of its validations is neither
    the first nor the last, and each of them is followed by something to prune."""
    recipe = make(
        valid=True,
        steps=7,
        save={"every": 2, "keep": 2},
        average=2,
        validate={"every": 3, "metric": "loss", "sentences": 0},
    )
    tmp_path.mkdir(exist_ok=True)
    path = saved_to(recipe, tmp_path / "killed")
    script = Path(kill_points_module.__file__)
    command = [sys.executable, str(script), str(path), str(tmp_path / "runs"), json.dumps(plans)]
    done = warm_python.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    result = json.loads((tmp_path / "runs" / "whole" / "result.json").read_text())
    assert result["weights"] == f"checkpoint of step {kill_points_module.BEST}" and found["events"] > 300
    assert not found["wrong"], found["wrong"]
    return found


def test_a_run_killed_at_any_file_event_ends_in_the_same_model(make: Make, tmp_path: Path):
    """While the recipe is first written; when the best checkpoint has its name, but nothing else says so; anywhere."""
    anywhere = random.Random(time.time_ns()).sample(range(10**6), 3)
    kill_points(make, tmp_path, [[("recipe.yaml", 0)], [("step-00000006", 2)], anywhere[:1], anywhere[1:]])


@pytest.mark.slow
def test_a_run_killed_at_every_file_event_ends_in_the_same_model(make: Make, tmp_path: Path):
    events = kill_points(make, tmp_path / "count", [])["events"]
    chance = random.Random(time.time_ns())
    chains = [[chance.randrange(events) for _ in range(chance.randint(2, 6))] for _ in range(40)]
    kill_points(make, tmp_path / "all", [*([event] for event in range(events)), *chains])


def test_a_kill_while_the_recipe_is_first_written_is_recovered_from(make: Make):
    recipe = make(steps=2)
    (recipe.output / "data").mkdir(parents=True)
    half = recipe.output / ".recipe.yaml.0123abcd"
    half.write_text("model: {ki")
    assert train(recipe).steps == 2 and not half.exists()


@pytest.mark.parametrize("text", ["", "data: 3", "a: ["])
def test_a_run_whose_recipe_cannot_be_read_is_refused_in_one_message(make: Make, text: str):
    recipe = make(steps=2)
    recipe.output.mkdir()
    (recipe.output / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=r"recipe\.yaml: cannot be read .* use --restart"):
        train(recipe)
    assert train(recipe, fresh=True).steps == 2


def test_stopped_before_a_validation_the_run_ends_in_the_same_model(make: Make, monkeypatch: pytest.MonkeyPatch):
    """The checkpoint of the step that is the best, and the last, was saved before it was validated."""
    options = {
        "valid": True,
        "steps": 6,
        "validate": {"every": 3, "metric": "loss", "sentences": 0},
        "save": {"every": 5, "keep": 3},
    }

    def outcome() -> tuple[bytes, Any, Any]:
        output = make().output
        result, best = (json.loads((output / name).read_text()) for name in ("result.json", "checkpoints/best.json"))
        return (output / "model" / "model.safetensors").read_bytes(), result["weights"], best

    train(make(**options))
    straight = outcome()
    real = loop.Trainer._update

    def update(self: loop.Trainer, given: Any) -> None:
        real(self, given)
        if self.state.step in (3, 6):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Trainer, "_update", update)
    marker = make().output / "stopped.json"  # for scripts around torchrun, which has no exit code for it
    for fresh, step in ((True, 3), (False, 6)):
        with pytest.raises(Interrupted):
            train(make(**options), fresh=fresh)
        assert json.loads(marker.read_text()) == {"step": step}
    monkeypatch.undo()
    assert train(make(**options)).steps == 6
    assert not marker.exists()
    assert outcome() == straight


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(make: Make, tmp_path: Path, number: signal.Signals, listener: Listener):
    recipe = make(valid=True, steps=20)
    path = saved_to(recipe, tmp_path / "asked")
    run = Run(path, long_step=5)
    run.process.send_signal(number)
    code, said = run.end()
    assert code == 130, said
    assert "stopped at step 5" in said
    assert "and saved; run the same command again to resume" in said and "Traceback" not in said
    straight = make(valid=True, steps=20)
    train(straight, console=listener.console)
    asked = straight.model_copy(update={"output": tmp_path / "asked"})
    train(asked, console=listener.console)
    assert losses(tmp_path / "asked" / "log.jsonl") == losses(straight.output / "log.jsonl")
    # a checkpoint made by Ctrl-C takes no part in the average
    names = [folder / "model" / "model.safetensors" for folder in (straight.output, asked.output)]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_a_second_signal_stops_at_once(make: Make, tmp_path: Path):
    run = Run(saved_to(make(steps=20), tmp_path / "twice"), long_step=2, heeds=False)
    run.process.send_signal(signal.SIGINT)
    run.wait_until_said("press again to stop at once")
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    assert code not in (0, 130) and "KeyboardInterrupt" in said
    assert len((tmp_path / "twice" / "log.jsonl").read_text().splitlines()) <= 1  # not the step that did not end


def test_a_finished_run_is_left_alone_and_more_steps_continue_it(make: Make, listener: Listener):
    train(make())
    before = {p: p.stat().st_mtime_ns for p in make().output.rglob("*") if p.suffix == ".safetensors"}
    result = train(make(), console=listener.console)
    assert result.already and result.steps == 12 and "is finished" in listener.text
    assert before == {p: p.stat().st_mtime_ns for p in make().output.rglob("*") if p.suffix == ".safetensors"}
    assert train(make(steps=16), console=listener.console).steps == 16
    assert "after step 12" in listener.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 2}, r"seed: 1 before, 2 now"),
        ({"tokenizer": {"vocab": 310}}, r"tokenizer\.vocab: 300 before, 310 now"),
        ({"set": ["width=32"]}, r"model\.width: 16 before, 32 now"),
        ({"optimiser": {"kind": "adam", "beta2": 0.9}}, r"optimiser\.beta2"),
    ],
)
def test_a_changed_recipe_is_rejected_with_the_changes(make: Make, changes: dict[str, Any], words: str):
    train(make(steps=4))
    with pytest.raises(UserError, match=words) as caught:
        train(make(steps=4, **changes))
    assert "--restart" in str(caught.value)
    assert train(make(steps=4, **changes), fresh=True).steps == 4


def test_a_run_that_never_started_may_be_changed(make: Make, tmp_path: Path, pairs: Path):
    """Nothing was learnt, so nothing can be lost: the same command is enough."""
    mine = tmp_path / "mine.tsv"
    mine.write_text("no tab\n")
    with pytest.raises(UserError, match="no text to learn a vocabulary from"):
        train(make(f"data.train.path={mine}", "steps=2"))
    mine.write_bytes((pairs / "train.tsv").read_bytes())
    with pytest.raises(UserError, match="a vocabulary of 9 is too small"):
        train(make(f"data.train.path={mine}", "tokenizer.vocab=9", "steps=2"))
    assert train(make(f"data.train.path={mine}", "steps=2")).steps == 2


def test_changed_data_is_noticed(make: Make, tmp_path: Path, pairs: Path):
    mine = tmp_path / "mine.tsv"
    mine.write_bytes((pairs / "train.tsv").read_bytes())
    override = f"data.train={mine}"
    train(make(override, steps=4))
    mine.write_bytes(mine.read_bytes() + b"1 May 1999\t1999-05-01\n")
    with pytest.raises(UserError, match=r"the contents of train\[0\] mine.tsv"):
        train(make(override, steps=4))


def test_a_recipe_with_checksums_refuses_other_data(make: Make):
    recipe = make(steps=4)
    train(recipe)
    saved = yaml.safe_load((recipe.output / "recipe.yaml").read_text())
    assert list(saved["data"]["sha256"]) == ["train[0] train.tsv"]
    with pytest.raises(UserError, match=r"does not match data\.sha256"):
        train(
            make(steps=4, data={"train": "", "max_tokens": 48, "sha256": {"train[0] train.tsv": "0" * 64}}), fresh=True
        )


def test_resume_can_be_required_or_forbidden(make: Make):
    with pytest.raises(UserError, match="no run to resume"):
        train(make(), resume=True)
    train(make())
    with pytest.raises(UserError, match="already holds a run"):
        train(make(), resume=False)


def test_a_folder_with_something_else_in_it_is_not_touched(make: Make):
    recipe = make()
    work = recipe.output / "model" / "thesis.tex"
    work.parent.mkdir(parents=True)
    work.write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(UserError, match="exists and is not a run"):
            train(recipe, fresh=fresh)
    assert work.read_text() == "years of work" and list(recipe.output.iterdir()) == [work.parent]


def test_two_processes_do_not_train_in_one_folder(make: Make, tmp_path: Path):
    recipe = make()
    with RunFolder(recipe.output).lock(), pytest.raises(UserError, match="another process is training here"):
        train(recipe)
    assert train(recipe).steps == 12
