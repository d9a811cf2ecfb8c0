"""OPT (Zhang et al. 2022): GPT-2 with two unused rows in its position table."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

IGNORED_KEYS = ("activation_dropout", "init_std", "layerdrop", "prefix")


def wiring(config: ConfigReader) -> Tree:
    prepare = config.get("do_layer_norm_before", True)
    final = not config.get("_remove_final_layer_norm", False)
    return {"kind": "pre-norm", "final": final} if prepare else {"kind": "post-norm"}


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    width, bias = config["hidden_size"], config.get("enable_bias", True)
    config.require("word_embed_proj_dim", width)
    affine = config.get("layer_norm_elementwise_affine", True)
    found = {
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
    return match_head(config, found)


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


def hf_config(ours: ModelTree) -> HfConfig:
    prepare = ours.get("decoder.wiring.kind") == "pre-norm"
    return {
        "architectures": ours.architectures("OPTForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "word_embed_proj_dim": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "num_attention_heads": ours["decoder.mixer.heads"],
        "ffn_dim": ours["decoder.channel.hidden"],
        "activation_function": ours.activation("decoder.channel.activation"),
        "max_position_embeddings": ours["embed.positions.length"],
        "do_layer_norm_before": prepare,
        "_remove_final_layer_norm": prepare and not ours["decoder.wiring.final"],
        "layer_norm_elementwise_affine": ours["norm.weight"],
        "enable_bias": ours.flag("decoder.mixer.bias"),
        "dropout": ours["dropout"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
    }


FAMILY = Family(
    "opt",
    tree,
    LINES,
    ["lm_head.weight"],
    prepare=chain(add_prefix("model."), untie_head("lm_head.weight", "model.decoder.embed_tokens.weight")),
    hf_config=hf_config,
    finish=remove_prefix("model."),
)
