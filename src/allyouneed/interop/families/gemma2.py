"""Gemma 2 (Gemma Team 2024): sandwich norms, soft-capped scores and logits, a sliding window in every other layer."""

from __future__ import annotations

from allyouneed.interop.families import gemma, llama
from allyouneed.interop.families.qwen2 import read_patterns, write_types
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree

FIELDS = gemma.FIELDS + """
decoder.wiring: sandwich
decoder.mixer.scores: {kind: scaled-dot}
decoder.mixer.scores.scale = query_pre_attn_scalar |scalar
decoder.mixer.soft_cap = attn_logit_softcapping ?? null
decoder.channel.activation = hidden_activation |activation gelu_pytorch_tanh
decoder[*].mixer.pattern = layer_types, sliding_window |alternating
ignore cache_implementation
head<vocabulary>.soft_cap = final_logit_softcapping ?? null
"""  # fmt: skip


def alternating(config: ConfigReader, line: Line) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return read_patterns(config, [kinds[number % 2] for number in range(config["num_hidden_layers"])])


def write_scalar(ours: ModelTree, line: Line) -> int:
    scale = ours.get(line.path)
    if scale is None:
        return int(ours.get("decoder.mixer.head_width") or ours["width"] // ours["decoder.mixer.heads"])
    return round(scale**-2)  # an integer


CONVERSIONS = {
    "alternating": Conversion(alternating, write_types),
    "scalar": Conversion(lambda config, line: config[line.key] ** -0.5, write_scalar),
}
NORMS = """
decoder.blocks.{n}.wiring.norms.0.weight = model.layers.{n}.input_layernorm.weight
decoder.blocks.{n}.wiring.norms.1.weight = model.layers.{n}.post_attention_layernorm.weight
decoder.blocks.{n}.wiring.norms.2.weight = model.layers.{n}.pre_feedforward_layernorm.weight
decoder.blocks.{n}.wiring.norms.3.weight = model.layers.{n}.post_feedforward_layernorm.weight
"""

LINES = llama.OUTSIDE + NORMS + llama.ATTENTION + llama.CHANNEL
FAMILY = llama.family("gemma2", "Gemma2ForCausalLM", FIELDS, LINES, CONVERSIONS)
