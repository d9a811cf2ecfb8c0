"""T5 (Raffel et al. 2020) and T5 1.1 (gated, untied), and what mT5 and Switch share with them."""

from __future__ import annotations

from torch import Tensor

from allyouneed.interop.hf.config_reader import ACTIVATIONS, ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import is_headless
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights

IGNORED_KEYS = (
    "classifier_dropout", "dense_act_fn", "initializer_factor", "is_encoder_decoder",
    "is_gated_act", "n_positions", "num_hidden_layers", "output_past",
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}
GATED = "gated-"


# their gated GELU is the tanh approximation
GATES = {"gated-gelu": "gelu-tanh"} | {f"{GATED}{word}": ours for word, ours in ACTIVATIONS.items() if word != "gelu"}


def channel(config: ConfigReader) -> Tree:
    """From `feed_forward_proj`: an activation, optionally prefixed with `gated-`."""
    names = ACTIVATIONS | GATES
    return {
        "kind": "glu" if config["feed_forward_proj"].startswith(GATED) else "ffn",
        "hidden": config["d_ff"],
        "activation": config.map_value("feed_forward_proj", names),
        "bias": False,
        "dropout": config["dropout_rate"],
    }


def build_tree(config: ConfigReader, encoder: list[Tree], decoder: list[Tree], scaled: bool) -> Tree:
    """The encoder-decoder around layers with their channels; `scaled`: scale the input of the head by width^-1/2."""
    config.require_architecture("ForConditionalGeneration", "Model")
    vocab = config["vocab_size"]
    return {
        "kind": "encoder-decoder",
        "vocab": {"source": vocab, "target": vocab} if config.get("two_vocabularies", False) else vocab,
        "width": config["d_model"],
        "dropout": config["dropout_rate"],
        "norm": {"kind": "rms", "eps": config["layer_norm_epsilon"]},
        "init": {"kind": "t5"},
        "embed": {"scale": "none", "tied": config["tie_word_embeddings"]},
        "encoder": [layer | _layer(config, "full") for layer in encoder],
        "decoder": [layer | _layer(config, "causal") | {"cross": _attention(config)} for layer in decoder],
        "head": {"scale": "inverse-sqrt-width" if scaled else "none"},
    }


def _attention(config: ConfigReader) -> Tree:
    return {
        "kind": "attention",
        "heads": config["num_heads"],
        "head_width": config["d_kv"],
        "scores": "dot",
        "bias": False,
        "dropout": config["dropout_rate"],
    }


def _layer(config: ConfigReader, pattern: str) -> Tree:
    buckets = {
        "kind": "buckets",
        "buckets": config["relative_attention_num_buckets"],
        "distance": config["relative_attention_max_distance"],
    }
    return {"wiring": "pre-norm", "mixer": _attention(config) | {"pattern": pattern, "positions": buckets}}


def depths(config: ConfigReader) -> tuple[int, int]:
    """Number of encoder and decoder layers."""
    return config["num_layers"], config.get("num_decoder_layers") or config["num_layers"]


def config_fields(ours: ModelTree, name: str) -> Tree:
    """T5's config for our encoder-decoder; `name`: the class. Their `tie_word_embeddings` means that the input of the
    head is scaled; whether it is tied, only the weights tell."""
    vocab, scaled = ours["vocab"], ours.get("head.scale", "none") != "none"
    heads = ours["encoder.mixer.heads"]
    return {
        "vocab_size": vocab["target"] if isinstance(vocab, dict) else vocab,
        "d_model": ours["width"],
        "d_kv": ours.get("encoder.mixer.head_width", (ours["width"] or 0) // (heads or 1)),
        "d_ff": ours.get("encoder.channel.hidden", ours.get("encoder.channel.expert.hidden")),
        "num_layers": ours.depth("encoder"),
        "num_decoder_layers": ours.depth("decoder" if ours.get("decoder") else "encoder"),
        "num_heads": heads,
        "relative_attention_num_buckets": ours["encoder.mixer.positions.buckets"],
        "relative_attention_max_distance": ours["encoder.mixer.positions.distance"],
        "dropout_rate": ours.get("dropout", 0.0),
        "layer_norm_epsilon": ours["norm.eps"],
        "scale_decoder_outputs": scaled,
        "tie_word_embeddings": ours.get("embed.tied", True),
        "two_vocabularies": isinstance(vocab, dict),
        "architectures": [name],
        "is_encoder_decoder": True,
    }


def feed_forward(ours: ModelTree) -> Tree:
    gated = ours["encoder.channel.kind"] == "glu"
    return {"feed_forward_proj": ours.hf_name("encoder.channel.activation", GATES if gated else ACTIVATIONS)}


LINES = """
embed.tokens.weight = decoder.embed_tokens.weight
source_embed.tokens.weight = encoder.embed_tokens.weight
encoder.blocks.0.sublayers.mixer.relative.table.weight = encoder.block.0.layer.0.SELF.BUCKETS.weight
encoder.blocks.{n}.sublayers.mixer.qkv.weight = ENC.0.SELF.q.weight + ENC.0.SELF.k.weight + ENC.0.SELF.v.weight
encoder.blocks.{n}.sublayers.mixer.out.weight = ENC.0.SELF.o.weight
encoder.blocks.{n}.sublayers.channel.up.weight = ENC.1.FFN.wi.weight
encoder.blocks.{n}.sublayers.channel.gate_up.weight = ENC.1.FFN.wi_0.weight + ENC.1.FFN.wi_1.weight
encoder.blocks.{n}.sublayers.channel.down.weight = ENC.1.FFN.wo.weight
encoder.blocks.{n}.wiring.norms.{m}.weight = ENC.{m}.layer_norm.weight
encoder.end.weight = encoder.final_layer_norm.weight
decoder.blocks.0.sublayers.mixer.relative.table.weight = decoder.block.0.layer.0.SELF.BUCKETS.weight
decoder.blocks.{n}.sublayers.mixer.qkv.weight = DEC.0.SELF.q.weight + DEC.0.SELF.k.weight + DEC.0.SELF.v.weight
decoder.blocks.{n}.sublayers.mixer.out.weight = DEC.0.SELF.o.weight
decoder.blocks.{n}.sublayers.cross.q.weight = DEC.1.EncDecAttention.q.weight
decoder.blocks.{n}.sublayers.cross.kv.weight = DEC.1.EncDecAttention.k.weight + DEC.1.EncDecAttention.v.weight
decoder.blocks.{n}.sublayers.cross.out.weight = DEC.1.EncDecAttention.o.weight
decoder.blocks.{n}.sublayers.channel.up.weight = DEC.2.FFN.wi.weight
decoder.blocks.{n}.sublayers.channel.gate_up.weight = DEC.2.FFN.wi_0.weight + DEC.2.FFN.wi_1.weight
decoder.blocks.{n}.sublayers.channel.down.weight = DEC.2.FFN.wo.weight
decoder.blocks.{n}.wiring.norms.{m}.weight = DEC.{m}.layer_norm.weight
decoder.end.weight = decoder.final_layer_norm.weight
head.weight = lm_head.weight
"""
SHORT = {
    "ENC": "encoder.block.{n}.layer",
    "DEC": "decoder.block.{n}.layer",
    "SELF": "SelfAttention",
    "BUCKETS": "relative_attention_bias",
}
for _short, _name in SHORT.items():
    LINES = LINES.replace(_short, _name)
IGNORED_WEIGHTS = ("lm_head.weight",)
PRESERVED_WEIGHTS = (
    "shared.weight",
    "*.EncDecAttention.relative_attention_bias.weight",
)  # a table in old files
SIDES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def is_encoder_only(config: HfConfig) -> bool:
    """Whether the class has no decoder."""
    return bool((config.get("architectures") or [""])[0].endswith("EncoderModel"))


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Only the weights tell whether the head and the two sides have separate matrices; copies are dropped. Newer T5
    configs always declare them tied, and use another key for scaling the input of the head."""
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    found, shared = {**weights}, weights.get("shared.weight")
    source, target = (found.pop(side, shared) for side in SIDES)
    if is_encoder_only(config):
        target = source
    apart = not _same(source, target)
    tied = _same(found.get("lm_head.weight"), target)
    kept = {SIDES[0]: source if apart else None, SIDES[1]: target}
    if shared is not None and _same(shared, target):
        del found["shared.weight"]
    flags = {"scale_decoder_outputs": scaled, "tie_word_embeddings": tied, "two_vocabularies": apart}
    return {**config, **flags}, found | {name: tensor for name, tensor in kept.items() if tensor is not None}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """A missing matrix is a copy of the other."""
    return one is None or (other is not None and one.shape == other.shape and one.equal(other))


def finish(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """One matrix is called `shared`; two come with a third, unused one. The head is written even if it is a copy where
    there are two matrices, or where the config is untied (their way to leave the head's input unscaled)."""
    found, written = {**weights}, {**config}
    if written.pop("two_vocabularies", None) is not None:  # written by `config_fields`
        scaled = written.pop("scale_decoder_outputs")
        written["tie_word_embeddings"] = written["tie_word_embeddings"] if written["model_type"] == "mt5" else scaled
    target = found.pop(SIDES[1])
    headless = is_encoder_only(written) or is_headless(written)
    untied = not written.get("tie_word_embeddings", True) and not headless
    copies = {"lm_head.weight": target.clone()} if untied or (SIDES[0] in found and not headless) else {}
    if SIDES[0] in found:
        return written, {"shared.weight": found[SIDES[0]].clone(), SIDES[1]: target, **copies, **found}
    if untied and written["model_type"] == "switch_transformers":  # the others tie the sides themselves
        copies |= {side: target.clone() for side in SIDES}
    return written, {"shared.weight": target, **copies, **found}


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    encoder, decoder = ([{"repeat": count, "channel": channel(config)}] for count in depths(config))
    scaled = config.get("scale_decoder_outputs", config["tie_word_embeddings"])
    found = build_tree(config, encoder, decoder, scaled)
    return without_decoder(found) if is_encoder_only(config) else found


def without_decoder(tree: Tree) -> Tree:
    """The encoder only."""
    kept = {key: value for key, value in tree.items() if key != "decoder"}
    return kept | {"kind": "encoder", "embed": kept["embed"] | {"tied": True}, "head": {"kind": "none"}}


def hf_config(ours: ModelTree, name: str = "T5") -> Tree:
    encoder_only = ours["kind"] == "encoder"
    return config_fields(
        ours, f"{name}EncoderModel" if encoder_only else f"{name}ForConditionalGeneration"
    ) | feed_forward(ours)


FAMILY = Family(
    "t5",
    tree,
    LINES.replace("FFN", "DenseReluDense"),
    IGNORED_WEIGHTS,
    prepare=prepare,
    preserve=PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=finish,
)
