"""GPT-NeoX (Black et al. 2022), and Pythia: parallel sub-layers, a quarter of each head rotated."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import rope_parameters, rotary
from allyouneed.interop.hf.transforms import chain, grouped_qkv, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights


@strict_config("classifier_dropout", "max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    mixer = {
        "kind": "attention",
        "heads": config["num_attention_heads"],
        "pattern": "causal",
        "positions": rotary(config, fraction=config.get("rotary_pct", 0.25), base=config.get("rotary_emb_base", 10000)),
        "bias": config.get("attention_bias", True),
        "dropout": config.get("attention_dropout", 0.0),
    }
    channel = {"kind": "ffn", "hidden": config["intermediate_size"], "activation": config.activation("hidden_act")}
    parallel = config.get("use_parallel_residual", True)
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "dropout": config.get("hidden_dropout", 0.0),
        "norm": {"kind": "layer", "eps": config["layer_norm_eps"]},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False)},
        "decoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": {"kind": "parallel", "norms": "each"} if parallel else "pre-norm",
                "mixer": mixer,
                "channel": channel,
            }
        ],
    }
    return match_head(config, found)


LINES = """
embed.tokens.weight = gpt_neox.embed_in.weight
head.weight = embed_out.weight
decoder.blocks.{n}.wiring.norms.0.* = gpt_neox.layers.{n}.input_layernorm.*
decoder.blocks.{n}.wiring.norms.1.* = gpt_neox.layers.{n}.post_attention_layernorm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = gpt_neox.layers.{n}.attention.query_key_value.* |apart
decoder.blocks.{n}.sublayers.mixer.out.* = gpt_neox.layers.{n}.attention.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = gpt_neox.layers.{n}.mlp.dense_h_to_4h.*
decoder.blocks.{n}.sublayers.channel.down.* = gpt_neox.layers.{n}.mlp.dense_4h_to_h.*
decoder.end.* = gpt_neox.final_layer_norm.*
"""


def normalize_names(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """The head has two names in use; files of a headless model omit the prefix."""
    prefix = "" if any(name.startswith("gpt_neox.") for name in weights) else "gpt_neox."
    return config, {
        "embed_out.weight" if name.endswith(("lm_head.weight", "embed_out.weight")) else prefix + name: tensor
        for name, tensor in weights.items()
    }


def hf_config(ours: ModelTree) -> HfConfig:
    return {
        "architectures": ours.architectures("GPTNeoXForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "num_attention_heads": ours["decoder.mixer.heads"],
        "intermediate_size": ours["decoder.channel.hidden"],
        "hidden_act": ours.activation("decoder.channel.activation"),
        "layer_norm_eps": ours["norm.eps"],
        "attention_bias": ours.flag("decoder.mixer.bias"),
        "use_parallel_residual": ours.get("decoder.wiring.kind") == "parallel",
        "hidden_dropout": ours["dropout"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
        **rope_parameters(ours, partial=True),
    }


FAMILY = Family(
    "gpt_neox",
    tree,
    LINES,
    ignore=["embed_out.weight", "*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"],
    transforms={"apart": grouped_qkv(lambda config: (config["num_attention_heads"], config["num_attention_heads"]))},
    prepare=chain(normalize_names, untie_head("embed_out.weight", "gpt_neox.embed_in.weight")),
    hf_config=hf_config,
    finish=remove_prefix("gpt_neox."),
)
