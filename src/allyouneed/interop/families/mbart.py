"""mBART (Liu et al. 2020): BART with pre-norm and a final norm in each stack."""

from __future__ import annotations

from allyouneed.interop.families.bart import (
    DEFAULTS,
    IGNORED_KEYS,
    IGNORED_WEIGHTS,
    LINES,
    PRESERVED_WEIGHTS,
    TRANSFORMS,
    build_tree,
    config_fields,
    finish,
    learned,
    prepare,
)
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    for key in ("add_final_layer_norm", "normalize_before", "normalize_embedding"):
        config.require(key, True)
    return build_tree(config, learned(config), "pre-norm", norm=True)


def hf_config(ours: ModelTree) -> Tree:
    return config_fields(ours, "MBartForConditionalGeneration") | {
        "max_position_embeddings": ours["embed.positions.length"]
    }


FAMILY = Family("mbart", tree, LINES, IGNORED_WEIGHTS, TRANSFORMS, prepare, PRESERVED_WEIGHTS, hf_config, finish)
