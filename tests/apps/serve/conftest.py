"""One server with a tiny random model of each kind, and one with the bundled translator, for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from allyouneed.models import shipped
from served import KINDS, Running, served_client, serving, write_folder
from waiting import PATIENCE

KEY = "secret-key"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    return {kind: write_folder(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def one_process(folders: dict[str, Path]) -> Iterator[Running]:
    with serving(folders, aliases={"gpt": "lm"}) as running:
        yield running


@pytest.fixture(scope="session")
def api_process(folders: dict[str, Path]) -> Iterator[Running]:
    with serving(folders, aliases={"gpt": "lm"}, split=True) as running:
        yield running


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Running:
    """In one process; tests with `BOTH_SERVERS` run with HTTP and engine apart, too."""
    found: Running = request.getfixturevalue(getattr(request, "param", "one_process"))
    return found


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as found:
        yield found


@pytest.fixture(scope="session")
def translating() -> Iterator[tuple[Running, httpx.Client]]:
    """The bundled translator behind a key; its glossaries are in memory."""
    with served_client({"translator": shipped()}, keys=(KEY,)) as (running, client):
        client.headers["authorization"] = f"Bearer {KEY}"
        yield running, client
