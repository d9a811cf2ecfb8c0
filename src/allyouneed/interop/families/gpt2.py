"""GPT-2 (Radford et al. 2019). Its Conv1D keeps matrices transposed."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs

# of the class with several choices, and what older files say besides
HARMLESS = ("embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_*")


def attention(config: Reader, **other: Any) -> Tree:
    scores = "scaled-dot" if config.get("scale_attn_weights", True) else "dot"
    found = {"kind": "attention", "heads": config["n_head"], "pattern": "causal", "scores": scores}
    return found | {"dropout": config.get("attn_pdrop", 0.0)} | other


def mixers(config: Reader) -> list[tuple[Tree, int]]:
    """The attention of so many layers in a row: all of them, or each with a scale of its own (Stanford's Mistral)."""
    mixer, count = attention(config), config["n_layer"]
    if not config.get("scale_attn_by_inverse_layer_idx"):
        return [(mixer, count)]
    scale = 1.0 if mixer["scores"] == "dot" else (config["n_embd"] // config["n_head"]) ** -0.5
    return [(mixer | {"scores": {"kind": "scaled-dot", "scale": scale / (n + 1)}}, 1) for n in range(count)]


def decoder(config: Reader, mixers: list[tuple[Tree, int]]) -> Tree:
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
    return headed(config, found)


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    return decoder(config, mixers(config))


def sizes(said: Said) -> dict[str, Any]:
    """What GPT-2 and its relatives say."""
    return {
        "vocab_size": said["vocab"],
        "n_embd": said["width"],
        "n_layer": said.depth("decoder"),
        "n_head": said["decoder.mixer.heads"],
        "n_inner": said["decoder.channel.hidden"],
        "activation_function": said.activation("decoder.channel.activation"),
        "layer_norm_epsilon": said["norm.eps"],
        "resid_pdrop": said["dropout"],
        "embd_pdrop": said["dropout"],
        "attn_pdrop": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
    }


def scores(said: Said) -> dict[str, bool]:
    """Whether all layers, or each with its number, divide by √head_width."""
    usual = (said["width"] // said["decoder.mixer.heads"]) ** -0.5
    layers = [layer.get("mixer.scores", {}) for layer in said.layers("decoder")]
    scales = [1.0 if layer.get("kind") == "dot" else layer.get("scale") or usual for layer in layers]
    return {"scale_attn_weights": scales[0] != 1.0, "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1}


def back(said: Said) -> Theirs:
    names = {"architectures": said.writer("GPT2LMHeadModel"), "n_positions": said["embed.positions.length"]}
    return {**names, **sizes(said), **scores(said)}


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
IGNORE = ["lm_head.weight", "*.attn.bias", "*.attn.masked_bias"]
FAMILY = Family(
    "gpt2",
    tree,
    LINES,
    IGNORE,
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.wte.weight")),
    back=back,
    after=unprefixed("transformer."),
)
