"""Gemma 2 (Gemma Team 2024): sandwich norms, capped scores and logits, a window in every other layer."""

from __future__ import annotations

from allyouneed.interop.families import gemma, llama
from allyouneed.interop.families.qwen2 import patterns
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family


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
FAMILY = Family("gemma2", tree, llama.OUTSIDE + NORMS + llama.ATTENTION + llama.CHANNEL, llama.IGNORE)
