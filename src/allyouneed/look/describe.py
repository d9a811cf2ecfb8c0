"""A model as a tree: what it is made of in the words of its config, the shapes of its weights, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.tree import Tree
from torch import nn

from allyouneed.config import Config, tree_of
from allyouneed.nn.block import Block, Layer
from allyouneed.nn.encoder_decoder import EncoderDecoder
from allyouneed.nn.model import Model
from allyouneed.nn.stack import Stack

BYTES = {"fp32": 4, "bf16": 2}


def describe(config: Model, length: int = 1024) -> RenderableType:
    """Needs no weights: the modules are built on torch's meta device."""
    with torch.device("meta"):
        model = config.build()
    sizes = f"width {config.width}, dropout {config.dropout:g}, norm {words(config.norm)}"
    tree = Tree(f"[bold]{tree_of(config)['kind']}[/]  {_count(model):,} parameters  [dim]{sizes}[/]")
    seen: set[int] = set()
    for name, child in model.named_children():
        part = getattr(config, name, None)
        if isinstance(child, Stack):
            _stack(tree.add(f"{name}  {_count(child):,}"), child, getattr(config, name), seen)
        else:
            _grow(tree, name, child, seen, words(part) if isinstance(part, Config) else "")
    return Group(tree, "", costs(config, length))


def costs(config: Model, length: int) -> str:
    """What the config alone answers."""
    cost = config.cost(length)
    both = isinstance(config, EncoderDecoder)
    rows = {
        "parameters": f"{cost.parameters:,}",
        "FLOPs": f"{cost.flops:,.0f} forward per {'source and target ' if both else ''}token, context {length:,}",
    }
    for name, size in BYTES.items():
        per_source = cost.state_constant / length * size
        source = f" + {per_source:,.0f} per source token" if per_source else ""
        rows[f"cache, {name}"] = f"{cost.state_per_token * size:,.0f} bytes per target token{source}"
    return "\n".join(f"{name:<11}  {value}" for name, value in rows.items())


def words(part: Config) -> str:
    """A part as a person wrote it, without its defaults: `attention, heads 8, pattern causal`."""
    tree = tree_of(part, full=False)
    kind = [tree.pop("kind")] if "kind" in tree else []
    return ", ".join([*kind, *(f"{key} {_value(value)}" for key, value in tree.items())])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_value(inner)}" for key, inner in value.items()) + ")"
    return str(value)


def _stack(tree: Tree, stack: Stack, layers: Sequence[Layer], seen: set[int]) -> None:
    """One branch for each entry of the config's list: its blocks differ in nothing but their numbers."""
    blocks = iter(stack.blocks)
    for layer in layers:
        block, *others = (next(blocks) for _ in range(layer.repeat))
        assert isinstance(block, Block)
        each = " each" if others else ""
        branch = tree.add(f"{layer.repeat} × [bold]{escape(words(layer.wiring))}[/] block  {_count(block):,}{each}")
        for name, part in layer.sublayers.items():
            _grow(branch, name, block.sublayers[name], seen, words(part))
        _grow(branch, "wiring", block.wiring, seen)
    if stack.end is not None:
        _grow(tree, "end", stack.end, seen)


def _grow(tree: Tree, name: str, module: nn.Module, seen: set[int], said: str = "") -> None:
    """A module, what the config says about it (else its class), and the shapes of its weights or their number."""
    if not said and not _count(module):  # dropout: the config says it
        return
    own = [
        f"{key} {tuple(value.shape)}" + (" (tied)" if id(value) in seen else "")
        for key, value in module.named_parameters(recurse=False)
    ]
    seen.update(id(value) for value in module.parameters(recurse=False))
    label = f"{name}  [bold]{escape(said)}[/]" if said else f"{name}  [dim]{type(module).__name__}[/]"
    children = list(module.named_children())
    if own:
        label += f"  {', '.join(own)}"
    elif _count(module):
        label += f"  {_count(module):,}"
    branch = tree.add(label)
    while children:
        first, child = children.pop(0)
        alike = 1
        while isinstance(module, nn.ModuleList) and children and _shape(children[0][1]) == _shape(child):
            alike += 1
            children.pop(0)
        _grow(branch, f"{alike} ×" if alike > 1 else first, child, seen)


def _shape(module: nn.Module) -> Any:
    return type(module), [(name, tuple(value.shape)) for name, value in module.named_parameters()]


def _count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())
