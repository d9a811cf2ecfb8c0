"""The micro run as fixtures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from allyouneed.cli.tour import dates
from allyouneed.training import Recipe, load_recipe
from micro_run import RECIPE, Listener, Make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests share the machine with others; threads that wait for each other are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    if "torch._dynamo" in sys.modules:  # a failed compilation disables it for the rest of the process
        torch.compiler.set_stance("default")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dates")
    dates.write(folder, train=400, valid=20, test=10)
    return folder


@pytest.fixture
def make(tmp_path: Path, pairs: Path) -> Make:
    """make(steps=5, …): the recipe with these keys changed, in a folder of its own, as if read from a file."""

    def build(*overrides: str, valid: bool = False, test: bool = False, **changes: Any) -> Recipe:
        tree = RECIPE | changes
        if changes.get("epochs"):
            tree.pop("steps")
        data = dict(tree["data"]) | {"train": str(pairs / "train.tsv")}
        data |= {"valid": str(pairs / "valid.tsv")} if valid else {}
        data |= {"test": str(pairs / "test.tsv")} if test else {}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree | {"data": data}, sort_keys=False))
        return load_recipe(path, overrides)

    return build


@pytest.fixture
def listener() -> Listener:
    return Listener()
