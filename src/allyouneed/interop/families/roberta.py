"""RoBERTa (Liu et al. 2019): BERT with positions that start after `pad_token_id`. Its head always uses GELU."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family


@strict_config(*bert.IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(bert.DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1})
    found = bert.encoder(config, bert.learned(config, offset=config["pad_token_id"] + 1))
    return found | {"head": bert.head(config, with_gelu(found["head"]), "tanh")}


def with_gelu(vocabulary: Tree) -> Tree:
    return vocabulary | {"transform": vocabulary["transform"] | {"activation": "gelu"}}


def hf_config(ours: ModelTree) -> Tree:
    return bert.config_fields(ours, "Roberta") | bert.position_fields(ours)


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
    bert.untied_bias(bert.BODY.replace("bert.", "roberta.") + HEAD + bert.CLASSES, "lm_head"),
    IGNORED_WEIGHTS,
    prepare=bert.normalize_names,
    preserve=PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=bert.restore_names({"RobertaModel": "roberta.pooler.dense"}),
)
