"""Whisper (Radford et al. 2022). Its files store the encoder's sinusoids, which ours computes."""

from __future__ import annotations

from allyouneed.config import tree_of
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import check_sinusoids, is_headless, sinusoid_table, untie_if_different
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights
from allyouneed.nn.positions.absolute import Sinusoidal

# used only in training, generation, alignment or other tasks; scale_embedding has no effect
IGNORED_KEYS = (
    "*_layerdrop", "*suppress_tokens", "apply_spec_augment", "classifier_proj_size", "init_std", "is_encoder_decoder",
    "mask_*", "max_source_positions", "median_filter_width", "num_hidden_layers", "scale_embedding",
    "use_weighted_layer_sum", "forced_decoder_ids",
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "activation_function": "gelu",
    "d_model": 384,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "max_target_positions": 448,
}
SINUSOIDS = Sinusoidal(order="halves", closed=True)


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    config.require("tie_word_embeddings", True)
    config.require_architecture("ForConditionalGeneration", "WhisperModel")
    return {
        "kind": "encoder-decoder",
        "vocab": config["vocab_size"],
        "width": config["d_model"],
        "dropout": config["dropout"],
        "source_embed": {"kind": "frames", "mels": config["num_mel_bins"], "positions": tree_of(SINUSOIDS)},
        "embed": {"positions": {"kind": "learned", "length": config["max_target_positions"]}, "scale": "none"},
        "encoder": [_layer(config, "encoder")],
        "decoder": [_layer(config, "decoder")],
    }


def _layer(config: ConfigReader, side: str) -> Tree:
    attention = {
        "kind": "attention",
        "heads": config[f"{side}_attention_heads"],
        "bias": {"k": False},
        "dropout": config["attention_dropout"],
    }
    channel = {
        "kind": "ffn",
        "hidden": config[f"{side}_ffn_dim"],
        "activation": config.activation("activation_function"),
        "dropout": config["activation_dropout"],
    }
    layer = {"repeat": config[f"{side}_layers"], "wiring": "pre-norm", "mixer": attention, "channel": channel}
    return layer if side == "encoder" else layer | {"mixer": attention | {"pattern": "causal"}, "cross": attention}


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


def hf_config(ours: ModelTree) -> Tree:
    found: Tree = {
        "vocab_size": ours["vocab"],
        "num_mel_bins": ours["source_embed.mels"],
        "activation_function": ours.activation("encoder.channel.activation"),
        "d_model": ours["width"],
        "dropout": ours.get("dropout", 0.0),
        "attention_dropout": ours.get("encoder.mixer.dropout", 0.0),
        "activation_dropout": ours.get("encoder.channel.dropout", 0.0),
        "max_source_positions": DEFAULT_POSITIONS,
        "max_target_positions": ours["embed.positions.length"],
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
    }
    for side in ("encoder", "decoder"):
        found |= {
            f"{side}_layers": ours.depth(side),
            f"{side}_attention_heads": ours[f"{side}.mixer.heads"],
            f"{side}_ffn_dim": ours[f"{side}.channel.hidden"],
        }
    return found


DEFAULT_POSITIONS = 1500  # of 20 ms
TABLE = "model.encoder.embed_positions.weight"
LINES = """
embed.tokens.weight = model.decoder.embed_tokens.weight
embed.positions.weight = model.decoder.embed_positions.weight
source_embed.first.* = model.encoder.conv1.*
source_embed.second.* = model.encoder.conv2.*
encoder.blocks.{n}.sublayers.mixer.q.* = ENC.self_attn.q_proj.*
encoder.blocks.{n}.sublayers.mixer.k.* = ENC.self_attn.k_proj.*
encoder.blocks.{n}.sublayers.mixer.v.* = ENC.self_attn.v_proj.*
encoder.blocks.{n}.sublayers.mixer.out.* = ENC.self_attn.out_proj.*
encoder.blocks.{n}.sublayers.channel.up.* = ENC.fc1.*
encoder.blocks.{n}.sublayers.channel.down.* = ENC.fc2.*
encoder.blocks.{n}.wiring.norms.0.* = ENC.self_attn_layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = ENC.final_layer_norm.*
encoder.end.* = model.encoder.layer_norm.*
decoder.blocks.{n}.sublayers.mixer.q.* = DEC.self_attn.q_proj.*
decoder.blocks.{n}.sublayers.mixer.k.* = DEC.self_attn.k_proj.*
decoder.blocks.{n}.sublayers.mixer.v.* = DEC.self_attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = DEC.self_attn.out_proj.*
decoder.blocks.{n}.sublayers.cross.q.* = DEC.encoder_attn.q_proj.*
decoder.blocks.{n}.sublayers.cross.k.* = DEC.encoder_attn.k_proj.*
decoder.blocks.{n}.sublayers.cross.v.* = DEC.encoder_attn.v_proj.*
decoder.blocks.{n}.sublayers.cross.out.* = DEC.encoder_attn.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = DEC.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = DEC.fc2.*
decoder.blocks.{n}.wiring.norms.0.* = DEC.self_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.1.* = DEC.encoder_attn_layer_norm.*
decoder.blocks.{n}.wiring.norms.2.* = DEC.final_layer_norm.*
decoder.end.* = model.decoder.layer_norm.*
""".replace("ENC", "model.encoder.layers.{n}").replace("DEC", "model.decoder.layers.{n}")
IGNORED_WEIGHTS = ("proj_out.weight",)
FAMILY = Family(
    "whisper", tree, LINES, IGNORED_WEIGHTS, prepare=prepare, preserve=(TABLE,), hf_config=hf_config, finish=finish
)
