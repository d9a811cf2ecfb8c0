"""CRATE's claims, measured: do its layers compress tokens against their subspaces, and sparsify them?

    python bench/family/crate.py PATH              # a folder with MNIST's four idx files, gzipped or not
    python bench/family/crate.py                   # generated strokes, without MNIST
    python bench/family/crate.py PATH --write docs # docs/pictures/crate.png and docs/results/crate.md

A small CRATE learns ten classes of images; then on held-out ones, layer by layer (Yu et al. 2023, figure 3): the coding
rate R^c(Z; U) = ½ Σ_k log det(I + p/(nε²) (U_kᵀZ)ᵀ(U_kᵀZ)) of the input and the output of a layer's
attention (against that layer's own U, tokens at length 1 in each subspace, ε² = 0.01 as in the authors' code),
and the share of non-zero features after ISTA, also for the untrained model.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Signal
from allyouneed.nn.context import Context
from allyouneed.nn.models.base import Model

SIDE, PATCH, CLASSES, EPSILON = 28, 4, 10, 0.01
KEYS = ("behind", "there")


def model_of(layers: int, width: int, heads: int, out: str, sparsity: float) -> Any:
    compress = {"wiring": "pre-norm", "mixer": {"kind": "mssa", "heads": heads, "out": out}}
    sparsify = {"wiring": "no-skip", "channel": {"kind": "ista", "sparsity": sparsity}}
    tree = {
        "kind": "encoder",
        "width": width,
        "init": {"kind": "normal", "std": 0.5 * width**-0.5},
        "embed": {
            "kind": "patches",
            "image": SIDE,
            "patch": PATCH,
            "channels": 1,
            "positions": {"kind": "learned", "length": (SIDE // PATCH) ** 2 + 1},
            "patch_norm": "layer",
        },
        "layers": {"compress": compress, "sparsify": sparsify},
        "encoder": f"{layers}×(compress, sparsify)",
        "head": {"kind": "classes", "labels": CLASSES},
    }
    config: Any = parse(Model, tree)  # type: ignore[type-abstract]
    return config.build()


def idx(folder: Path, name: str) -> Tensor:
    """An idx file: two zero bytes, the type, the number of axes, their sizes, then bytes."""
    plain, packed = folder / name, folder / f"{name}.gz"
    data = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    axes = data[3]
    sizes = [int.from_bytes(data[4 + 4 * n : 8 + 4 * n], "big") for n in range(axes)]
    return torch.frombuffer(bytearray(data[4 + 4 * axes :]), dtype=torch.uint8).view(sizes)


def digits(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images = idx(folder, f"{part}-images-idx3-ubyte").float()[:, None] / 255
    return (images - 0.13) / 0.31, idx(folder, f"{part}-labels-idx1-ubyte").long()


def strokes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A line at one of ten angles, somewhere near the middle, of some thickness, in noise."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=dice)
    grid = torch.arange(SIDE) - (SIDE - 1) / 2
    shift = torch.randn(2, count, 1, 1, generator=dice) * 2
    thick = 1 + torch.rand(count, 1, 1, generator=dice) * 2
    angle = (labels * math.pi / CLASSES)[:, None, None] + torch.randn(count, 1, 1, generator=dice) * 0.05
    y, x = grid[None, :, None] - shift[0], grid[None, None, :] - shift[1]
    across, along = x * angle.sin() - y * angle.cos(), x * angle.cos() + y * angle.sin()
    drawn = ((across.abs() < thick) & (along.abs() < 10)).float()
    return (drawn + 0.2 * torch.randn(drawn.shape, generator=dice) - 0.13)[:, None] / 0.31, labels


def train(model: Any, images: Tensor, labels: Tensor, steps: int, batch: int, rate: float, decay: float) -> None:
    """Train with warm-up and decay to zero."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=decay)
    dice = torch.Generator().manual_seed(0)
    for step in range(steps):
        picked = torch.randint(len(images), (batch,), generator=dice).to(images.device)
        optimiser.param_groups[0]["lr"] = rate * min(1.0, 20 * (step + 1) / steps) * (1 - step / steps)
        loss = torch.nn.functional.cross_entropy(model.logits(Batch(Signal(images[picked]))), labels[picked])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def coding_rate(z: Tensor) -> Tensor:
    """z (images, heads, tokens, p), tokens in each subspace: (images,)"""
    z = torch.nn.functional.normalize(z.double(), dim=-1)
    tokens, size = z.shape[-2:]
    inner = (
        torch.eye(size, dtype=z.dtype, device=z.device) + size / (tokens * EPSILON) * z.transpose(-1, -2) @ z
    )  # the same determinant
    return torch.logdet(inner).sum(1) / 2


@torch.no_grad()
def measured(model: Any, images: Tensor) -> list[dict[str, float]]:
    """For each layer: coding rate before and after its attention, share of non-zero features after ISTA."""
    streams: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, given, out: streams.extend((given[0], out)))
        for block in model.encoder.blocks
    ]
    model.eval()(Batch(Signal(images)))
    for hook in hooks:
        hook.remove()
    context, found = Context(model.embed.layout(Signal(images))), []
    blocks = list(model.encoder.blocks)
    for number in range(0, len(blocks), 2):
        before, behind, _, sparse = streams[2 * number : 2 * number + 4]
        block = blocks[number]

        def rate(z: Tensor, block: Any = block) -> float:
            inside = block.sublayers["mixer"].subspaces(block.wiring.norms[0](z, context))
            return coding_rate(inside.unflatten(-1, (block.sublayers["mixer"].heads, -1)).transpose(1, 2)).mean().item()

        there = (sparse != 0).double().mean().item()
        found.append({"before": rate(before), "behind": rate(behind), "there": there})
    return found


def draw(learned: list[dict[str, float]], random: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = range(1, len(learned) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for curve, name, colour in ((learned, "trained", "tab:blue"), (random, "before training", "tab:gray")):
        left.plot(layers, [one["before"] for one in curve], "o--", color=colour, alpha=0.5, label=f"{name}, into MSSA")
        left.plot(layers, [one["behind"] for one in curve], "o-", color=colour, label=f"{name}, out of MSSA")
        right.plot(layers, [one["there"] for one in curve], "o-", color=colour, label=name)
    left.set(xlabel="layer", ylabel="coding rate $R^c(Z; U)$", title="Compression", ylim=(0, None))
    right.set(xlabel="layer", ylabel="features that are not zero", title="Sparsity", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(list(layers))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def verdict(curve: list[float]) -> str:
    steps = [later - earlier for earlier, later in pairwise(curve)]
    falls = sum(step < 0 for step in steps)
    return f"{curve[0]:.3g} → {curve[-1]:.3g}, falls at {falls} of {len(steps)} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="MNIST's idx files")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--out", choices=["linear", "tied"], default="linear", help="output map of the heads")
    parser.add_argument("--sparsity", type=float, default=0.1, help="λ of ISTA")
    parser.add_argument("--steps", type=int, default=800, help="of training")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--decay", type=float, default=0.01, help="of weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=Path, help="write the measurements to this file (JSON)")
    parser.add_argument("--kept", type=Path, help="show the measurements of --keep instead of training")
    parser.add_argument("--images", type=int, default=500, help="held-out images to measure on")
    parser.add_argument("--write", type=Path, help="write the picture and the table under this folder")
    options = parser.parse_args()
    kept = json.loads(options.kept.read_text(encoding="utf-8")) if options.kept else trained(options)
    if options.keep:
        options.keep.write_text(json.dumps(kept), encoding="utf-8")
    show(kept, options.write)


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """The command, its results, and the curves of the trained and the untrained model."""
    torch.manual_seed(0)
    if options.folder:
        (images, labels), (unseen, answers) = digits(options.folder, "train"), digits(options.folder, "t10k")
    else:
        (images, labels), (unseen, answers) = strokes(20000, 0), strokes(2000, 1)
    images, labels, unseen, answers = (each.to(options.device) for each in (images, labels, unseen, answers))
    model = model_of(options.layers, options.width, options.heads, options.out, options.sparsity).to(options.device)
    held = unseen[: options.images]
    random = measured(model, held)
    train(model.train(), images, labels, options.steps, options.batch, options.rate, options.decay)
    with torch.no_grad():
        right = (model.eval().logits(Batch(Signal(unseen[:2000]))).argmax(-1) == answers[:2000]).double().mean()
    what = "MNIST" if options.folder else "strokes drawn by the program"
    about = (
        f"{what}; {options.layers} layers of width {options.width}, {options.heads} heads, output map "
        f"{options.out}, λ {options.sparsity:g}; {options.steps} steps of {options.batch} images "
        f"at {options.rate:g}, decay {options.decay:g}; "
        f"{right:.1%} of 2,000 held-out images correct; measured on {len(held)} of them."
    )
    given = " ".join(word for word in sys.argv[1:] if str(options.folder) != word)
    command = f"python bench/family/crate.py{' MNIST' if options.folder else ''} {given}"
    return {"command": command, "about": about, "learned": measured(model, held), "random": random}


def show(kept: dict[str, Any], write: Path | None) -> None:
    learned, random = kept["learned"], kept["random"]
    lines = [
        kept["about"],
        "",
        "| layer | rate into MSSA | rate out of MSSA | non-zero after ISTA | untrained: into | out | non-zero |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, both in enumerate(zip(learned, random, strict=True), 1):
        cells = [
            f"{one[key]:.{places}f}" for one in both for key, places in (("before", 1), ("behind", 1), ("there", 3))
        ]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    inside = sum(one["behind"] < one["before"] for one in learned)
    lines += ["", f"Coding rate after attention, by layer: {verdict([one['behind'] for one in learned])}."]
    lines += [f"Within a layer, attention lowers it in {inside} of {len(learned)}."]
    lines += [f"Non-zero features: {verdict([one['there'] for one in learned])}."]
    lower, fewer = (sum(one[key] < other[key] for one, other in zip(learned, random, strict=True)) for key in KEYS)
    text = f"Against the untrained model: a lower rate in {lower} of {len(learned)} layers, fewer features in {fewer}."
    lines += [text]
    print("\n".join(lines))
    if write:
        draw(learned, random, write / "pictures" / "crate.png")
        page = ["# CRATE, layer by layer", "", f"`{kept['command']}`", "", *lines, "", "![](../pictures/crate.png)", ""]
        result = write / "results" / "crate.md"
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text("\n".join(page), encoding="utf-8")


if __name__ == "__main__":
    main()
