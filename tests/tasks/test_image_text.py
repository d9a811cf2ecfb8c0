"""Images with captions become a model that matches them: trained, resumed, scored, asked and served."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import logsigmoid

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch
from allyouneed.nn.models.base import Model
from allyouneed.tasks.task import Task
from allyouneed.tasks.vision.image_text import sigmoid_loss
from allyouneed.training import Recipe, load_recipe, loop, train
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.log import read_log
from allyouneed.training.reporting.progress import Reporter
from served import served_client
from toy_images import COLOURS, caption, towers, write_pictures
from toy_texts import LAYER, Listener

pytest.importorskip("PIL")
TEXTS = [caption(colour, right) for colour in COLOURS for right in (False, True)]
RECIPE: dict[str, Any] = {
    "model": towers(LAYER),
    "task": {"kind": "image-text", "augment": "erasing"},
    "tokenizer": {"vocab": 300},
    "steps": 60,
    "batch": {"rows": 32},
    "schedule": {"kind": "constant", "peak": 0.005, "warmup": 5},
    "validate": {"every": 60, "sentences": 1},
    "save": {"every": 20, "keep": 1},
    "average": 0,
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    for split, count in (("train", 200), ("valid", 40)):
        write_pictures(folder, split, count)
    return folder


def recipe(pictures: Path, output: Path, **keys: Any) -> Recipe:
    data = {split: str(pictures / f"{split}.captions.tsv") for split in ("train", "valid")}
    output.mkdir(parents=True, exist_ok=True)
    path = output / "recipe.yaml"
    path.write_text(yaml.safe_dump({"data": data, "output": str(output / "run")} | RECIPE | keys))
    return load_recipe(path)


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(recipe(pictures, tmp_path_factory.mktemp("trained")), console=Listener().console)


def test_images_find_their_texts_after_seconds(trained: Any) -> None:
    assert trained.scores["valid"]["recall@1"] >= 80
    assert {"image to text", "text to image"} <= trained.scores["valid"].keys()


def test_commands_python_and_server_agree(trained: Any, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pictures / "pictures" / "valid-captioned-0.png"
    expected = ayn.load(trained.model).match_image(image, TEXTS)
    for args, said in [
        (["match-image", image, "--model", trained.model, *(word for t in TEXTS for word in ("-t", t))], expected),
        (["evaluate", pictures / "valid.captions.tsv", "--model", trained.model], "text to image"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(list(map(str, args)))
        assert not stopped.value.code and said in capsys.readouterr().out
    content = base64.b64encode(image.read_bytes()).decode()
    with served_client({"matcher": trained.model}) as (_, client):
        body = {"model": "matcher", "inputs": [content], "labels": TEXTS}
        (answer,) = client.post("/v1/tasks/image-text", json=body).json()["results"]
    assert answer["label"] == expected


def test_a_killed_run_resumes_bit_for_bit(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, logs = loop.Trainer._update, []

    def dying(self: Any, given: Any) -> None:
        if self.state.step == 9:
            raise KeyboardInterrupt
        update(self, given)

    for name in ("whole", "killed"):
        given = recipe(pictures, tmp_path / name, steps=14, save={"every": 5, "keep": 1})
        if name == "killed":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(loop.Trainer, "_update", dying)
                train(given, console=Listener().console)
        train(given, console=Listener().console)
        log = read_log(tmp_path / name / "run" / "log.jsonl")
        logs.append([(one["step"], one["loss"].hex(), one["norm"].hex()) for one in log if "loss" in one])
    assert logs[0] == logs[1] and len(logs[0]) == 14


def test_the_loss_of_clip_is_that_of_figure_3(pictures: Path, tmp_path: Path) -> None:
    given = recipe(pictures, tmp_path)
    data = prepare(given, RunFolder(given.output), Reporter(Listener().console))
    model: Any = given.model_for(data.vocabularies).build()
    batch: Batch = next(data.train.batches(0))
    logits = model.logits(batch)
    own = torch.arange(len(logits))
    cross_entropy = torch.nn.functional.cross_entropy
    expected = (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
    found = given.task.loss(model, batch)
    torch.testing.assert_close(found.total / found.tokens, expected)


def test_the_sigmoid_loss_is_that_of_the_paper() -> None:
    """Zhai et al. 2023, algorithm 1, pair by pair, with gradients."""
    scores = torch.randn(5, 5, dtype=torch.double, requires_grad=True)
    pairs = [[-logsigmoid((1 if i == j else -1) * scores[i, j]) for j in range(5)] for i in range(5)]
    expected = torch.stack([one for row in pairs for one in row]).sum()
    found = sigmoid_loss(scores)
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, scores) for one in (found.total, expected)))


def test_siglip_learns_a_bias_and_begins_as_the_paper_says(pictures: Path, tmp_path: Path) -> None:
    given = recipe(pictures, tmp_path, task={"kind": "image-text", "objective": "siglip"}, steps=60)
    model: Any = given.model_for(None).build()
    assert model.bias.item() == -10 and model.scale.item() == pytest.approx(10)
    result = train(given, console=Listener().console)
    assert ayn.load(result.model).model.bias.item() != -10
    assert result.scores["valid"]["recall@1"] >= 50


def test_the_bias_moves_every_score() -> None:
    tree = towers(LAYER) | {"bias": -2.5}
    model: Any = parse(Model, tree).build()  # type: ignore[type-abstract]
    vectors = torch.nn.functional.normalize(torch.randn(2, 3, 32), dim=-1)
    torch.testing.assert_close(model.scores(*vectors), model.scale * vectors[0] @ vectors[1].T - 2.5)
    assert model.config.cost().parameters == sum(one.numel() for one in model.parameters())


def test_texts_are_not_mixed(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixup mixes classes, and texts cannot be mixed"):
        recipe(pictures, tmp_path, task={"kind": "image-text", "augment": ["mixup"]})
    assert parse(Task, "image-text").usual_tokens == 64  # type: ignore[type-abstract]
