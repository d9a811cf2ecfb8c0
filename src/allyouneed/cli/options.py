"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def option(*names: str, panel: str = "Options", show_default: bool = False, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=show_default, **more)


SetOption = Annotated[
    list[str] | None, option("--set", metavar="KEY=VALUE", help="change a key, e.g. width=256; repeatable")
]
JsonOption = Annotated[bool, option("--json", help="answer in JSON")]
