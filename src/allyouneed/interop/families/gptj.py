"""GPT-J (Wang, Komatsuzaki 2021): parallel sub-layers after one norm, adjacent features rotated."""

from __future__ import annotations

from allyouneed.interop.families import gpt2
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.decoders import decoder_family
from allyouneed.interop.hf.rope import DEFAULT_LENGTH

FIELDS = gpt2.MODEL + f"""
init: {{kind: normal}}
embed.tied = tie_word_embeddings ?? false
decoder.wiring: {{kind: parallel, norms: one}}
decoder.mixer: {{kind: attention, pattern: causal, bias: false}}
decoder.mixer.positions: {{kind: rotary, order: interleaved}}
decoder.mixer.positions.fraction = rotary_dim |rotary_dim
head.kind = architectures |decoder GPTJForCausalLM
head<vocabulary>.bias: true
-> {{n_positions: {DEFAULT_LENGTH}}}
ignore n_positions, rotary, scale_attn_weights
"""  # fmt: skip


def fraction(config: ConfigReader, line: Line) -> float:
    head_width: int = config["n_embd"] // config["n_head"]
    return (config.get(line.key) or head_width) / head_width


def rotary_dim(ours: ModelTree, line: Line) -> int:
    return round(ours[line.path] * (ours["width"] // ours["decoder.mixer.heads"]))


LINES = """
embed.tokens.weight = transformer.wte.weight
head.* = lm_head.*
decoder.blocks.{n}.wiring.norms.0.* = LAYER.ln_1.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = LAYER.attn.q_proj.* + LAYER.attn.k_proj.* + LAYER.attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = LAYER.attn.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.mlp.fc_in.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.mlp.fc_out.*
decoder.end.* = transformer.ln_f.*
""".replace("LAYER", "transformer.h.{n}")
FRACTION = Conversion(fraction, rotary_dim)
FAMILY = decoder_family("gptj", FIELDS, LINES, gpt2.TOKENS, {"rotary_dim": FRACTION}, ignore=gpt2.IGNORED)
