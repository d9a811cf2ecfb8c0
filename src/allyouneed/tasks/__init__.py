"""Tasks register by subclassing: importing this package imports every module in it."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, __name__ + "."):
    importlib.import_module(_module.name)
