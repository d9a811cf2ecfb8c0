"""MPT (MosaicML 2023): ALiBi, no biases anywhere."""

from __future__ import annotations

from allyouneed.interop.hf.config_table import Conversion
from allyouneed.interop.hf.decoders import MODEL, decoder_family

# the implementation has no learned positions and a hidden width of 4 × d_model, whatever the config says; the rest of
# the ignored keys concerns training
FIELDS = MODEL + """
width = d_model
dropout = resid_pdrop ?? 0.0
norm: {kind: layer, bias: false}
norm_type in [low_precision_layernorm, layernorm]
no_bias in [true]
decoder.repeat = n_layers
attn_config.attn_type in [multihead_attention]
attn_config.alibi in [true]
-> {attn_config: {alibi: true}}
decoder.mixer: {kind: attention, pattern: causal, bias: false, positions: {kind: alibi}, scores: {kind: scaled-dot}}
decoder.mixer.heads = n_heads
decoder.mixer.dropout <- attn_config.attn_pdrop ?? 0.0
decoder.mixer.positions.octaves = attn_config.alibi_bias_max ?? 8 |integer
decoder.mixer.scores.scale = attn_config.softmax_scale ?? null
decoder.channel: {kind: ffn, activation: gelu, bias: false}
decoder.channel.hidden <- 4 * d_model
head.kind = architectures |decoder MptForCausalLM
ignore expansion_ratio, emb*_pdrop, embedding_fraction, fc_type, init_*, learned_pos_emb, max_seq_len, tokenizer_name,
    attn_config.attn_impl, attn_config.attn_uses_sequence_id, attn_config.is_encoder_decoder
"""  # fmt: skip
INTEGER = Conversion(lambda config, line: config[line.key], lambda ours, line: int(ours[line.path]))
LINES = """
embed.tokens.weight = transformer.wte.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.weight = transformer.blocks.{n}.norm_1.weight
decoder.blocks.{n}.wiring.norms.1.weight = transformer.blocks.{n}.norm_2.weight
decoder.blocks.{n}.sublayers.mixer.qkv.weight = transformer.blocks.{n}.attn.Wqkv.weight
decoder.blocks.{n}.sublayers.mixer.out.weight = transformer.blocks.{n}.attn.out_proj.weight
decoder.blocks.{n}.sublayers.channel.up.weight = transformer.blocks.{n}.ffn.up_proj.weight
decoder.blocks.{n}.sublayers.channel.down.weight = transformer.blocks.{n}.ffn.down_proj.weight
decoder.end.weight = transformer.norm_f.weight
"""
FAMILY = decoder_family("mpt", FIELDS, LINES, "transformer.wte.weight", {"integer": INTEGER})
