"""The soak test of bench/serve/soak.py, with few clients."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "bench" / "serve" / "soak.py"


@pytest.mark.slow
def test_few_clients_for_ten_seconds() -> None:
    spec = importlib.util.spec_from_file_location("serve_soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["serve_soak"] = module
    spec.loader.exec_module(module)
    table, passed = module.soak(clients=12, seconds=10, workers=1)
    assert passed, table
