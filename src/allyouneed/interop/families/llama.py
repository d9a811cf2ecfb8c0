"""Llama (Touvron et al. 2023), and what its descendants share with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allyouneed.interop.hf import decoders
from allyouneed.interop.hf.config_table import Conversion
from allyouneed.interop.hf.decoders import decoder_family
from allyouneed.interop.hf.weight_table import Family, HfConfig

MODEL = decoders.MODEL + """
norm: {kind: rms}
norm.eps = rms_norm_eps
embed.tied = tie_word_embeddings ?? false
head.kind = architectures |decoder CLASS
"""  # fmt: skip
ATTENTION_FIELDS = """
decoder.mixer.heads = num_attention_heads
decoder.mixer.kv_heads = num_key_value_heads or num_attention_heads
decoder.mixer.head_width = head_dim or hidden_size // num_attention_heads
decoder.mixer.bias = attention_bias ?? false |flag
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


def family(
    name: str,
    architecture: str,
    fields: str,
    lines: str | Callable[[HfConfig], str] = LINES,
    conversions: Mapping[str, Conversion] | None = None,
    **other: Any,
) -> Family:
    """A descendant; `architecture`: its class with a head."""
    fields, ignore = fields.replace("CLASS", architecture), ("*.rotary_emb.inv_freq",)
    return decoder_family(name, fields, lines, "model.embed_tokens.weight", conversions, ignore=ignore, **other)


FAMILY = family("llama", "LlamaForCausalLM", FIELDS)
