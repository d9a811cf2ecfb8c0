"""PEGASUS (Zhang et al. 2020): the paper's Transformer with pre-norm, a final norm in each stack, and all sines before
all cosines."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from allyouneed.interop.families import bart
from allyouneed.interop.families.marian import EQUIVALENT, SINUSOIDS
from allyouneed.interop.hf.config_reader import is_headless
from allyouneed.interop.hf.weight_table import HfConfig, Weights

# ignored keys describe the family; the published models' position tables have 1024 rows, ours are computed
FIELDS = bart.MODEL + SINUSOIDS + """
-> {max_position_embeddings: 1024}
ignore add_bias_logits, add_final_layer_norm, normalize_before, normalize_embedding, static_position_embeddings
"""  # fmt: skip


def with_tables(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Their files have the sinusoids as well, one table for each side; an imported model keeps its own."""
    written, found = bart.finish(config, weights)
    prefix = "" if is_headless(config) else "model."
    names = [f"{prefix}{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    kept = found.get(names[0])
    table = sinusoid_rows(written["max_position_embeddings"], written["d_model"]) if kept is None else kept
    tables = {name: table.clone() for name in names if name not in found}
    return {**written, "max_position_embeddings": len(table)}, {**found, **tables}


def sinusoid_rows(length: int, width: int) -> Tensor:
    """(length, width), computed in double precision as theirs are."""
    features = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000, 2 * (features // 2) / width)
    return torch.from_numpy(np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], 1)).float()


FAMILY = bart.family(
    "pegasus",
    "Pegasus",
    FIELDS,
    preserve=("model.*.embed_positions.weight",),
    finish=with_tables,
    equivalent=EQUIVALENT,
)
