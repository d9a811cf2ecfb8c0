"""Mistral 7B (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig


@strict_config("max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    mixer = llama.attention(config, pattern=llama.window_pattern(config), bias=False)
    return llama.decoder(config, llama.layers(config, mixer, llama.swiglu(config, bias=False)))


def hf_config(ours: ModelTree) -> HfConfig:
    window = {"sliding_window": llama.sliding_window(ours)}
    return {
        "architectures": ours.architectures("MistralForCausalLM"),
        **llama.shared_fields(ours),
        **llama.mlp_fields(ours),
        **window,
    }


FAMILY = Family(
    "mistral", tree, llama.LINES, llama.IGNORED_WEIGHTS, prepare=llama.PREPARE, hf_config=hf_config, finish=llama.FINISH
)
