"""Whisper (Radford et al. 2022). Its files store the encoder's sinusoids, which ours computes."""

from __future__ import annotations

from allyouneed.interop.families.bart import BODY, DEC, ENC, LAYERS
from allyouneed.interop.hf.config_reader import is_headless
from allyouneed.interop.hf.config_table import ConfigTable
from allyouneed.interop.hf.transforms import check_sinusoids, sinusoid_table, untie_if_different
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights
from allyouneed.nn.positions.absolute import Sinusoidal

# ignored keys are used only in training, generation, alignment or other tasks; scale_embedding has no effect
FIELDS = LAYERS + """
kind = architectures |class [Whisper, {ForConditionalGeneration: encoder-decoder, WhisperModel: encoder-decoder}]
tie_word_embeddings in [true]
source_embed: {kind: frames, positions: {kind: sinusoidal, order: halves, closed: true}}
source_embed.mels = num_mel_bins ?? 80
embed: {positions: {kind: learned}, scale: none}
embed.positions.length = max_target_positions ?? 448
encoder.mixer: {kind: attention, bias: {k: false}}
decoder.mixer: {kind: attention, bias: {k: false}, pattern: causal}
decoder.cross: {kind: attention, bias: {k: false}}
-> {max_source_positions: 1500}
?? {vocab_size: 51865, d_model: 384, dropout: 0.0, encoder_layers: 4, decoder_layers: 4}
?? {encoder_attention_heads: 6, decoder_attention_heads: 6, encoder_ffn_dim: 1536, decoder_ffn_dim: 1536}
ignore *suppress_tokens, apply_spec_augment, classifier_proj_size, mask_*, max_source_positions, median_filter_width,
    scale_embedding, use_weighted_layer_sum, forced_decoder_ids
"""  # fmt: skip
SINUSOIDS = Sinusoidal(order="halves", closed=True)
DEFAULT_POSITIONS = 1500  # of 20 ms


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Files of the headless model omit `model.`; an encoder with trained positions and an untied head are refused."""
    if "encoder.conv1.weight" in weights:
        weights = {f"model.{name}": tensor for name, tensor in weights.items()}
    if TABLE in weights:
        check_sinusoids(weights[TABLE], SINUSOIDS, "whisper: the encoder's positions")
    return untie_if_different(config, weights, "proj_out.weight", "model.decoder.embed_tokens.weight"), weights


def finish(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Add the encoder's position table for 30 seconds, which ours computes."""
    found = {**weights}
    if TABLE not in found:
        table = sinusoid_table(SINUSOIDS, config.get("max_source_positions", DEFAULT_POSITIONS), config["d_model"])
        found[TABLE] = table.to(next(iter(weights.values())))
    config = {**config, "max_source_positions": len(found[TABLE])}
    if is_headless(config):
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    return config, found


TABLE = "model.encoder.embed_positions.weight"
LINES = BODY + """
source_embed.first.* = model.encoder.conv1.*
source_embed.second.* = model.encoder.conv2.*
encoder.blocks.{n}.sublayers.mixer.q.* = ENC.self_attn.q_proj.*
encoder.blocks.{n}.sublayers.mixer.k.* = ENC.self_attn.k_proj.*
encoder.blocks.{n}.sublayers.mixer.v.* = ENC.self_attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.q.* = DEC.self_attn.q_proj.*
decoder.blocks.{n}.sublayers.mixer.k.* = DEC.self_attn.k_proj.*
decoder.blocks.{n}.sublayers.mixer.v.* = DEC.self_attn.v_proj.*
decoder.blocks.{n}.sublayers.cross.k.* = DEC.encoder_attn.k_proj.*
decoder.blocks.{n}.sublayers.cross.v.* = DEC.encoder_attn.v_proj.*
""".replace("ENC", ENC).replace("DEC", DEC)  # fmt: skip
IGNORED_WEIGHTS = ("proj_out.weight",)
FAMILY = Family(
    "whisper", ConfigTable(FIELDS), LINES, IGNORED_WEIGHTS, prepare=prepare, preserve=(TABLE,), finish=finish
)
