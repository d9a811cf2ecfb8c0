"""T5 (Raffel et al. 2020) and T5 1.1 (gated, untied), and what mT5 and Switch have in common with them."""

from __future__ import annotations

from torch import Tensor

from allyouneed.interop.hf.config_reader import ACTIVATIONS, Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import bare
from allyouneed.interop.hf.weight_table import Family, Theirs, Weights

HARMLESS = (
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


# their gated gelu is the tanh one
GATES = {"gated-gelu": "gelu-tanh"} | {f"{GATED}{word}": ours for word, ours in ACTIVATIONS.items() if word != "gelu"}


def channel(config: Reader) -> Tree:
    """What `feed_forward_proj` says: an activation, or `gated-` and one."""
    words = ACTIVATIONS | GATES
    return {
        "kind": "glu" if config["feed_forward_proj"].startswith(GATED) else "ffn",
        "hidden": config["d_ff"],
        "activation": config.choose("feed_forward_proj", words),
        "bias": False,
        "dropout": config["dropout_rate"],
    }


def tree_with(config: Reader, encoder: list[Tree], decoder: list[Tree], scaled: bool) -> Tree:
    """The encoder-decoder around layers that say their channels; `scaled`: what goes into the head by width^-1/2."""
    config.classes("ForConditionalGeneration", "Model")
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


def _attention(config: Reader) -> Tree:
    return {
        "kind": "attention",
        "heads": config["num_heads"],
        "head_width": config["d_kv"],
        "scores": "dot",
        "bias": False,
        "dropout": config["dropout_rate"],
    }


def _layer(config: Reader, pattern: str) -> Tree:
    buckets = {
        "kind": "buckets",
        "buckets": config["relative_attention_num_buckets"],
        "distance": config["relative_attention_max_distance"],
    }
    return {"wiring": "pre-norm", "mixer": _attention(config) | {"pattern": pattern, "positions": buckets}}


def depths(config: Reader) -> tuple[int, int]:
    """Layers of each side."""
    return config["num_layers"], config.get("num_decoder_layers") or config["num_layers"]


def words(said: Said, name: str) -> Tree:
    """T5's words for an encoder-decoder of ours, of the class of this name. Whether what goes into the head is scaled
    is what they mean by its being tied: whether it is, the weights tell."""
    vocab, scaled = said["vocab"], said.get("head.scale", "none") != "none"
    heads = said["encoder.mixer.heads"]
    return {
        "vocab_size": vocab["target"] if isinstance(vocab, dict) else vocab,
        "d_model": said["width"],
        "d_kv": said.get("encoder.mixer.head_width", (said["width"] or 0) // (heads or 1)),
        "d_ff": said.get("encoder.channel.hidden", said.get("encoder.channel.expert.hidden")),
        "num_layers": said.depth("encoder"),
        "num_decoder_layers": said.depth("decoder" if said.get("decoder") else "encoder"),
        "num_heads": heads,
        "relative_attention_num_buckets": said["encoder.mixer.positions.buckets"],
        "relative_attention_max_distance": said["encoder.mixer.positions.distance"],
        "dropout_rate": said.get("dropout", 0.0),
        "layer_norm_epsilon": said["norm.eps"],
        "scale_decoder_outputs": scaled,
        "tie_word_embeddings": said.get("embed.tied", True),
        "two_vocabularies": isinstance(vocab, dict),
        "architectures": [name],
        "is_encoder_decoder": True,
    }


def feed_forward(said: Said) -> Tree:
    gated = said["encoder.channel.kind"] == "glu"
    return {"feed_forward_proj": said.word("encoder.channel.activation", GATES if gated else ACTIVATIONS)}


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
IGNORE = ("lm_head.weight",)
SPARE = ("shared.weight", "*.EncDecAttention.relative_attention_bias.weight")  # of a table that the files of old had
SIDES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def reads_only(config: Theirs) -> bool:
    """The class without a decoder."""
    return bool((config.get("architectures") or [""])[0].endswith("EncoderModel"))


def completed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Only the weights tell whether the head and the two sides have matrices of their own; copies are left out. Newer
    configs of T5 always say that all are one, and mean by another key that what goes into the head is not scaled."""
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    found, shared = {**weights}, weights.get("shared.weight")
    source, target = (found.pop(side, shared) for side in SIDES)
    if reads_only(config):
        target = source
    apart = not _same(source, target)
    tied = _same(found.get("lm_head.weight"), target)
    kept = {SIDES[0]: source if apart else None, SIDES[1]: target}
    if shared is not None and _same(shared, target):
        del found["shared.weight"]
    said = {"scale_decoder_outputs": scaled, "tie_word_embeddings": tied, "two_vocabularies": apart}
    return {**config, **said}, found | {name: tensor for name, tensor in kept.items() if tensor is not None}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """What is not there is a copy of the other."""
    return one is None or (other is not None and one.shape == other.shape and one.equal(other))


def undone(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """One matrix is called `shared`, two stand beside one more that nobody reads. A head beside two, or beside a config
    that calls it untied (by which they mean that what goes into it is not scaled), is written even if it is a copy."""
    found, said = {**weights}, {**config}
    if said.pop("two_vocabularies", None) is not None:  # `words` wrote this config
        scaled = said.pop("scale_decoder_outputs")
        said["tie_word_embeddings"] = said["tie_word_embeddings"] if said["model_type"] == "mt5" else scaled
    target = found.pop(SIDES[1])
    headless = reads_only(said) or bare(said)
    untied = not said.get("tie_word_embeddings", True) and not headless
    copies = {"lm_head.weight": target.clone()} if untied or (SIDES[0] in found and not headless) else {}
    if SIDES[0] in found:
        return said, {"shared.weight": found[SIDES[0]].clone(), SIDES[1]: target, **copies, **found}
    if untied and said["model_type"] == "switch_transformers":  # the others know that the sides are one
        copies |= {side: target.clone() for side in SIDES}
    return said, {"shared.weight": target, **copies, **found}


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    encoder, decoder = ([{"repeat": count, "channel": channel(config)}] for count in depths(config))
    scaled = config.get("scale_decoder_outputs", config["tie_word_embeddings"])
    found = tree_with(config, encoder, decoder, scaled)
    return without_decoder(found) if reads_only(config) else found


def without_decoder(tree: Tree) -> Tree:
    """A bare encoder."""
    kept = {key: value for key, value in tree.items() if key != "decoder"}
    return kept | {"kind": "encoder", "embed": kept["embed"] | {"tied": True}, "head": {"kind": "none"}}


def back(said: Said, name: str = "T5") -> Tree:
    reads = said["kind"] == "encoder"
    return words(said, f"{name}EncoderModel" if reads else f"{name}ForConditionalGeneration") | feed_forward(said)


FAMILY = Family(
    "t5",
    tree,
    LINES.replace("FFN", "DenseReluDense"),
    IGNORE,
    before=completed,
    spare=SPARE,
    back=back,
    after=undone,
)
