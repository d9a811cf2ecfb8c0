"""RoBERTa (Liu et al. 2019): BERT with positions that start after `pad_token_id`. Its head always uses GELU."""

from __future__ import annotations

from allyouneed.interop.families.bert import (
    BODY,
    CLASSES,
    DEFAULTS,
    IGNORED_KEYS,
    config_fields,
    encoder,
    head,
    learned,
    normalize_names,
    position_fields,
    restore_names,
    untied_bias,
)
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1})
    found = encoder(config, learned(config, offset=config["pad_token_id"] + 1))
    return found | {"head": head(config, with_gelu(found["head"]), "tanh")}


def with_gelu(vocabulary: Tree) -> Tree:
    return vocabulary | {"transform": vocabulary["transform"] | {"activation": "gelu"}}


def hf_config(ours: ModelTree) -> Tree:
    return config_fields(ours, "Roberta") | position_fields(ours)


HEAD = """
head.weight = lm_head.decoder.weight
head.bias = lm_head.bias
head.transform.linear.* = lm_head.dense.*
head.transform.norm.* = lm_head.layer_norm.*
"""
IGNORED_WEIGHTS = ("*.position_ids", "lm_head.decoder.*")
PRESERVED_WEIGHTS = ("*.pooler.*", "lm_head.bias")
FAMILY = Family(
    "roberta",
    tree,
    untied_bias(BODY.replace("bert.", "roberta.") + HEAD + CLASSES, "lm_head"),
    IGNORED_WEIGHTS,
    prepare=normalize_names,
    preserve=PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=restore_names({"RobertaModel": "roberta.pooler.dense"}),
)
