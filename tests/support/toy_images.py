"""Images that are small and easily told apart, and tables that name them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = {"red": (230, 40, 30), "green": (30, 220, 50), "blue": (40, 60, 240)}
SIDE = 12


def picture(colour: str, dice: random.Random, right: bool | None = None) -> NDArray[np.uint8]:
    """A square of this colour somewhere, or on that side, on a dark, noisy ground: (height, width, channels)."""
    noise = np.random.default_rng(dice.randrange(1 << 30))
    pixels = noise.integers(0, 60, (SIDE, SIDE, 3)).astype(np.uint8)
    top, left = dice.randrange(6), dice.randrange(6) if right is None else 5 * right + dice.randrange(2)
    pixels[top : top + 6, left : left + 6] = COLOURS[colour]
    return pixels


def labelled_pictures(count: int, dice: random.Random) -> tuple[NDArray[np.uint8], list[str]]:
    labels = [dice.choice(list(COLOURS)) for _ in range(count)]
    return np.stack([picture(label, dice) for label in labels]), labels


def write_pictures(folder: Path, split: str, count: int) -> None:
    """`{split}.images.tsv`, `{split}.captions.tsv`, and the images that they name, in `pictures/`."""
    from PIL import Image

    pixels, labels = labelled_pictures(count, random.Random(f"{split} images"))
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        name = f"pictures/{split}-{number}.png"
        Image.fromarray(image).save(folder / name)
        rows.append(f"{name}\t{label}\n")
    (folder / f"{split}.images.tsv").write_text("".join(rows), encoding="utf-8")
    dice, rows = random.Random(f"{split} captions"), []
    for number in range(count):
        colour, right = dice.choice(list(COLOURS)), dice.random() < 0.5
        name = f"pictures/{split}-captioned-{number}.png"
        Image.fromarray(picture(colour, dice, right)).save(folder / name)
        rows.append(f"{name}\t{caption(colour, right)}\n")
    (folder / f"{split}.captions.tsv").write_text("".join(rows), encoding="utf-8")


def caption(colour: str, right: bool) -> str:
    return f"a {colour} square on the {'right' if right else 'left'}"


def class_folders(folder: Path, count: int, seed: int = 0) -> Path:
    """A folder of images for each class."""
    from PIL import Image

    dice = random.Random(seed)
    for number in range(count):
        label = list(COLOURS)[number % len(COLOURS)]
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(label, dice)).save(folder / label / f"{number}.png")
    return folder


def vit(layer: dict[str, Any], **embed: Any) -> dict[str, Any]:
    """A vision transformer of one layer."""
    patches = {"kind": "patches", "image": SIDE, "patch": 4, "class_token": False, "positions": "sinusoidal"}
    return {"kind": "encoder", "width": 32, "embed": patches | embed, "encoder": [layer]}


def towers(layer: dict[str, Any]) -> dict[str, Any]:
    """A vision and a text transformer of one layer."""
    text = {"width": 32, "vocab": 1, "embed": {"positions": "sinusoidal"}, "encoder": [layer]}
    sides = {"image": {key: value for key, value in vit(layer).items() if key != "kind"}, "text": text}
    return {"kind": "two-towers", "width": 32, **{name: side | {"head": "pooled"} for name, side in sides.items()}}


def describer(layer: dict[str, Any], attention: dict[str, Any]) -> dict[str, Any]:
    """An encoder of images and a decoder of texts."""
    seen = vit(layer)
    decoder = layer | {"mixer": attention | {"pattern": "causal"}, "cross": attention}
    return {
        "kind": "encoder-decoder",
        "vocab": 1,
        "width": 32,
        "source_embed": seen["embed"],
        "embed": {"positions": "sinusoidal"},
        "encoder": seen["encoder"],
        "decoder": [decoder],
    }
