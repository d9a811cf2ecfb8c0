"""Mamba (Gu, Dao 2023): one mixer per layer, no feed-forward network."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.decoders import decoder_family
from allyouneed.interop.hf.weight_table import Family, TensorTransform

# ignored are training-only options, choices of their implementation, other names of sizes, and sizes that follow from
# others
FIELDS = """
kind: decoder
vocab = vocab_size
width = hidden_size
norm: {kind: rms}
norm.eps = layer_norm_epsilon ?? 1.0e-5
rms_norm in [true]
embed: {scale: none}
embed.tied = tie_word_embeddings ?? true
decoder.repeat = num_hidden_layers
decoder.wiring: pre-norm
decoder.mixer: {kind: mamba}
decoder.mixer.state = state_size ?? 16
decoder.mixer.convolution = conv_kernel ?? 4
decoder.mixer.conv_bias = use_conv_bias ?? true
decoder.mixer.bias = use_bias ?? false
hidden_act in [silu, swish]
-> {hidden_act: silu}
head.kind = architectures |decoder MambaForCausalLM
?? {expand: 2}
ignore d_inner, d_model, fused_add_norm, intermediate_size, n_layer, norm_before_gate, pad_vocab_size_multiple,
    rescale_prenorm_residual, residual_in_fp32, time_step_*, use_associative_scan, use_mambapy
"""
OWN = """
decoder.mixer.hidden = expand |expand
decoder.mixer.hidden -> intermediate_size |intermediate
decoder.mixer.rank = time_step_rank ?? auto |rank
"""


def read_hidden(config: ConfigReader, line: Line) -> int | None:
    width, hidden = config["hidden_size"], int(config["expand"] * config["hidden_size"])
    return None if hidden == 2 * width else hidden


def write_hidden(ours: ModelTree, line: Line) -> int:
    return ours.get(line.path) or 2 * int(ours["width"])


def read_rank(config: ConfigReader, line: Line) -> int | None:
    rank: Any = config[line.key]
    return None if (isinstance(rank, str) and rank == "auto") or rank == -(-config["hidden_size"] // 16) else rank


CONVERSIONS = {
    "expand": Conversion(read_hidden, lambda ours, line: write_hidden(ours, line) // ours["width"]),
    "intermediate": Conversion(read_hidden, write_hidden),
    "rank": Conversion(read_rank, lambda ours, line: ours.get(line.path) or -(-ours["width"] // 16)),
}
LINES = """
embed.tokens.weight = backbone.embeddings.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.weight = backbone.layers.{n}.norm.weight
decoder.blocks.{n}.sublayers.mixer.up.* = backbone.layers.{n}.mixer.in_proj.*
decoder.blocks.{n}.sublayers.mixer.convolution.taps = backbone.layers.{n}.mixer.conv1d.weight |flat
decoder.blocks.{n}.sublayers.mixer.convolution.shift = backbone.layers.{n}.mixer.conv1d.bias
decoder.blocks.{n}.sublayers.mixer.a_log = backbone.layers.{n}.mixer.A_log
decoder.blocks.{n}.sublayers.mixer.skip = backbone.layers.{n}.mixer.D
decoder.blocks.{n}.sublayers.mixer.out.* = backbone.layers.{n}.mixer.out_proj.*
decoder.end.weight = backbone.norm_f.weight
"""
OWN_LINES = """
decoder.blocks.{n}.sublayers.mixer.select.weight = backbone.layers.{n}.mixer.x_proj.weight
decoder.blocks.{n}.sublayers.mixer.step_map = backbone.layers.{n}.mixer.dt_proj.weight
decoder.blocks.{n}.sublayers.mixer.step_bias = backbone.layers.{n}.mixer.dt_proj.bias
"""
FLAT = TensorTransform(lambda tensor, config: tensor[:, 0], lambda tensor, config: tensor[:, None])  # one input each


def mamba_family(name: str, fields: str, conversions: dict[str, Conversion], lines: str) -> Family:
    """A family with the weights that Mamba and Mamba-2 share, and those of `lines`."""
    tokens = "backbone.embeddings.weight"
    return decoder_family(name, fields, LINES + lines, tokens, conversions, transforms={"flat": FLAT})


FAMILY = mamba_family("mamba", FIELDS + OWN, CONVERSIONS, OWN_LINES)
