"""Gemma (Gemma Team 2024): Llama with GEGLU, a scaled and tied embedding, and norms that begin at zero."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs


def decoder(config: Reader, layers: list[Tree], **other: Tree) -> Tree:
    embed = {"scale": "sqrt-width", "tied": config.get("tie_word_embeddings", True)}
    norm = {"kind": "rms", "eps": config["rms_norm_eps"], "offset": 1}
    return llama.decoder(config, layers, embed=embed, norm=norm, **other)


@reading("hidden_act", "max_position_embeddings")
def tree(config: Reader) -> Tree:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"  # where both are there, it counts
    channel = {"kind": "glu", "hidden": config["intermediate_size"], "activation": config.activation(key)}
    return decoder(config, llama.layers(config, llama.attention(config), channel))


def back(said: Said) -> Theirs:
    bias = {"attention_bias": said.flag("decoder.mixer.bias")}
    return {"architectures": said.writer("GemmaForCausalLM"), **llama.sizes(said), **llama.gated(said), **bias}


FAMILY = Family("gemma", tree, llama.LINES, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
