"""Qwen3 (Yang et al. 2025): Qwen2 with normalised queries and keys, and a bias everywhere or nowhere."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.families.qwen2 import layer_patterns, layer_type_fields
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig


@strict_config("max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    norm = {"kind": "rms", "eps": config["rms_norm_eps"]}
    channel = llama.swiglu(config, bias=False)
    layers = [
        {
            "repeat": count,
            "wiring": "pre-norm",
            "mixer": llama.attention(config, pattern=pattern, qk_norm=norm),
            "channel": channel,
        }
        for pattern, count in layer_patterns(config)
    ]
    return llama.decoder(config, layers)


NORMS = """
decoder.blocks.{n}.sublayers.mixer.q_norm.weight = model.layers.{n}.self_attn.q_norm.weight
decoder.blocks.{n}.sublayers.mixer.k_norm.weight = model.layers.{n}.self_attn.k_norm.weight
"""


def hf_config(ours: ModelTree) -> HfConfig:
    bias = {"attention_bias": ours.flag("decoder.mixer.bias")}
    return {
        "architectures": ours.architectures("Qwen3ForCausalLM"),
        **llama.shared_fields(ours),
        **llama.mlp_fields(ours),
        **layer_type_fields(ours),
        **bias,
    }


FAMILY = Family(
    "qwen3",
    tree,
    llama.LINES + NORMS,
    llama.IGNORED_WEIGHTS,
    prepare=llama.PREPARE,
    hf_config=hf_config,
    finish=llama.FINISH,
)
