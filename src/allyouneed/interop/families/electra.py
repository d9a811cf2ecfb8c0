"""ELECTRA (Clark et al. 2020): BERT with narrow token vectors. Its generator fills masks in, with a gelu in its head
whatever the layers have; its discriminator says of each token whether it was replaced."""

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
    words,
)
from allyouneed.interop.families.roberta import with_gelu
from allyouneed.interop.families.roformer import narrower
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs

OTHERS = {
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}


@reading(*HARMLESS, "summary_*")
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    found = encoder(config, learned(config), inner=narrower(config))
    replaced = {"kind": "tags", "labels": 1, "hidden": config.activation("hidden_act"), "dropout": 0.0}
    return found | {"head": head(config, with_gelu(found["head"]), "gelu", ForPreTraining=replaced)}


def back(said: Said) -> Tree:
    found = words(said, "Electra") | places(said) | {"embedding_size": said.get("embed.inner", said["width"])}
    discriminates = said["head.kind"] == "tags" and said.get("head.hidden") is not None
    return found | {"architectures": ["ElectraForPreTraining"]} if discriminates else found


LINES = BODY.replace("bert.", "electra.") + """
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


def lines(config: Theirs) -> str:
    discriminates = (config.get("architectures") or [""])[0].endswith("ForPreTraining")
    return LINES + (DISCRIMINATOR if discriminates else CLASSES)


IGNORE = ("*.position_ids", "generator_lm_head.weight")
FAMILY = Family("electra", tree, lines, IGNORE, before=renamed, back=back, after=named_back({}))
