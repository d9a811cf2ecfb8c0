"""What was seen and written, as tables for a terminal."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from allyouneed.apps.propose.choice import Choice
from allyouneed.apps.propose.facts import ColumnFacts, DataFacts, shown
from allyouneed.apps.propose.recipe import Written

CLASSES = 12  # listed


def show_facts(console: Console, facts: DataFacts) -> None:
    files = _table("file", "set", "format", "encoding", "rows", "broken", "empty", "repeated")
    for one in facts.files:
        rows = f"{one.rows:,}" + ("" if one.complete else " or more")
        counts = (f"{number:,}" for number in (one.broken.dropped, one.empty, one.duplicates))
        files.add_row(
            escape(one.file.path.name), one.role, escape(one.format), one.file.encoding or "utf-8", rows, *counts
        )
    console.print(files)
    columns = _table("column", "looks like", "values", "language", "characters", "examples")
    for column in facts.first.columns.values():
        columns.add_row(*map(escape, _column(column)))
    console.print(columns)
    for first, second, count in facts.leaks:
        console.print(f"[yellow]leak:[/] {count:,} texts are in {first} and in {second} data")


def show_recipe(console: Console, choice: Choice, written: Written) -> None:
    if choice.label is not None:
        classes = _table(f"{choice.label.name}", "count", "share")
        counted = choice.label.counts.most_common()
        for name, count in counted[:CLASSES]:
            classes.add_row(escape(shown(name, 40)), f"{count:,}", f"{count / choice.label.filled:.1%}")
        if len(counted) > CLASSES:
            classes.add_row(f"… and {len(counted) - CLASSES:,} more", "", "")
        console.print(classes)
    others = f" (others: {', '.join(choice.others)}; choose with --task)" if choice.others else ""
    console.print(f"task: [bold]{choice.task}[/], as {escape(choice.why)}{others}")
    for note in written.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    console.print(written.plan.text(sum(choice.texts[0].counts.values())))
    console.print(f"wrote {escape(str(written.path))}; next:", soft_wrap=True)
    console.print(f"  allyouneed train {escape(str(written.path))}\n  {escape(written.command)}", soft_wrap=True)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        number = head in ("rows", "broken", "empty", "repeated", "count", "share", "values")
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    return table


def _column(column: ColumnFacts) -> tuple[str, ...]:
    kinds = {"list": column.is_list, "label": column.is_label, "number": column.is_number, "id": column.is_id}
    kind = next((name for name, fits in kinds.items() if fits), "text")
    lengths = f"{statistics.median(column.lengths):.0f}, at most {max(column.lengths)}" if column.lengths else ""
    examples = " · ".join(shown(example, 30) for example in column.examples)
    language = column.language if kind == "text" else ""
    return str(column.name), kind if column.filled else "empty", f"{column.distinct:,}", language, lengths, examples
