"""A model as a tree: what it is made of, the shapes of its weights, and what it costs."""

from __future__ import annotations

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.tree import Tree
from torch import nn

from allyouneed.nn.model import EncoderDecoder, Model

BYTES = {"fp32": 4, "bf16": 2}


def describe(config: Model, length: int = 1024) -> RenderableType:
    """Needs no weights: the modules are built on torch's meta device."""
    with torch.device("meta"):
        model = config.build()
    tree = Tree(f"[bold]{type(config).__name__}[/]  {_count(model):,} parameters")
    seen: set[int] = set()
    for name, child in model.named_children():
        _grow(tree, name, child, seen)
    return Group(tree, costs(config, length))


def costs(config: Model, length: int) -> Table:
    """What the config alone answers."""
    cost = config.cost(length)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("parameters", f"{cost.parameters:,}")
    what = "one source and one target token" if isinstance(config, EncoderDecoder) else "one token"
    table.add_row("FLOPs", f"{cost.flops:,.0f} forward for {what}, at a context of {length:,}")
    for name, size in BYTES.items():
        per_source = cost.state_constant / length * size
        source = f" + {per_source:,.0f} bytes per source token" if per_source else ""
        table.add_row(f"cache, {name}", f"{cost.state_per_token * size:,.0f} bytes per target token{source}")
    return table


def _grow(tree: Tree, name: str, module: nn.Module, seen: set[int]) -> None:
    own = [
        f"{key} {tuple(value.shape)}" + (" (tied)" if id(value) in seen else "")
        for key, value in module.named_parameters(recurse=False)
    ]
    seen.update(id(value) for value in module.parameters(recurse=False))
    label = f"{name}  [dim]{type(module).__name__}[/]"
    if own:
        label += f"  {', '.join(own)}"
    elif _count(module):
        label += f"  {_count(module):,}"
    branch = tree.add(label)
    children = list(module.named_children())
    while children:  # blocks that are alike are shown once
        first, child = children.pop(0)
        alike = [child]
        while isinstance(module, nn.ModuleList) and children and _shape(children[0][1]) == _shape(child):
            alike.append(children.pop(0)[1])
        last = int(first) + len(alike) - 1 if len(alike) > 1 else None
        _grow(branch, f"{first}–{last}  ({len(alike)} ×)" if last is not None else first, child, seen)
        for other in alike[1:]:
            seen.update(id(value) for value in other.parameters())


def _shape(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(value.shape)) for name, value in module.named_parameters()]


def _count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())
