"""XLNet (Yang et al. 2019). The memory length (`mem_len`, `reuse_len`) is chosen at run time."""

from __future__ import annotations

from allyouneed.interop.families.bert import head, head_fields
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import ROW, is_headless, untie_if_different
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform, Weights

DEFAULTS = {
    "vocab_size": 32000,
    "d_model": 1024,
    "n_layer": 24,
    "n_head": 16,
    "d_inner": 4096,
    "ff_activation": "gelu",
    "dropout": 0.1,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "clamp_len": -1,
}


@strict_config(
    "mem_len", "reuse_len", "use_mems_*", "start_n_top", "end_n_top", "n_token", "untie_r", "d_head", "same_length"
)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    config.require("attn_type", "bi")
    config.require("bi_data", False)
    config.require("summary_type", "last")
    config.require("summary_use_proj", True)
    clamp, dropout = config["clamp_len"], config["dropout"]
    mixer = {
        "kind": "attention",
        "heads": config["n_head"],
        "pattern": "permuted",
        "positions": {"kind": "xlnet", "clamp": clamp if clamp > 0 else None},
        "bias": False,
        "dropout": dropout,
        "cache": "hidden",
    }
    channel = {"kind": "ffn", "hidden": config["d_inner"], "activation": config.activation("ff_activation")}
    vocabulary = {"kind": "vocabulary", "bias": True}
    pooled = config.require("summary_activation", "tanh")
    found = head(config, vocabulary, pooled, "summary_last_dropout", LMHeadModel=vocabulary)
    if found["kind"] == "classes":
        found |= {"pool": "last"}
    return {
        "kind": "encoder",
        "vocab": config["vocab_size"],
        "width": config["d_model"],
        "dropout": dropout,
        "norm": {"kind": "layer", "eps": config["layer_norm_eps"]},
        "embed": {"scale": "none", "tied": config["tie_word_embeddings"], "asks": True},
        "encoder": [{"repeat": config["n_layer"], "mixer": mixer, "channel": channel | {"dropout": dropout}}],
        "head": found,
    }


LINES = """
embed.tokens.weight = transformer.word_embedding.weight
embed.asking.weight = transformer.mask_emb |first
encoder.blocks.{n}.sublayers.mixer.qkv.weight = LAYER.rel_attn.q |into + LAYER.rel_attn.k |into + LAYER.rel_attn.v |into
encoder.blocks.{n}.sublayers.mixer.out.weight = LAYER.rel_attn.o |out
encoder.blocks.{n}.sublayers.mixer.relative.far.weight = LAYER.rel_attn.r |into
encoder.blocks.{n}.sublayers.mixer.relative.biases.content = LAYER.rel_attn.r_w_bias |between
encoder.blocks.{n}.sublayers.mixer.relative.biases.place = LAYER.rel_attn.r_r_bias |between
encoder.blocks.{n}.sublayers.mixer.relative.kinds.bias = LAYER.rel_attn.r_s_bias |between
encoder.blocks.{n}.sublayers.mixer.relative.kinds.vectors = LAYER.rel_attn.seg_embed |between
encoder.blocks.{n}.sublayers.channel.up.* = LAYER.ff.layer_1.*
encoder.blocks.{n}.sublayers.channel.down.* = LAYER.ff.layer_2.*
encoder.blocks.{n}.wiring.norms.0.* = LAYER.rel_attn.layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = LAYER.ff.layer_norm.*
head.weight = lm_loss.weight
head.bias = lm_loss.bias
head.hidden.* = sequence_summary.summary.*
head.classes.* = logits_proj.*
head.tags.* = classifier.*
""".replace("LAYER", "transformer.layer.{n}")


def head_shape(config: HfConfig) -> tuple[int, int]:
    """The last two dimensions of their tensors: (heads, head_width)."""
    return config["n_head"], config["d_model"] // config["n_head"]


# theirs are (width, heads, head_width), biases (…, heads, head_width)
TRANSFORMS = {
    "into": TensorTransform(
        lambda tensor, config: tensor.flatten(1).T, lambda tensor, config: tensor.T.unflatten(1, head_shape(config))
    ),
    "out": TensorTransform(
        lambda tensor, config: tensor.flatten(1), lambda tensor, config: tensor.unflatten(1, head_shape(config))
    ),
    "between": TensorTransform(lambda tensor, config: tensor.unsqueeze(-2), lambda tensor, config: tensor.squeeze(-2)),
    "first": ROW,
}


def add_prefix(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Files of the headless model omit the prefix."""
    unprefixed = not any(name.startswith("transformer.") for name in weights)
    weights = {f"transformer.{name}": tensor for name, tensor in weights.items()} if unprefixed else weights
    return untie_if_different(config, weights, "lm_loss.weight", "transformer.word_embedding.weight"), weights


def remove_prefix(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    if is_headless(config):
        weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    return config, weights


def hf_config(ours: ModelTree) -> Tree:
    heads = ours["encoder.mixer.heads"]
    return {
        "vocab_size": ours["vocab"],
        "d_model": ours["width"],
        "d_head": ours.get("encoder.mixer.head_width", (ours["width"] or 0) // (heads or 1)),
        "n_layer": ours.depth("encoder"),
        "n_head": heads,
        "d_inner": ours["encoder.channel.hidden"],
        "ff_activation": ours.activation("encoder.channel.activation"),
        "dropout": ours.get("dropout", 0.0),
        "layer_norm_eps": ours["norm.eps"],
        "tie_word_embeddings": ours.get("embed.tied", True),
        "clamp_len": ours.get("encoder.mixer.positions.clamp", -1),
    } | head_fields(ours, "XLNet", "summary_last_dropout", masks="LMHeadModel")


FAMILY = Family(
    "xlnet", tree, LINES, ("lm_loss.weight",), TRANSFORMS, add_prefix, hf_config=hf_config, finish=remove_prefix
)
