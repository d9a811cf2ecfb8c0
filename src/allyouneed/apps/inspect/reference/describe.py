"""A model as a tree: its parts as in the config, the shapes of its weights, and its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.tree import Tree
from torch import nn

from allyouneed.config import Config, tree_of
from allyouneed.nn.cost import Cost
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Block, Layer
from allyouneed.nn.models.encoder_decoder import EncoderDecoder
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.models.two_towers import TwoTowers
from allyouneed.nn.models.weights import meta_model
from allyouneed.runtime.report import executor_lines

BYTES = {"fp32": 4, "bf16": 2}


def describe(config: Model, length: int = 1024) -> RenderableType:
    """Builds the modules on the meta device, so no weights are needed."""
    model = meta_model(config)
    tree = Tree(_heading(config, model))
    _model(tree, model, config, set())
    return Group(tree, "", costs(config, length), executors(model))


def _heading(config: Model, model: nn.Module) -> str:
    kind, sizes = tree_of(config)["kind"], [f"width {config.width}"]
    if not isinstance(config, TwoTowers):  # each tower has its own
        sizes += [f"dropout {config.dropout:g}", f"norm {summary(config.norm)}"]
    return f"[bold]{kind}[/]  {_count(model):,} parameters  [dim]{escape(', '.join(sizes))}[/]"


def _model(tree: Tree, model: nn.Module, config: Model, seen: set[int]) -> None:
    for name, child in model.named_children():
        part = getattr(config, name, None)
        if isinstance(child, Stack) and part is not None:
            _stack(tree.add(f"{name}  {_count(child):,}"), child, part, seen)
        elif isinstance(part, Model):
            _model(tree.add(f"{name}  {_heading(part, child)}"), child, part, seen)
        else:
            _add_module(tree, name, child, seen, summary(part) if isinstance(part, Config) else "")
    for name, value in model.named_parameters(recurse=False):
        tree.add(f"{name}  {tuple(value.shape)}")


def costs(config: Model, length: int) -> str:
    """The cost according to the config."""
    cost = config.cost(length)
    of = {"encoder-decoder": "source and target token", "two-towers": "image and text token"}
    rows = {
        "parameters": f"{cost.parameters:,}",
        "FLOPs": f"{cost.flops:,.0f} forward per {of.get(tree_of(config)['kind'], 'token')}, context {length:,}",
    }
    source = _source_cost(config, length)
    for name, size in BYTES.items() if config.generates else ():
        rows[f"cache, {name}"] = _cache(cost, source, length, size)
    return "\n".join(f"{name:<11}  {value}" for name, value in rows.items())


def executors(model: nn.Module) -> str:
    """What decodes with it, and which parts keep it from the fast executor."""
    return "\n".join(f"{name}  {escape(value)}" for name, value in executor_lines(model).items())


def _cache(cost: Cost, source: Cost, length: int, size: int) -> str:
    """Bytes of state of one row, by what they depend on; numbers of the model have `size` bytes."""
    of_source = source.state_bytes(0, size)
    constant, captured = (cost.state_bytes(0, size, captured) - of_source for captured in (False, True))
    words = [
        f"{cost.state_bytes(1, size) - cost.state_bytes(0, size):,.0f} bytes per {'target ' * bool(of_source)}token"
    ]
    words += [f"{of_source / length:,.0f} per source token"] if of_source else []
    words += [f"{constant:,.0f} whatever the length"] if constant or captured else []
    return " + ".join(words) + (f" ({captured:,.0f} in a CUDA graph)" if captured != constant else "")


def _source_cost(config: Model, length: int) -> Cost:
    """The decoding state of a source of this length."""
    layers = config.decoder if isinstance(config, EncoderDecoder) else ()
    crosses = [(layer.repeat, layer.cross) for layer in layers if layer.cross is not None]
    costs = [(times, cross.cost(config, length, cross=True)) for times, cross in crosses]
    constant, wide = (sum(n * getattr(cost, key) for n, cost in costs) for key in ("state_constant", "wide_constant"))
    return Cost(state_constant=constant, wide_constant=wide)


def summary(part: Config) -> str:
    """A part without its defaults: `attention, heads 8, pattern causal`."""
    tree = tree_of(part, full=False)
    kind = [tree.pop("kind")] if "kind" in tree else []
    return ", ".join([*kind, *_pairs(tree)])


def _pairs(tree: dict[str, Any]) -> list[str]:
    """`key value` pairs; an empty value is just its key."""
    return [key if value == {} else f"{key} {_value(value)}" for key, value in tree.items()]


def _value(value: Any) -> str:
    return f"({', '.join(_pairs(value))})" if isinstance(value, dict) else str(value)


def _stack(tree: Tree, stack: Stack, layers: Sequence[Layer], seen: set[int]) -> None:
    """One branch per entry of the config's list, since its blocks are equal."""
    owners = Counter(id(value) for block in set(stack.blocks) for value in block.parameters())
    shared = {value for value, count in owners.items() if count > 1}  # T5 shares one table between all layers
    blocks = iter(stack.blocks)
    for number, layer in enumerate(layers):
        block, *others = (next(blocks) for _ in range(layer.repeat))
        assert isinstance(block, Block)
        times = f"{layer.repeat} times the same" if layer.share and others else f"{layer.repeat} ×"
        each = " each" if others and not layer.share else ""
        branch = tree.add(f"{times} [bold]{escape(summary(layer.wiring))}[/] block  {_count(block):,}{each}")
        for name, part in layer.sublayers.items():
            _add_module(branch, name, block.sublayers[name], seen, summary(part), shared)
        _add_module(branch, "wiring", block.wiring, seen)
        for name, between in (("steps", stack.recurrences), ("joint", stack.joints)):
            if str(number) in between:
                _add_module(tree, name, between[str(number)], seen)
    if stack.end is not None:
        _add_module(tree, "end", stack.end, seen)


def _add_module(
    tree: Tree, name: str, module: nn.Module, seen: set[int], text: str = "", shared: Collection[int] = ()
) -> None:
    """Add a module: its config (else its class), and the shapes or the number of its weights."""
    if not text and not _count(module):  # dropout, shown in the heading
        return
    own = [
        f"{key} {tuple(value.shape)}"
        + (" (tied)" if id(value) in seen else " (one for all layers)" if id(value) in shared else "")
        for key, value in module.named_parameters(recurse=False)
    ]
    seen.update(id(value) for value in module.parameters(recurse=False))
    label = f"{name}  [bold]{escape(text)}[/]" if text else f"{name}  [dim]{type(module).__name__}[/]"
    children = list(module.named_children())
    if own:
        label += f"  {', '.join(own)}"
    elif _count(module):
        label += f"  {_count(module):,}"
    branch = tree.add(label)
    while children:
        first, child = children.pop(0)
        equal = 1
        while isinstance(module, nn.ModuleList) and children and _shape(children[0][1]) == _shape(child):
            equal += 1
            children.pop(0)
        _add_module(branch, f"{equal} ×" if equal > 1 else first, child, seen, shared=shared)


def _shape(module: nn.Module) -> Any:
    return type(module), [(name, tuple(value.shape)) for name, value in module.named_parameters()]


def _count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())
