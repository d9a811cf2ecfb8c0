"""ALBERT (Lan et al. 2020): BERT with factorised embeddings and one layer's weights shared by all layers."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

OWN_DEFAULTS = {
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


OLD = ("down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type", "num_memory_blocks")  # no effect


@strict_config(*bert.IGNORED_KEYS, *OLD)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(bert.DEFAULTS | OWN_DEFAULTS)
    config.require("num_hidden_groups", 1)
    config.require("inner_group_num", 1)
    found = bert.encoder(config, bert.learned(config), inner=config["embedding_size"])
    found["encoder"][0]["share"] = True
    vocabulary = found["head"]
    return found | {"head": bert.head(config, vocabulary, "tanh", "classifier_dropout_prob", ForPreTraining=vocabulary)}


def hf_config(ours: ModelTree) -> Tree:
    found = bert.config_fields(ours, "Albert") | bert.head_fields(ours, "Albert", "classifier_dropout_prob")
    found.pop("classifier_dropout", None)
    return (
        found
        | bert.position_fields(ours)
        | {"embedding_size": ours["embed.inner"], "num_hidden_groups": 1, "inner_group_num": 1}
    )


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
IGNORED_WEIGHTS = ("*.position_ids", "predictions.decoder.*")
PRESERVED_WEIGHTS = ("*.pooler.*", "sop_classifier.*")
FINISH = bert.restore_names({"AlbertModel": "albert.pooler"})
FAMILY = Family(
    "albert",
    tree,
    LINES,
    IGNORED_WEIGHTS,
    prepare=bert.normalize_names,
    preserve=PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=FINISH,
)
