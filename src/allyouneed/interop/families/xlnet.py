"""XLNet (Yang et al. 2019). How much of a text it remembers (`mem_len`, `reuse_len`) is for its reader to say."""

from __future__ import annotations

from allyouneed.interop.families.bert import head, head_words
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import ROW, bare, unless_tied
from allyouneed.interop.hf.weight_table import Change, Family, Theirs, Weights

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


@reading(
    "mem_len", "reuse_len", "use_mems_*", "start_n_top", "end_n_top", "n_token", "untie_r", "d_head", "same_length"
)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    config.only("attn_type", "bi")
    config.only("bi_data", False)
    config.only("summary_type", "last")
    config.only("summary_use_proj", True)
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
    pooled = config.only("summary_activation", "tanh")
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


def by_heads(config: Theirs) -> tuple[int, int]:
    """The last dimensions of their tensors."""
    return config["n_head"], config["d_model"] // config["n_head"]


# theirs are (width, heads, head_width), biases (…, heads, head_width)
CHANGES = {
    "into": Change(
        lambda tensor, config: tensor.flatten(1).T, lambda tensor, config: tensor.T.unflatten(1, by_heads(config))
    ),
    "out": Change(
        lambda tensor, config: tensor.flatten(1), lambda tensor, config: tensor.unflatten(1, by_heads(config))
    ),
    "between": Change(lambda tensor, config: tensor.unsqueeze(-2), lambda tensor, config: tensor.squeeze(-2)),
    "first": ROW,
}


def named(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """A bare model does not say what it is called."""
    bare = not any(name.startswith("transformer.") for name in weights)
    weights = {f"transformer.{name}": tensor for name, tensor in weights.items()} if bare else weights
    return unless_tied(config, weights, "lm_loss.weight", "transformer.word_embedding.weight"), weights


def named_back(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    if bare(config):
        weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    return config, weights


def back(said: Said) -> Tree:
    heads = said["encoder.mixer.heads"]
    return {
        "vocab_size": said["vocab"],
        "d_model": said["width"],
        "d_head": said.get("encoder.mixer.head_width", (said["width"] or 0) // (heads or 1)),
        "n_layer": said.depth("encoder"),
        "n_head": heads,
        "d_inner": said["encoder.channel.hidden"],
        "ff_activation": said.activation("encoder.channel.activation"),
        "dropout": said.get("dropout", 0.0),
        "layer_norm_eps": said["norm.eps"],
        "tie_word_embeddings": said.get("embed.tied", True),
        "clamp_len": said.get("encoder.mixer.positions.clamp", -1),
    } | head_words(said, "XLNet", "summary_last_dropout", masks="LMHeadModel")


FAMILY = Family("xlnet", tree, LINES, ("lm_loss.weight",), CHANGES, named, back=back, after=named_back)
