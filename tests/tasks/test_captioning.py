"""Images with captions become a model that describes images: trained, resumed, scored, asked and served."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.training import Recipe, load_recipe, loop, train
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.log import read_log
from allyouneed.training.reporting.progress import Reporter
from served import served_client
from toy_images import describer, write_pictures
from toy_texts import ATTENTION, LAYER, Listener

pytest.importorskip("PIL")
RECIPE: dict[str, Any] = {
    "model": describer(LAYER, ATTENTION),
    "task": "captioning",
    "tokenizer": {"vocab": 300},
    "steps": 140,
    "batch": {"rows": 32},
    "schedule": {"kind": "constant", "peak": 0.005, "warmup": 5},
    "validate": {"every": 140, "sentences": 1},
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


def test_images_are_described_after_seconds(trained: Any) -> None:
    assert trained.scores["valid"]["exact"] >= 80


def test_commands_python_and_server_agree(trained: Any, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pictures / "pictures" / "valid-captioned-0.png"
    expected = ayn.load(trained.model).caption(image)
    for args, said in [
        (["caption", image, "--model", trained.model], expected),
        (["evaluate", pictures / "valid.captions.tsv", "--model", trained.model], "chrF"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(list(map(str, args)))
        assert not stopped.value.code and said in capsys.readouterr().out
    content = base64.b64encode(image.read_bytes()).decode()
    with served_client({"describer": trained.model}) as (_, client):
        body = {"model": "describer", "inputs": [content]}
        (answer,) = client.post("/v1/tasks/captioning", json=body).json()["results"]
    assert answer["text"] == expected


def test_an_image_is_described_alike_alone_and_among_others(trained: Any, pictures: Path) -> None:
    images = sorted((pictures / "pictures").glob("valid-captioned-*.png"))[:20]
    model = ayn.load(trained.model)
    for options in ({"beam": 1}, {"beam": 3}):
        assert model.caption(images, **options) == [model.caption(image, **options) for image in images]


def test_the_labels_are_the_next_tokens_of_the_text(pictures: Path, tmp_path: Path) -> None:
    """The loss is that of the model called with image and text, token by token."""
    given = recipe(pictures, tmp_path, task="captioning")
    data = prepare(given, RunFolder(given.output), Reporter(Listener().console))
    model: Any = given.model_for(data.vocabularies).build().eval()
    batch = next(data.train.batches(0))
    assert batch.labels is not None and batch.rows.lengths is not None
    found, expected = given.task.loss(model, batch), torch.zeros(())
    logits = model.logits(batch)
    for row, length in enumerate(batch.rows.lengths.tolist()):
        ids = [*batch.rows.tokens[row, 1:length].tolist(), data.vocabularies.target.eos]
        assert batch.labels[row, :length].tolist() == ids
        expected = expected - logits[row, range(length)].log_softmax(-1)[range(length), ids].sum()
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-4)
    assert int(found.tokens) == int(batch.rows.lengths.sum())


def test_a_killed_run_resumes_bit_for_bit(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, logs = loop.Trainer._update, []

    def dying(self: Any, given: Any) -> None:
        if self.state.step == 9:
            raise KeyboardInterrupt
        update(self, given)

    for name in ("whole", "killed"):
        given = recipe(
            pictures,
            tmp_path / name,
            steps=14,
            task={"kind": "captioning", "augment": "erasing"},
            save={"every": 5, "keep": 1},
        )
        if name == "killed":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(loop.Trainer, "_update", dying)
                train(given, console=Listener().console)
        train(given, console=Listener().console)
        log = read_log(tmp_path / name / "run" / "log.jsonl")
        logs.append([(one["step"], one["loss"].hex(), one["norm"].hex()) for one in log if "loss" in one])
    assert logs[0] == logs[1] and len(logs[0]) == 14
