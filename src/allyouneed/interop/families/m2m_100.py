"""M2M-100 (Fan et al. 2020): norms before the sub-layers, and tensor2tensor's sinusoids, counted from behind the number
of the padding token."""

from __future__ import annotations

from allyouneed.interop.families.bart import (
    CHANGES,
    DEFAULTS,
    HARMLESS,
    IGNORE,
    LINES,
    SPARE,
    completed,
    tree_with,
    undone,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family

OTHERS = {
    "scale_embedding": True,
    "pad_token_id": 1,
    "vocab_size": 128112,
    "activation_function": "relu",
    "attention_dropout": 0.1,
}


@reading(*HARMLESS, "max_position_embeddings")  # places go on after it
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    if config["d_model"] % 2:
        config.problems.append(f"d_model: {config['d_model']} is odd, and the last feature would have no place")
    positions = {"kind": "sinusoidal", "order": "halves", "closed": True, "offset": config["pad_token_id"] + 1}
    return tree_with(config, positions, "pre-norm", norm=False)


def back(said: Said) -> Tree:
    offset = said.get("embed.positions.offset", 0)
    named = words(said, "M2M100ForConditionalGeneration")
    return named | {"max_position_embeddings": PLACES, "pad_token_id": max(offset - 1, 0)}


PLACES = 1024  # as of the reference: theirs fills a table, ours counts on
UNBIASED = LINES.replace("head.bias = final_logits_bias |row", "")
IGNORED = (*IGNORE, "model.*.embed_positions.weights")
FAMILY = Family("m2m_100", tree, UNBIASED, IGNORED, CHANGES, completed, SPARE, back, undone)
