"""Gemma 2 (Gemma Team 2024): sandwich norms, capped scores and logits, a window in every other layer."""

from __future__ import annotations

from allyouneed.interop.families import gemma, llama
from allyouneed.interop.families.qwen2 import kinds, patterns
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs


@reading("cache_implementation", "hidden_act", "max_position_embeddings")
def tree(config: Reader) -> Tree:
    scale = config["query_pre_attn_scalar"] ** -0.5
    channel = {
        "kind": "glu",
        "hidden": config["intermediate_size"],
        "activation": config.activation("hidden_activation"),
    }
    turns = [("sliding_attention", "full_attention")[n % 2] for n in range(config["num_hidden_layers"])]
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
        for pattern, count in patterns(config, turns)
    ]
    return gemma.decoder(config, layers, head={"soft_cap": config.get("final_logit_softcapping")})


NORMS = """
decoder.blocks.{n}.wiring.norms.0.weight = model.layers.{n}.input_layernorm.weight
decoder.blocks.{n}.wiring.norms.1.weight = model.layers.{n}.post_attention_layernorm.weight
decoder.blocks.{n}.wiring.norms.2.weight = model.layers.{n}.pre_feedforward_layernorm.weight
decoder.blocks.{n}.wiring.norms.3.weight = model.layers.{n}.post_feedforward_layernorm.weight
"""


def back(said: Said) -> Theirs:
    sizes, types = llama.sizes(said), kinds(said)
    scale = said.get("decoder.mixer.scores.scale")
    divided = sizes["head_dim"] if scale is None else round(scale**-2)  # theirs is a whole number
    return {
        "architectures": said.writer("Gemma2ForCausalLM"),
        **sizes,
        "intermediate_size": said["decoder.channel.hidden"],
        "hidden_activation": said.activation("decoder.channel.activation", tanh="gelu_pytorch_tanh"),
        "attention_bias": said.flag("decoder.mixer.bias"),
        "query_pre_attn_scalar": divided,
        "attn_logit_softcapping": said.get("decoder.mixer.soft_cap"),
        "final_logit_softcapping": said.get("head.soft_cap"),
        "layer_types": types["layer_types"],
        "sliding_window": types["sliding_window"],
    }


LINES = llama.OUTSIDE + NORMS + llama.ATTENTION + llama.CHANNEL
FAMILY = Family("gemma2", tree, LINES, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
