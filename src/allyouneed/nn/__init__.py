"""The parts. Importing this package imports every file in it, and a part registers by being defined."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, __name__ + "."):
    importlib.import_module(_module.name)
