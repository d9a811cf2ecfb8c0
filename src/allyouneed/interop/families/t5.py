"""T5 (Raffel et al. 2020) and T5 1.1 (gated, untied), and what mT5 and Switch share with them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from allyouneed.interop.hf.config_reader import ACTIVATIONS, ConfigReader, Tree, is_headless
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights

# their `tie_word_embeddings` means that the input of the head is scaled; whether it is tied, only the weights tell
MODEL = """
kind = architectures |class [CLASS, {ForConditionalGeneration: encoder-decoder, EncoderModel: encoder,
    Model: encoder-decoder}]
-> {is_encoder_decoder: true}
vocab = vocab_size, two_vocabularies |vocabularies
width = d_model ?? 512
dropout = dropout_rate ?? 0.1
norm: {kind: rms}
norm.eps = layer_norm_epsilon ?? 1.0e-6
init: {kind: t5}
embed: {scale: none}
embed.tied = tie_word_embeddings ?? true
encoder.repeat = num_layers ?? 6
encoder.wiring: pre-norm
encoder.mixer: {kind: attention, scores: dot, bias: false, pattern: full, positions: {kind: buckets}}
encoder.mixer.heads = num_heads ?? 8
encoder.mixer.head_width = d_kv ?? 64 or d_model // num_heads
encoder.mixer.dropout <- dropout_rate
encoder.mixer.positions.buckets = relative_attention_num_buckets ?? 32
encoder.mixer.positions.distance = relative_attention_max_distance ?? 128
decoder.repeat = num_decoder_layers, num_layers |depth
decoder.wiring: pre-norm
decoder.mixer: {kind: attention, scores: dot, bias: false, pattern: causal, positions: {kind: buckets}}
decoder.mixer.heads <- num_heads
decoder.mixer.head_width <- d_kv
decoder.mixer.dropout <- dropout_rate
decoder.mixer.positions.buckets <- relative_attention_num_buckets
decoder.mixer.positions.distance <- relative_attention_max_distance
decoder.cross: {kind: attention, scores: dot, bias: false}
decoder.cross.heads <- num_heads
decoder.cross.head_width <- d_kv
decoder.cross.dropout <- dropout_rate
head.scale = scale_decoder_outputs |scaled
?? {vocab_size: 32128}
ignore classifier_dropout, dense_act_fn, initializer_factor, is_encoder_decoder, is_gated_act, n_positions,
    num_hidden_layers, output_past
"""
CHANNELS = """
encoder.channel.bias: false
encoder.channel = feed_forward_proj ?? relu |channel
encoder.channel.hidden = d_ff ?? 2048
encoder.channel.dropout <- dropout_rate
decoder.channel.bias: false
decoder.channel <- feed_forward_proj |channel
decoder.channel.hidden <- d_ff
decoder.channel.dropout <- dropout_rate
"""
GATED = "gated-"
# their gated GELU is the tanh approximation
GATES = {"gated-gelu": "gelu-tanh"} | {f"{GATED}{word}": ours for word, ours in ACTIVATIONS.items() if word != "gelu"}


def read_channel(config: ConfigReader, line: Line) -> Tree:
    """An activation, optionally prefixed with `gated-`."""
    kind = "glu" if config[line.key].startswith(GATED) else "ffn"
    return {"kind": kind, "activation": config.map_value(line.key, ACTIVATIONS | GATES)}


def write_channel(ours: ModelTree, line: Line) -> str | None:
    gated = ours[f"{line.path}.kind"] == "glu"
    return ours.hf_name(f"{line.path}.activation", GATES if gated else ACTIVATIONS)


def read_vocabularies(config: ConfigReader, line: Line) -> Tree | int:
    vocab: int = config["vocab_size"]
    return {"source": vocab, "target": vocab} if config.get("two_vocabularies", False) else vocab


def write_vocabularies(ours: ModelTree, line: Line) -> Tree:
    vocab = ours["vocab"]
    apart = isinstance(vocab, dict)
    return {"vocab_size": vocab["target"] if apart else vocab, "two_vocabularies": apart}


def read_scale(config: ConfigReader, line: Line) -> str:
    return "inverse-sqrt-width" if config.get(line.key, config["tie_word_embeddings"]) else "none"


CONVERSIONS = {
    "channel": Conversion(read_channel, write_channel),
    "depth": Conversion(
        lambda config, line: config.get("num_decoder_layers") or config["num_layers"],
        lambda ours, line: {"num_decoder_layers": ours.depth("decoder" if ours.get("decoder") else "encoder")},
    ),
    "scaled": Conversion(read_scale, lambda ours, line: ours.get(line.path, "none") != "none"),
    "vocabularies": Conversion(read_vocabularies, write_vocabularies),
}


def without_decoder(config: ConfigReader, tree: Tree) -> Tree:
    """The encoder only, where the class has no decoder."""
    if tree["kind"] != "encoder":
        return tree
    kept = {key: value for key, value in tree.items() if key != "decoder"}
    return kept | {"embed": kept["embed"] | {"tied": True}, "head": {"kind": "none"}}


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
PRESERVED_WEIGHTS = ("shared.weight", "*.EncDecAttention.relative_attention_bias.weight")  # a table in old files
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


def family(
    name: str,
    architecture: str,
    fields: str,
    lines: str = LINES.replace("FFN", "DenseReluDense"),
    conversions: Mapping[str, Conversion] = CONVERSIONS,
) -> Family:
    """A relative; `architecture`: the prefix of its classes."""
    return Family(
        name,
        ConfigTable(fields.replace("CLASS", architecture), {**CONVERSIONS, **conversions}, without_decoder),
        lines,
        IGNORED_WEIGHTS,
        prepare=prepare,
        preserve=PRESERVED_WEIGHTS,
        finish=finish,
    )


FAMILY = family("t5", "T5", MODEL + CHANNELS)
