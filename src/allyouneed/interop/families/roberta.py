"""RoBERTa (Liu et al. 2019): BERT, whose places begin behind the number of the padding token. Its head has a gelu,
whatever the layers have."""

from __future__ import annotations

from allyouneed.interop.families.bert import (
    BODY,
    CLASSES,
    DEFAULTS,
    HARMLESS,
    encoder,
    head,
    learned,
    named_back,
    places,
    renamed,
    untied_bias,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1})
    found = encoder(config, learned(config, offset=config["pad_token_id"] + 1))
    return found | {"head": head(config, with_gelu(found["head"]), "tanh")}


def with_gelu(vocabulary: Tree) -> Tree:
    return vocabulary | {"transform": vocabulary["transform"] | {"activation": "gelu"}}


def back(said: Said) -> Tree:
    return words(said, "Roberta") | places(said)


HEAD = """
head.weight = lm_head.decoder.weight
head.bias = lm_head.bias
head.transform.linear.* = lm_head.dense.*
head.transform.norm.* = lm_head.layer_norm.*
"""
IGNORE = ("*.position_ids", "lm_head.decoder.*")
SPARE = ("*.pooler.*", "lm_head.bias")
FAMILY = Family(
    "roberta",
    tree,
    untied_bias(BODY.replace("bert.", "roberta.") + HEAD + CLASSES, "lm_head"),
    IGNORE,
    before=renamed,
    spare=SPARE,
    back=back,
    after=named_back({"RobertaModel": "roberta.pooler.dense"}),
)
