"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, query, key and value rows interleaved by head."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion
from allyouneed.interop.hf.decoders import MODEL, decoder_family
from allyouneed.interop.hf.transforms import grouped_qkv
from allyouneed.interop.hf.weight_table import HfConfig

# ignored are keys of the authors' own training code
FIELDS = MODEL + """
width = hidden_size, n_embed, n_embd |first
dropout = hidden_dropout ?? 0.0
embed: {scale: none, norm: {kind: layer}}
embed.norm.eps <- layer_norm_epsilon
decoder.repeat = n_layer, num_hidden_layers |first
decoder.mixer: {kind: attention, pattern: causal, positions: alibi}
decoder.mixer.heads = n_head, num_attention_heads |first
decoder.channel: {kind: ffn, activation: gelu-tanh}
decoder.channel.hidden <- hidden_size, n_embed, n_embd |times4
head.kind = architectures |decoder BloomForCausalLM
ignore attention_softmax_in_fp32, bias_dropout_fusion, masked_softmax_fusion, offset_alibi, seq_length,
    skip_bias_add*, slow_but_exact
"""  # fmt: skip
CONVERSIONS = {
    "first": Conversion(
        lambda config, line: config.first_of(*line.keys), lambda ours, line: {line.key: ours[line.path]}
    ),
    "times4": Conversion(lambda config, line: 4 * config.first_of(*line.keys)),
}
LINES = """
embed.tokens.weight = transformer.word_embeddings.weight
embed.norm.* = transformer.word_embeddings_layernorm.*
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = transformer.h.{n}.input_layernorm.*
decoder.blocks.{n}.wiring.norms.1.* = transformer.h.{n}.post_attention_layernorm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = transformer.h.{n}.self_attention.query_key_value.* |apart
decoder.blocks.{n}.sublayers.mixer.out.* = transformer.h.{n}.self_attention.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = transformer.h.{n}.mlp.dense_h_to_4h.*
decoder.blocks.{n}.sublayers.channel.down.* = transformer.h.{n}.mlp.dense_4h_to_h.*
decoder.end.* = transformer.ln_f.*
"""


def heads(config: HfConfig) -> int:
    return ConfigReader(config).first_of("n_head", "num_attention_heads")


APART = grouped_qkv(lambda config: (heads(config), heads(config)))
TOKENS = "transformer.word_embeddings.weight"
FAMILY = decoder_family("bloom", FIELDS, LINES, TOKENS, CONVERSIONS, transforms={"apart": APART})
