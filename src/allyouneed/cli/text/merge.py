"""`allyouneed merge`: the outputs of `--shard 1/N` to `--shard N/N` as one file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import ForceOption, argument, option
from allyouneed.cli.text.resumable_output import check_output, partial_paths, read_journal
from allyouneed.cli.text.shards import Shard
from allyouneed.errors import UserError
from allyouneed.files import write_file

SHOWN = 5  # incomplete shards named in a message


def merge(
    output: Annotated[Path, argument("OUTPUT", "the output that all shards were given, such as book.done.txt")],
    force: ForceOption = False,
    remove: Annotated[bool, option("--remove", help="delete the shards and their journals afterwards")] = False,
) -> None:
    """Join the outputs of all shards of a job, after checking that each is complete."""
    check_output(output, force)
    shards = list(_shards(output))
    lines = _check(output, shards)
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) for path in shards]
        write_file(output, lambda target: (_join_arrays if output.suffix == ".npy" else _join)(files, target))
    for path in shards if remove else ():
        path.unlink()
        partial_paths(path)[1].unlink()
    show_notes([f"{output}: {lines:,} lines of {len(shards)} shards" + (", which are deleted" if remove else "")])


def _shards(output: Path) -> Iterator[Path]:
    """The outputs of the shards, in order, by the number of shards that their names tell."""
    numbered = Shard(1, 1).output(output).name.split("1-of-1")
    pattern = r"\d+-of-(\d+)".join(map(re.escape, numbered))
    names = [path.name.removesuffix(".part").removesuffix(".journal") for path in output.resolve().parent.iterdir()]
    counts = sorted({int(found[1]) for name in names if (found := re.fullmatch(pattern, name))})
    if not counts:
        raise UserError(f"{output}: there are no shards of it, such as {Shard(1, 2).output(output).name}")
    if len(counts) > 1:
        raise UserError(f"{output}: there are shards of {counts[0]} and of {counts[1]}; move those of one job away")
    yield from (Shard(index, counts[0]).output(output) for index in range(1, counts[0] + 1))


def _check(output: Path, shards: list[Path]) -> int:
    """How many lines of input they hold together; raise unless they are all, complete, and of one job."""
    problems, lines, jobs = [], 0, list[tuple[Path, dict[str, Any]]]()
    for path in shards:
        journal = partial_paths(path)[1]
        if not journal.exists():
            problems.append(
                f"{path}: " + ("has no journal, so it may be incomplete" if path.exists() else "is missing")
            )
            continue
        settings, point, _ = read_journal(journal)
        lines += point.lines
        jobs.append((path, {key: value for key, value in (settings or {}).items() if key != "shard"}))
        if not point.whole or not path.exists():
            problems.append(f"{path}: is incomplete ({point.lines:,} lines are done)")
        elif path.stat().st_size != point.size:
            problems.append(f"{path}: has changed since it was complete")
    problems += [f"{path}: has other settings than {jobs[0][0]}" for path, settings in jobs if settings != jobs[0][1]]
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        listed = "\n".join([*problems[:SHOWN], *more])
        raise UserError(f"{listed}\nrun the commands of these shards again, then merge {output}")
    total = jobs[0][1].get("lines")
    if total is not None and total != lines:
        raise UserError(f"{output}: the shards hold {lines:,} lines, but the input had {total:,}; begin again")
    return lines


def _join(files: Sequence[BinaryIO], target: BinaryIO) -> None:
    """Lines, plain or packed: joined streams of gzip or zstd are one."""
    for file in files:
        shutil.copyfileobj(file, target)


def _join_arrays(files: Sequence[BinaryIO], target: BinaryIO) -> None:
    """Rows of NumPy arrays under one header."""
    import numpy as np

    rows, shapes = 0, set()
    for file in files:
        np.lib.format.read_magic(file)
        (count, *rest), fortran, dtype = np.lib.format.read_array_header_1_0(file)
        rows += count
        shapes.add((tuple(rest), fortran, dtype.str))
    if len(shapes) > 1:
        raise UserError(f"{', '.join(str(file.name) for file in files[:SHOWN])} …: arrays of different rows")
    width, fortran, descr = shapes.pop()
    np.lib.format.write_array_header_1_0(target, {"descr": descr, "fortran_order": fortran, "shape": (rows, *width)})
    _join(files, target)
