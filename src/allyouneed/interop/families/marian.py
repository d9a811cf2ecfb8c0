"""Marian (Junczys-Dowmunt et al. 2018) as the OPUS-MT models have it (Tiedemann, Thottingal 2020): the paper's
Transformer with all sines before all cosines."""

from __future__ import annotations

from allyouneed.interop.families.bart import CHANGES, DEFAULTS, HARMLESS, IGNORE, LINES, completed, tree_with
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family


@reading(*HARMLESS, "max_position_embeddings")  # places go on after it
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | {"vocab_size": 58101})
    config.only("static_position_embeddings", True)
    positions = {"kind": "sinusoidal", "order": "halves"}
    return tree_with(config, positions, "post-norm", norm=False)


FAMILY = Family("marian", tree, LINES, (*IGNORE, "model.*.embed_positions.weight"), CHANGES, completed)
