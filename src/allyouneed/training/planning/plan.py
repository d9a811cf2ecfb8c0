"""Plan a large run: memory, FLOPs, time and layout, from the config's own counts.

python -m allyouneed.training.planning.plan            # the tables of docs/scaling.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allyouneed.config import override, parse, preset_tree
from allyouneed.nn.models.base import Model

LENGTH = 4096  # tokens per row
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", table 3
PEAK = 800e12  # FLOP/s of bf16 matrix products measured on one H200 (bench/train/gpu.py prints it)
UTILISATION = 0.4  # of the peak, typical for large models; a small model on one GPU reaches more
MEMORY = 139 * 2**30  # bytes of that GPU
USABLE_MEMORY = 0.9  # fraction of it to plan with
# fp32 weight, gradient and Adam's two moments; plus a bf16 copy of the weights of the current block
STATE_BYTES = 4 + 4 + 8
BLOCK_INPUT = 2  # bytes per number that a block stores with activation checkpointing
# numbers a block stores otherwise, in units of width per token, for attention and a gated channel 8/3 as wide
BLOCK_INSIDES = 18
SIZES: dict[str, dict[str, Any]] = {
    "1B": {"width": 2048, "repeat": 18, "heads": 16, "hidden": 5632},
    "7B": {"width": 4096, "repeat": 32, "heads": 32, "hidden": 11008},
    "70B": {"width": 8192, "repeat": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
}
GPUS = (8, 64, 1024)


def model_of(size: str) -> Model:
    """Llama's architecture at this size."""
    keys = dict(SIZES[size])
    changes = [f"width={keys.pop('width')}"]
    paths = {"repeat": "repeat", "hidden": "channel.hidden"}
    changes += [f"decoder[0].{paths.get(key, f'mixer.{key}')}={value}" for key, value in keys.items()]
    return parse(Model, override(preset_tree("llama-7b"), changes), size)  # type: ignore[type-abstract]


@dataclass(frozen=True)
class TrainingPlan:
    parameters: int
    tokens: float  # of training
    flops: float  # of the whole training: three times the forward pass, by the parts' own counts
    rule: float  # the same by 6 · N · D
    gpus: int
    kind: str  # ddp or fsdp
    checkpointed: bool
    rows: int  # per GPU at a time
    state: float  # bytes of weights, gradients and optimiser per GPU
    activations: float  # bytes per GPU
    seconds: float

    @property
    def memory(self) -> float:
        return self.state + self.activations

    @property
    def fits(self) -> bool:
        return self.memory <= MEMORY * USABLE_MEMORY


def plan(model: Model, gpus: int, length: int = LENGTH) -> TrainingPlan:
    """The simplest layout that fits: ddp before fsdp, storing activations before recomputing them. One row at a time;
    more rows are accumulated and need no memory."""
    cost: Any = model.cost(length)
    count: int = cost.parameters
    tokens = float(TOKENS_PER_PARAMETER * count)
    flops = 3.0 * cost.flops * tokens
    found: list[TrainingPlan] = []
    for kind, twice in (("ddp", False), ("fsdp", False), ("fsdp", True)):
        held = STATE_BYTES * count / (gpus if kind == "fsdp" else 1)
        temporary = 2 * 4 * largest_unit(model) if kind == "fsdp" else 2 * count  # two full blocks, or the bf16 copy
        work = flops * (4 / 3 if twice else 1)
        seconds = work / (gpus * PEAK * UTILISATION)
        kept = activations(model, length, twice)
        found.append(
            TrainingPlan(
                count, tokens, flops, 6.0 * count * tokens, gpus, kind, twice, 1, held + temporary, kept, seconds
            )
        )
    return next((one for one in found if one.fits), found[-1])


def largest_unit(model: Any) -> int:
    """Parameters of the largest fsdp unit: a block, or embeddings and head."""
    blocks = [layer.cost(model, 1).parameters // layer.repeat for layer in model.decoder]
    outside = model.cost(1).parameters - sum(n * layer.repeat for n, layer in zip(blocks, model.decoder, strict=True))
    return int(max([*blocks, outside]))


def activations(model: Any, length: int, twice: bool) -> float:
    """Bytes stored for the backward pass of one row, in bf16."""
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
