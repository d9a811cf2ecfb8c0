"""Commands that import models of other libraries and export ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed.cli.messages import created_folders_as_note, show_notes, show_status
from allyouneed.cli.options import argument, option
from allyouneed.errors import UserError, printable
from allyouneed.errors.extras import EXTRAS, is_installed, require

if TYPE_CHECKING:
    from allyouneed.lab.selfcheck import Check

OutArgument = Annotated[Path, argument("OUT", "the folder to write; new or empty")]
NoCheckOption = Annotated[bool, option("--no-check", help="skip the comparison with the original")]


def import_(
    source: Annotated[Path, argument("MODEL", "a folder or model file of another library")],
    out: OutArgument,
    *,
    dtype: Annotated[
        str | None,
        option("--dtype", metavar="float32|bfloat16|float16", help="precision of the weights; default: unchanged"),
    ] = None,
    tokenizer: Annotated[
        Path | None, option("--tokenizer", metavar="FILE", help="the tokenizer of a single-file model")
    ] = None,
    no_check: NoCheckOption = False,
) -> None:
    """Convert a model of another library to a folder of ours, and compare the two."""
    from allyouneed.folder import as_dtype
    from allyouneed.interop.hf.checkpoint import is_hf_folder
    from allyouneed.interop.load import find_model, is_ctranslate2, load

    as_dtype(dtype)
    check_free(out)
    source = find_model(source)
    theirs = is_hf_folder(source) or is_ctranslate2(source)
    if source.is_dir() and not theirs and (source / "config.json").is_file():
        load(source)  # reports what is wrong with it
        raise UserError(f"{source}: is already a folder of allyouneed; copy it, or use `allyouneed export`")
    folder = load(source, dtype=dtype, as_stored=True, tokenizer=tokenizer)
    with created_folders_as_note(out):
        folder.save(out)
    show_notes(folder.notes)
    config: Any = folder.model.config
    parameters = config.cost().parameters
    show_status(f"{out}: a model for {folder.task['kind']}, {parameters:,} parameters")
    if not no_check and is_hf_folder(source):
        _report(_against_transformers(out, source, dtype))
    elif not no_check and is_ctranslate2(source) and folder.vocabularies is not None and is_installed("ctranslate2"):
        _report(_against_ctranslate2(out, source))


def export(
    model: Annotated[Path, argument("MODEL", "a model folder, or translator")],
    out: OutArgument,
    *,
    to: Annotated[str, option("--to", metavar="hf|ctranslate2", help="format to write")],
    no_check: NoCheckOption = False,
) -> None:
    """Export a model for another library, and compare the two."""
    from allyouneed.files import write_folder
    from allyouneed.interop.export import writer
    from allyouneed.interop.load import load

    write = writer(to)
    if to in EXTRAS:
        require(to, f"--to {to}")
    check_free(out)
    folder = load(model, as_stored=True)
    notes: list[str] = []
    with created_folders_as_note(out):
        write_folder(out, lambda path: notes.extend(write(folder, path)))
    show_notes(notes)
    check = CHECKS[to](model, out) if to in CHECKS and not no_check else None
    if check is not None and not check.agreed:
        shutil.rmtree(out)
        show_notes([f"{out} was removed: {to} computes something else from it"])
    else:
        show_status(f"{out}: written for {to}")
    _report(check)


def check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists; name a new folder")


def _against_transformers(ours: Path, theirs: Path, dtype: str | None = None) -> Check | None:
    from allyouneed.lab import selfcheck

    if not selfcheck.has_transformers():
        show_notes(["not compared with the original: transformers is not installed"])
        return None
    if ignored := selfcheck.ignored_option(theirs):
        show_notes([f"not compared with the original: the installed transformers ignores {ignored}"])
        return None
    return selfcheck.against_transformers(ours, theirs, dtype)


def _against_ctranslate2(ours: Path, theirs: Path) -> Check | None:
    from allyouneed.lab.selfcheck_ctranslate2 import against_ctranslate2  # installed, for it has written

    return against_ctranslate2(ours, theirs)


# format -> (our folder, the exported one)
CHECKS: dict[str, Callable[[Path, Path], Check | None]] = {
    "hf": _against_transformers,
    "ctranslate2": _against_ctranslate2,
}


def _report(check: Check | None) -> None:
    """Print the comparison; exit with code 1 if the two differ."""
    if check is None:
        return
    for line in check.lines:
        print(printable(line))
    if not check.agreed:
        raise typer.Exit(1)
