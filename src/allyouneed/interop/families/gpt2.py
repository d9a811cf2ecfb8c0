"""GPT-2 (Radford et al. 2019). Its Conv1D keeps matrices transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.interop.table import Family

ACTIVATIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def tree(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["n_embd"],
        "norm": {"kind": "layer", "eps": config["layer_norm_epsilon"]},
        "embed": {
            "positions": {"kind": "learned", "length": config["n_positions"]},
            "scale": "none",
            "tied": config.get("tie_word_embeddings", True),
        },
        "decoder": [
            {
                "repeat": config["n_layer"],
                "wiring": "pre-norm",
                "mixer": {"kind": "attention", "heads": config["n_head"], "pattern": "causal"},
                "channel": {
                    "kind": "ffn",
                    "hidden": config["n_inner"] or 4 * config["n_embd"],
                    "activation": ACTIVATIONS[config["activation_function"]],
                },
            }
        ],
    }


LINES = """
embed.tokens.weight = transformer.wte.weight
embed.positions.weight = transformer.wpe.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = transformer.h.{n}.ln_1.*
decoder.blocks.{n}.wiring.norms.1.* = transformer.h.{n}.ln_2.*
decoder.blocks.{n}.sublayers.mixer.qkv.weight = transformer.h.{n}.attn.c_attn.weight |T
decoder.blocks.{n}.sublayers.mixer.qkv.bias = transformer.h.{n}.attn.c_attn.bias
decoder.blocks.{n}.sublayers.mixer.out.weight = transformer.h.{n}.attn.c_proj.weight |T
decoder.blocks.{n}.sublayers.mixer.out.bias = transformer.h.{n}.attn.c_proj.bias
decoder.blocks.{n}.sublayers.channel.up.weight = transformer.h.{n}.mlp.c_fc.weight |T
decoder.blocks.{n}.sublayers.channel.up.bias = transformer.h.{n}.mlp.c_fc.bias
decoder.blocks.{n}.sublayers.channel.down.weight = transformer.h.{n}.mlp.c_proj.weight |T
decoder.blocks.{n}.sublayers.channel.down.bias = transformer.h.{n}.mlp.c_proj.bias
decoder.end.* = transformer.ln_f.*
"""
FAMILY = Family("gpt2", tree, LINES, ignore=["lm_head.weight", "*.attn.bias", "*.attn.masked_bias"])
