"""Phi (Li et al. 2023): parallel sub-layers after one norm, half of each head rotated, a bias in the head."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree

FIELDS = llama.MODEL + llama.ATTENTION_FIELDS + """
dropout = resid_pdrop ?? 0.0
norm: {kind: layer}
norm.eps = layer_norm_eps
decoder.wiring: {kind: parallel, norms: one}
decoder.mixer.head_width = head_dim |head_dim
decoder.mixer.bias: true
decoder.mixer.positions = rope_parameters, rope_scaling, rope_theta, partial_rotary_factor, max_position_embeddings
    |rotary {fraction: 0.5}
decoder.mixer.qk_norm = qk_layernorm |qk_norm
decoder.channel: {kind: ffn}
decoder.channel.hidden = intermediate_size
decoder.channel.activation = hidden_act |activation
head<vocabulary>.bias: true
ignore embd_pdrop
"""  # fmt: skip


def qk_norm(config: ConfigReader, line: Line) -> Tree | None:
    return {"kind": "layer", "eps": config["layer_norm_eps"]} if config.get(line.key) else None


def head_dim(ours: ModelTree, line: Line) -> int | object:
    """Written where it differs from the usual one."""
    width: int | None = ours.get(line.path)
    return width if width and width * ours["decoder.mixer.heads"] != ours["width"] else OMITTED


CONVERSIONS = {
    "head_dim": Conversion(
        lambda config, line: config.get(line.key) or config["hidden_size"] // config["num_attention_heads"], head_dim
    ),
    "qk_norm": Conversion(qk_norm, lambda ours, line: ours.get(line.path) is not None),
}
LINES = """
embed.tokens.weight = model.embed_tokens.weight
head.* = lm_head.*
decoder.blocks.{n}.wiring.norms.0.* = model.layers.{n}.input_layernorm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.q_proj.* + SELF.k_proj.* + SELF.v_proj.*
decoder.blocks.{n}.sublayers.mixer.q_norm.* = SELF.q_layernorm.*
decoder.blocks.{n}.sublayers.mixer.k_norm.* = SELF.k_layernorm.*
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = model.layers.{n}.mlp.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = model.layers.{n}.mlp.fc2.*
decoder.end.* = model.final_layernorm.*
""".replace("SELF", "model.layers.{n}.self_attn")

FAMILY = llama.family("phi", "PhiForCausalLM", FIELDS, LINES, CONVERSIONS)
