"""OPT (Zhang et al. 2022): GPT-2 with two unused rows in its position table."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.decoders import MODEL, decoder_family

FIELDS = MODEL + """
width = hidden_size, word_embed_proj_dim |width
dropout = dropout ?? 0.1
norm.eps: 1.0e-5
norm.weight = layer_norm_elementwise_affine ?? true
norm.bias <- layer_norm_elementwise_affine
init.std <- init_std ?? 0.02
embed: {scale: none, positions: {kind: learned, offset: 2}}
embed.positions.length = max_position_embeddings
decoder.wiring = do_layer_norm_before, _remove_final_layer_norm |wiring
decoder.mixer.heads = num_attention_heads
decoder.mixer.bias = enable_bias ?? true |flag
decoder.channel.hidden = ffn_dim
decoder.channel.activation = activation_function |activation
decoder.channel.bias <- enable_bias
head.kind = architectures |decoder OPTForCausalLM
ignore activation_dropout, init_std, layerdrop, prefix
"""  # fmt: skip


def read_width(config: ConfigReader, line: Line) -> int:
    width: int = config["hidden_size"]
    config.require("word_embed_proj_dim", width)
    return width


def read_wiring(config: ConfigReader, line: Line) -> Tree:
    before, final = config.get("do_layer_norm_before", True), not config.get("_remove_final_layer_norm", False)
    return {"kind": "pre-norm", "final": final} if before else {"kind": "post-norm"}


def write_wiring(ours: ModelTree, line: Line) -> Tree:
    before = ours.get("decoder.wiring.kind") == "pre-norm"
    return {"do_layer_norm_before": before, "_remove_final_layer_norm": before and not ours["decoder.wiring.final"]}


CONVERSIONS = {
    "width": Conversion(read_width, lambda ours, line: dict.fromkeys(line.keys, ours["width"])),
    "wiring": Conversion(read_wiring, write_wiring),
}
LINES = """
embed.tokens.weight = model.decoder.embed_tokens.weight
embed.positions.weight = model.decoder.embed_positions.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = LAYER.self_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.1.* = LAYER.final_layer_norm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.q_proj.* + SELF.k_proj.* + SELF.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.fc2.*
decoder.end.* = model.decoder.final_layer_norm.*
""".replace("SELF", "LAYER.self_attn").replace("LAYER", "model.decoder.layers.{n}")
FAMILY = decoder_family("opt", FIELDS, LINES, "model.decoder.embed_tokens.weight", CONVERSIONS)
