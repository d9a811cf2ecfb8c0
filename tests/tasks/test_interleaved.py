"""Texts with images and sounds: files, encoding, training, and generation in Python and on the command line."""

import json
import wave

import numpy as np
import pytest
import torch

import allyouneed as ayn
from allyouneed.config import ConfigError, parse
from allyouneed.data.files.interleaved import InterleavedFiles
from allyouneed.data.files.readers import Report
from allyouneed.data.media.pieces import AudioInput, ImageInput, MediaPiece, fill_placeholders
from allyouneed.errors import UserError
from allyouneed.training.recipe.recipe import Recipe

pillow = pytest.importorskip("PIL.Image")
COLOURS = {"red": (250, 20, 0), "green": (0, 240, 10), "blue": (10, 0, 230)}
TONES = {"low": 300, "high": 2500}
LAYER = {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 48}}


def image(name):
    return np.full((12, 16, 3), COLOURS[name], np.uint8)


def sound(name):
    return 0.5 * np.sin(2 * np.pi * TONES[name] * np.arange(2400, dtype=np.float32) / 16000)


def tower(embed, slots):
    resampler = {"kind": "perceiver", "slots": slots, "heads": 2, "layers": 1}
    return {"encoder": {"width": 16, "embed": embed, "encoder": [LAYER]}, "resampler": resampler}


def recipe(folder, **changes):
    learned = {"positions": {"kind": "learned", "length": 9}}
    model = {
        "kind": "interleaved",
        "vocab": 1,
        "width": 32,
        "embed": {"scale": "none"},
        "decoder": [LAYER | {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": "rotary"}}],
        "image": tower({"kind": "patches", "image": 8, "patch": 4, "class_token": False}, 2),
        "audio": tower({"kind": "frames", "mels": 16} | learned, 3),
    }
    return {
        "model": model,
        "task": "interleaved",
        "data": {"train": str(folder / "train.jsonl"), "valid": str(folder / "valid.jsonl")},
        "tokenizer": {"vocab": 300},
        "batch": {"rows": 2, "row": 96},
        "steps": 40,
        "schedule": {"kind": "inverse-sqrt", "peak": 0.01, "warmup": 5},
        "validate": {"every": 40, "metric": "accuracy", "sentences": 0},
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(folder / "run"),
    } | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("interleaved")
    for name in COLOURS:
        pillow.fromarray(image(name)).save(found / f"{name}.png")
    for name in TONES:
        with wave.open(str(found / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((sound(name) * 32767).astype("<i2").tobytes())
    seen = [{"pieces": [{"image": f"{name}.png"}, "Colour?"], "answer": name} for name in COLOURS]
    heard = [{"pieces": ["This ", {"audio": f"{name}.wav"}, " is?"], "answer": name} for name in TONES]
    both = [
        {"pieces": [{"image": f"{one}.png"}, {"image": f"{two}.png"}, "Second?"], "answer": two}
        for one in COLOURS
        for two in COLOURS
    ]
    lines = [json.dumps(example) + "\n" for example in [*seen, *heard, *both, {"pieces": ["a text alone"]}]]
    (found / "valid.jsonl").write_text("".join(lines))
    (found / "train.jsonl").write_text("".join(lines) + '{"pieces": [{"image": "none.png"}, "x"]}\n')
    return found


@pytest.fixture(scope="module")
def trained(folder):
    return ayn.train(recipe(folder))


def test_it_learns_to_answer_and_every_way_of_asking_gives_the_same(folder, trained, capsys):
    model = ayn.load(folder / "run" / "model")
    assert json.loads((folder / "run" / "result.json").read_text())["scores"]["valid"]["accuracy"] == 100
    given = [
        [{"image": folder / "green.png"}, "Colour?"],
        [{"image": image("blue")}, {"text": "Colour?"}],
        ["This ", {"audio": (torch.tensor(sound("high")), 16000)}, " is?"],
        [{"image": pillow.fromarray(image("red"))}, {"image": str(folder / "blue.png")}, "Second?"],
    ]
    assert model.generate(given) == ["green", "blue", "high", "blue"]
    assert model.generate("Colour?", images=[folder / "red.png"]) == "red"
    assert model.generate("This <audio> is?", audio=[folder / "low.wav"]) == "low"
    assert "".join(model.stream(given[3])) == "blue"
    assert model.generate_full(given[3:], beam=2, method="beam")[0].prompt == "<image><image>Second?"
    inside = model.inside(given[0])
    assert inside["towers.image.encoder.embed"].shape == (1, 4, 16)
    assert model.tokenizer.decode([answer.id for answer in inside.answers[:-1]]) == "green"
    from typer.testing import CliRunner

    from allyouneed.cli import app

    place = str(folder / "run" / "model")
    files = ["--image", str(folder / "red.png"), "--image", str(folder / "green.png"), "--model", place]
    app.load()
    found = CliRunner().invoke(app, ["generate", "<image><image>Second?", *files])
    assert (found.exit_code, found.stdout.strip()) == (0, "green")


def test_prompts_that_cannot_be_read(folder, trained):
    model = ayn.load(folder / "run" / "model")
    for prompt, options, message in [
        (
            [[{"imag": "x"}]],
            {},
            r"piece 1: unknown key 'imag' \(did you mean 'image'\?\) \(allowed: text, image, audio",
        ),
        ([[{"image": folder / "none.png"}]], {}, "none.png: cannot be read as an image: No such file"),
        ([[{"audio": torch.zeros(4000)}]], {}, "sound of 0.25 s: longer than 0.18 s"),
        (["<image> and <image>"], {"images": [image("red")]}, "2 placeholders <image> in the prompt, but 1 given"),
        ([[1]], {}, "piece 1: a int; expected a text"),
        ("text", {"images": "red.png"}, "images takes a list"),
    ]:
        with pytest.raises(UserError, match=message):
            model.generate(prompt, **options)


def test_lines_that_cannot_be_read_are_reported(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    lines = [
        {"pieces": [{"image": "b.png"}, "x"]},
        {"pieces": [{"image": 3}, "x"]},
        {"pieces": ["x"], "anser": "y"},
        {"pieces": ["x"], "answer": 7},
        {"pieces": [{"image": "a.png"}]},
        {"piece": []},
        {"pieces": [{"image": "a.png"}], "answer": "y"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(show=10)
    (kept,) = InterleavedFiles(path=tmp_path / "a.jsonl").read(report)
    assert kept.pieces == (MediaPiece("image", tmp_path / "a.png"),) and kept.answer == "y"
    expected = [
        "b.png: no such file",
        "image: a int, expected a path",
        "unknown key 'anser' (did you mean 'answer'?) (allowed: pieces, answer)",
        "answer: a int, expected a text",
        "no text and no answer: there is nothing to learn",
        "no key 'pieces'",
    ]
    for number, (found, message) in enumerate(zip(report.drops["broken"].examples, expected, strict=True), start=1):
        assert found.startswith(f"{tmp_path / 'a.jsonl'}:{number}: ") and message in found


def test_what_is_stored_is_what_is_read():
    pixels = ImageInput(size=(8, 8), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), slots=2)
    both = [image("red"), image("blue")]
    stored = np.concatenate([pixels.stored(one).reshape(-1) for one in both])
    assert torch.equal(pixels.load(stored), torch.stack([pixels.read(one) for one in both]))
    frames = AudioInput(mels=16, seconds=0.18)
    stored = np.concatenate([frames.stored(sound(name)).reshape(-1) for name in TONES])
    assert torch.equal(frames.load(stored), torch.stack([frames.read(sound(name)) for name in TONES]))


def test_placeholders():
    given = {"image": ["a", "b"], "audio": ["c"]}
    text = MediaPiece("text", " and ")
    found = fill_placeholders("<image> and <audio><image>", given)
    assert found == (MediaPiece("image", "a"), text, MediaPiece("audio", "c"), MediaPiece("image", "b"))
    assert fill_placeholders("x<audio>", given)[:2] == (MediaPiece("image", "a"), MediaPiece("image", "b"))


def test_a_task_takes_its_sizes_from_the_model(folder):
    task = parse(
        Recipe, recipe(folder, task={"kind": "interleaved", "image": {"mean": [0, 0, 0], "std": [1, 1, 1]}})
    ).task
    assert (task.image.slots, task.image.size, task.image.mean) == (2, (8, 8), (0, 0, 0))
    assert (task.audio.slots, task.audio.mels, task.audio.seconds) == (3, 16, 0.18)
    for part, message in [
        ({"image": {"size": [8, 9]}}, "task.image: images of 8×9 pixels, the model reads"),
        ({"audio": {"seconds": 1}}, "task.audio.seconds: 1, the model has positions for 0.18"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse(Recipe, recipe(folder, task={"kind": "interleaved"} | part))
