"""Texts for all tasks, and a model of each, trained on first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from allyouneed.training import Recipe, train
from allyouneed.training.prepare import PreparedData, RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import Listener, recipe, write_all


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Callable[[str], tuple[Recipe, PreparedData]]:
    """prepared("tagging"): the recipe of that run and its data, for tests that only read them."""

    @cache
    def make(name: str) -> tuple[Recipe, PreparedData]:
        given = recipe(tmp_path_factory.mktemp("prepared"), texts, name)
        return given, prepare(given, RunFolder(given.output), Reporter(Listener().console))

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Callable[[str], tuple[Path, str]]:
    """trained("tagging"): the run's folder, and what training said."""
    found: dict[str, tuple[Path, str]] = {}

    def run(name: str) -> tuple[Path, str]:
        if name not in found:
            listener = Listener()
            made = train(recipe(tmp_path_factory.mktemp("run"), texts, name), console=listener.console)
            found[name] = made.model.parent, listener.text
        return found[name]

    return run
