"""The parts. Importing this package imports every module that defines one; defining a part registers it."""

import importlib
import pkgutil
from pathlib import Path

SLOTS = ("patterns", "positions", "embed", "mixers", "channels", "linear", "wiring", "heads", "models")

for _slot in SLOTS:
    for _module in pkgutil.walk_packages([str(Path(__path__[0]) / _slot)], f"{__name__}.{_slot}."):
        importlib.import_module(_module.name)
