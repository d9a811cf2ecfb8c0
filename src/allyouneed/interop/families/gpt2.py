"""GPT-2 (Radford et al. 2019). Its Conv1D stores matrices transposed."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.decoders import decoder_family

# ignored are options of GPT2DoubleHeadsModel, and keys of older files
MODEL = """
kind: decoder
vocab = vocab_size
width = n_embd
dropout = resid_pdrop ?? 0.0
dropout -> embd_pdrop
norm: {kind: layer}
norm.eps = layer_norm_epsilon ?? 1.0e-5
init: {kind: gpt2}
init.std <- initializer_range ?? 0.02
embed: {scale: none}
embed.tied = tie_word_embeddings ?? true
decoder.repeat = n_layer
decoder.wiring: pre-norm
decoder.mixer: {kind: attention, pattern: causal}
decoder.mixer.heads = n_head
decoder.mixer.dropout = attn_pdrop ?? 0.0
decoder.channel: {kind: ffn}
decoder.channel.hidden = n_inner or 4 * n_embd
decoder.channel.activation = activation_function |activation
head.kind = architectures |decoder GPT2LMHeadModel
ignore embd_pdrop, n_ctx, reorder_and_upcast_attn, summary_*
"""
POSITIONS = """
embed.positions: {kind: learned}
embed.positions.length = n_positions
"""
SCORES = """
decoder[*].mixer.scores = scale_attn_weights, scale_attn_by_inverse_layer_idx |scores
"""


def read_scores(config: ConfigReader, line: Line) -> str | list[Tree]:
    """The same for all layers, or one per layer with its own scale (Stanford's Mistral)."""
    scaled = config.get("scale_attn_weights", True)
    if "scale_attn_by_inverse_layer_idx" not in line.keys or not config.get("scale_attn_by_inverse_layer_idx"):
        return "scaled-dot" if scaled else "dot"
    scale = (config["n_embd"] // config["n_head"]) ** -0.5 if scaled else 1.0
    return [{"kind": "scaled-dot", "scale": scale / (n + 1)} for n in range(config["n_layer"])]


def write_scores(ours: ModelTree, line: Line) -> dict[str, Any]:
    """Whether scores are divided by √head_width, and also by the layer number."""
    usual = (ours["width"] // ours["decoder.mixer.heads"]) ** -0.5
    layers = [layer.get("mixer.scores", {}) for layer in ours.layers("decoder")]
    scales = [1.0 if layer.get("kind") == "dot" else layer.get("scale") or usual for layer in layers]
    return {"scale_attn_weights": scales[0] != 1.0, "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1}


FIELDS = MODEL + POSITIONS + SCORES
CONVERSIONS = {"scores": Conversion(read_scores, write_scores)}
LINES = """
embed.tokens.weight = transformer.wte.weight
embed.positions.weight = transformer.wpe.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = transformer.h.{n}.ln_1.*
decoder.blocks.{n}.wiring.norms.1.* = transformer.h.{n}.ln_2.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = transformer.h.{n}.attn.c_attn.* |T
decoder.blocks.{n}.sublayers.mixer.out.* = transformer.h.{n}.attn.c_proj.* |T
decoder.blocks.{n}.sublayers.channel.up.* = transformer.h.{n}.mlp.c_fc.* |T
decoder.blocks.{n}.sublayers.channel.down.* = transformer.h.{n}.mlp.c_proj.* |T
decoder.end.* = transformer.ln_f.*
"""
TOKENS = "transformer.wte.weight"
IGNORED = ("*.attn.bias", "*.attn.masked_bias")
FAMILY = decoder_family("gpt2", FIELDS, LINES, TOKENS, CONVERSIONS, ignore=IGNORED)
