"""mBART (Liu et al. 2020): BART with the norms before the sub-layers and one more at the end of each stack."""

from __future__ import annotations

from allyouneed.interop.families.bart import (
    CHANGES,
    DEFAULTS,
    HARMLESS,
    IGNORE,
    LINES,
    SPARE,
    completed,
    learned,
    tree_with,
    undone,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    for key in ("add_final_layer_norm", "normalize_before", "normalize_embedding"):
        config.only(key, True)
    return tree_with(config, learned(config), "pre-norm", norm=True)


def back(said: Said) -> Tree:
    return words(said, "MBartForConditionalGeneration") | {"max_position_embeddings": said["embed.positions.length"]}


FAMILY = Family("mbart", tree, LINES, IGNORE, CHANGES, completed, SPARE, back, undone)
