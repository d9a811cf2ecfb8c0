"""docs/serving.md: its commands can be parsed, its limits and routes are the server's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.main import get_command

from allyouneed.cli import app
from allyouneed.serve.settings import Limits
from served import Running

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_commands_can_be_parsed() -> None:
    lines = re.findall(r"^(?:\$ |ExecStart=\S*/)allyouneed (serve.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 7
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for line in lines:
        command.make_context("serve", shlex.split(line)[1:])


def test_limits_are_the_servers() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", PAGE, re.MULTILINE))
    assert {name: float(value.replace(",", "")) for name, value in rows.items()} == Limits().model_dump()


def test_routes_are_the_servers(server: Running) -> None:
    known = set(server.gate.app.openapi()["paths"])  # type: ignore[attr-defined]
    section = PAGE[PAGE.index("## Routes") : PAGE.index("Clients: ")]
    named = {f"/api/{name}" for name in ("tags", "show", "ps", "chat", "generate", "embed")}
    named |= set(re.findall(r"(/[a-z][\w/{}-]*)", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert known - {"/v1/models/{name}"} == named - {"/openapi"}
