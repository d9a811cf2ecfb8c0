"""A large run on paper: memory, work, time and layout, from the config's own counts.

python -m allyouneed.train.plan            # the tables of docs/scaling.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import allyouneed.nn as parts  # every part is registered before a config is read
from allyouneed.config import override, parse, preset_tree
from allyouneed.nn.models.base import Model

__all__ = ["Plan", "parts", "plan"]

LENGTH = 4096  # tokens of a row
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", table 3
PEAK = 800e12  # FLOP/s of bf16 matrix products measured on one H200 (bench/train_gpu.py prints it)
SHARE = 0.4  # of them that large models reach; one GPU reaches more with a small one
MEMORY = 139 * 2**30  # bytes of that GPU
SPARE = 0.9  # of it that may be planned with
# fp32 weight, gradient and Adam's two moments, and a bf16 copy of the weights of the block at work
STATE_BYTES = 4 + 4 + 8
BLOCK_INPUT = 2  # bytes of each number that a block keeps when its insides are computed twice
# numbers a block keeps otherwise, in units of width per token, for attention and a gated channel 8/3 as wide
BLOCK_INSIDES = 18
SIZES: dict[str, dict[str, Any]] = {
    "1B": {"width": 2048, "repeat": 18, "heads": 16, "hidden": 5632},
    "7B": {"width": 4096, "repeat": 32, "heads": 32, "hidden": 11008},
    "70B": {"width": 8192, "repeat": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
}
GPUS = (8, 64, 1024)


def model_of(size: str) -> Model:
    """Llama's shape at this size."""
    keys = dict(SIZES[size])
    changes = [f"width={keys.pop('width')}"]
    places = {"repeat": "repeat", "hidden": "channel.hidden"}
    changes += [f"decoder[0].{places.get(key, f'mixer.{key}')}={value}" for key, value in keys.items()]
    found: Model = parse(Model, override(preset_tree("llama-7b"), changes), size)  # type: ignore[type-abstract]
    return found


@dataclass(frozen=True)
class Plan:
    parameters: int
    tokens: float  # to train on
    flops: float  # of the whole training: three times the forward pass, by the parts' own counts
    rule: float  # the same by 6 · N · D
    gpus: int
    kind: str  # ddp or fsdp
    checkpointed: bool
    rows: int  # of one GPU at a time
    state: float  # bytes of weights, gradients and optimiser on each GPU
    activations: float  # bytes on each GPU
    seconds: float

    @property
    def memory(self) -> float:
        return self.state + self.activations

    @property
    def fits(self) -> bool:
        return self.memory <= MEMORY * SPARE


def plan(model: Model, gpus: int, length: int = LENGTH) -> Plan:
    """The plainest layout that fits: copies before parts, keeping before computing twice. One row at a time: more rows
    are gradients accumulated, and cost no memory."""
    cost: Any = model.cost(length)
    count: int = cost.parameters
    tokens = float(TOKENS_PER_PARAMETER * count)
    flops = 3.0 * cost.flops * tokens
    found: list[Plan] = []
    for kind, twice in (("ddp", False), ("fsdp", False), ("fsdp", True)):
        held = STATE_BYTES * count / (gpus if kind == "fsdp" else 1)
        borrowed = 2 * 4 * largest_unit(model) if kind == "fsdp" else 2 * count  # two blocks in full, or the bf16 copy
        work = flops * (4 / 3 if twice else 1)
        seconds = work / (gpus * PEAK * SHARE)
        kept = activations(model, length, twice)
        found.append(
            Plan(count, tokens, flops, 6.0 * count * tokens, gpus, kind, twice, 1, held + borrowed, kept, seconds)
        )
    return next((one for one in found if one.fits), found[-1])


def largest_unit(model: Any) -> int:
    """Weights of the largest part that fsdp puts together at once: a block, or embeddings and head."""
    blocks = [layer.cost(model, 1).parameters // layer.repeat for layer in model.decoder]
    outside = model.cost(1).parameters - sum(n * layer.repeat for n, layer in zip(blocks, model.decoder, strict=True))
    return int(max([*blocks, outside]))


def activations(model: Any, length: int, twice: bool) -> float:
    """Bytes kept for the backward pass of one row, in bf16."""
    layers = sum(layer.repeat for layer in model.decoder)
    inside = BLOCK_INSIDES * model.width * length * 2
    return layers * BLOCK_INPUT * model.width * length + inside if twice else layers * inside


def table() -> Iterator[str]:
    yield "| model | parameters | tokens | FLOPs | 6·N·D | GPUs | layout | state | activations | of 149 GB | days |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for size in SIZES:
        for gpus in GPUS:
            one = plan(model_of(size), gpus)
            layout = one.kind + (", blocks computed twice" if one.checkpointed else "")
            cells = [
                size,
                f"{one.parameters / 1e9:.2f}e9",
                f"{one.tokens / 1e9:.0f}e9",
                f"{one.flops:.2e}",
                f"{one.rule:.2e}",
                str(gpus),
                layout,
                f"{one.state / 1e9:.1f} GB",
                f"{one.activations / 1e9:.1f} GB",
                f"{100 * one.memory / MEMORY:.0f}%" if one.fits else "does not fit",
                f"{one.seconds / 86400:.2f}",
            ]
            yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(table()))
