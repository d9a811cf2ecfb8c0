"""One module per family, named as its Hugging Face `model_type`. `FAMILIES` imports a family when it is looked up."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

from allyouneed.errors import UserError
from allyouneed.interop.hf.weight_table import Family
from allyouneed.nn.models.base import Model

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__))


class Families(Mapping[str, Family]):
    def __getitem__(self, name: str) -> Family:
        if name not in NAMES:
            raise KeyError(name)
        return importlib.import_module(f"{__name__}.{name}").FAMILY

    def __contains__(self, name: object) -> bool:
        return name in NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


FAMILIES = Families()


def closest_refusal(config: Model) -> UserError:
    """The error of the family that comes closest to a model that none can express."""
    found = [error for family in FAMILIES.values() if (error := refusal(family, config)) is not None]
    # prefer a family that has every part and lacks only values
    return min(found, key=lambda error: ("cannot be expressed" not in str(error), len(str(error).splitlines())))


def matching_families(config: Model) -> list[Family]:
    """The families that can express this model of ours."""
    return [family for family in FAMILIES.values() if refusal(family, config) is None]


def refusal(family: Family, config: Model) -> UserError | None:
    """Why a family cannot express a model; None: it can."""
    try:
        family.write_config(config)
    except UserError as error:
        return error
    return None
