"""Commands that bring models in from elsewhere and give ours to others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allyouneed.cli.options import option
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.lab.selfcheck import Check

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="the folder to write; it must not exist, or be empty")]
NoCheckOption = Annotated[bool, option("--no-check", help="do not compare with the original afterwards")]


def import_(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="a Hugging Face folder, or a model that is one file")],
    out: OutArgument,
    *,
    dtype: Annotated[
        str | None,
        option("--dtype", metavar="float32|bfloat16|float16", help="store the weights so; as they are if not given"),
    ] = None,
    tokenizer: Annotated[
        Path | None, option("--tokenizer", metavar="FILE", help="the tokenizer of a model that is one file")
    ] = None,
    no_check: NoCheckOption = False,
) -> None:
    """Write somebody else's model as a folder of ours, and compare the two."""
    from allyouneed.folder import as_dtype
    from allyouneed.interop.hf.checkpoint import is_hf_folder
    from allyouneed.interop.load import load

    as_dtype(dtype)
    _free(out)
    if source.is_dir() and not is_hf_folder(source) and (source / "config.json").is_file():
        load(source)  # says what is wrong with it
        raise UserError(f"{source}: is a folder of ours already; copy it, or use `allyouneed export`")
    folder = load(source, dtype=dtype, as_stored=True, tokenizer=tokenizer)
    folder.save(out)
    for note in folder.notes:
        print(f"note: {note}", file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in folder.model.parameters())
    print(f"{out}: a model for {folder.task['kind']}, {parameters:,} parameters", file=sys.stderr)
    if source.is_dir() and not no_check:
        _report(_against_transformers(out, source, dtype))


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder")],
    out: OutArgument,
    *,
    to: Annotated[str, option("--to", metavar="hf|ctranslate2", help="who is to read it")],
    no_check: NoCheckOption = False,
) -> None:
    """Write a model for other people's programs, and compare the two."""
    from allyouneed.files import write_folder
    from allyouneed.interop.export import writer
    from allyouneed.interop.load import load

    write = writer(to)
    _free(out)
    folder = load(model, as_stored=True)
    notes: list[str] = []
    write_folder(out, lambda place: notes.extend(write(folder, place)))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{out}: written for {to}", file=sys.stderr)
    if to in CHECKS and not no_check:
        _report(CHECKS[to](model, out))


def _free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is in the way; name a folder that does not exist yet")


def _against_transformers(ours: Path, theirs: Path, dtype: str | None = None) -> Check | None:
    from allyouneed.lab import selfcheck

    if not selfcheck.has_transformers():
        print("note: not compared with the original: transformers is not installed", file=sys.stderr)
        return None
    return selfcheck.against_transformers(ours, theirs, dtype)


def _against_ctranslate2(ours: Path, theirs: Path) -> Check | None:
    from allyouneed.lab.selfcheck_ctranslate2 import against_ctranslate2  # the library is there: it has written

    return against_ctranslate2(ours, theirs)


# (a folder, what was written)
CHECKS: dict[str, Callable[[Path, Path], Check | None]] = {
    "hf": _against_transformers,
    "ctranslate2": _against_ctranslate2,
}


def _report(check: Check | None) -> None:
    """Say what was compared; exit code 1 when it is not the same."""
    if check is None:
        return
    for line in check.lines:
        print(line)
    if not check.agreed:
        raise typer.Exit(1)
