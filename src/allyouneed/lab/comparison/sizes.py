"""Models of other people's sizes brought to one size: small enough for the machine, and matched with each other.

`scaled` keeps the words of a model (mixers, wiring, norms, positions, the ratios of its widths) and changes its
numbers. `matched` solves for the width and the hidden size at which its cost equals that of the first model, by the
cost functions of the parts: nothing is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from allyouneed.config import parse, tree_of
from allyouneed.errors import UserError
from allyouneed.nn.models.base import Model

Match = Literal["parameters", "flops", "state", "time"]
MATCHES: tuple[Match, ...] = ("parameters", "flops", "state", "time")
STATE_LENGTH = 1024  # tokens at which states are matched
NUMBER = 4  # bytes of a number of a state: fp32
CLOSE = 0.01  # as good as equal
FAR = 0.1  # more is said
HEAD, WIDE_HEAD, WIDE = 32, 64, 512  # width of a head, also of models from a width on
WIDTHS = {"hidden", "width", "row_width", "far_width", "kv_rank", "query_rank", "key_width", "encoder_width"}
STACKS = ("context", "encoder", "decoder", "first", "second")
GROWTH = (0.5, 2.0)  # of hidden sizes, beside the width


@dataclass(frozen=True)
class Sized:
    """A model at its size. `ratio`: its cost over that of the first model, in what is matched."""

    name: str
    tree: dict[str, Any]
    ratio: float

    @property
    def model(self) -> Any:
        return parse(Model, self.tree, self.name)  # type: ignore[type-abstract]

    @property
    def warning(self) -> str | None:
        if abs(self.ratio - 1) <= FAR:
            return None
        return f"its sizes allow no closer match: {self.ratio:.2f} times the first model's"


def cost_of(model: Any, match: Match, length: int) -> float:
    """What is matched, of a model that reads texts of this length. Time is not known before it is measured, so models
    matched by it have the same number of parameters and train for the same seconds."""
    cost = model.cost(length)
    if match == "flops":
        return float(cost.flops)
    return float(cost.state_bytes(STATE_LENGTH, NUMBER)) if match == "state" else float(cost.parameters)


def matched(
    models: Mapping[str, Mapping[str, Any]], match: Match, width: int, blocks: int, length: int, dropout: float = 0.0
) -> list[Sized]:
    """Each model at the size at which it costs what the first costs at this width and depth."""
    found: list[Sized] = []
    target = 0.0
    for name, tree in models.items():
        if not found:
            first = scaled(tree, width, blocks, length, dropout=dropout)
            target = cost_of(_parsed(first, name), match, length)
            if not target:
                raise UserError(f"{name}: has no decoding state, so nothing can be matched by it; use another --match")
            found.append(Sized(name, first, 1.0))
        else:
            found.append(_solve(name, tree, match, width, blocks, length, dropout, target))
    return found


def _solve(
    name: str,
    tree: Mapping[str, Any],
    match: Match,
    width: int,
    blocks: int,
    length: int,
    dropout: float,
    target: float,
) -> Sized:
    best: Sized | None = None
    errors: list[UserError] = []

    def sized(at: int, growth: float) -> Sized:
        found = scaled(tree, at, blocks, length, growth, dropout)
        return Sized(name, found, cost_of(_parsed(found, name), match, length) / target)

    for at in _widths(width, 4 if match == "state" else 2):
        try:
            plain, low, high = (sized(at, growth) for growth in (1.0, *GROWTH))
            for one in (plain, low, high):
                best = _closer(best, one)
            if low.ratio < 1 < high.ratio:
                edges = list(GROWTH)
                for _ in range(10):
                    middle = math.sqrt(edges[0] * edges[1])
                    best = _closer(best, one := sized(at, middle))
                    edges[one.ratio > 1] = middle
        except UserError as error:
            errors.append(error)
            continue
        if best is not None and abs(best.ratio - 1) < CLOSE:
            break
    if best is None:
        raise errors[0]
    return best


def _closer(best: Sized | None, one: Sized) -> Sized:
    return one if best is None or abs(math.log(one.ratio or 1e-9)) < abs(math.log(best.ratio or 1e-9)) else best


def _widths(width: int, factor: int) -> Iterator[int]:
    """Widths to be tried, the nearest first."""
    step = 8 if width < WIDE else 64
    candidates = range(step, factor * width + 1, step)
    yield from sorted((at for at in candidates if at >= width / factor), key=lambda at: abs(math.log(at / width)))


def _parsed(tree: Mapping[str, Any], name: str) -> Any:
    return parse(Model, tree, name)  # type: ignore[type-abstract]


def scaled(
    tree: Mapping[str, Any], width: int, blocks: int, length: int, growth: float = 1.0, dropout: float = 0.0
) -> dict[str, Any]:
    """The model of this width with `blocks` blocks in each stack, for texts of up to `length` tokens. A block mixes
    tokens and features; a layer that does one of the two is half a block. `growth`: of hidden sizes, beside the width.
    All models have the same dropout."""
    full = tree_of(_parsed(tree, "model"))
    scale = _Scale(full["width"], width, length, growth)
    sized = {key: value if key in STACKS else scale.node(value) for key, value in full.items()}
    for key in ("embed", "source_embed"):  # patches of an image are as many as before
        if isinstance(full.get(key), Mapping) and full[key].get("kind", "tokens") != "tokens":
            sized[key] = replace(scale, length=0).node(full[key])
    share = 2 if "first" in full else 1  # the two stacks of a decoder-decoder are one in two halves
    for name in STACKS:
        if full.get(name):
            layers = _blocks(full[name], max(1, blocks // share))
            sized[name] = [scale.node(layer) for layer in layers]
    return sized | {"width": width, "dropout": dropout}


def _blocks(layers: Sequence[Mapping[str, Any]], blocks: int) -> list[dict[str, Any]]:
    """The first blocks of the stack, up to this number; a shorter stack is repeated."""
    if any(layer.get("share") for layer in layers):  # one layer, applied several times
        return [dict(layer) | {"repeat": max(1, blocks // len(layers))} for layer in layers]
    flat = [dict(layer) | {"repeat": 1} for layer in layers for _ in range(layer["repeat"])]
    found: list[dict[str, Any]] = []
    done = 0.0
    while done < blocks:
        layer = flat[len(found) % len(flat)]
        done += 1.0 if layer.get("channel") and (layer.get("mixer") or layer.get("cross")) else 0.5
        found.append(layer)
    merged: list[dict[str, Any]] = []
    for layer in found:
        if merged and {**merged[-1], "repeat": 1} == layer:
            merged[-1]["repeat"] += 1
        else:
            merged.append(dict(layer))
    return merged


@dataclass(frozen=True)
class _Scale:
    """From one width to another."""

    before: int
    width: int
    length: int
    growth: float

    def node(self, value: Any, of_channel: bool = False) -> Any:
        """A part of the tree in the new size."""
        if isinstance(value, list | tuple):
            return [self.node(item, of_channel) for item in value]
        if not isinstance(value, Mapping):
            return value
        found = {
            key: self._number(key, item, of_channel) if _is_size(item) else self.node(item, of_channel or key in GROWN)
            for key, item in value.items()
            if not (key == "dropout" and isinstance(item, int | float))
        }
        return found | (self._heads(value) if _is_size(value.get("heads")) else {})

    def _number(self, key: str, value: int, of_channel: bool) -> int:
        if key == "length":  # of learned positions and of mixers with a weight for each pair of positions
            return self.length or value
        if key not in WIDTHS:
            return value
        factor = self.width / self.before * (self.growth if of_channel and key == "hidden" else 1.0)
        return max(8, round(value * factor / 8) * 8)

    def _heads(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Heads of the usual width; groups, and widths of keys and values, in proportion."""
        heads = self._count()
        wide, old = self.width // heads, part["heads"]
        before = part.get("head_width") or self.before / old
        found: dict[str, Any] = {}
        if part.get("head_width"):  # heads that do not fill the width
            heads = max(1, round(old * before * self.width / self.before / wide))
            found["head_width"] = wide
        if part.get("kv_heads"):
            wanted = part["kv_heads"] * heads / old
            found["kv_heads"] = min(_divisors(heads), key=lambda count: abs(math.log(count / wanted)))
        for key in ("value_width", "nope_width", "rope_width"):
            if part.get(key):
                found[key] = max(4, round(part[key] * wide / before / 4) * 4)
        return found | {"heads": heads}

    def _count(self) -> int:
        """Heads that divide the width into parts near the usual width, a multiple of 4 for rotary positions."""
        usual = WIDE_HEAD if self.width >= WIDE else HEAD
        fitting = [count for count in _divisors(self.width) if self.width // count % 4 == 0] or [1]
        return min(fitting, key=lambda count: abs(math.log(self.width / count / usual)))


GROWN = ("channel", "mixer")  # their hidden sizes may grow beside the width


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def sizes_text(model: Any) -> str:
    """The sizes that were solved for, in one line."""
    tree = tree_of(model)
    layers = [layer for name in STACKS for layer in tree.get(name) or ()]
    hidden = {layer["channel"]["hidden"] for layer in layers if layer.get("channel") and "hidden" in layer["channel"]}
    heads = {layer["mixer"]["heads"] for layer in layers if layer.get("mixer") and "heads" in layer["mixer"]}
    count = "+".join(str(sum(layer["repeat"] for layer in tree[name])) for name in STACKS if tree.get(name))
    parts = [f"width {tree['width']}", f"{count} layers"]
    parts += [f"hidden {', '.join(map(str, sorted(hidden)))}"] if hidden else []
    parts += [f"heads {', '.join(map(str, sorted(heads)))}"] if heads else []
    return ", ".join(parts)


def words_text(model: Any) -> str:
    """What the model is, in one line: its parts without their sizes."""
    tree = tree_of(model)
    kinds: dict[str, None] = {}
    for name in STACKS:
        for layer in tree.get(name) or ():
            parts = [_kind(layer.get(slot)) for slot in ("wiring", "mixer", "cross", "channel")]
            kinds[" · ".join(part for part in parts if part)] = None
    positions = _kind((tree.get("embed") or {}).get("positions"))
    norm = _kind(tree.get("norm"))
    extra = [f"{norm} norm" if norm else "", f"{positions} positions" if positions not in ("", "none") else ""]
    return f"{tree['kind']}: " + " / ".join(kinds) + "".join(f", {one}" for one in extra if one)


def _kind(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part or "")
    name, pattern, positions = str(part.get("kind", "")), part.get("pattern"), _kind(part.get("positions"))
    inside = [
        str(pattern) if pattern not in (None, "full", "causal") else "",
        positions if positions != "none" else "",
        _kind(part.get("activation")),
    ]
    inside = [one for one in inside if one]
    return f"{name} ({', '.join(inside)})" if inside else name
