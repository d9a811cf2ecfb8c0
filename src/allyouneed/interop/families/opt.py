"""OPT (Zhang et al. 2022): GPT-2 with two places that are never used."""

from __future__ import annotations

from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.shapes import prefixed
from allyouneed.interop.table import Family

HARMLESS = ("activation_dropout", "init_std", "layerdrop", "prefix")


def wiring(config: Reader) -> Tree:
    before = config.get("do_layer_norm_before", True)
    final = not config.get("_remove_final_layer_norm", False)
    return {"kind": "pre-norm", "final": final} if before else {"kind": "post-norm"}


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    width, bias = config["hidden_size"], config.get("enable_bias", True)
    config.only("word_embed_proj_dim", width)
    affine = config.get("layer_norm_elementwise_affine", True)
    return {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("dropout", 0.1),
        "norm": {"kind": "layer", "weight": affine, "bias": affine},
        "init": {"kind": "normal", "std": config.get("init_std", 0.02)},
        "embed": {
            "positions": {"kind": "learned", "length": config["max_position_embeddings"], "offset": 2},
            "scale": "none",
            "tied": config.get("tie_word_embeddings", True),
        },
        "decoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": wiring(config),
                "mixer": {
                    "kind": "attention",
                    "heads": config["num_attention_heads"],
                    "pattern": "causal",
                    "bias": bias,
                    "dropout": config.get("attention_dropout", 0.0),
                },
                "channel": {
                    "kind": "ffn",
                    "hidden": config["ffn_dim"],
                    "activation": config.activation("activation_function"),
                    "bias": bias,
                },
            }
        ],
    }


LINES = """
embed.tokens.weight = model.decoder.embed_tokens.weight
embed.positions.weight = model.decoder.embed_positions.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = LAYER.self_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.1.* = LAYER.final_layer_norm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.q_proj.* + SELF.k_proj.* + SELF.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.fc2.*
decoder.end.* = model.decoder.final_layer_norm.*
""".replace("SELF", "LAYER.self_attn").replace("LAYER", "model.decoder.layers.{n}")
FAMILY = Family("opt", tree, LINES, ["lm_head.weight"], before=prefixed("model."))
