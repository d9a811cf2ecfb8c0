"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, query, key and value rows interleaved by head."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, grouped_qkv, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

# keys of the authors' own training code
IGNORED_KEYS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "seq_length",
    "skip_bias_add*",
    "slow_but_exact",
)


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    width = config.first_of("hidden_size", "n_embed", "n_embd")
    norm = {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)}
    mixer = {
        "kind": "attention",
        "heads": config.first_of("n_head", "num_attention_heads"),
        "pattern": "causal",
        "positions": "alibi",
        "dropout": config.get("attention_dropout", 0.0),
    }
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("hidden_dropout", 0.0),
        "norm": norm,
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", True), "norm": norm},
        "decoder": [
            {
                "repeat": config.first_of("n_layer", "num_hidden_layers"),
                "wiring": "pre-norm",
                "mixer": mixer,
                "channel": {"kind": "ffn", "hidden": 4 * width, "activation": "gelu-tanh"},
            }
        ],
    }
    return match_head(config, found)


LINES = """
embed.tokens.weight = transformer.word_embeddings.weight
embed.norm.* = transformer.word_embeddings_layernorm.*
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = transformer.h.{n}.input_layernorm.*
decoder.blocks.{n}.wiring.norms.1.* = transformer.h.{n}.post_attention_layernorm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = transformer.h.{n}.self_attention.query_key_value.* |apart
decoder.blocks.{n}.sublayers.mixer.out.* = transformer.h.{n}.self_attention.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = transformer.h.{n}.mlp.dense_h_to_4h.*
decoder.blocks.{n}.sublayers.channel.down.* = transformer.h.{n}.mlp.dense_4h_to_h.*
decoder.end.* = transformer.ln_f.*
"""


def heads(config: HfConfig) -> int:
    count: int = ConfigReader(config).first_of("n_head", "num_attention_heads")
    return count


def hf_config(ours: ModelTree) -> HfConfig:
    return {
        "architectures": ours.architectures("BloomForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "n_layer": ours.depth("decoder"),
        "n_head": ours["decoder.mixer.heads"],
        "layer_norm_epsilon": ours["norm.eps"],
        "hidden_dropout": ours["dropout"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
    }


FAMILY = Family(
    "bloom",
    tree,
    LINES,
    ignore=["lm_head.weight"],
    transforms={"apart": grouped_qkv(lambda config: (heads(config), heads(config)))},
    prepare=chain(add_prefix("transformer."), untie_head("lm_head.weight", "transformer.word_embeddings.weight")),
    hf_config=hf_config,
    finish=remove_prefix("transformer."),
)
