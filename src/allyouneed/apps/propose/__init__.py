"""`allyouneed init`: look at files of data, say what is in them, and write a recipe that trains as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from allyouneed.apps.propose.choice import choose
from allyouneed.apps.propose.facts import look_at
from allyouneed.apps.propose.media import look_at_media, propose_media
from allyouneed.apps.propose.recipe import write_recipe
from allyouneed.apps.propose.tables import show_facts, show_recipe


def propose(
    files: Sequence[Path],
    task: str | None = None,
    output: Path = Path("recipe.yaml"),
    start: str | None = None,
    force: bool = False,
    table: str | None = None,
    console: Console | None = None,
) -> Path:
    """Write a recipe for these files and return its path. `task`: instead of the likeliest; `start`: a model folder to
    fine-tune instead of a new model; `force`: overwrite an existing recipe; `table`: of spreadsheets and databases that
    have several."""
    console = console or Console(highlight=False)
    if (found := look_at_media(files)) is not None:
        return propose_media(found, task, output, start, force, console)
    facts = look_at(files, table)
    show_facts(console, facts)
    chosen = choose(facts, task)
    written = write_recipe(facts, chosen, output, start, force)
    show_recipe(console, chosen, written)
    return written.path


__all__ = ["propose"]
