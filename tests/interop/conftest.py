"""Families are judged here with the small models that tests/parity lists for them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
