"""Gemma 2 (Gemma Team 2024): sandwich norms, soft-capped scores and logits, a sliding window in every other layer."""

from __future__ import annotations

from allyouneed.interop.families import gemma, llama
from allyouneed.interop.families.qwen2 import layer_patterns, layer_type_fields
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig


@strict_config("cache_implementation", "hidden_act", "max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    scale = config["query_pre_attn_scalar"] ** -0.5
    channel = {
        "kind": "glu",
        "hidden": config["intermediate_size"],
        "activation": config.activation("hidden_activation"),
    }
    alternating = [("sliding_attention", "full_attention")[n % 2] for n in range(config["num_hidden_layers"])]
    layers = [
        {
            "repeat": count,
            "wiring": "sandwich",
            "mixer": llama.attention(
                config,
                pattern=pattern,
                scores={"kind": "scaled-dot", "scale": scale},
                soft_cap=config.get("attn_logit_softcapping"),
            ),
            "channel": channel,
        }
        for pattern, count in layer_patterns(config, alternating)
    ]
    return gemma.decoder(config, layers, head={"soft_cap": config.get("final_logit_softcapping")})


NORMS = """
decoder.blocks.{n}.wiring.norms.0.weight = model.layers.{n}.input_layernorm.weight
decoder.blocks.{n}.wiring.norms.1.weight = model.layers.{n}.post_attention_layernorm.weight
decoder.blocks.{n}.wiring.norms.2.weight = model.layers.{n}.pre_feedforward_layernorm.weight
decoder.blocks.{n}.wiring.norms.3.weight = model.layers.{n}.post_feedforward_layernorm.weight
"""


def hf_config(ours: ModelTree) -> HfConfig:
    sizes, types = llama.shared_fields(ours), layer_type_fields(ours)
    scale = ours.get("decoder.mixer.scores.scale")
    scalar = sizes["head_dim"] if scale is None else round(scale**-2)  # an integer
    return {
        "architectures": ours.architectures("Gemma2ForCausalLM"),
        **sizes,
        "intermediate_size": ours["decoder.channel.hidden"],
        "hidden_activation": ours.activation("decoder.channel.activation", tanh="gelu_pytorch_tanh"),
        "attention_bias": ours.flag("decoder.mixer.bias"),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": ours.get("decoder.mixer.soft_cap"),
        "final_logit_softcapping": ours.get("head.soft_cap"),
        "layer_types": types["layer_types"],
        "sliding_window": types["sliding_window"],
    }


LINES = llama.OUTSIDE + NORMS + llama.ATTENTION + llama.CHANNEL
FAMILY = Family(
    "gemma2", tree, LINES, llama.IGNORED_WEIGHTS, prepare=llama.PREPARE, hf_config=hf_config, finish=llama.FINISH
)
