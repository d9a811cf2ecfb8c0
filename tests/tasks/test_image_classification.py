"""A folder of photographs becomes a model in use: trained, killed, resumed, scored, asked and served."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import allyouneed as ayn
import warm_python
from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Signal, count_labels
from allyouneed.tasks.task import class_loss
from allyouneed.training import Recipe, load_recipe, loop, train
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.log import read_log
from allyouneed.training.reporting.progress import Reporter
from served import served_client
from toy_images import COLOURS, class_folders, picture, vit
from toy_texts import LAYER, Listener

pytest.importorskip("PIL")
RECIPE: dict[str, Any] = {
    "model": vit(LAYER, stem=[8]),
    "task": {"kind": "image-classification", "augment": ["crop", "flip"], "smoothing": 0.1},
    "epochs": 12,
    "schedule": {"kind": "constant", "peak": 0.003, "warmup": 5},
    "validate": {"every": 30, "sentences": 1},
    "save": {"every": 10, "keep": 1},
    "average": 0,
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    class_folders(folder / "train", 120)
    class_folders(folder / "valid", 60, seed=1)
    (folder / "train" / "red" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def recipe(photographs: Path, output: Path, **keys: Any) -> Recipe:
    data = {"train": str(photographs / "train"), "valid": str(photographs / "valid")}
    output.mkdir(parents=True, exist_ok=True)
    path = output / "recipe.yaml"
    path.write_text(yaml.safe_dump({"data": data, "output": str(output / "run")} | RECIPE | keys))
    return load_recipe(path)


@pytest.fixture(scope="module")
def trained(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, float]]:
    listener = Listener()
    result = train(recipe(photographs, tmp_path_factory.mktemp("trained")), console=listener.console)
    return result.model, listener.text, result.scores["valid"]


def run(*args: Any) -> str:
    """A command in a process of its own."""
    done = warm_python.run(
        [sys.executable, "-m", "allyouneed", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout, "utf-8")


def test_photographs_are_told_apart_after_seconds(trained: tuple[Path, str, dict[str, float]]) -> None:
    _, said, scores = trained
    assert scores["accuracy"] >= 95 and scores["macro-f1"] >= 95
    assert "unreadable image: 1" in said and "broken.png" in said
    assert "batch.rows: 16" in said, "small data gets small batches"
    assert "valid baseline, always" in said


def test_the_model_folder_answers_in_another_process(
    trained: tuple[Path, str, dict[str, float]], photographs: Path
) -> None:
    model, _, scores = trained
    text = run("evaluate", photographs / "valid", "--model", model)
    assert f"accuracy {scores['accuracy']:5.1f} %  of 60 images" in text and "macro-f1" in text
    assert "expected in rows, found in columns:" in text
    image = next((photographs / "valid" / "green").glob("*.png"))
    assert run("classify-image", image, "--model", model).strip() == "green"
    assert sorted(ayn.load(model).labels) == sorted(COLOURS)


def test_the_server_gives_the_answers_of_the_library(
    trained: tuple[Path, str, dict[str, float]], photographs: Path
) -> None:
    images = [next((photographs / "valid" / name).glob("*.png")) for name in COLOURS]
    expected = [{"label": one.label, "scores": one.scores} for one in ayn.load(trained[0]).classify_image_full(images)]
    encoded = [base64.b64encode(image.read_bytes()).decode() for image in images]
    with served_client({"colours": trained[0]}) as (_, client):
        answer = client.post("/v1/tasks/image-classification", json={"model": "colours", "inputs": encoded}).json()
    assert [one["label"] for one in answer["results"]] == [one["label"] for one in expected]


@pytest.mark.parametrize("augment", [["crop", "flip"], ["randaugment", {"kind": "mixup", "alpha": 1.0}, "cutmix"]])
def test_a_killed_run_resumes_bit_for_bit(
    augment: list[Any], photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"task": {"kind": "image-classification", "augment": augment}, "epochs": 3, "batch": {"rows": 16}}
    keys |= {"save": {"every": 5, "keep": 1}}
    for name in ("whole", "killed"):
        given = recipe(photographs, tmp_path / name, **keys)
        if name == "killed":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(loop.Trainer, "_update", die_at(13))
                train(given, console=Listener().console)
        train(given, console=Listener().console)
    logs = [read_log(tmp_path / name / "run" / "log.jsonl") for name in ("whole", "killed")]
    exact = [[(one["step"], one["loss"].hex(), one["norm"].hex()) for one in log if "loss" in one] for log in logs]
    assert exact[0] == exact[1] and len(exact[0]) == 24
    weights = [(tmp_path / name / "run" / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def die_at(step: int) -> Any:
    update = loop.Trainer._update

    def dying(self: Any, given: Any) -> None:
        if self.state.step + 1 == step:
            raise KeyboardInterrupt
        update(self, given)

    return dying


def test_changed_photographs_are_noticed_when_a_run_is_resumed(photographs: Path, tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "train", 40)
    given = recipe(photographs, tmp_path / "run", data={"train": str(folder)}, epochs=1)
    train(given, console=Listener().console)
    (folder / "red" / "0.png").write_bytes((folder / "red" / "3.png").read_bytes() + b" ")
    with pytest.raises(UserError, match=r"the contents of train\[0\] images"):
        train(given.model_copy(update={"epochs": 2}), console=Listener().console)


def test_augmentation_depends_on_seed_epoch_and_image_and_leaves_validation_alone(
    photographs: Path, tmp_path: Path
) -> None:
    task = {"kind": "image-classification", "augment": ["crop", "erasing", "mixup"]}
    plain = prepare_for(recipe(photographs, tmp_path / "plain", task="image-classification"))
    data = prepare_for(recipe(photographs, tmp_path / "changed", task=task))
    assert data.valid is not None and plain.valid is not None
    for one, other in zip(data.valid.batches(0), plain.valid.batches(0), strict=True):
        assert torch.equal(pixels(one), pixels(other)) and torch.equal(one.labels, other.labels)
    first, again, later = (next(data.train.batches(epoch)) for epoch in (0, 0, 1))
    assert torch.equal(pixels(first), pixels(again)) and not torch.equal(pixels(first), pixels(later))
    assert not torch.equal(pixels(first), pixels(next(plain.train.batches(0))))
    assert first.labels is not None and torch.allclose(first.labels.sum(1), torch.ones(len(first.labels)))
    assert int(count_labels(first.labels)) == len(first.labels)


def prepare_for(given: Recipe) -> Any:
    return prepare(given, RunFolder(given.output), Reporter(Listener().console))


def pixels(batch: Batch) -> torch.Tensor:
    assert isinstance(batch.target, Signal)
    return batch.target.values


def test_the_loss_of_a_mixture_is_the_mixture_of_the_losses() -> None:
    """Zhang et al. 2018: λ · loss(x, y₁) + (1 − λ) · loss(x, y₂); smoothing included."""
    logits, one, other = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0, 2])
    classes = torch.eye(3)
    for smoothing in (0.0, 0.2):
        mixture = class_loss(logits, 0.3 * classes[one] + 0.7 * classes[other], smoothing)
        parts = [class_loss(logits, labels, smoothing) for labels in (one, other)]
        for name in ("total", "plain"):
            expected = 0.3 * getattr(parts[0], name) + 0.7 * getattr(parts[1], name)
            torch.testing.assert_close(getattr(mixture, name), expected)
        assert int(mixture.tokens) == int(parts[0].tokens) == 4


def test_the_data_says_how_many_classes_a_preset_has(tmp_path: Path) -> None:
    for keys in ({"model": "vit-tiny"}, {"model": "vit-tiny", "set": ["embed.stem=[16]"]}):
        given = parse(Recipe, {"task": "image-classification", "data": {"train": "x"}, "output": "run", **keys})
        assert tree_of(given.model_for(None, ["a", "b", "c"]))["head"]["labels"] == 3
    assert given.task.reader.sides == (32, 32) and given.task.reader.mean == (0.5, 0.5, 0.5)


def test_top_five_is_scored_where_there_are_more_classes(photographs: Path, tmp_path: Path) -> None:
    dice = random.Random(0)
    images = np.stack([picture(dice.choice(list(COLOURS)), dice) for _ in range(48)])
    np.savez(tmp_path / "many.npz", image=images, label=np.arange(48) % 8)
    result = train(
        recipe(photographs, tmp_path / "run", data=str_data(tmp_path / "many.npz"), epochs=1), console=quiet()
    )
    assert result.scores["valid"]["top-5"] >= result.scores["valid"]["accuracy"]


def str_data(path: Path) -> dict[str, str]:
    return {"train": str(path), "valid": str(path)}


def quiet() -> Any:
    return Listener().console


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"task": {"kind": "image-classification", "augment": "flop"}}, "did you mean 'flip'"),
        (
            {"task": {"kind": "image-classification", "image": {"size": [8, 8]}}},
            "images of 8×8 pixels, the model reads",
        ),
        ({"tokenizer": {"vocab": 300}}, "'tokenizer' has no effect on image-classification"),
        ({"model": "bert-base"}, "image-classification trains a model that reads images, this one reads tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    keys: dict[str, Any], said: str, photographs: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(photographs, tmp_path, **keys)


def test_a_trained_model_is_fine_tuned_as_it_read_its_images(
    trained: tuple[Path, str, dict[str, float]], photographs: Path, tmp_path: Path
) -> None:
    keys = {key: value for key, value in RECIPE.items() if key != "model"}
    path = tmp_path / "more.yaml"
    data = {"train": str(photographs / "valid")}
    path.write_text(yaml.safe_dump(keys | {"start": str(trained[0]), "data": data, "epochs": 1}))
    given = load_recipe(path)
    assert tree_of(given.task.reader) == json.loads((trained[0] / "config.json").read_text())["task"]["image"]
    listener = Listener()
    train(given, console=listener.console)
    assert "newly initialised" not in listener.text


def test_the_moving_average_is_what_is_scored_resumed_and_kept(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"optimiser": {"kind": "adam", "ema": 0.8, "layer_decay": 0.9}, "epochs": 3}
    keys |= {
        "save": {"every": 5, "keep": 2},
        "batch": {"rows": 16},
        "set": ["encoder[0].wiring={kind: pre-norm, depth_dropout: 0.2}"],
    }
    models = []
    for name in ("whole", "killed"):
        given, listener = recipe(photographs, tmp_path / name, **keys), Listener()
        if name == "killed":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(loop.Trainer, "_update", die_at(13))
                train(given, console=Listener().console)
        result = train(given, console=listener.console)
        models.append((result.model / "model.safetensors").read_bytes())
        assert "moving average of step 24" in (result.model / "README.md").read_text()
    assert models[0] == models[1]
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / "step-00000024"
    assert (checkpoint / "model.safetensors").read_bytes() != models[0], "training continues from its own weights"
    means = load_file(checkpoint / "training" / "optimiser.safetensors")
    for key, value in load_file(result.model / "model.safetensors").items():
        assert torch.equal(value, means[f"ema/{key}"])
