"""Qwen3 (Yang et al. 2025): Qwen2 with normalised queries and keys, and a bias everywhere or nowhere."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.families.qwen2 import FIELDS, LAYER_TYPES

NORM = """
decoder.mixer.qk_norm: {kind: rms}
decoder.mixer.qk_norm.eps <- rms_norm_eps
"""
NORMS = """
decoder.blocks.{n}.sublayers.mixer.q_norm.weight = model.layers.{n}.self_attn.q_norm.weight
decoder.blocks.{n}.sublayers.mixer.k_norm.weight = model.layers.{n}.self_attn.k_norm.weight
"""

FAMILY = llama.family("qwen3", "Qwen3ForCausalLM", FIELDS + NORM, llama.LINES + NORMS, LAYER_TYPES)
