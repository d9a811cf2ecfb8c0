"""What people do from one end to the other, with small models and texts."""

from pathlib import Path

import pytest

from toy_texts import write_all


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("texts"))
