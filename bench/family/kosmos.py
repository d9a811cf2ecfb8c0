"""KOSMOS-1, small: one decoder that reads text, images and sounds, and answers questions about them.

    python bench/family/kosmos.py

Images of 28×28 pixels show a digit of 5×7 dots in one of five colours, at one of three places with noise; sounds of
0.3 s are "spoken" digits, two formants each, at a random pitch with noise. Examples are written as files and trained by
a recipe, as a user would. Some pairs of colour and digit never occur in training. Writes
docs/family/pictures/kosmos.svg.
"""

from __future__ import annotations

import json
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import allyouneed as ayn

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/kosmos.svg"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1)}
UNSEEN = {(colour, (3 * n + 1) % 10) for n, colour in enumerate(COLOURS)}  # never in training
SIDE, SECONDS, RATE, TRAIN, TEST, STEPS = 28, 0.3, 16_000, 3000, 300, 1000
DOTS = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
LINES = [line.split() for line in DOTS.strip().splitlines()]
Dice = np.random.Generator


def draw(colour: str, digit: int, dice: Dice) -> Image.Image:
    dots = np.array([[dot == "#" for dot in line[digit]] for line in LINES], dtype=float)
    shape = dots.repeat(4, 0).repeat(4, 1)  # 28×20
    pixels = 0.1 * dice.random((SIDE, SIDE, 3))
    left = 4 * dice.integers(0, 3)
    pixels[:, left : left + 20] += 0.85 * shape[..., None] * np.array(COLOURS[colour])
    return Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))


def speak(digit: int, dice: Dice) -> NDArray[np.float64]:
    """Two formants, the first of which glides, at a random pitch and loudness."""
    time, pitch = np.arange(round(SECONDS * RATE)) / RATE, dice.uniform(0.94, 1.06)
    first, second = pitch * (300 + 180 * (digit % 5)), pitch * (2000 + 1400 * (digit // 5))
    glide = 2 * np.pi * first * (time + 0.4 * time**2)
    voice = np.sin(glide) + 0.7 * np.sin(2 * np.pi * second * time)
    found: NDArray[np.float64] = dice.uniform(0.2, 0.5) * np.hanning(len(time)) * voice
    return found + 0.01 * dice.standard_normal(len(time))


class Writer:
    """Writes examples and their files into a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir()
        self.folder, self.dice, self.count = folder, np.random.default_rng(seed), 0

    def image(self, colour: str, digit: int) -> dict[str, str]:
        self.count += 1
        draw(colour, digit, self.dice).save(self.folder / f"{self.count}.png")
        return {"image": f"{self.count}.png"}

    def sound(self, digit: int) -> dict[str, str]:
        self.count += 1
        with wave.open(str(self.folder / f"{self.count}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((speak(digit, self.dice) * 32767).clip(-32768, 32767).astype("<i2").tobytes())
        return {"audio": f"{self.count}.wav"}

    def pair(self, unseen: bool) -> tuple[str, int]:
        pairs = [(c, d) for c in COLOURS for d in range(10) if ((c, d) in UNSEEN) == unseen]
        return pairs[self.dice.integers(len(pairs))]

    def example(self, kind: str) -> dict[str, Any]:
        colour, digit = self.pair(kind == "caption of an unseen pair")
        if kind.startswith("caption"):
            return {"pieces": [self.image(colour, digit), "This is"], "answer": f"a {colour} {DIGITS[digit]}"}
        if kind == "colour":
            return {"pieces": [self.image(colour, digit), "Which colour?"], "answer": colour}
        if kind == "digit":
            return {"pieces": [self.image(colour, digit), "Which digit?"], "answer": DIGITS[digit]}
        if kind == "second image":
            other = self.pair(False)
            pieces = [self.image(colour, digit), self.image(*other), "Which digit is second?"]
            return {"pieces": pieces, "answer": DIGITS[other[1]]}
        if kind == "spoken digit":
            return {"pieces": ["You hear ", self.sound(digit)], "answer": DIGITS[digit]}
        heard = digit if self.dice.random() < 0.5 else int(self.dice.integers(10))
        pieces = [self.sound(heard), self.image(colour, digit), "The same digit?"]
        return {"pieces": pieces, "answer": "yes" if heard == digit else "no"}

    def write(self, kinds: list[str], count: int) -> list[dict[str, Any]]:
        found = [self.example(kinds[n % len(kinds)]) for n in range(count)]
        text = "".join(json.dumps(example) + "\n" for example in found)
        (self.folder / "examples.jsonl").write_text(text)
        return found


LEARNED = ["caption", "colour", "digit", "second image", "spoken digit", "sound and image"]
ASKED = ["caption", "caption of an unseen pair", *LEARNED[1:]]


def tower(embed: dict[str, Any]) -> dict[str, Any]:
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 4}}
    layer["channel"] = {"kind": "ffn", "hidden": 128, "activation": "gelu"}
    encoder = {"width": 48, "embed": embed, "encoder": [layer]}
    return {"encoder": encoder, "resampler": {"kind": "perceiver", "slots": 4, "heads": 4, "layers": 1, "hidden": 128}}


def recipe(folder: Path) -> dict[str, Any]:
    layer = {"repeat": 2, "wiring": "pre-norm", "channel": {"kind": "ffn", "hidden": 192, "activation": "gelu"}}
    layer["mixer"] = {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "rotary"}
    patches = {"kind": "patches", "image": SIDE, "patch": 4, "class_token": False}
    frames = {"kind": "frames", "mels": 20, "positions": {"kind": "learned", "length": 15}}
    model = {
        "kind": "interleaved",
        "width": 64,
        "embed": {"scale": "none"},
        "decoder": [layer],
        "image": tower(patches | {"positions": {"kind": "learned", "length": 49}}),
        "audio": tower(frames),
    }
    return {
        "model": model,
        "task": "interleaved",
        "data": {"train": str(folder / "train/examples.jsonl")},
        "tokenizer": {"vocab": 400},
        "batch": {"rows": 5, "row": 128},
        "steps": STEPS,
        "schedule": {"kind": "cosine", "peak": 1e-3, "warmup": 40},
        "save": {"every": STEPS, "keep": 1},
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(folder / "run"),
    }


def ask(model: Any, folder: Path, examples: list[dict[str, Any]], swapped: bool = False) -> float:
    """Share of exact answers; `swapped`: with the images and sounds of other examples of the same kind."""
    prompts = []
    for n, example in enumerate(examples):
        other = iter(p for p in examples[(n + 1) % len(examples)]["pieces"] if isinstance(p, dict))
        pieces = [next(other) if swapped and isinstance(p, dict) else p for p in example["pieces"]]
        read = [p if isinstance(p, str) else {kind: folder / name for kind, name in p.items()} for p in pieces]
        prompts.append(read)
    answers = model.generate(prompts, max_length=8)
    return float(np.mean([a.strip() == e["answer"] for a, e in zip(answers, examples, strict=True)]))


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Writer(folder / "train", 1).write(LEARNED, TRAIN)
        ayn.train(recipe(folder))
        model = ayn.load(folder / "run" / "model")
        log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
        found = {}
        print(f"\n{'question':28} accuracy   with the media of another example")
        for number, kind in enumerate(ASKED):
            place = folder / f"test{number}"
            examples = Writer(place, 100 + number).write([kind], TEST // len(ASKED))
            found[kind] = ask(model, place, examples), ask(model, place, examples, swapped=True)
            print(f"{kind:28} {found[kind][0]:8.1%}   {found[kind][1]:8.1%}", flush=True)
        losses = [(one["step"], one["loss"]) for one in log if "loss" in one and "step" in one]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), width_ratios=[1, 1.5])
    left.plot(*zip(*losses, strict=True), linewidth=0.8)
    left.set(xlabel="training steps", ylabel="loss of an answer token", yscale="log")
    places = np.arange(len(found))
    right.barh(places - 0.2, [one for one, _ in found.values()], 0.4, label="its own images and sounds")
    right.barh(places + 0.2, [other for _, other in found.values()], 0.4, label="those of another example")
    right.set(yticks=places, yticklabels=list(found), xlabel="answers that are right", xlim=(0, 1.02))
    right.invert_yaxis()
    right.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.6, 1), ncols=2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
