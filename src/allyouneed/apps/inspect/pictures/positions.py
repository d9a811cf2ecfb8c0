"""Pictures of position parts. Any registered part is drawn by what it does:

* added to embeddings: a matrix, one vector per position;
* added to the scores: curves, one bias per distance and head;
* rotating queries and keys: a matrix, the product of equal features at each distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn

from allyouneed.apps.inspect.pictures.canvas import Panel
from allyouneed.apps.inspect.reference.describe import summary
from allyouneed.config import Config, Part, parse, tree_of
from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.positions.absolute import Positions
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule

SEED = 0


@dataclass(frozen=True)
class Sizes:
    positions: int = 64
    width: int = 128
    heads: int = 8
    causal: bool = False


class _AbsoluteHolder(Config):
    """Parses and validates a part as in a model."""

    part: Positions


class _RelativeHolder(Config):
    part: Relative


def panels(texts: Sequence[str], sizes: Sizes) -> list[Panel]:
    """Panels of these parts; without any, of all parts."""
    if sizes.width % sizes.heads:
        raise UserError(f"--width {sizes.width} is not divisible by --heads {sizes.heads}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        chosen = [part for text in texts for part in read(text, sizes)] if texts else list(all_parts(sizes))
        found = []
        for part in chosen:
            torch.manual_seed(SEED)
            drawn = _absolute(part, sizes) if isinstance(part, Positions) else _relative(part, sizes)
            if drawn is not None:
                found.append(drawn)
    if not found:
        raise UserError(f"{', '.join(texts)}: nothing to draw: no position information")
    return found


def read(text: str, sizes: Sizes) -> list[Any]:
    """The parts that a name or YAML selects: added to embeddings, inside attention, or both."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{text!r}: neither a name nor YAML; try alibi or '{{kind: rotary, base: 500}}'") from None
    tree = tree if isinstance(tree, dict) else {"kind": tree}
    kind = str(tree.get("kind"))
    slots = [
        (slot, holder)
        for slot, holder in ((Positions, _AbsoluteHolder), (Relative, _RelativeHolder))
        if slot.find(kind) is not None
    ]
    if not slots:
        known = sorted({*Positions.known(), *Relative.known()} - {"none"})
        raise UserError(f"unknown positions {text!r} (allowed: {', '.join(known)})")
    trees = [(holder, {"part": _with_required(tree, slot.known()[kind], sizes)}) for slot, holder in slots]
    return [parse(holder, tree, text).part for holder, tree in trees]  # type: ignore[attr-defined]


def all_parts(sizes: Sizes) -> Iterator[Any]:
    for slot in (Positions, Relative):
        for kind in slot.known():
            yield from (part for part in read(kind, sizes) if isinstance(part, slot))


def _with_required(tree: dict[str, Any], cls: type[Part], sizes: Sizes) -> dict[str, Any]:
    """Fill in required integers: the number of positions, or the sides of a square."""
    needed = [name for name, field in cls.model_fields.items() if field.is_required() and name not in tree]
    side = sizes.positions if len(needed) == 1 else max(1, int(sizes.positions ** (1 / max(1, len(needed)))))
    return {name: side for name in needed} | tree


# --- added to embeddings ----------------------------------------------------------------------------------------------


def _absolute(part: Positions, sizes: Sizes) -> Panel | None:
    module = part.build(sizes.width)
    count = sizes.positions if part.limit is None else min(sizes.positions, part.limit)
    vectors = module(torch.arange(count)[None])
    if vectors is None:
        return None
    notes = ["added to the embeddings", *_learned(module)]
    return Panel(summary(part), notes, "matrix", vectors[0].float(), "position", "dimension")


# --- inside attention -------------------------------------------------------------------------------------------------


def _relative(part: Relative, sizes: Sizes) -> Panel | None:
    common = Common(width=sizes.width)
    part, heads = _supported_heads(part, sizes, common)
    module = part.build(heads, common)
    notes_before = ["for causal attention"] if heads.causal else []
    if module.adds_bias:
        return _bias(part, module, heads, sizes, notes_before)
    if type(module).apply_positions is not RelativeModule.apply_positions:
        return _turn(part, module, heads, sizes, notes_before)
    return None


def _supported_heads(part: Relative, sizes: Sizes, common: Common) -> tuple[Relative, Heads]:
    """The heads it is drawn for: as requested, or causal where the part requires it."""
    each = sizes.width // sizes.heads
    first_problems: list[tuple[str, str]] = []
    for causal in dict.fromkeys((sizes.causal, True)):
        heads = Heads(sizes.heads, sizes.heads, each, causal)
        problems = part.problems(heads, common)
        if not problems:
            return part, heads
        first_problems = first_problems or problems
    key, text = first_problems[0]
    raise UserError(f"{tree_of(part)['kind']}: {key}: {text}")


def _bias(part: Relative, module: RelativeModule, heads: Heads, sizes: Sizes, notes_before: list[str]) -> Panel:
    here, far = sizes.positions - 1, sizes.positions
    keys = torch.arange(far if heads.causal else 2 * far - 1)[None]
    queries = torch.tensor([[here]])
    q = torch.randn(1, heads.heads, 1, heads.head_width)
    depends_on_query = module.static is None
    bias = module.bias(q, queries, keys, heads.head_width**-0.5)
    curves = bias.expand(1, heads.heads, 1, keys.shape[1])[0, :, 0]
    notes = [
        "added to the scores",
        *notes_before,
        *_learned(module),
        *(["for one random query"] if depends_on_query else []),
    ]
    lines = [f"head {number + 1}" for number in range(heads.heads)]
    return Panel(summary(part), notes, "curves", curves.float(), "bias", "key − query", -here, lines)


def _turn(part: Relative, module: RelativeModule, heads: Heads, sizes: Sizes, notes_before: list[str]) -> Panel:
    """A query at the last position and keys at all positions, one feature at a time: q_i · k_i."""
    size = sizes.positions
    units = torch.eye(heads.head_width)[:, None, None].expand(-1, 1, size, -1)  # (features, 1, time, features)
    layout = TokenLayout(torch.arange(size)[None], start=0)
    q, k, _ = module.apply_positions(units, units, units, Context(layout))
    products = (q[:, :, -1:] * k).sum(-1)[:, 0]  # (features, time)
    notes = ["queries and keys are rotated: the product of equal features", *notes_before, *_learned(module)]
    return Panel(summary(part), notes, "matrix", products.float(), "feature of a head", "key − query", 1 - size)


def _learned(module: nn.Module) -> list[str]:
    return ["learned: random weights"] if any(True for _ in module.parameters()) else []
