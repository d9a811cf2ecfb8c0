"""PEGASUS (Zhang et al. 2020): the paper's Transformer with pre-norm, a final norm in each stack, and all sines before
all cosines."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
    prepare,
)
from allyouneed.interop.families.marian import EQUIVALENT
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import is_headless
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights


@strict_config(  # positions are computed, not limited; the flags describe the family
    *IGNORED_KEYS,
    "max_position_embeddings",
    "add_bias_logits",
    "add_final_layer_norm",
    "normalize_before",
    "normalize_embedding",
    "static_position_embeddings",
)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    return build_tree(config, {"kind": "sinusoidal", "order": "halves"}, "pre-norm", norm=False)


def hf_config(ours: ModelTree) -> Tree:
    return config_fields(ours, "PegasusForConditionalGeneration") | {"max_position_embeddings": DEFAULT_POSITIONS}


def with_tables(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Their files have the sinusoids as well, one table for each side; an imported model keeps its own."""
    written, found = finish(config, weights)
    prefix = "" if is_headless(config) else "model."
    names = [f"{prefix}{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    kept = found.get(names[0])
    table = sinusoids(written["max_position_embeddings"], written["d_model"]) if kept is None else kept
    tables = {name: table.clone() for name in names if name not in found}
    return {**written, "max_position_embeddings": len(table)}, {**found, **tables}


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width), computed in double precision as theirs are."""
    features = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000, 2 * (features // 2) / width)
    return torch.from_numpy(np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], 1)).float()


DEFAULT_POSITIONS = 1024  # theirs is a table, ours is computed
PRESERVED = (*PRESERVED_WEIGHTS, "model.*.embed_positions.weight")
FAMILY = Family(
    "pegasus", tree, LINES, IGNORED_WEIGHTS, TRANSFORMS, prepare, PRESERVED, hf_config, with_tables, EQUIVALENT
)
