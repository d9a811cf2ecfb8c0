"""Whisper (Radford et al. 2022). Its encoder's table of positions holds sinusoids, which ours computes."""

from __future__ import annotations

from allyouneed.config import tree_of
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import bare, refuse_other_sinusoids, sinusoids, unless_tied
from allyouneed.interop.hf.weight_table import Family, Theirs, Weights
from allyouneed.nn.positions.absolute import Sinusoidal

# what only training, generation, alignment or another task looks at; scale_embedding is read there and never used
HARMLESS = (
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


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    config.only("tie_word_embeddings", True)
    config.classes("ForConditionalGeneration", "WhisperModel")
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


def _layer(config: Reader, side: str) -> Tree:
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


def checked(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Files of the model without its head leave `model.` out; an encoder with trained positions is refused, and so is a
    head of its own."""
    if "encoder.conv1.weight" in weights:
        weights = {f"model.{name}": tensor for name, tensor in weights.items()}
    if TABLE in weights:
        refuse_other_sinusoids(weights[TABLE], SINUSOIDS, "whisper: the encoder's positions")
    return unless_tied(config, weights, "proj_out.weight", "model.decoder.embed_tokens.weight"), weights


def with_positions(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Their encoder has a table of the places of 30 seconds, which ours computes."""
    found = {**weights}
    if TABLE not in found:
        table = sinusoids(SINUSOIDS, config.get("max_source_positions", PLACES), config["d_model"])
        found[TABLE] = table.to(next(iter(weights.values())))
    config = {**config, "max_source_positions": len(found[TABLE])}
    if bare(config):
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    return config, found


def back(said: Said) -> Tree:
    found: Tree = {
        "vocab_size": said["vocab"],
        "num_mel_bins": said["source_embed.mels"],
        "activation_function": said.activation("encoder.channel.activation"),
        "d_model": said["width"],
        "dropout": said.get("dropout", 0.0),
        "attention_dropout": said.get("encoder.mixer.dropout", 0.0),
        "activation_dropout": said.get("encoder.channel.dropout", 0.0),
        "max_source_positions": PLACES,
        "max_target_positions": said["embed.positions.length"],
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
    }
    for side in ("encoder", "decoder"):
        found |= {
            f"{side}_layers": said.depth(side),
            f"{side}_attention_heads": said[f"{side}.mixer.heads"],
            f"{side}_ffn_dim": said[f"{side}.channel.hidden"],
        }
    return found


PLACES = 1500  # of 20 ms each
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
IGNORE = ("proj_out.weight",)
FAMILY = Family("whisper", tree, LINES, IGNORE, before=checked, spare=(TABLE,), back=back, after=with_positions)
