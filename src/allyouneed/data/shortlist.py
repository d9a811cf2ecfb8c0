"""Shortlist of a translation model: which tokens the translation of a source may have (Jean et al. 2015, 3.3).

`shortlist.safetensors` of a model folder has three tensors: `always` (n,), tokens that any translation may have, `ids`
(m,), those listed for each source token, one list after the other, and `offsets` (source tokens + 1,), where each list
begins and the last one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.files.mapped import MappedFile
from allyouneed.errors import UserError

MULTIPLE = 8  # the number of tokens that are allowed, as in Marian


@dataclass(frozen=True, eq=False)
class Shortlist:
    """All int64. `size`: of the target vocabulary."""

    always: Any
    offsets: Any
    ids: Any
    size: int

    @classmethod
    def checked(cls, where: Path, always: Any, offsets: Any, ids: Any, sizes: tuple[int, int]) -> Shortlist:
        """`sizes`: of the source and the target vocabulary."""
        tokens = np.concatenate([always, ids])
        if not 1 <= len(offsets) <= sizes[0] + 1:
            raise UserError(f"{where}: lists for {len(offsets) - 1:,} source tokens; the model has {sizes[0]:,}")
        if offsets[0] != 0 or offsets[-1] != len(ids) or bool((offsets[1:] < offsets[:-1]).any()):
            raise UserError(f"{where}: damaged: its lists do not follow each other")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < sizes[1]:
            raise UserError(f"{where}: lists tokens outside the model's {sizes[1]:,}")
        if not len(always):
            raise UserError(f"{where}: no token is always allowed, not even the end mark")
        return cls(always, offsets, ids, sizes[1])

    def allowed(self, source: Sequence[int]) -> Tensor:
        """The tokens that the translation of these source tokens may have, sorted; others fill up a multiple of 8."""
        mask, lists = np.zeros(self.size, np.bool_), len(self.offsets) - 1
        mask[self.always] = True
        for token in set(source):
            if token < lists:
                mask[self.ids[self.offsets[token] : self.offsets[token + 1]]] = True
        missing = -int(mask.sum()) % MULTIPLE
        mask[np.flatnonzero(~mask)[:missing]] = True
        return torch.from_numpy(np.flatnonzero(mask))

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        parts = {"always": self.always, "ids": self.ids}
        tensors = {name: torch.from_numpy(part.astype(np.int32)) for name, part in parts.items()}
        save_file(tensors | {"offsets": torch.from_numpy(self.offsets)}, path)

    @classmethod
    def load(cls, path: Path, vocabs: Any) -> Shortlist:
        """`vocabs`: the sizes of the model's vocabularies, `source` and `target`."""
        stored = MappedFile(path)
        if vocabs is None:
            raise UserError(f"{path}: the model has no vocabulary to choose from; remove it from config.json")
        if set(stored) != {"always", "offsets", "ids"}:
            raise UserError(f"{path}: not a shortlist (tensors always, offsets and ids)")
        parts = {name: stored[name] for name in stored}
        if any(part.dim() != 1 or part.dtype not in (torch.int32, torch.int64) for part in parts.values()):
            raise UserError(f"{path}: not a shortlist: its tensors must be lists of integers")
        always, offsets, ids = (parts[name].long().numpy() for name in ("always", "offsets", "ids"))
        return cls.checked(path, always, offsets, ids, (vocabs.source, vocabs.target))
