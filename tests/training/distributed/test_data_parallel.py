"""A run does not depend on the number of processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from allyouneed.errors import UserError
from allyouneed.training import Recipe, train
from allyouneed.training.reporting.log import read_log
from micro_run import BLOCK, MODEL, Make
from processes import inspect_training, train_with
from toy_images import towers, write_pictures

READS = {"kind": "attention", "heads": 2, "pattern": "causal & block-window(16, 2)", "positions": "transformer-xl"}
ENCODER = {"kind": "encoder", "vocab": 1, "width": 16, "encoder": [BLOCK]}
DRY: dict[str, Any] = MODEL | {"dropout": 0.0}
EXPERTS = {"kind": "moe", "experts": 8, "top": 1, "expert": {"kind": "ffn", "hidden": 8}, "balance": 0.0}
MIXED: dict[str, Any] = DRY | {"encoder": [BLOCK | {"channel": EXPERTS}]}


def written(recipe: Recipe, output: Path) -> Path:
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe.resolved() | {"output": str(output)}))
    return path


def steps(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_log(folder / "log.jsonl") if "loss" in entry]


def assert_same_run(one: Path, other: Path, near: float = 1e-5) -> None:
    first, second = steps(one), steps(other)
    assert [entry["step"] for entry in first] == [entry["step"] for entry in second] and first
    for a, b in zip(first, second, strict=True):
        assert (a["tokens"], a["epoch"], a["rate"]) == (b["tokens"], b["epoch"], b["rate"])
        assert b["loss"] == pytest.approx(a["loss"], rel=near) and b["norm"] == pytest.approx(a["norm"], rel=10 * near)
    judged = [[e["valid"]["loss"] for e in read_log(run / "log.jsonl") if "valid" in e] for run in (one, other)]
    assert judged[1] == pytest.approx(judged[0], rel=near)


def run(recipe: Recipe, output: Path, processes: int, *changes: str) -> Path:
    train_with(written(recipe, output), processes, *changes)
    return output


def test_two_processes_equal_one(make: Make, tmp_path: Path):
    """Three batches of ten rows an update, over the end of an epoch, and experts that only some rows choose."""
    recipe = make(valid=True, model=MIXED, steps=8, accumulate=3, batch={"rows": 10, "row": 64})
    one = run(recipe, tmp_path / "one", 1)
    assert len({entry["epoch"] for entry in steps(one)}) > 1
    for kind in ("ddp", "fsdp"):  # the clock of the first process lets all of them save after every step
        assert_same_run(one, run(recipe, tmp_path / kind, 2, f"parallel={kind}", "save.minutes=0.000001"))


def test_weights_are_sent_in_bf16_and_stored_in_fp32(make: Make, tmp_path: Path):
    path = written(make(model=DRY, steps=2), tmp_path / "run")
    for found in inspect_training(path, 2, "parallel=fsdp", "precision=bf16"):
        assert found["computed"] == {torch.bfloat16}, found
        assert found["stored"] == found["gradients"] == {torch.float32}, found


@pytest.mark.parametrize("model", [DRY, pytest.param(MIXED, marks=pytest.mark.slow)])
def test_unused_parameters_are_looked_for_where_there_are_experts(make: Make, tmp_path: Path, model: dict[str, Any]):
    path = written(make(model=model, steps=2), tmp_path / "run")
    for found in inspect_training(path, 2, "parallel=ddp"):
        assert found["finds unused"] == (model is MIXED), found


@pytest.mark.slow
def test_gathering_in_bf16_trains_as_well(make: Make, tmp_path: Path):
    recipe = make(valid=True, model=DRY, steps=12, precision="bf16")
    assert_same_run(run(recipe, tmp_path / "one", 1), run(recipe, tmp_path / "two", 2, "parallel=fsdp"), near=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_processes_equal_one(make: Make, tmp_path: Path, kind: str):
    """Ten rows are no multiple of four: two processes have more to read than the others."""
    recipe = make(valid=True, model=MIXED, steps=8, accumulate=3, batch={"rows": 10, "row": 64})
    assert_same_run(run(recipe, tmp_path / "one", 1), run(recipe, tmp_path / "four", 4, f"parallel={kind}"))


@pytest.mark.slow
def test_a_run_of_two_resumes_with_four_and_with_one(make: Make, tmp_path: Path):
    recipe = make(model=DRY, steps=12, batch={"rows": 4, "row": 64})
    straight = run(recipe, tmp_path / "straight", 1)
    changed = run(recipe, tmp_path / "changed", 2, "parallel=fsdp", "steps=4")
    shards = changed / "checkpoints" / "step-00000004" / "training" / "shards"
    assert len(list(shards.glob("*.safetensors"))) == 2
    run(recipe, changed, 4, "parallel=fsdp", "steps=8")
    run(recipe, changed, 1)
    assert_same_run(straight, changed)


def test_dropout_differs_between_processes_and_is_the_same_again(make: Make, tmp_path: Path):
    """Also after a resume: every process draws the numbers it would have drawn."""
    recipe = make(steps=8)
    once = run(recipe, tmp_path / "once", 2)
    again = run(recipe, tmp_path / "again", 2, "steps=4")
    run(recipe, again, 2)
    assert [e["loss"] for e in steps(once)] == [e["loss"] for e in steps(again)]
    alone = run(recipe, tmp_path / "alone", 1, "steps=1")
    assert steps(alone)[0]["loss"] != pytest.approx(steps(once)[0]["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_pairs_of_all_processes_are_compared(make: Make, tmp_path: Path, kind: str):
    """Nine rows: one process has one more, and both have as many pairs as stand in theirs."""
    model = ENCODER | {"head": {"kind": "pooled"}}
    recipe = make(valid=True, task={"kind": "contrastive"}, model=model, steps=5, batch={"rows": 9, "row": 64})
    one = run(recipe, tmp_path / "one", 1)
    assert_same_run(one, run(recipe, tmp_path / "two", 2, f"parallel={kind}"))


def test_images_and_texts_of_all_processes_are_compared(make: Make, tmp_path: Path):
    """Seven pairs a batch, of which one process has one more; the learned scale is the same too."""
    write_pictures(tmp_path, "train", 21)
    paths = [f"data.{split}.path={tmp_path / 'train.captions.tsv'}" for split in ("train", "valid")]
    task = {"kind": "image-text"}
    recipe = make(*paths, valid=True, task=task, model=towers(BLOCK), steps=4, batch={"rows": 7, "row": 64})
    one = run(recipe, tmp_path / "one", 1)
    assert_same_run(one, run(recipe, tmp_path / "two", 2))


READING_ON: dict[str, Any] = {
    "task": {"kind": "causal-lm", "memory": True},
    "model": {
        "kind": "decoder",
        "vocab": 1,
        "width": 16,
        "decoder": [{"mixer": READS | {"cache": "hidden"}, "channel": {"kind": "ffn", "hidden": 32}}],
    },
    "validate": {},
}


def test_segment_memory_is_redistributed(make: Make, tmp_path: Path):
    """Two processes, then one, then three, which have other rows each; memory is in the checkpoint."""
    recipe = make(**READING_ON, steps=9, batch={"rows": 5, "row": 16}, data={})
    straight = run(recipe, tmp_path / "straight", 1)
    changed = run(recipe, tmp_path / "changed", 2, "steps=3")
    run(recipe, changed, 1, "steps=6")
    run(recipe, changed, 3, "parallel=fsdp")
    assert_same_run(straight, changed)


def test_a_non_finite_loss_in_one_process_skips_the_update_in_all(make: Make, tmp_path: Path):
    recipe = make(model=DRY, steps=4, clip=None, schedule={"kind": "constant", "peak": 1e30})
    with pytest.raises(Exception, match="keeps becoming non-finite after step 0, even after 3 rewinds"):
        run(recipe, tmp_path / "bad", 2, "steps=3")
    assert [entry.get("skipped") for entry in steps(tmp_path / "bad")][1:] == ["not finite"] * 2
    named = (tmp_path / "bad" / "bad-batches.jsonl").read_text().splitlines()
    assert len(named) == 2 * 4 and all(json.loads(line)["sentences"] for line in named)


# --- without starting any -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": "none"}, "parallel.kind: none, but torchrun started 4 processes"),
        ({"batch": {"rows": 3, "row": 64}}, "batch.rows: 3 rows cannot be divided among 4 processes"),
        (
            {"task": {"kind": "contrastive"}, "model": ENCODER, "parallel": {"tensor": 2}},
            "task.kind: contrastive does not support parallel.tensor",
        ),
    ],
)
def test_unsupported_parallel_recipes_are_rejected(
    make: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=words):
        train(make(**({"validate": {}} | changes)))


def test_the_environment_of_one_process_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(make(steps=2, parallel="fsdp")).steps == 2
