"""The view "anatomy": a model drawn from its config alone, or two side by side with their differences; its attention
patterns and positions as heat maps, and how far a pattern reaches in how many layers.

A config comes as the name of a preset or as YAML, never as a path. Nothing is computed with weights: parts are built
on the meta device, one of those that are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field
from torch import Tensor, nn

import allyouneed
from allyouneed.apps.inspect.pictures.canvas import Panel
from allyouneed.apps.inspect.pictures.pattern import fitting_size, panel
from allyouneed.apps.inspect.pictures.pattern import read as read_pattern
from allyouneed.apps.inspect.pictures.positions import Sizes
from allyouneed.apps.inspect.pictures.positions import panels as position_panels
from allyouneed.apps.inspect.reference.describe import summary
from allyouneed.apps.inspect.reference.models import paper
from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document, tensor
from allyouneed.apps.inspect.views.model import Text, ViewRequest
from allyouneed.config import Config, iter_parts, preset_names, to_yaml, tree_of
from allyouneed.errors import UserError, near
from allyouneed.files.reading import parse_yaml
from allyouneed.models import NAMES, is_bundled
from allyouneed.nn.cost import Cost
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Layer
from allyouneed.nn.models.stack import behind, stack_cost
from allyouneed.nn.patterns.core import Pattern

CELLS = 128  # of a heat map on each side; larger patterns are pooled
MOST_TOKENS = 2048  # of a pattern
ENCODERS = ("encoder", "context")  # stacks that do not decode
Length = Annotated[int, Field(gt=0, le=1 << 24)]
Yaml = Annotated[str, Field(strict=True, max_length=200_000)]


class AnatomyRequest(ViewRequest):
    """`preset` or `yaml`, and optionally a second model in `other` or `other_yaml`. `length`: context that FLOPs and
    cache are computed for. `patterns`, `positions`: to draw besides those of the models, as `allyouneed look pattern`
    and `positions` take them; `size`: their tokens. `names`: of models given as YAML."""

    preset: Text | None = None
    yaml: Yaml | None = None
    other: Text | None = None
    other_yaml: Yaml | None = None
    names: Annotated[list[Text], Field(default_factory=list, max_length=2)]
    length: Length = 1024
    patterns: Annotated[list[Text], Field(default_factory=list, max_length=8)]
    positions: Annotated[list[Text], Field(default_factory=list, max_length=8)]
    size: Annotated[int, Field(gt=1, le=MOST_TOKENS)] | None = None


@view("anatomy", AnatomyRequest, models=False)
def anatomy(model: None, request: AnatomyRequest) -> Document:
    given = [(request.preset, request.yaml), (request.other, request.other_yaml)]
    if given[0] == (None, None) and not request.patterns and not request.positions:
        given[0] = ("transformer-base", None)
    found = []
    for number, (preset, text) in enumerate(given):
        if preset is not None and text is not None:
            raise UserError("a model is given by its preset or by YAML, not by both; remove one")
        if preset is not None or text is not None:
            name = request.names[number] if number < len(request.names) else preset or "YAML"
            found.append((name, read_config(preset, text), preset))
    data = {
        "presets": [*preset_names(), *(name for name in NAMES if is_bundled(name))],
        "length": request.length,
        "models": [_model(name, config, preset, request.length) for name, config, preset in found],
        "differences": differences(found[0][1], found[1][1]) if len(found) == 2 else [],
        "patterns": _patterns([config for _, config, _ in found], request),
        "positions": _positions([config for _, config, _ in found], request),
    }
    return document("anatomy", None, request, _python(found, request), data)


def read_config(preset: str | None, text: str | None) -> Model:
    """The config of a preset, by name; or that of a YAML text. Errors name the keys by their path."""
    if preset is not None:
        known = [*preset_names(), *(name for name in NAMES if is_bundled(name))]
        if preset not in known:
            raise UserError(f"unknown preset {preset[:60]!r}{near(preset[:60], known)}")
        return allyouneed.model_config(preset)
    try:
        tree = parse_yaml(text or "")
    except ValueError as error:
        raise UserError(f"not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"expected a mapping of keys such as `kind: decoder`, got {type(tree).__name__}")
    inner = tree.get("model")  # a recipe
    return allyouneed.model_config(inner if isinstance(inner, dict) and "kind" not in tree else tree)


def _python(found: Sequence[tuple[str, Model, str | None]], request: AnatomyRequest) -> str:
    if not found:
        shown = " ".join(f"'{one}'" for one in request.patterns or request.positions)
        return f"allyouneed look {'pattern' if request.patterns else 'positions'} {shown}"
    return "; ".join(
        f"allyouneed.model_config({preset!r})" if preset else "allyouneed.model_config(yaml.safe_load(text))"
        for _, _, preset in found
    )


# --- a model as boxes -----------------------------------------------------------------------------------------------


def _model(name: str, config: Model, preset: str | None, length: int) -> Document:
    cost, rest = config.cost(length), config.cost(length)
    columns = [column for path, part in _halves(config) for column in _columns(part, path, length)]
    for box in (box for one in columns for box in (one, one["embed"], one["head"]) if box is not None):
        rest += Cost(**{name: box[name] for name in _figures(rest)}) * -1
    return {
        "name": name,
        "paper": paper(preset) if preset is not None else "",
        "kind": tree_of(config)["kind"],
        "width": config.width,
        "yaml": to_yaml(config),
        "limit": config.limit,
        **_figures(cost),
        "generates": config.generates,
        "columns": columns,
        "rest": _figures(rest),  # of what belongs to no single part: retrieval, shared keys, the scale of two towers
    }


def _figures(cost: Cost) -> Document:
    """FLOPs: forward, per token; state: numbers that decoding keeps, per token and whatever the length."""
    return {
        "parameters": cost.parameters,
        "flops": cost.flops,
        "state_per_token": cost.state_per_token,
        "state_constant": cost.state_constant,
    }


def _halves(config: Model) -> Iterator[tuple[str, Any]]:
    """The model itself, or each of the models it consists of."""
    inner = [(name, part) for name in type(config).model_fields if isinstance(part := getattr(config, name), Model)]
    yield from ((f"{name}.", part) for name, part in inner) if inner else [("", config)]


def _columns(config: Any, path: str, length: int) -> Iterator[Document]:
    """One column for each stack: embedding, layers, and after the last stack the head."""
    stacks = [name for name in type(config).stacks if getattr(config, name, None)]
    for name in stacks:
        layers: Sequence[Layer] = getattr(config, name)
        last = name == stacks[-1]
        own = getattr(config, "source_embed", None) if not last else None
        reads = hasattr(config, "source_embed") or name == ("decoder" if "decoder" in stacks else stacks[0])
        embed = own or (config.embed if reads and name != "context" else None)  # a context shares the source's
        whole = stack_cost(layers, config, length)
        rest, drawn = whole, []
        for number, layer in enumerate(layers):
            rest += layer.cost(config, length) * -1
            whole += _source_cost(layer, config) * layer.repeat
            drawn.append(_layer(layer, config, f"{path}{name}[{number}]", length, name))
        yield {
            "name": f"{path}{name}",
            "embed": None if embed is None else _embed(embed, config, path, own is None, not last),
            "layers": drawn,
            "end": _figures(rest) if rest.parameters or rest.flops else None,
            "head": _head(config, layers, path) if last else None,
            "reads": _read_stacks(stacks, name) if any(layer.cross for layer in layers) else [],
            **_figures(whole if name not in ENCODERS else _stateless(whole)),
        }


def _read_stacks(stacks: list[str], name: str) -> list[str]:
    """What the cross-attention of a stack reads: the other one; with a context encoder, those before it."""
    return stacks[: stacks.index(name)] if "context" in stacks else [one for one in stacks if one != name]


def _source_cost(layer: Layer, config: Any) -> Cost:
    """Keys and values of a cross-attention, once per source token; where layers share them, they are the model's."""
    cross = layer.cross
    return Cost() if cross is None or type(config).shares_keys else Cost(flops=cross.source_flops(config))


def _stateless(cost: Cost) -> Cost:
    """An encoder keeps nothing: it does not decode."""
    return Cost(cost.parameters, cost.flops)


def _embed(part: Any, config: Any, path: str, main: bool, of_source: bool) -> Document:
    """`main`: the field `embed`, not `source_embed`. A source whose matrix is that of the target adds none."""
    vocabs, joint = config.vocabs, bool(getattr(config, "joint", False)) and of_source
    vocab = None if vocabs is None else vocabs.source if of_source else vocabs.target
    with torch.device("meta"):
        module = part.build(config, vocab)
    if joint and main:
        return _box(f"{path}embed", "embed", part, module, Cost(), tied=True)
    name, cost = "embed" if main else "source_embed", part.cost(config, vocab, shared=joint)
    return _box(f"{path}{name}", "embed", part, module, cost, tied=joint)


def _head(config: Any, layers: Sequence[Layer], path: str) -> Document:
    common, vocabs = behind(layers, config), config.vocabs
    vocab = None if vocabs is None else vocabs.target
    with torch.device("meta"):
        shared = vocab is not None and config.embed.ties
        tied = nn.Parameter(torch.empty(int(vocab or 0), config.embed.vector(config))) if shared else None
        module = config.head.build(common, vocab, tied)
    cost = config.head.cost(common, vocab, config.embed.vector(config), config.embed.ties)
    return _box(f"{path}head", "head", config.head, module, cost, tied=bool(config.embed.ties))


def _layer(layer: Layer, config: Any, path: str, length: int, side: str) -> Document:
    """`figures` of all its repetitions; those of its slots are of one."""
    depth = Depth(1, 1, "encoder" if side in ENCODERS else "decoder")
    with torch.device("meta"):
        block = layer.build(config, depth)
    slots = []
    for name, part in layer.sublayers.items():
        options = {"cross": True} if name == "cross" else {}
        cost = part.cost(config) if name == "channel" else part.cost(config, length, **options)  # type: ignore[call-arg]
        cost += _source_cost(layer, config) if name == "cross" else Cost()
        cost = _stateless(cost) if side in ENCODERS else cost
        slots.append(_box(f"{path}.{name}", name, part, block.sublayers[name], cost))
    wiring = layer.wiring.cost(config, len(layer.sublayers))
    whole = layer.cost(config, length) + _source_cost(layer, config) * layer.repeat
    return {
        "path": path,
        "repeat": layer.repeat,
        "share": layer.share,
        "wiring": _box(f"{path}.wiring", "wiring", layer.wiring, block.wiring, wiring),
        "norm": summary(config.norm),
        "slots": slots,
        **_figures(_stateless(whole) if side in ENCODERS else whole),
    }


def _box(path: str, slot: str, part: Config, module: nn.Module, cost: Cost, tied: bool = False) -> Document:
    tree = tree_of(part, full=False)
    kind = str(tree.pop("kind", tree_of(part).get("kind", "")))
    return {
        "path": path,
        "slot": slot,
        "kind": kind,
        "summary": summary(part).removeprefix(kind).lstrip(", "),
        "config": tree,
        "shapes": shapes(module),
        "tied": tied,
        **_figures(cost),
    }


def shapes(module: nn.Module) -> list[Document]:
    """Weights by name; equal ones of a list (experts) once, with their number."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, value in module.named_parameters():
        key = re.sub(r"\b\d+\b", "*", name), tuple(value.shape)
        found[key] = found.get(key, 0) + 1
    return [{"name": name, "shape": list(shape), "times": times} for (name, shape), times in found.items()]


# --- differences ----------------------------------------------------------------------------------------------------


def differences(left: Model, right: Model) -> list[Document]:
    """Where two configs differ: [{"path", "left", "right"}]. A part of another kind is one difference; None: absent."""
    return [
        {"path": path.removeprefix("."), "left": _short(one), "right": _short(other)}
        for path, one, other in _different(tree_of(left), tree_of(right), "")
    ]


def _different(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    one, other = _as_part(one, other), _as_part(other, one)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if path and one.get("kind") != other.get("kind"):
            yield path, one, other
            return
        for key in dict.fromkeys((*one, *other)):
            yield from _different(one.get(key), other.get(key), f"{path}.{key}")
    elif (
        isinstance(one, list | tuple)
        and isinstance(other, list | tuple)
        and any(isinstance(value, Mapping) for value in (*one, *other))
    ):
        for number in range(max(len(one), len(other))):
            here, there = (side[number] if number < len(side) else None for side in (one, other))
            yield from _different(here, there, f"{path}[{number}]")
    elif one != other:
        yield path, one, other


def _as_part(value: Any, beside: Any) -> Any:
    """`post-norm` is short for `{kind: post-norm}`."""
    return {"kind": value} if isinstance(value, str) and isinstance(beside, Mapping) and "kind" in beside else value


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} {_short(one)}" for key, one in value.items() if key != "kind" and not _empty(one))
        return f"{value['kind']} ({inner})" if "kind" in value and inner else str(value.get("kind", inner))
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_short(one)) for one in value)}]"
    return value


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], ())


# --- patterns and positions -----------------------------------------------------------------------------------------


def _patterns(configs: Sequence[Model], request: AnatomyRequest) -> list[Document]:
    """The patterns of the models' mixers, each once, and those that were asked for."""
    used: dict[str, list[str]] = {}
    found: dict[str, Pattern] = {}
    for number, config in enumerate(configs):
        for path, part in _mixers(config):
            pattern = getattr(part, "pattern", None)
            if isinstance(pattern, Pattern):
                used.setdefault(str(pattern), []).append(f"{number}:{path}")
                found[str(pattern)] = pattern
    for asked in request.patterns:
        found.setdefault(str(read_pattern(asked)), read_pattern(asked))
    return [
        _pattern(pattern, request.size or fitting_size(pattern), used.get(text, [])) for text, pattern in found.items()
    ]


def _mixers(config: Model) -> Iterator[tuple[str, Any]]:
    for path, part in _halves(config):
        for name in type(part).stacks:
            for number, layer in enumerate(getattr(part, name, None) or ()):
                yield from ((f"{path}{name}[{number}].{slot}", one) for slot, one in layer.sublayers.items())


def _pattern(pattern: Pattern, size: int, used: list[str]) -> Document:
    """`reach`: of a query, before and after it; None: unlimited. `keeps`: first and last keys for decoding; None:
    all. `hops`: for each token, how many layers it takes until it can influence the last one; NaN: it never does."""
    drawn, window = panel(pattern, size), pattern.kv_window
    hops = reach(drawn.values)
    steps = hops[~hops.isnan()]
    return {
        "title": drawn.title,
        "notes": [note for note in drawn.notes if note.startswith("here ")],  # of a pattern that depends on the batch
        "decodes": pattern.decodes,
        "causal": pattern.causal,
        "reach": [None if math.isinf(side) else int(side) for side in pattern.reach],
        "keeps": None if window is None else [window.first, window.recent],
        "keys": float(drawn.values.sum()) / len(drawn.values),
        "used": used,
        "size": len(drawn.values),
        "mask": tensor(drawn.values.float(), CELLS, "mean"),
        "hops": tensor(hops, MOST_TOKENS),
        "layers": int(steps.max()),
        "never": int(hops.isnan().sum()),
    }


def reach(mask: Tensor) -> Tensor:
    """(tokens,): the number of layers of this mask (queries, keys) after which each token can influence the last: the
    length of the shortest path to it, for the residual stream carries every token to itself. NaN: none."""
    size = len(mask)
    hops = torch.full((size,), torch.nan)
    reached = torch.zeros(size, dtype=torch.bool)
    reached[-1] = True
    for step in range(size):
        hops[reached & hops.isnan()] = step
        wider = reached | mask[reached].any(0)
        if torch.equal(wider, reached):
            break
        reached = wider
    return hops


def _positions(configs: Sequence[Model], request: AnatomyRequest) -> list[Document]:
    """What the models' embeddings and mixers use, each once, drawn for their width and heads; and those asked for."""
    found: dict[str, list[Panel]] = {}
    size = min(request.size or 64, 256)
    for config in configs:
        for _, half in _halves(config):
            for part in iter_parts(half):
                positions = getattr(part, "positions", None)
                if not isinstance(positions, Config):
                    continue
                text = yaml.safe_dump(tree_of(positions), sort_keys=False)
                heads = getattr(part, "heads", None) or 8
                sizes = Sizes(size, half.width - half.width % heads, heads, bool(getattr(part, "causal", False)))
                if text not in found:
                    found[text] = _drawn(text, sizes)
    drawn = [one for some in found.values() for one in some]
    if request.positions:
        drawn += position_panels(request.positions, Sizes(size))
    return [
        {
            "title": one.title,
            "notes": list(one.notes),
            "shape": one.shape,
            "values": tensor(one.values.float(), 256),
            "down": one.down,
            "across": one.across,
            "start": one.start,
            "lines": list(one.lines),
        }
        for one in {(panel.title, *panel.notes): panel for panel in drawn}.values()
    ]


def _drawn(text: str, sizes: Sizes) -> list[Panel]:
    try:
        return position_panels([text], sizes)
    except UserError:  # nothing to draw, or not for these sizes
        return []
