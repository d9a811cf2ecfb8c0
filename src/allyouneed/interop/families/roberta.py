"""RoBERTa (Liu et al. 2019): BERT with positions that start after `pad_token_id`. Its head always uses GELU."""

from __future__ import annotations

from allyouneed.interop.families import bert

FIELDS = bert.MODEL + bert.NO_PRETRAINING + bert.HEADS + bert.OFFSET + """
head<vocabulary>.transform.activation: gelu
?? {vocab_size: 50265, pad_token_id: 1}
"""  # fmt: skip
HEAD = """
head.weight = lm_head.decoder.weight
head.bias = lm_head.bias
head.transform.linear.* = lm_head.dense.*
head.transform.norm.* = lm_head.layer_norm.*
"""
IGNORED_WEIGHTS = ("*.position_ids", "lm_head.decoder.*")
PRESERVED_WEIGHTS = ("*.pooler.*", "lm_head.bias")
LINES = bert.untied_bias(bert.BODY.replace("bert.", "roberta.") + HEAD + bert.CLASSES, "lm_head")
POOLERS = {"RobertaModel": "roberta.pooler.dense"}
FAMILY = bert.family("roberta", "Roberta", FIELDS, LINES, {}, POOLERS, IGNORED_WEIGHTS, PRESERVED_WEIGHTS)
