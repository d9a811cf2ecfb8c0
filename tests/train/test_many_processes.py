"""However many processes share a run, it is the same run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from many import train_with
from microrun import BLOCK, MODEL, Make

from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.train import Recipe, train
from allyouneed.train.feed import labelled
from allyouneed.train.log import read_log
from allyouneed.train.prepare import Run, prepare
from allyouneed.train.progress import Reporter
from allyouneed.train.team import share_of

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


def test_two_processes_make_the_run_of_one(make: Make, tmp_path: Path):
    """Three batches of ten rows an update, over the end of an epoch, and experts that only some rows choose."""
    recipe = make(valid=True, model=MIXED, steps=8, accumulate=3, batch={"rows": 10, "row": 64})
    one = run(recipe, tmp_path / "one", 1)
    assert len({entry["epoch"] for entry in steps(one)}) > 1
    for kind in ("ddp", "fsdp"):
        assert_same_run(one, run(recipe, tmp_path / kind, 2, f"parallel={kind}"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_processes_make_the_run_of_one(make: Make, tmp_path: Path, kind: str):
    """Ten rows are no multiple of four: two processes have more to read than the others."""
    recipe = make(valid=True, model=MIXED, steps=8, accumulate=3, batch={"rows": 10, "row": 64})
    assert_same_run(run(recipe, tmp_path / "one", 1), run(recipe, tmp_path / "four", 4, f"parallel={kind}"))


def test_two_go_on_as_four_and_as_one_with_the_same_data(make: Make, tmp_path: Path):
    recipe = make(model=DRY, steps=12, batch={"rows": 4, "row": 64})
    straight = run(recipe, tmp_path / "straight", 1)
    changed = run(recipe, tmp_path / "changed", 2, "parallel=fsdp", "steps=4")
    shards = changed / "checkpoints" / "step-00000004" / "training" / "shards"
    assert len(list(shards.glob("*.safetensors"))) == 2
    run(recipe, changed, 4, "parallel=fsdp", "steps=8")
    run(recipe, changed, 1)
    assert_same_run(straight, changed)


def test_dropout_differs_between_processes_and_is_the_same_again(make: Make, tmp_path: Path):
    """Also when the run is left and gone on with: every process draws what it would have drawn."""
    recipe = make(steps=8)
    once = run(recipe, tmp_path / "once", 2)
    again = run(recipe, tmp_path / "again", 2, "steps=4")
    run(recipe, again, 2)
    assert [e["loss"] for e in steps(once)] == [e["loss"] for e in steps(again)]
    alone = run(recipe, tmp_path / "alone", 1, "steps=1")
    assert steps(alone)[0]["loss"] != pytest.approx(steps(once)[0]["loss"], rel=1e-6)


def test_what_is_not_a_number_in_one_process_is_refused_by_all(make: Make, tmp_path: Path):
    recipe = make(model=DRY, steps=4, clip=None, schedule={"kind": "constant", "peak": 1e30})
    found = steps(run(recipe, tmp_path / "bad", 2, "steps=3"))
    assert [entry.get("skipped") for entry in found][1:] == ["not finite"] * 2
    named = (tmp_path / "bad" / "bad-batches.jsonl").read_text().splitlines()
    assert len(named) == 2 and all(json.loads(line)["sentences"] for line in named)


# --- without starting any -------------------------------------------------------------------------------------------


def test_the_shares_of_a_batch_are_the_batch(make: Make):
    recipe = make(batch={"rows": 5, "row": 64})
    batch = next(prepare(recipe, Run(recipe.output), Reporter()).train.batches(0))
    for readers in (2, 3, 5):
        shares = [share_of(batch, number, readers) for number in range(readers)]
        for side in ("source", "target"):
            parts = [getattr(share, side) for share in shares]
            for name, tensor in vars(getattr(batch, side)).items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(torch.cat([getattr(part, name) for part in parts]), tensor)
        assert torch.equal(torch.cat([share.labels for share in shares]), batch.labels)
    idle = share_of(batch, 0, 6)
    assert labelled(idle) == 0 and len(idle.rows.tokens) == 1
    assert sum(labelled(share_of(batch, number, 6)) for number in range(6)) == labelled(batch)


def test_labels_of_sentences_go_where_their_rows_go():
    segments = torch.tensor([[1, 1, 2], [1, 0, 0], [0, 0, 0], [1, 2, 3]])
    batch = Batch(Rows(torch.arange(12).view(4, 3), segments=segments), labels=torch.arange(6))
    assert [share_of(batch, number, 2).labels.tolist() for number in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
    assert [share_of(batch, number, 4).labels.tolist() for number in range(4)] == [[0, 1], [2], [], [3, 4, 5]]
    idle = share_of(batch, 0, 5)
    assert idle.labels.tolist() == [] and not idle.rows.segments.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": "none"}, "parallel.kind: none, but torchrun started 4 processes"),
        ({"batch": {"rows": 3, "row": 64}}, "batch.rows: 3 rows cannot be shared by 4 processes"),
        ({"task": {"kind": "contrastive"}, "model": ENCODER}, "task.kind: contrastive compares all pairs"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=words):
        train(make(**({"validate": {}} | changes)))


def test_the_environment_of_one_process_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(make(steps=2, parallel="fsdp")).steps == 2
