"""M2M-100 (Fan et al. 2020): pre-norm, and tensor2tensor's sinusoids, starting after `pad_token_id`."""

from __future__ import annotations

from allyouneed.interop.families.bart import Variant
from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_writer import ModelTree


def positions(config: ConfigReader) -> Tree:
    if config["d_model"] % 2:
        config.problems.append(f"d_model: {config['d_model']} is odd; the last feature would have no sinusoid")
    return {"kind": "sinusoidal", "order": "halves", "closed": True, "offset": config["pad_token_id"] + 1}


def fields(ours: ModelTree) -> Tree:
    return {"pad_token_id": max(ours.get("embed.positions.offset", 0) - 1, 0)}


FAMILY = Variant(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    positions,
    "pre-norm",
    defaults={
        "scale_embedding": True,
        "pad_token_id": 1,
        "vocab_size": 128112,
        "activation_function": "relu",
        "attention_dropout": 0.1,
    },
    table=1024,  # of the published model
    fields=fields,
    ignored_weights=("model.*.embed_positions.weights",),
    has_bias=False,
).family()
