"""What the parity tests measured, written down for docs/family.md (`make family`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def record_difference(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record_difference(system, judge, outputs, gradients)`: largest differences seen by this test.

    With PARITY_RESULTS set to a folder, each call writes one small file there; the table is made of them.
    """

    def record(system: str, judge: str, outputs: float, gradients: float | None = None) -> None:
        folder = os.environ.get("PARITY_RESULTS")
        if folder is None:
            return
        test = request.node.nodeid
        entry = {"system": system, "judge": judge, "test": test, "outputs": outputs, "gradients": gradients}
        name = "".join(c if c.isalnum() else "-" for c in f"{test}-{system}")[-180:]
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(entry), encoding="utf-8")

    return record
