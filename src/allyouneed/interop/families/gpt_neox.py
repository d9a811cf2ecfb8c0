"""GPT-NeoX (Black et al. 2022), and Pythia: both sub-layers at once, a quarter of each head turned."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.rope import rotary, turned
from allyouneed.interop.hf.transforms import chained, grouping, headed, own_head, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs, Weights


@reading("classifier_dropout", "max_position_embeddings")
def tree(config: Reader) -> Tree:
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
    return headed(config, found)


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


def renamed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """The head has had two names, and without one the rest has none."""
    prefix = "" if any(name.startswith("gpt_neox.") for name in weights) else "gpt_neox."
    return config, {
        "embed_out.weight" if name.endswith(("lm_head.weight", "embed_out.weight")) else prefix + name: tensor
        for name, tensor in weights.items()
    }


def back(said: Said) -> Theirs:
    return {
        "architectures": said.writer("GPTNeoXForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": said.depth("decoder"),
        "num_attention_heads": said["decoder.mixer.heads"],
        "intermediate_size": said["decoder.channel.hidden"],
        "hidden_act": said.activation("decoder.channel.activation"),
        "layer_norm_eps": said["norm.eps"],
        "attention_bias": said.flag("decoder.mixer.bias"),
        "use_parallel_residual": said.get("decoder.wiring.kind") == "parallel",
        "hidden_dropout": said["dropout"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
        **turned(said, partly=True),
    }


FAMILY = Family(
    "gpt_neox",
    tree,
    LINES,
    ignore=["embed_out.weight", "*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"],
    changes={"apart": grouping(lambda config: (config["num_attention_heads"], config["num_attention_heads"]))},
    before=chained(renamed, own_head("embed_out.weight", "gpt_neox.embed_in.weight")),
    back=back,
    after=unprefixed("gpt_neox."),
)
