"""XLNet (Yang et al. 2019). The memory length (`mem_len`, `reuse_len`) is chosen at run time."""

from __future__ import annotations

from allyouneed.interop.hf.config_table import ConfigTable, Conversion
from allyouneed.interop.hf.transforms import ROW, add_prefix, chain, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform

FIELDS = """
attn_type in [bi]
bi_data in [false]
summary_type in [last]
summary_use_proj in [true]
summary_activation in [tanh]
kind: encoder
vocab = vocab_size ?? 32000
width = d_model ?? 1024
dropout = dropout ?? 0.1
norm: {kind: layer}
norm.eps = layer_norm_eps ?? 1.0e-12
embed: {scale: none, asks: true}
embed.tied = tie_word_embeddings ?? true
encoder.repeat = n_layer ?? 24
encoder.mixer: {kind: attention, pattern: permuted, positions: {kind: xlnet}, bias: false, cache: hidden}
encoder.mixer.heads = n_head ?? 16
encoder.mixer.head_width -> d_head or d_model // n_head
encoder.mixer.positions.clamp = clamp_len ?? -1 |clamp
encoder.mixer.dropout <- dropout
encoder.channel: {kind: ffn}
encoder.channel.hidden = d_inner ?? 4096
encoder.channel.activation = ff_activation ?? gelu |activation
encoder.channel.dropout <- dropout
head.kind = architectures |class [XLNet, {LMHeadModel: vocabulary, ForMaskedLM: vocabulary,
    ForSequenceClassification: classes, ForTokenClassification: tags, Model: none}]
head<vocabulary>: {bias: true}
head<classes>: {hidden: tanh, pool: last}
head<classes>.labels = id2label, label2id |labels
head<classes>.dropout = summary_last_dropout |optional
head<tags>.labels = id2label, label2id |labels
head<tags>.dropout = summary_last_dropout |optional
ignore mem_len, reuse_len, use_mems_*, start_n_top, end_n_top, n_token, untie_r, d_head, same_length
"""
CLAMP = Conversion(
    lambda config, line: config[line.key] if config[line.key] > 0 else None, lambda ours, line: ours.get(line.path, -1)
)
LINES = """
embed.tokens.weight = transformer.word_embedding.weight
embed.asking.weight = transformer.mask_emb |first
encoder.blocks.{n}.sublayers.mixer.qkv.weight = LAYER.rel_attn.q |into + LAYER.rel_attn.k |into + LAYER.rel_attn.v |into
encoder.blocks.{n}.sublayers.mixer.out.weight = LAYER.rel_attn.o |out
encoder.blocks.{n}.sublayers.mixer.relative.far.weight = LAYER.rel_attn.r |into
encoder.blocks.{n}.sublayers.mixer.relative.biases.content = LAYER.rel_attn.r_w_bias |between
encoder.blocks.{n}.sublayers.mixer.relative.biases.place = LAYER.rel_attn.r_r_bias |between
encoder.blocks.{n}.sublayers.mixer.relative.kinds.bias = LAYER.rel_attn.r_s_bias |between
encoder.blocks.{n}.sublayers.mixer.relative.kinds.vectors = LAYER.rel_attn.seg_embed |between
encoder.blocks.{n}.sublayers.channel.up.* = LAYER.ff.layer_1.*
encoder.blocks.{n}.sublayers.channel.down.* = LAYER.ff.layer_2.*
encoder.blocks.{n}.wiring.norms.0.* = LAYER.rel_attn.layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = LAYER.ff.layer_norm.*
head.weight = lm_loss.weight
head.bias = lm_loss.bias
head.hidden.* = sequence_summary.summary.*
head.classes.* = logits_proj.*
head.tags.* = classifier.*
""".replace("LAYER", "transformer.layer.{n}")


def head_shape(config: HfConfig) -> tuple[int, int]:
    """The last two dimensions of their tensors: (heads, head_width)."""
    return config["n_head"], config["d_model"] // config["n_head"]


# theirs are (width, heads, head_width), biases (…, heads, head_width)
TRANSFORMS = {
    "into": TensorTransform(
        lambda tensor, config: tensor.flatten(1).T, lambda tensor, config: tensor.T.unflatten(1, head_shape(config))
    ),
    "out": TensorTransform(
        lambda tensor, config: tensor.flatten(1), lambda tensor, config: tensor.unflatten(1, head_shape(config))
    ),
    "between": TensorTransform(lambda tensor, config: tensor.unsqueeze(-2), lambda tensor, config: tensor.squeeze(-2)),
    "first": ROW,
}


PREPARE = chain(add_prefix("transformer."), untie_head("lm_loss.weight", "transformer.word_embedding.weight"))
FAMILY = Family(
    "xlnet",
    ConfigTable(FIELDS, {"clamp": CLAMP}),
    LINES,
    ("lm_loss.weight",),
    TRANSFORMS,
    PREPARE,
    finish=remove_prefix("transformer."),
)
