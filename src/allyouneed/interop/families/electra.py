"""ELECTRA (Clark et al. 2020): BERT with factorised embeddings. The head of its generator always uses GELU; its
discriminator predicts for each token whether it was replaced."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree
from allyouneed.interop.hf.weight_table import HfConfig

FIELDS = bert.MODEL + bert.HEADS + bert.LEARNED + """
embed.inner = embedding_size ?? 128 |inner
head.kind = architectures |class [Electra, {ForMaskedLM: vocabulary, ForSequenceClassification: classes,
    ForTokenClassification: tags, ForQuestionAnswering: span, ForPreTraining: tags, Model: none}]
head<vocabulary>.transform.activation: gelu
head<classes>.hidden: gelu
head<tags> = architectures, hidden_act |discriminator
?? {hidden_size: 256, num_attention_heads: 4, intermediate_size: 1024}
ignore summary_*
"""  # fmt: skip


def is_discriminator(config: HfConfig) -> bool:
    return bool((config.get("architectures") or [""])[0].endswith("ForPreTraining"))


def read_discriminator(config: ConfigReader, line: Line) -> Tree | object:
    replaced = {"labels": 1, "hidden": config.activation("hidden_act"), "dropout": 0.0}
    return replaced if is_discriminator(config) else OMITTED


def write_discriminator(ours: ModelTree, line: Line) -> Tree:
    return {} if ours.get("head.hidden") is None else {"architectures": ["ElectraForPreTraining"]}


DISCRIMINATES = Conversion(read_discriminator, write_discriminator)
LINES = bert.BODY.replace("bert.", "electra.") + """
embed.widen.* = electra.embeddings_project.*
head.weight = generator_lm_head.weight
head.bias = generator_lm_head.bias
head.transform.linear.* = generator_predictions.dense.*
head.transform.norm.* = generator_predictions.LayerNorm.*
"""  # fmt: skip
DISCRIMINATOR = """
head.hidden.* = discriminator_predictions.dense.*
head.tags.* = discriminator_predictions.dense_prediction.*
"""


def lines(config: HfConfig) -> str:
    return LINES + (DISCRIMINATOR if is_discriminator(config) else bert.CLASSES)


CONVERSIONS = {"discriminator": DISCRIMINATES}
IGNORED_WEIGHTS = ("*.position_ids", "generator_lm_head.weight")
FAMILY = bert.family("electra", "Electra", FIELDS, lines, CONVERSIONS, ignore=IGNORED_WEIGHTS, preserve=())
