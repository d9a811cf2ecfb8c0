"""docs/serving.md and its Chinese page: their commands can be parsed, their limits and routes are the server's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from allyouneed.apps.serve.settings import Limits
from allyouneed.cli import app
from served import Running

DOCS = Path(__file__).parents[3] / "docs"
PAGE, CHINESE = ((DOCS / name).read_text(encoding="utf-8") for name in ("serving.md", "zh/serving.md"))


def test_commands_can_be_parsed() -> None:
    pattern = re.compile(r"^(?:\$ |ExecStart=\S*/)allyouneed (serve.*)$", re.MULTILINE)
    lines, chinese = pattern.findall(PAGE), pattern.findall(CHINESE)
    assert len(lines) == 8 and set(chinese) <= set(lines) and len(chinese) == 7
    app.load()
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for line in lines:
        command.make_context("serve", shlex.split(line)[1:])


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=["english", "chinese"])
def test_limits_are_the_servers(page: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", page, re.MULTILINE))
    assert {name: float(value.replace(",", "")) for name, value in rows.items()} == Limits().model_dump()


@pytest.mark.parametrize(
    "section",
    [
        PAGE[PAGE.index("## Routes") : PAGE.index("Clients: ")],
        CHINESE[CHINESE.index("## 路由") : CHINESE.index("客户端：")],
    ],
    ids=["english", "chinese"],
)
def test_routes_are_the_servers(server: Running, section: str) -> None:
    known = set(server.gate.app.openapi()["paths"])  # type: ignore[attr-defined]
    named = {f"/api/{name}" for name in ("tags", "show", "ps", "chat", "generate", "embed")}
    named |= set(re.findall(r"(/[a-z][\w/{}-]*)", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert known - {"/v1/models/{name}"} == named - {"/openapi"}
