"""ELECTRA (Clark et al. 2020): BERT with factorised embeddings. The head of its generator always uses GELU; its
discriminator predicts for each token whether it was replaced."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.families.roberta import with_gelu
from allyouneed.interop.families.roformer import embedding_width
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig

OWN_DEFAULTS = {
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}


@strict_config(*bert.IGNORED_KEYS, "summary_*")
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(bert.DEFAULTS | OWN_DEFAULTS)
    found = bert.encoder(config, bert.learned(config), inner=embedding_width(config))
    replaced = {"kind": "tags", "labels": 1, "hidden": config.activation("hidden_act"), "dropout": 0.0}
    return found | {"head": bert.head(config, with_gelu(found["head"]), "gelu", ForPreTraining=replaced)}


def hf_config(ours: ModelTree) -> Tree:
    found = (
        bert.config_fields(ours, "Electra")
        | bert.position_fields(ours)
        | {"embedding_size": ours.get("embed.inner", ours["width"])}
    )
    is_discriminator = ours["head.kind"] == "tags" and ours.get("head.hidden") is not None
    return found | {"architectures": ["ElectraForPreTraining"]} if is_discriminator else found


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
    is_discriminator = (config.get("architectures") or [""])[0].endswith("ForPreTraining")
    return LINES + (DISCRIMINATOR if is_discriminator else bert.CLASSES)


IGNORED_WEIGHTS = ("*.position_ids", "generator_lm_head.weight")
FAMILY = Family(
    "electra",
    tree,
    lines,
    IGNORED_WEIGHTS,
    prepare=bert.normalize_names,
    hf_config=hf_config,
    finish=bert.restore_names({}),
)
