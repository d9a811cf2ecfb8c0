"""One file a family. `FAMILIES` finds them by their Hugging Face `model_type`."""

from __future__ import annotations

import importlib
import pkgutil

from allyouneed.interop.table import Family

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(__path__):
    _family: Family = importlib.import_module(f"{__name__}.{_module.name}").FAMILY
    FAMILIES[_family.name] = _family
