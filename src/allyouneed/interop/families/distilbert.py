"""DistilBERT (Sanh et al. 2019): BERT with half the layers and no token types.

Sinusoidal positions (`sinusoidal_pos_embds`) are stored as a table too, and read as one.
"""

from __future__ import annotations

from allyouneed.interop.families import bert

FIELDS = """
kind: encoder
vocab = vocab_size ?? 30522
width = dim ?? 768
dropout = dropout ?? 0.1
norm: {kind: layer, eps: 1.0e-12}
embed: {scale: none, positions: {kind: learned}, norm: {kind: layer, eps: 1.0e-12}}
embed.positions.length = max_position_embeddings ?? 512
embed.tied = tie_word_embeddings ?? true
encoder.repeat = n_layers ?? 6
encoder.mixer: {kind: attention}
encoder.mixer.heads = n_heads ?? 12
encoder.mixer.dropout = attention_dropout ?? 0.1
encoder.channel: {kind: ffn}
encoder.channel.hidden = hidden_dim ?? 3072
encoder.channel.activation = activation ?? gelu |activation
head<vocabulary>: {bias: true, transform: {norm: {kind: layer, eps: 1.0e-12}}}
head<vocabulary>.transform.activation <- activation |activation
head<classes>.hidden: relu
head<classes>.labels = id2label, label2id |labels
head<classes>.dropout = seq_classif_dropout ?? 0.2 |optional
head<tags>.labels = id2label, label2id |labels
ignore qa_dropout, sinusoidal_pos_embds, tie_weights_, output_past
"""
LINES = """
embed.tokens.weight = distilbert.embeddings.word_embeddings.weight
embed.positions.weight = distilbert.embeddings.position_embeddings.weight
embed.norm.* = distilbert.embeddings.LayerNorm.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = LAYER.attention.q_lin.* + LAYER.attention.k_lin.* + LAYER.attention.v_lin.*
encoder.blocks.{n}.sublayers.mixer.out.* = LAYER.attention.out_lin.*
encoder.blocks.{n}.sublayers.channel.up.* = LAYER.ffn.lin1.*
encoder.blocks.{n}.sublayers.channel.down.* = LAYER.ffn.lin2.*
encoder.blocks.{n}.wiring.norms.0.* = LAYER.sa_layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = LAYER.output_layer_norm.*
head.weight = vocab_projector.weight
head.bias = vocab_projector.bias
head.transform.linear.* = vocab_transform.*
head.transform.norm.* = vocab_layer_norm.*
head.hidden.* = pre_classifier.*
head.classes.* = classifier.*
head.tags.* = classifier.*
head.ends.* = qa_outputs.*
""".replace("LAYER", "distilbert.transformer.layer.{n}")
IGNORED_WEIGHTS = ("*.position_ids", "vocab_projector.weight")
FAMILY = bert.family(
    "distilbert", "DistilBert", bert.NO_PRETRAINING + FIELDS, LINES, ignore=IGNORED_WEIGHTS, preserve=()
)
