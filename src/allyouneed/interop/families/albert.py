"""ALBERT (Lan et al. 2020): BERT with narrow token vectors and one layer's weights for all layers."""

from __future__ import annotations

from allyouneed.interop.families.bert import (
    DEFAULTS,
    HARMLESS,
    encoder,
    head,
    head_words,
    learned,
    named_back,
    places,
    renamed,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family

OTHERS = {
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.1,
}


OLD = ("down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type", "num_memory_blocks")  # never used


@reading(*HARMLESS, *OLD)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    config.only("num_hidden_groups", 1)
    config.only("inner_group_num", 1)
    found = encoder(config, learned(config), inner=config["embedding_size"])
    found["encoder"][0]["share"] = True
    filling = found["head"]
    return found | {"head": head(config, filling, "tanh", "classifier_dropout_prob", ForPreTraining=filling)}


def back(said: Said) -> Tree:
    found = words(said, "Albert") | head_words(said, "Albert", "classifier_dropout_prob")
    found.pop("classifier_dropout", None)
    return found | places(said) | {"embedding_size": said["embed.inner"], "num_hidden_groups": 1, "inner_group_num": 1}


LINES = """
embed.tokens.weight = albert.embeddings.word_embeddings.weight
embed.positions.weight = albert.embeddings.position_embeddings.weight
embed.types.weight = albert.embeddings.token_type_embeddings.weight
embed.norm.* = albert.embeddings.LayerNorm.*
embed.widen.* = albert.encoder.embedding_hidden_mapping_in.*
encoder.blocks.0.sublayers.mixer.qkv.* = LAYER.attention.query.* + LAYER.attention.key.* + LAYER.attention.value.*
encoder.blocks.0.sublayers.mixer.out.* = LAYER.attention.dense.*
encoder.blocks.0.sublayers.channel.up.* = LAYER.ffn.*
encoder.blocks.0.sublayers.channel.down.* = LAYER.ffn_output.*
encoder.blocks.0.wiring.norms.0.* = LAYER.attention.LayerNorm.*
encoder.blocks.0.wiring.norms.1.* = LAYER.full_layer_layer_norm.*
head.bias = predictions.bias
head.transform.linear.* = predictions.dense.*
head.transform.norm.* = predictions.LayerNorm.*
head.hidden.* = albert.pooler.*
head.classes.* = classifier.*
head.tags.* = classifier.*
""".replace("LAYER", "albert.encoder.albert_layer_groups.0.albert_layers.0")
IGNORE = ("*.position_ids", "predictions.decoder.*")
SPARE = ("*.pooler.*", "sop_classifier.*")
UNDONE = named_back({"AlbertModel": "albert.pooler"})
FAMILY = Family("albert", tree, LINES, IGNORE, before=renamed, spare=SPARE, back=back, after=UNDONE)
