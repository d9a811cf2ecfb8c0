"""Export a model folder for another project: one writer for each target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from allyouneed.errors import UserError
from allyouneed.folder import Folder

TARGETS = ("hf", "ctranslate2")


def writer(target: str) -> Callable[[Folder, Path], list[str]]:
    """`write(folder, out)` of this target: it fills the empty folder `out` and returns notes."""
    if target == "hf":
        from allyouneed.interop.hf.export import write as write_hf

        return write_hf
    if target == "ctranslate2":
        from allyouneed.interop.ctranslate2.write import write as write_ctranslate2

        return write_ctranslate2
    raise UserError(f"--to {target}: unknown export target (allowed: {', '.join(TARGETS)})")
