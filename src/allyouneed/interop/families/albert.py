"""ALBERT (Lan et al. 2020): BERT with factorised embeddings and one layer's weights shared by all layers."""

from __future__ import annotations

from allyouneed.interop.families import bert

HEADS = bert.HEADS.replace("classifier_dropout", "classifier_dropout_prob")
FIELDS = bert.MODEL + HEADS + bert.LEARNED + """
embed.inner = embedding_size ?? 128 |inner always
encoder.share: true
head<vocabulary>.pair = architectures |pair Albert
num_hidden_groups in [1]
inner_group_num in [1]
-> {num_hidden_groups: 1, inner_group_num: 1}
?? {vocab_size: 30000, hidden_size: 4096, num_attention_heads: 64, intermediate_size: 16384, hidden_act: gelu_new}
?? {hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, classifier_dropout_prob: 0.1}
ignore down_scale_factor, gap_size, layers_to_keep, net_structure_type, num_memory_blocks
"""  # fmt: skip
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
head.pooler.* = albert.pooler.*
head.pair.* = sop_classifier.classifier.*
head.hidden.* = albert.pooler.*
head.classes.* = classifier.*
head.tags.* = classifier.*
head.ends.* = qa_outputs.*
""".replace("LAYER", "albert.encoder.albert_layer_groups.0.albert_layers.0")
FAMILY = bert.family(
    "albert",
    "Albert",
    FIELDS,
    LINES,
    poolers={"AlbertModel": "albert.pooler"},
    ignore=("*.position_ids", "predictions.decoder.*"),
    preserve=("*.pooler.*", "sop_classifier.*"),
)
