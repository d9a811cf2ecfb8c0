"""Gemma (Gemma Team 2024): Llama with GEGLU, a scaled and tied embedding, and norm weights stored minus one."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig


def decoder(config: ConfigReader, layers: list[Tree], **other: Tree) -> Tree:
    embed = {"scale": "sqrt-width", "tied": config.get("tie_word_embeddings", True)}
    norm = {"kind": "rms", "eps": config["rms_norm_eps"], "offset": 1}
    return llama.decoder(config, layers, embed=embed, norm=norm, **other)


@strict_config("hidden_act", "max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"  # takes precedence
    channel = {"kind": "glu", "hidden": config["intermediate_size"], "activation": config.activation(key)}
    return decoder(config, llama.layers(config, llama.attention(config), channel))


def hf_config(ours: ModelTree) -> HfConfig:
    bias = {"attention_bias": ours.flag("decoder.mixer.bias")}
    return {
        "architectures": ours.architectures("GemmaForCausalLM"),
        **llama.shared_fields(ours),
        **llama.mlp_fields(ours),
        **bias,
    }


FAMILY = Family(
    "gemma", tree, llama.LINES, llama.IGNORED_WEIGHTS, prepare=llama.PREPARE, hf_config=hf_config, finish=llama.FINISH
)
