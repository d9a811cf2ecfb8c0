"""GPT-2 (Radford et al. 2019). Its Conv1D stores matrices transposed."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

# options of GPT2DoubleHeadsModel, and keys of older files
IGNORED_KEYS = ("embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_*")


def attention(config: ConfigReader, **other: Any) -> Tree:
    scores = "scaled-dot" if config.get("scale_attn_weights", True) else "dot"
    found = {"kind": "attention", "heads": config["n_head"], "pattern": "causal", "scores": scores}
    return found | {"dropout": config.get("attn_pdrop", 0.0)} | other


def mixers(config: ConfigReader) -> list[tuple[Tree, int]]:
    """(attention, number of layers): one for all layers, or one per layer with its own scale (Stanford's Mistral)."""
    mixer, count = attention(config), config["n_layer"]
    if not config.get("scale_attn_by_inverse_layer_idx"):
        return [(mixer, count)]
    scale = 1.0 if mixer["scores"] == "dot" else (config["n_embd"] // config["n_head"]) ** -0.5
    return [(mixer | {"scores": {"kind": "scaled-dot", "scale": scale / (n + 1)}}, 1) for n in range(count)]


def decoder(config: ConfigReader, mixers: list[tuple[Tree, int]]) -> Tree:
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["n_embd"],
        "dropout": config.get("resid_pdrop", 0.0),
        "norm": {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        "init": {"kind": "gpt2", "std": config.get("initializer_range", 0.02)},
        "embed": {
            "positions": {"kind": "learned", "length": config["n_positions"]},
            "scale": "none",
            "tied": config.get("tie_word_embeddings", True),
        },
        "decoder": [
            {
                "repeat": count,
                "wiring": "pre-norm",
                "mixer": mixer,
                "channel": {
                    "kind": "ffn",
                    "hidden": config.get("n_inner") or 4 * config["n_embd"],
                    "activation": config.activation("activation_function"),
                },
            }
            for mixer, count in mixers
        ],
    }
    return match_head(config, found)


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    return decoder(config, mixers(config))


def shared_fields(ours: ModelTree) -> dict[str, Any]:
    """Fields that GPT-2 and its relatives share."""
    return {
        "vocab_size": ours["vocab"],
        "n_embd": ours["width"],
        "n_layer": ours.depth("decoder"),
        "n_head": ours["decoder.mixer.heads"],
        "n_inner": ours["decoder.channel.hidden"],
        "activation_function": ours.activation("decoder.channel.activation"),
        "layer_norm_epsilon": ours["norm.eps"],
        "resid_pdrop": ours["dropout"],
        "embd_pdrop": ours["dropout"],
        "attn_pdrop": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
    }


def score_fields(ours: ModelTree) -> dict[str, bool]:
    """Whether scores are divided by √head_width, and also by the layer number."""
    usual = (ours["width"] // ours["decoder.mixer.heads"]) ** -0.5
    layers = [layer.get("mixer.scores", {}) for layer in ours.layers("decoder")]
    scales = [1.0 if layer.get("kind") == "dot" else layer.get("scale") or usual for layer in layers]
    return {"scale_attn_weights": scales[0] != 1.0, "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1}


def hf_config(ours: ModelTree) -> HfConfig:
    names = {"architectures": ours.architectures("GPT2LMHeadModel"), "n_positions": ours["embed.positions.length"]}
    return {**names, **shared_fields(ours), **score_fields(ours)}


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
IGNORED_WEIGHTS = ["lm_head.weight", "*.attn.bias", "*.attn.masked_bias"]
PREPARE = chain(add_prefix("transformer."), untie_head("lm_head.weight", "transformer.wte.weight"))
FINISH = remove_prefix("transformer.")
FAMILY = Family(
    "gpt2",
    tree,
    LINES,
    IGNORED_WEIGHTS,
    prepare=PREPARE,
    hf_config=hf_config,
    finish=FINISH,
)
