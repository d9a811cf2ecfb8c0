"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, queries, keys and values of each head in turn."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, grouping, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs

# what the files of the authors' own training code say besides
HARMLESS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "seq_length",
    "skip_bias_add*",
    "slow_but_exact",
)


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    width = config.first("hidden_size", "n_embed", "n_embd")
    norm = {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)}
    mixer = {
        "kind": "attention",
        "heads": config.first("n_head", "num_attention_heads"),
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
                "repeat": config.first("n_layer", "num_hidden_layers"),
                "wiring": "pre-norm",
                "mixer": mixer,
                "channel": {"kind": "ffn", "hidden": 4 * width, "activation": "gelu-tanh"},
            }
        ],
    }
    return headed(config, found)


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


def heads(config: Theirs) -> int:
    count: int = Reader(config).first("n_head", "num_attention_heads")
    return count


def back(said: Said) -> Theirs:
    return {
        "architectures": said.writer("BloomForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "n_layer": said.depth("decoder"),
        "n_head": said["decoder.mixer.heads"],
        "layer_norm_epsilon": said["norm.eps"],
        "hidden_dropout": said["dropout"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
    }


FAMILY = Family(
    "bloom",
    tree,
    LINES,
    ignore=["lm_head.weight"],
    changes={"apart": grouping(lambda config: (heads(config), heads(config)))},
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.word_embeddings.weight")),
    back=back,
    after=unprefixed("transformer."),
)
