"""A model folder in few bytes, to be kept between two sessions of training: about 4.7 bits a weight.

    python recipes/translator/snapshot.py save MODEL SNAPSHOT
    python recipes/translator/snapshot.py restore SNAPSHOT MODEL

A row of a matrix is rounded to multiples of a part of its standard deviation, as int8, and what is left is the entropy:
zstd codes small numbers, which are frequent, in few bits. Vectors (norms, biases) stay in fp32. The weights lie in
pieces of at most 15 MiB; everything else of the model folder is copied. Restoring gives fp32 weights, the same ones
every time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.config import parse, tree_of
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.files import write_folder
from allyouneed.folder import LANGUAGES, Folder
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors

STEPS = 6  # of rounding in a standard deviation
PIECE = 15 << 20
INDEX, PIECES = "snapshot.json", "weights-{:02}.zst"

Codes = tuple[Tensor, Tensor]  # int8, and the size of a step in each row


def quantise(weight: Tensor, steps: int = STEPS) -> Codes:
    """Codes of a matrix, by rows. A row with an outlier has larger steps, so that it fits into int8."""
    rows = weight.detach().float().flatten(1)
    step = (rows.std(1, correction=0) / steps).maximum(rows.abs().amax(1) / 127)
    step = torch.where(step > 0, step, torch.ones_like(step))
    return (rows / step[:, None]).round().clamp(-127, 127).to(torch.int8), step


def dequantise(codes: Codes, shape: list[int]) -> Tensor:
    return (codes[0].float() * codes[1][:, None]).view(shape)


def rounded(tensor: Tensor) -> Tensor:
    """What a snapshot keeps of a tensor."""
    return tensor if tensor.ndim < 2 else dequantise(quantise(tensor), [*tensor.shape])


def encode(weights: Mapping[str, Tensor], steps: int = STEPS) -> dict[str, Tensor | Codes]:
    """What a snapshot stores, on the CPU."""
    found: dict[str, Tensor | Codes] = {}
    for name, tensor in weights.items():
        if tensor.ndim < 2:
            found[name] = tensor.detach().float().cpu()
        else:
            codes, step = quantise(tensor, steps)
            found[name] = codes.cpu(), step.cpu()
    return found


def write(folder: Path, stored: Mapping[str, Tensor | Codes], shapes: Mapping[str, list[int]], about: Any) -> None:
    """`about`: whatever else the index shall say."""
    import zstandard

    floats = [one if isinstance(one, Tensor) else one[1] for one in stored.values()]
    codes = [one[0] for one in stored.values() if not isinstance(one, Tensor)]
    content = b"".join(one.contiguous().numpy().tobytes() for one in (*floats, *codes))
    packed = zstandard.ZstdCompressor(level=1).compress(content)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(math.ceil(len(packed) / PIECE)):
        (folder / PIECES.format(number)).write_bytes(packed[number * PIECE : (number + 1) * PIECE])
    index = {"shapes": {name: shapes[name] for name in stored}} | dict(about)
    (folder / INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, and the index."""
    import zstandard

    index: dict[str, Any] = json.loads((folder / INDEX).read_text("utf-8"))
    packed = b"".join(path.read_bytes() for path in sorted(folder.glob("weights-*.zst")))
    content = bytearray(zstandard.ZstdDecompressor().decompress(packed))
    at, floats = 0, {}
    for name, shape in index["shapes"].items():
        count = shape[0] if shape else 1
        floats[name] = torch.frombuffer(content, dtype=torch.float32, count=count, offset=at).clone()
        at += 4 * count
    found = {}
    for name, shape in index["shapes"].items():
        if len(shape) < 2:
            found[name] = floats[name].view(shape)
            continue
        codes = torch.frombuffer(content, dtype=torch.int8, count=math.prod(shape), offset=at)
        at += math.prod(shape)
        found[name] = dequantise((codes.view(shape[0], -1), floats[name]), shape)
    assert at == len(content)
    return found, index


def describe(folder: Folder) -> dict[str, Any]:
    """The model folder without its weights and files."""
    config: Any = folder.model.config
    return {
        "model": tree_of(config),
        "task": folder.task,
        "decoding": folder.decoding,
        "max_tokens": folder.max_tokens,
        "directions": folder.directions,
        "files": folder.files,
        "card": folder.card,
    }


def save(folder: Folder, path: Path, weights: Mapping[str, Tensor] | None = None, **about: Any) -> None:
    """`weights`: instead of the model's; `about`: what the index says besides, such as the sessions so far."""
    found = dict(named_tensors(folder.model)) if weights is None else dict(weights)
    stored, shapes = encode(found), {name: list(tensor.shape) for name, tensor in found.items()}

    def fill(work: Path) -> None:
        write(work, stored, shapes, {"folder": describe(folder)} | about)
        folder.tokenizers.save(work)
        if folder.detector is not None:
            folder.detector.save(work / LANGUAGES)

    write_folder(path, fill)


def restore(path: Path) -> tuple[Folder, dict[str, Any]]:
    """The model folder, and the index of the snapshot."""
    weights, index = read(path)
    about = index["folder"]
    model = meta_model(parse(Model, about.pop("model"), f"{path}: model"))  # type: ignore[type-abstract]
    assign_weights(model, weights)
    about["directions"] = [tuple(one) for one in about["directions"]]
    detector = LanguageDetector.load(path / LANGUAGES) if (path / LANGUAGES).is_file() else None
    return Folder(model.eval(), Vocabularies.load(path), detector=detector, **about), index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("save", "restore"))
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    if given.command == "save":
        save(Folder.load(given.source), given.output)
    else:
        restore(given.source)[0].save(given.output)


if __name__ == "__main__":
    main()
