"""Llama (Touvron et al. 2023), and what its descendants share with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allyouneed.interop.hf.config_table import ConfigTable, Conversion
from allyouneed.interop.hf.transforms import add_prefix, chain, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

MODEL = """
kind: decoder
vocab = vocab_size
width = hidden_size
norm: {kind: rms}
norm.eps = rms_norm_eps
init: {kind: normal}
init.std <- initializer_range ?? 0.02
embed: {scale: none}
embed.tied = tie_word_embeddings ?? false
decoder.repeat = num_hidden_layers
decoder.wiring: pre-norm
head.kind = architectures |decoder CLASS
"""
ATTENTION_FIELDS = """
decoder.mixer: {kind: attention, pattern: causal}
decoder.mixer.heads = num_attention_heads
decoder.mixer.kv_heads = num_key_value_heads or num_attention_heads
decoder.mixer.head_width = head_dim or hidden_size // num_attention_heads
decoder.mixer.bias = attention_bias ?? false |flag
decoder.mixer.dropout = attention_dropout ?? 0.0
decoder.mixer.positions = rope_parameters, rope_scaling, rope_theta, max_position_embeddings |rotary
ignore max_position_embeddings
"""
CHANNEL_FIELDS = """
decoder.channel: {kind: glu}
decoder.channel.hidden = intermediate_size
decoder.channel.activation = hidden_act |activation gelu_pytorch_tanh
decoder.channel.bias = mlp_bias ?? false |flag
"""
FIELDS = MODEL + ATTENTION_FIELDS + CHANNEL_FIELDS
NO_BIAS = """
decoder.mixer.bias: false
decoder.channel.bias: false
"""

OUTSIDE = """
embed.tokens.weight = model.embed_tokens.weight
head.weight = lm_head.weight
decoder.end.weight = model.norm.weight
"""
NORMS = """
decoder.blocks.{n}.wiring.norms.0.weight = model.layers.{n}.input_layernorm.weight
decoder.blocks.{n}.wiring.norms.1.weight = model.layers.{n}.post_attention_layernorm.weight
"""
ATTENTION = """
decoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.q_proj.* + SELF.k_proj.* + SELF.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.o_proj.*
""".replace("SELF", "model.layers.{n}.self_attn")
CHANNEL = """
decoder.blocks.{n}.sublayers.channel.gate_up.* = model.layers.{n}.mlp.gate_proj.* + model.layers.{n}.mlp.up_proj.*
decoder.blocks.{n}.sublayers.channel.down.* = model.layers.{n}.mlp.down_proj.*
"""
LINES = OUTSIDE + NORMS + ATTENTION + CHANNEL
IGNORED_WEIGHTS = ["lm_head.weight", "*.rotary_emb.inv_freq"]
PREPARE = chain(add_prefix("model."), untie_head("lm_head.weight", "model.embed_tokens.weight"))
FINISH = remove_prefix("model.")


def family(
    name: str,
    architecture: str,
    fields: str,
    lines: str | Callable[[HfConfig], str] = LINES,
    conversions: dict[str, Conversion] | None = None,
    **other: Any,
) -> Family:
    """A descendant; `architecture`: its class with a head."""
    table = ConfigTable(fields.replace("CLASS", architecture), conversions or {})
    return Family(name, table, lines, IGNORED_WEIGHTS, **({"prepare": PREPARE, "finish": FINISH} | other))


FAMILY = family("llama", "LlamaForCausalLM", FIELDS)
