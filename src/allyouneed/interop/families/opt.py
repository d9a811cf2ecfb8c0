"""OPT (Zhang et al. 2022): GPT-2 with two places that are never used."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs

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
    return headed(config, found)


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


def back(said: Said) -> Theirs:
    before = said.get("decoder.wiring.kind") == "pre-norm"
    return {
        "architectures": said.writer("OPTForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "word_embed_proj_dim": said["width"],
        "num_hidden_layers": said.depth("decoder"),
        "num_attention_heads": said["decoder.mixer.heads"],
        "ffn_dim": said["decoder.channel.hidden"],
        "activation_function": said.activation("decoder.channel.activation"),
        "max_position_embeddings": said["embed.positions.length"],
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not said["decoder.wiring.final"],
        "layer_norm_elementwise_affine": said["norm.weight"],
        "enable_bias": said.flag("decoder.mixer.bias"),
        "dropout": said["dropout"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
    }


FAMILY = Family(
    "opt",
    tree,
    LINES,
    ["lm_head.weight"],
    before=chained(prefixed("model."), own_head("lm_head.weight", "model.decoder.embed_tokens.weight")),
    back=back,
    after=unprefixed("model."),
)
