"""One file a family. `FAMILIES` finds them by their Hugging Face `model_type`."""

from __future__ import annotations

import importlib
import pkgutil

from allyouneed.errors import UserError
from allyouneed.interop.hf.weight_table import Family
from allyouneed.nn.models.base import Model

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(__path__):
    _family: Family = importlib.import_module(f"{__name__}.{_module.name}").FAMILY
    FAMILIES[_family.name] = _family


def nearest(config: Model) -> UserError:
    """What the family that comes closest to a model of ours cannot say of it."""
    found = []
    for family in FAMILIES.values():
        try:
            family.said(config)
        except UserError as error:
            found.append(error)
    # one that could say the rest says how it would put what it cannot
    return min(found, key=lambda error: ("cannot be said" not in str(error), len(str(error).splitlines())))


def choose(config: Model) -> list[Family]:
    """The families that can say this model of ours."""
    found = []
    for family in FAMILIES.values():
        try:
            family.said(config)
        except UserError:
            continue
        found.append(family)
    return found
