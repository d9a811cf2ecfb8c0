"""CLIP (Radford et al. 2021). The text vector is taken at the end token: the last one of a row with `lengths`,
otherwise the first `eos_token_id`, or, in folders with the `eos_token_id` 2 of the first release, the largest id."""

from __future__ import annotations

from copy import copy

from torch import nn

from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree
from allyouneed.interop.hf.weight_table import EquivalentModel, Family, HfConfig, TensorTransform
from allyouneed.nn.models.base import Model

DEFAULT_END = 49407
FIRST_END = 2  # in the first release, whose end token is not 2 but the last of the vocabulary
# ignored keys are used only in training, or redundant; older files repeat the towers' configs
FIELDS = """
width = projection_dim ?? 512
kind = architectures |class ["", {CLIPModel: two-towers}]
end = text_config.eos_token_id |end
ignore initializer_factor, logit_scale_init_value, text_config_dict, vision_config_dict
"""
# a tower's own projection_dim has no effect in CLIPModel; the rest are generation options and keys of older files
TOWER_FIELDS = """
OURS.width = CONFIG.hidden_size ?? 512
OURS.norm: {kind: layer}
OURS.norm.eps = CONFIG.layer_norm_eps ?? 1.0e-5
OURS.encoder.repeat = CONFIG.num_hidden_layers ?? 12
OURS.encoder.wiring: pre-norm
OURS.encoder.mixer: {kind: attention}
OURS.encoder.mixer.heads = CONFIG.num_attention_heads ?? 8
OURS.encoder.mixer.dropout = CONFIG.attention_dropout ?? 0.0
OURS.encoder.channel: {kind: ffn}
OURS.encoder.channel.hidden = CONFIG.intermediate_size ?? 2048
OURS.encoder.channel.activation = CONFIG.hidden_act ?? quick_gelu |activation
OURS.head: {kind: pooled}
OURS.head.width <- projection_dim
width -> CONFIG.projection_dim
"""
TOWER_IGNORED = """
    *_no_repeat_ngram_size add_cross_attention bad_words_ids diversity_penalty do_sample dropout early_stopping
    initializer_factor is_decoder is_encoder_decoder length_penalty min_length no_repeat_ngram_size num_beam*
    num_return_sequences prefix projection_dim repetition_penalty temperature tie_* top_* typical_p
"""
TEXT_FIELDS = """
-> {text_config: {model_type: clip_text_model}}
text.vocab = text_config.vocab_size ?? 49408
text.embed: {positions: {kind: learned}, scale: none, tied: false}
text.embed.positions.length = text_config.max_position_embeddings ?? 77
text.encoder.mixer.pattern: causal
text.head.pool: last
"""
IMAGE_FIELDS = """
-> {vision_config: {model_type: clip_vision_model}}
?? {vision_config.hidden_size: 768, vision_config.intermediate_size: 3072, vision_config.num_attention_heads: 12}
?? {vision_config.image_size: 224, vision_config.patch_size: 32, text_config.eos_token_id: 49407}
image.embed: {kind: patches, bias: false, norm: {kind: layer}, positions: {kind: learned}}
image.embed.image = vision_config.image_size
image.embed.patch = vision_config.patch_size
image.embed.channels = vision_config.num_channels ?? 3
image.embed.norm.eps <- vision_config.layer_norm_eps
image.embed.positions.length <- vision_config.image_size, vision_config.patch_size |patches
image.encoder.mixer.pattern: full
image.head.pool: first
"""
for _ours, _config, _own in ("image", "vision_config", IMAGE_FIELDS), ("text", "text_config", TEXT_FIELDS):
    FIELDS += TOWER_FIELDS.replace("OURS", _ours).replace("CONFIG", _config) + _own
    FIELDS += "ignore " + ", ".join(f"{_config}.{key}" for key in TOWER_IGNORED.split()) + "\n"


def read_end(config: ConfigReader, line: Line) -> str | int:
    end: int = config[line.key]
    return "largest" if end == FIRST_END else end


def write_end(ours: ModelTree, line: Line) -> int | object:
    end: int | str | None = ours.get("end")
    return OMITTED if end == DEFAULT_END else FIRST_END if end == "largest" else end


def patches(config: ConfigReader, line: Line) -> int:
    count: int = (config["vision_config.image_size"] // config["vision_config.patch_size"]) ** 2
    return count + 1


LINES = """
log_scale = logit_scale
image.embed.project.weight = vision_model.embeddings.patch_embedding.weight |flat
image.embed.class_token.weight = vision_model.embeddings.class_embedding |row
image.embed.positions.weight = vision_model.embeddings.position_embedding.weight
image.embed.norm.* = vision_model.pre_layrnorm.*
image.encoder.end.* = vision_model.post_layernorm.*
image.head.project.weight = visual_projection.weight
text.embed.tokens.weight = text_model.embeddings.token_embedding.weight
text.embed.positions.weight = text_model.embeddings.position_embedding.weight
text.encoder.end.* = text_model.final_layer_norm.*
text.head.project.weight = text_projection.weight
"""
TOWER = """
OURS.encoder.blocks.{n}.sublayers.mixer.qkv.* = ATT.q_proj.* + ATT.k_proj.* + ATT.v_proj.*
OURS.encoder.blocks.{n}.sublayers.mixer.out.* = ATT.out_proj.*
OURS.encoder.blocks.{n}.sublayers.channel.up.* = LAYER.mlp.fc1.*
OURS.encoder.blocks.{n}.sublayers.channel.down.* = LAYER.mlp.fc2.*
OURS.encoder.blocks.{n}.wiring.norms.0.* = LAYER.layer_norm1.*
OURS.encoder.blocks.{n}.wiring.norms.1.* = LAYER.layer_norm2.*
""".replace("ATT", "LAYER.self_attn")
IMAGE = TOWER.replace("OURS", "image").replace("LAYER", "vision_model.encoder.layers.{n}")
TEXT = TOWER.replace("OURS", "text").replace("LAYER", "text_model.encoder.layers.{n}")


def patch_shape(config: HfConfig) -> tuple[int, int, int]:
    """(channels, height, width) of a patch; ours is flat."""
    vision = config["vision_config"]
    side = vision.get("patch_size", 32)
    return vision.get("num_channels", 3), side, side


TRANSFORMS = {
    "flat": TensorTransform(
        lambda tensor, config: tensor.flatten(1), lambda tensor, config: tensor.unflatten(1, patch_shape(config))
    ),
    "row": TensorTransform(lambda tensor, config: tensor[None], lambda tensor, config: tensor[0]),
}
IGNORED_WEIGHTS = ("*.position_ids",)


def config_with_end(ours: Model) -> Model:
    """A model without a rule only reads texts with `lengths`, for which every rule gives the same."""
    return ours.model_copy(update={"end": DEFAULT_END}) if getattr(ours, "end", DEFAULT_END) is None else ours


def model_with_end(model: nn.Module) -> nn.Module:
    found = copy(model)
    assert isinstance(model.config, Model)
    found.config = config_with_end(model.config)  # type: ignore[assignment]
    return found


CONVERSIONS = {"end": Conversion(read_end, write_end), "patches": Conversion(patches)}
FAMILY = Family(
    "clip",
    ConfigTable(FIELDS, CONVERSIONS),
    LINES + IMAGE + TEXT,
    IGNORED_WEIGHTS,
    TRANSFORMS,
    equivalent=EquivalentModel(config_with_end, model_with_end),
)
