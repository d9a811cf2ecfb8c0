"""M2M-100 (Fan et al. 2020): pre-norm, and tensor2tensor's sinusoids, starting after `pad_token_id`."""

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
    prepare,
)
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

OWN_DEFAULTS = {
    "scale_embedding": True,
    "pad_token_id": 1,
    "vocab_size": 128112,
    "activation_function": "relu",
    "attention_dropout": 0.1,
}


@strict_config(*IGNORED_KEYS, "max_position_embeddings")  # positions are computed, not limited
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS | OWN_DEFAULTS)
    if config["d_model"] % 2:
        config.problems.append(f"d_model: {config['d_model']} is odd; the last feature would have no sinusoid")
    positions = {"kind": "sinusoidal", "order": "halves", "closed": True, "offset": config["pad_token_id"] + 1}
    return build_tree(config, positions, "pre-norm", norm=False)


def hf_config(ours: ModelTree) -> Tree:
    offset = ours.get("embed.positions.offset", 0)
    named = config_fields(ours, "M2M100ForConditionalGeneration")
    return named | {"max_position_embeddings": DEFAULT_POSITIONS, "pad_token_id": max(offset - 1, 0)}


DEFAULT_POSITIONS = 1024  # of the published model; theirs is a table, ours is computed
UNBIASED = LINES.replace("head.bias = final_logits_bias |row", "")
IGNORED = (*IGNORED_WEIGHTS, "model.*.embed_positions.weights")
FAMILY = Family("m2m_100", tree, UNBIASED, IGNORED, TRANSFORMS, prepare, PRESERVED_WEIGHTS, hf_config, finish)
