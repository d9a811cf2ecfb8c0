"""Sounds that are short and easily told apart, and tables that name them."""

from __future__ import annotations

import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TONES = {"low": 300, "middle": 800, "high": 2000}  # hertz
RATE = 8_000
SECONDS = 0.15  # of a tone


def sound(tones: list[str], dice: random.Random) -> NDArray[np.int16]:
    """Tones one after the other, with a little noise; 8,000 samples a second."""
    noise = np.random.default_rng(dice.randrange(1 << 30))
    parts = []
    for tone in tones:
        time = np.arange(round(SECONDS * RATE * dice.uniform(0.9, 1.2))) / RATE
        parts += [np.sin(2 * np.pi * TONES[tone] * time) * np.hanning(len(time)), np.zeros(RATE // 50)]
    values = 0.5 * np.concatenate(parts)
    return ((values + 0.01 * noise.standard_normal(len(values))) * 20_000).astype(np.int16)


def write_wav(path: Path, samples: NDArray[np.int16], rate: int = RATE, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


def write_sounds(folder: Path, split: str, count: int) -> None:
    """`{split}.sounds.tsv`, `{split}.transcripts.tsv`, and the recordings that they name, in `sounds/`."""
    dice, labels, texts = random.Random(f"{split} sounds"), [], []
    for number in range(count):
        tone = dice.choice(list(TONES))
        write_wav(folder / f"sounds/{split}-{number}.wav", sound([tone], dice))
        labels.append(f"sounds/{split}-{number}.wav\t{tone}\n")
        tones = [dice.choice(list(TONES)) for _ in range(dice.randint(1, 3))]
        write_wav(folder / f"sounds/{split}-said-{number}.wav", sound(tones, dice))
        texts.append(f"sounds/{split}-said-{number}.wav\t{' '.join(tones)}\n")
    (folder / f"{split}.sounds.tsv").write_text("".join(labels), encoding="utf-8")
    (folder / f"{split}.transcripts.tsv").write_text("".join(texts), encoding="utf-8")


def sound_folders(folder: Path, count: int, seed: int = 0) -> Path:
    """A folder of recordings for each class."""
    dice = random.Random(seed)
    for number in range(count):
        tone = list(TONES)[number % len(TONES)]
        write_wav(folder / tone / f"{number}.wav", sound([tone], dice))
    return folder


FRAMES = {"kind": "frames", "mels": 20, "positions": "sinusoidal"}


def hearer(layer: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """An encoder of sounds of one layer."""
    return {"kind": "encoder", "width": 32, "embed": FRAMES, "encoder": [layer], **keys}


def listener(layer: dict[str, Any], attention: dict[str, Any]) -> dict[str, Any]:
    """An encoder of sounds and a decoder of texts."""
    decoder = layer | {"mixer": attention | {"pattern": "causal"}, "cross": attention}
    return {
        "kind": "encoder-decoder",
        "vocab": 1,
        "width": 32,
        "source_embed": FRAMES,
        "embed": {"positions": "sinusoidal"},
        "encoder": [layer],
        "decoder": [decoder],
    }
