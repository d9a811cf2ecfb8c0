"""BART (Lewis et al. 2020), and what mBART, M2M-100, Marian and PEGASUS share with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, is_headless
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import ROW, untie_if_different
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights

# layers as Whisper has them too
LAYERS = """
vocab = vocab_size ?? 50265
width = d_model ?? 1024
dropout = dropout ?? 0.1
-> {is_encoder_decoder: true}
encoder.repeat = encoder_layers ?? 12
encoder.wiring: pre-norm
encoder.mixer: {kind: attention}
encoder.mixer.heads = encoder_attention_heads ?? 16
encoder.mixer.dropout = attention_dropout ?? 0.0
encoder.channel: {kind: ffn}
encoder.channel.hidden = encoder_ffn_dim ?? 4096
encoder.channel.activation = activation_function ?? gelu |activation
encoder.channel.dropout = activation_dropout ?? 0.0
decoder.repeat = decoder_layers ?? 12
decoder.wiring: pre-norm
decoder.mixer: {kind: attention, pattern: causal}
decoder.mixer.heads = decoder_attention_heads ?? 16
decoder.mixer.dropout <- attention_dropout
decoder.cross: {kind: attention}
decoder.cross.heads <- decoder_attention_heads
decoder.cross.dropout <- attention_dropout
decoder.channel: {kind: ffn}
decoder.channel.hidden = decoder_ffn_dim ?? 4096
decoder.channel.activation <- activation_function |activation
decoder.channel.dropout <- activation_dropout
ignore *_layerdrop, init_std, is_encoder_decoder, num_hidden_layers
"""
# ignored keys are used only in training, generation or other tasks, or redundant
MODEL = LAYERS + """
kind = architectures |class [CLASS, {ForConditionalGeneration: encoder-decoder, Model: encoder-decoder}]
vocab = vocab_size, decoder_vocab_size, two_vocabularies, share_encoder_decoder_embeddings |vocabularies
embed.scale = scale_embedding ?? false |{true: sqrt-width, false: none}
embed.tied = tie_word_embeddings ?? true
head.bias = logits_bias ?? false
?? {vocab_size: 50265}
ignore _num_labels, bad_words_ids, classif_dropout, classifier_dropout, early_stopping, extra_pos_embeddings,
    force_bos_token_to_be_generated, length_penalty, min_length, no_repeat_ngram_size, num_beams, output_past, prefix,
    save_step
"""  # fmt: skip
POST_NORM = """
encoder.wiring: post-norm
decoder.wiring: post-norm
"""
# learned positions after two unused rows, and the sum of embeddings normalised, on either side
EMBEDDINGS = """
embed.positions: {kind: learned, offset: 2}
embed.positions.length = max_position_embeddings ?? 1024
embed.norm: {kind: layer}
source_embed.positions: {kind: learned, offset: 2}
source_embed.positions.length <- max_position_embeddings
source_embed.scale <- scale_embedding |{true: sqrt-width, false: none}
source_embed.tied <- tie_word_embeddings
source_embed.norm: {kind: layer}
normalize_embedding in [true]
"""


def read_vocabularies(config: ConfigReader, line: Line) -> Tree | int:
    vocab: int = config["vocab_size"]
    target = config.get("decoder_vocab_size") or vocab
    if config.get("two_vocabularies", not config.get("share_encoder_decoder_embeddings", True)):
        return {"source": vocab, "target": target}
    if target != vocab:
        config.problems.append(f"decoder_vocab_size: {target} differs from vocab_size, but the sides share one matrix")
    return vocab


def write_vocabularies(ours: ModelTree, line: Line) -> Tree:
    vocab = ours["vocab"]
    apart = isinstance(vocab, dict)
    source, target = (vocab["source"], vocab["target"]) if apart else (vocab, vocab)
    found = {"vocab_size": source, "decoder_vocab_size": target, "two_vocabularies": apart}
    found["share_encoder_decoder_embeddings"] = not apart
    return found if line.argument == "separate" else {key: found[key] for key in ("vocab_size", "two_vocabularies")}


CONVERSIONS = {"vocabularies": Conversion(read_vocabularies, write_vocabularies)}
SHARED, SOURCE, TARGET = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
BIAS, OUTPUT = "final_logits_bias", "lm_head.weight"


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Only the weights tell whether the two sides have separate token matrices, and whether the bias of the logits,
    which is never trained, is nonzero. Copies are dropped."""
    prefix = "" if any(name.startswith("model.") for name in weights) else "model."  # files of a headless model omit it
    found = {prefix + name: tensor for name, tensor in weights.items()}
    shared = found.get(SHARED)
    source, target = (found.pop(side, shared) for side in (SOURCE, TARGET))
    apart = source is not None and target is not None and not _same(source, target)
    if target is not None:
        found |= {TARGET: target, SOURCE: source} if apart and source is not None else {TARGET: target}
    if shared is not None and target is not None and _same(shared, target):
        del found[SHARED]
    bias = found.get(BIAS)
    full = {**config, "two_vocabularies": apart, "logits_bias": bias is not None and bool(bias.any())}
    if OUTPUT not in found and is_headless(config):
        full["tie_word_embeddings"] = True  # no head to tie
    if apart and OUTPUT in found and target is not None and _same(found[OUTPUT], target):
        full["tie_word_embeddings"] = True  # their flag only covers a single matrix
    return untie_if_different(full, found, OUTPUT, TARGET), found


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.equal(other)


def finish(config: HfConfig, weights: Weights, has_bias: bool = True) -> tuple[HfConfig, Weights]:
    """One matrix is called `shared`. Two come with a third, unused one, and the head is written even where it is a
    copy: they tie all or none. Only Marian has two matrices without a third. `has_bias`: their files have a bias of
    the logits, usually zeros."""
    found, written = (
        {**weights},
        {key: value for key, value in config.items() if key not in ("two_vocabularies", "logits_bias")},
    )
    target = found.pop(TARGET)
    if SHARED in found and "share_encoder_decoder_embeddings" in written:
        written["share_encoder_decoder_embeddings"] = True
    if SOURCE in found and written.get("share_encoder_decoder_embeddings", True):
        written["tie_word_embeddings"] = False
        found = {SHARED: found[SOURCE].clone(), OUTPUT: target.clone(), TARGET: target, **found}
    elif SOURCE in found:
        found = {TARGET: target, **found}
    elif written.get("tie_word_embeddings", True):
        found = {SHARED: target, **found}
    else:
        found = {SHARED: target, SOURCE: target.clone(), TARGET: target.clone(), **found}
    if is_headless(config):
        found = {name.removeprefix("model."): tensor for name, tensor in found.items() if name not in (OUTPUT, BIAS)}
    elif has_bias:
        found.setdefault(BIAS, target.new_zeros(1, len(target)))
    return written, found


ENC, DEC = "model.encoder.layers.{n}", "model.decoder.layers.{n}"
BODY = """
embed.tokens.weight = model.decoder.embed_tokens.weight
embed.positions.weight = model.decoder.embed_positions.weight
encoder.blocks.{n}.sublayers.mixer.out.* = ENC.self_attn.out_proj.*
encoder.blocks.{n}.sublayers.channel.up.* = ENC.fc1.*
encoder.blocks.{n}.sublayers.channel.down.* = ENC.fc2.*
encoder.blocks.{n}.wiring.norms.0.* = ENC.self_attn_layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = ENC.final_layer_norm.*
encoder.end.* = model.encoder.layer_norm.*
decoder.blocks.{n}.sublayers.mixer.out.* = DEC.self_attn.out_proj.*
decoder.blocks.{n}.sublayers.cross.q.* = DEC.encoder_attn.q_proj.*
decoder.blocks.{n}.sublayers.cross.out.* = DEC.encoder_attn.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = DEC.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = DEC.fc2.*
decoder.blocks.{n}.wiring.norms.0.* = DEC.self_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.1.* = DEC.encoder_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.2.* = DEC.final_layer_norm.*
decoder.end.* = model.decoder.layer_norm.*
""".replace("ENC", ENC).replace("DEC", DEC)
LINES = BODY + """
embed.norm.* = model.decoder.layernorm_embedding.*
source_embed.tokens.weight = model.encoder.embed_tokens.weight
source_embed.positions.weight = model.encoder.embed_positions.weight
source_embed.norm.* = model.encoder.layernorm_embedding.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = ENC.self_attn.q_proj.* + ENC.self_attn.k_proj.* + ENC.self_attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = DEC.self_attn.q_proj.* + DEC.self_attn.k_proj.* + DEC.self_attn.v_proj.*
decoder.blocks.{n}.sublayers.cross.kv.* = DEC.encoder_attn.k_proj.* + DEC.encoder_attn.v_proj.*
head.weight = lm_head.weight
head.bias = final_logits_bias |row
""".replace("ENC", ENC).replace("DEC", DEC)  # fmt: skip
PRESERVED_WEIGHTS = (SHARED, BIAS)
TRANSFORMS = {"row": ROW}


def family(
    name: str,
    architecture: str,
    fields: str,
    conversions: Mapping[str, Conversion] | None = None,
    ignore: Sequence[str] = (),
    preserve: Sequence[str] = (),
    has_bias: bool = True,
    **other: Any,
) -> Family:
    """A relative; `architecture`: the prefix of its classes; `has_bias`: see `finish`."""
    lines = LINES if has_bias else LINES.replace("head.bias = final_logits_bias |row", "")
    return Family(
        name,
        ConfigTable(fields.replace("CLASS", architecture), {**CONVERSIONS, **(conversions or {})}),
        lines,
        (OUTPUT, *ignore),
        TRANSFORMS,
        prepare,
        (*PRESERVED_WEIGHTS, *preserve),
        **({"finish": partial(finish, has_bias=has_bias)} | other),
    )


FAMILY = family("bart", "Bart", MODEL + POST_NORM + EMBEDDINGS)
