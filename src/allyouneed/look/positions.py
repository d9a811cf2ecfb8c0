"""How parts tell where tokens stand, as pictures. Any registered part is drawn by what it does, not by its name:

* one that is added to embeddings as a matrix, a vector for each position;
* one that adds to the scores as curves, a bias for each distance and head;
* one that turns queries and keys as a matrix: what becomes of the product of equal features at each distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn

import allyouneed.nn  # noqa: F401  # every part is known before a word is read
from allyouneed.config import Config, Part, parse, tree_of
from allyouneed.errors import UserError
from allyouneed.look.canvas import Panel
from allyouneed.look.describe import words
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


class _Added(Config):
    """A holder, so that a part is read and refused as in a model."""

    part: Positions


class _Inside(Config):
    part: Relative


def panels(texts: Sequence[str], sizes: Sizes) -> list[Panel]:
    """Of these parts, or of all that can be drawn without being told more."""
    if sizes.width % sizes.heads:
        raise UserError(f"--width {sizes.width} cannot be shared by {sizes.heads} heads; change one")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        chosen = [part for text in texts for part in read(text, sizes)] if texts else list(everything(sizes))
        found = []
        for part in chosen:
            torch.manual_seed(SEED)
            drawn = _added(part, sizes) if isinstance(part, Positions) else _inside(part, sizes)
            if drawn is not None:
                found.append(drawn)
    if not found:
        raise UserError(f"{', '.join(texts)}: there is nothing to draw, it says nothing about positions")
    return found


def read(text: str, sizes: Sizes) -> list[Any]:
    """The parts a word or YAML means: of those added to embeddings, of those inside attention, or both."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{text!r}: no word and no YAML; write e.g. alibi or '{{kind: rotary, base: 500}}'") from None
    tree = tree if isinstance(tree, dict) else {"kind": tree}
    kind = str(tree.get("kind"))
    slots = [(slot, holder) for slot, holder in ((Positions, _Added), (Relative, _Inside)) if kind in slot.registry]
    if not slots:
        known = sorted({*Positions.registry, *Relative.registry} - {"none"})
        raise UserError(f"{text!r} names no positions; known: {', '.join(known)}")
    return [parse(holder, {"part": _filled(tree, slot.registry[kind], sizes)}, text).part for slot, holder in slots]  # type: ignore[attr-defined]


def everything(sizes: Sizes) -> Iterator[Any]:
    for slot in (Positions, Relative):
        for kind in slot.registry:
            yield from (part for part in read(kind, sizes) if isinstance(part, slot))


def _filled(tree: dict[str, Any], cls: type[Part], sizes: Sizes) -> dict[str, Any]:
    """Whole numbers that a part must be told and was not: as many as are drawn, or a square's sides."""
    needed = [name for name, field in cls.model_fields.items() if field.is_required() and name not in tree]
    side = sizes.positions if len(needed) == 1 else max(1, int(sizes.positions ** (1 / max(1, len(needed)))))
    return {name: side for name in needed} | tree


# --- added to embeddings ----------------------------------------------------------------------------------------------


def _added(part: Positions, sizes: Sizes) -> Panel | None:
    module = part.build(sizes.width)
    count = sizes.positions if part.limit is None else min(sizes.positions, part.limit)
    vectors = module(torch.arange(count)[None])
    if vectors is None:
        return None
    notes = ["added to the embeddings", *_learned(module)]
    return Panel(words(part), notes, "matrix", vectors[0].float(), "position", "dimension")


# --- inside attention -------------------------------------------------------------------------------------------------


def _inside(part: Relative, sizes: Sizes) -> Panel | None:
    common = Common(width=sizes.width)
    part, heads = _allowed(part, sizes, common)
    module = part.build(heads, common)
    said = ["for causal attention"] if heads.causal else []
    if module.adds_bias:
        return _bias(part, module, heads, sizes, said)
    if type(module).apply_positions is not RelativeModule.apply_positions:
        return _turn(part, module, heads, sizes, said)
    return None


def _allowed(part: Relative, sizes: Sizes, common: Common) -> tuple[Relative, Heads]:
    """The attention it is drawn for: as asked, or causal where it cannot be in another."""
    each = sizes.width // sizes.heads
    refused: list[tuple[str, str]] = []
    for causal in dict.fromkeys((sizes.causal, True)):
        heads = Heads(sizes.heads, sizes.heads, each, causal)
        problems = part.problems(heads, common)
        if not problems:
            return part, heads
        refused = refused or problems
    key, text = refused[0]
    raise UserError(f"{tree_of(part)['kind']}: {key}: {text}")


def _bias(part: Relative, module: RelativeModule, heads: Heads, sizes: Sizes, said: list[str]) -> Panel:
    here, far = sizes.positions - 1, sizes.positions
    keys = torch.arange(far if heads.causal else 2 * far - 1)[None]
    queries = torch.tensor([[here]])
    q = torch.randn(1, heads.heads, 1, heads.head_width)
    asks = module.static is None  # the bias depends on what the query is
    bias = module.bias(q, queries, keys, heads.head_width**-0.5)
    curves = bias.expand(1, heads.heads, 1, keys.shape[1])[0, :, 0]
    notes = ["added to the scores", *said, *_learned(module), *(["for one random query"] if asks else [])]
    lines = [f"head {number + 1}" for number in range(heads.heads)]
    return Panel(words(part), notes, "curves", curves.float(), "bias", "key − query", -here, lines)


def _turn(part: Relative, module: RelativeModule, heads: Heads, sizes: Sizes, said: list[str]) -> Panel:
    """A query stands at the last place and keys at all of them, each with one feature at a time: q_i · k_i."""
    size = sizes.positions
    units = torch.eye(heads.head_width)[:, None, None].expand(-1, 1, size, -1)  # (features, 1, time, features)
    layout = TokenLayout(torch.arange(size)[None], start=0)
    q, k, _ = module.apply_positions(units, units, units, Context(layout))
    products = (q[:, :, -1:] * k).sum(-1)[:, 0]  # (features, time)
    notes = ["queries and keys are turned: the product of equal features", *said, *_learned(module)]
    return Panel(words(part), notes, "matrix", products.float(), "feature of a head", "key − query", 1 - size)


def _learned(module: nn.Module) -> list[str]:
    return ["learned: fresh weights"] if any(True for _ in module.parameters()) else []
