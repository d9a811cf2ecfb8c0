"""Export a model folder for another project: one writer for each target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.read_back import check_exported
from allyouneed.nn.models.precision import stored_as, widen

TARGETS = ("hf", "ctranslate2")
Writer = Callable[[Folder, Path], list[str]]


def writer(target: str) -> Writer:
    """`write(folder, out)` of this target: it fills the empty folder `out` and returns notes.

    Neither target reads our storage formats: quantized weights are widened first. What would not be exact is refused.
    """
    if target == "hf":
        from allyouneed.interop.hf.export import write as write_hf

        return _checked(write_hf)
    if target == "ctranslate2":
        from allyouneed.interop.ctranslate2.write import write as write_ctranslate2

        return _checked(write_ctranslate2)
    raise UserError(f"--to {target}: unknown export target (allowed: {', '.join(TARGETS)})")


def _checked(write: Writer) -> Writer:
    def widen_write_and_check(folder: Folder, out: Path) -> list[str]:
        notes, stored = list[str](), stored_as(folder.model)
        if stored is not None:
            folder = replace(folder, model=widen(folder.model))
            notes.append(
                f"the {stored} weights were widened to float32, since the target does not read our {stored} format"
            )
        notes += write(folder, out)
        check_exported(folder, out)
        return notes

    return widen_write_and_check
