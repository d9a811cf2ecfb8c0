"""The part of the config behind a site: `decoder.3.mixer.q` belongs to the mixer of the layer of block 3."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from allyouneed.config import Part
from allyouneed.nn.models.block import Layer

EMBEDS = {"embed": "embed", "source_embed": "source_embed", "neighbour_embed": "embed"}


class SitePart(NamedTuple):
    """`part`: None for sums of several parts. `inner`: the name inside the part; "" for its output."""

    part: Part | None
    inner: str

    @property
    def kind(self) -> str:
        return "" if self.part is None else str(getattr(self.part, "kind", ""))

    @property
    def slot(self) -> str:
        return "" if self.part is None else self.part.slot


@lru_cache(maxsize=4096)
def find_part(config: Any, site: str) -> SitePart:
    names = site.partition("@")[0].split(".")
    if names[0] in EMBEDS:
        return SitePart(getattr(config, EMBEDS[names[0]], None) or config.embed, ".".join(names[1:]))
    if names[0] == "head":
        return SitePart(config.head, ".".join(names[1:]))
    found = getattr(config, names[0], None)
    if isinstance(found, Part):  # a tower
        return find_part(found, ".".join(names[1:])) if len(names) > 1 else SitePart(found, "")
    if not isinstance(found, tuple) or len(names) < 2:
        return SitePart(getattr(config, "reader", None) if names[0] == "keys" else None, ".".join(names[1:]))
    if not names[1].isdigit():  # encoder.end
        return SitePart(config.norm if names[1] in ("end", "joints") else None, "")
    return _in_block(config, _layer(found, int(names[1])), names[2:])


def _layer(layers: tuple[Layer, ...], number: int) -> Layer:
    """The entry of a stack's list that block `number` belongs to."""
    for layer in layers:
        if number < layer.repeat:
            return layer
        number -= layer.repeat
    raise IndexError(number)


def _in_block(config: Any, layer: Layer, names: list[str]) -> SitePart:
    if not names or names[0] in ("in", "2"):
        return SitePart(layer.wiring, "in" if names and names[0] == "in" else "")
    if "norm" in names[-1]:
        return SitePart(config.norm, "")
    part: Any = getattr(layer, names[0], None)
    if part is None:
        return SitePart(layer.wiring, ".".join(names))
    for at, name in enumerate(names[1:], 1):
        inside = _child(part, name)
        if inside is None:
            if name.isdigit():
                continue
            return SitePart(part, ".".join(names[at:]))
        part = inside
    return SitePart(part, "")


def _child(part: Any, name: str) -> Any:
    """A part inside a part, under the name of its module."""
    if name == "experts":
        return getattr(part, "expert", None)
    found = getattr(part, name, None)
    if isinstance(found, Part):
        return found
    for attribute in ("halves", "pieces"):
        several = getattr(part, attribute, None)
        if isinstance(several, Mapping) and name in several:
            return several[name]
    return None


@lru_cache(maxsize=256)
def source_file(cls: type) -> str:
    """The file that defines a class, from the package on: `allyouneed/nn/mixers/retention.py`."""
    file = inspect.getsourcefile(cls)
    root = Path(__file__).parents[4]
    path = Path(file) if file else Path()
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name
