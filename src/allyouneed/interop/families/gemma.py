"""Gemma (Gemma Team 2024): Llama with GEGLU, a scaled and tied embedding, and norm weights stored minus one."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line

FIELDS = llama.FIELDS + """
norm: {kind: rms, offset: 1}
embed: {scale: sqrt-width}
embed.tied = tie_word_embeddings ?? true
decoder.channel.activation = hidden_act, hidden_activation |geglu
decoder.channel.bias: false
ignore hidden_act
"""  # fmt: skip


def activation(config: ConfigReader, line: Line) -> str:
    return config.activation("hidden_activation" if config.get("hidden_activation") else "hidden_act")


GEGLU = Conversion(activation, lambda ours, line: {"hidden_act": ours.activation(line.path, tanh="gelu_pytorch_tanh")})
FAMILY = llama.family("gemma", "GemmaForCausalLM", FIELDS, conversions={"geglu": GEGLU})
