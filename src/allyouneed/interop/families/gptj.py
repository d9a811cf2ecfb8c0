"""GPT-J (Wang, Komatsuzaki 2021): parallel sub-layers after one norm, adjacent features rotated."""

from __future__ import annotations

from allyouneed.interop.families import gpt2
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import DEFAULT_LENGTH
from allyouneed.interop.hf.transforms import match_head
from allyouneed.interop.hf.weight_table import Family, HfConfig


@strict_config(*gpt2.IGNORED_KEYS, "n_positions", "rotary", "scale_attn_weights")
def tree(config: ConfigReader) -> Tree:
    width, heads = config["n_embd"], config["n_head"]
    rotated = config.get("rotary_dim") or width // heads
    positions = {"kind": "rotary", "order": "interleaved", "fraction": rotated / (width // heads)}
    drop = config.get("attn_pdrop", 0.0)
    mixer = {"kind": "attention", "heads": heads, "pattern": "causal", "bias": False, "dropout": drop}
    hidden, activation = config.get("n_inner") or 4 * width, config.activation("activation_function")
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("resid_pdrop", 0.0),
        "norm": {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False)},
        "decoder": [
            {
                "repeat": config["n_layer"],
                "wiring": {"kind": "parallel", "norms": "one"},
                "mixer": mixer | {"positions": positions},
                "channel": {"kind": "ffn", "hidden": hidden, "activation": activation},
            }
        ],
        "head": {"bias": True},
    }
    return match_head(config, found)


LINES = """
embed.tokens.weight = transformer.wte.weight
head.* = lm_head.*
decoder.blocks.{n}.wiring.norms.0.* = LAYER.ln_1.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = LAYER.attn.q_proj.* + LAYER.attn.k_proj.* + LAYER.attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = LAYER.attn.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.mlp.fc_in.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.mlp.fc_out.*
decoder.end.* = transformer.ln_f.*
""".replace("LAYER", "transformer.h.{n}")


def hf_config(ours: ModelTree) -> HfConfig:
    rotated = ours["decoder.mixer.positions.fraction"] * (ours["width"] // ours["decoder.mixer.heads"])
    names = {
        "architectures": ours.architectures("GPTJForCausalLM"),
        "n_positions": DEFAULT_LENGTH,
        "rotary_dim": round(rotated),
    }
    return {**names, **gpt2.shared_fields(ours)}


FAMILY = Family(
    "gptj",
    tree,
    LINES,
    gpt2.IGNORED_WEIGHTS,
    prepare=gpt2.PREPARE,
    hf_config=hf_config,
    finish=gpt2.FINISH,
)
