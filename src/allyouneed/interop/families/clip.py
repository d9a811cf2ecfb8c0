"""CLIP (Radford et al. 2021). The text vector is taken at the end token: the last one of a row with `lengths`,
otherwise the first `eos_token_id`, or, in folders with the `eos_token_id` 2 of the first release, the largest id."""

from __future__ import annotations

from copy import copy

from torch import nn

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import EquivalentModel, Family, HfConfig, TensorTransform
from allyouneed.nn.models.base import Model

# used only in training, or redundant; older files repeat the towers' configs
IGNORED_KEYS = ("initializer_factor", "logit_scale_init_value", "text_config_dict", "vision_config_dict")
DEFAULTS = {"projection_dim": 512}
TOWER_DEFAULTS = {"num_hidden_layers": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0}
DEFAULT_END = 49407
TEXT_DEFAULTS = TOWER_DEFAULTS | {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "eos_token_id": DEFAULT_END,
}
FIRST_END = 2  # in the first release, whose end token is not 2 but the last of the vocabulary
IMAGE_DEFAULTS = TOWER_DEFAULTS | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
# a tower's own projection_dim has no effect in CLIPModel; the rest are generation options and keys of older files
TOWER_HARMLESS = (
    "*_no_repeat_ngram_size", "add_cross_attention", "bad_words_ids", "diversity_penalty", "do_sample", "dropout",
    "early_stopping", "initializer_factor", "is_decoder", "is_encoder_decoder", "length_penalty", "min_length",
    "no_repeat_ngram_size", "num_beam*", "num_return_sequences", "prefix", "projection_dim", "repetition_penalty",
    "temperature", "tie_*", "top_*", "typical_p",
)  # fmt: skip


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    config.require_architecture("CLIPModel")
    text, image = config.nested("text_config"), config.nested("vision_config")
    text.set_defaults(TEXT_DEFAULTS)
    image.set_defaults(IMAGE_DEFAULTS)
    width = config["projection_dim"]
    patches = (image["image_size"] // image["patch_size"]) ** 2
    found = {
        "kind": "two-towers",
        "width": width,
        "image": _tower(image, width, "full", "first")
        | {
            "embed": {
                "kind": "patches",
                "image": image["image_size"],
                "patch": image["patch_size"],
                "channels": image["num_channels"],
                "bias": False,
                "norm": {"kind": "layer", "eps": image["layer_norm_eps"]},
                "positions": {"kind": "learned", "length": patches + 1},
            }
        },
        "text": _tower(text, width, "causal", "last")
        | {
            "vocab": text["vocab_size"],
            "embed": {
                "positions": {"kind": "learned", "length": text["max_position_embeddings"]},
                "scale": "none",
                "tied": False,
            },
        },
        "end": "largest" if text["eos_token_id"] == FIRST_END else text["eos_token_id"],
    }
    for tower in (text, image):
        tower.refuse_unread(*TOWER_HARMLESS)
    return found


def _tower(config: ConfigReader, width: int, pattern: str, pool: str) -> Tree:
    return {
        "width": config["hidden_size"],
        "norm": {"kind": "layer", "eps": config["layer_norm_eps"]},
        "encoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": "pre-norm",
                "mixer": {
                    "kind": "attention",
                    "heads": config["num_attention_heads"],
                    "pattern": pattern,
                    "dropout": config["attention_dropout"],
                },
                "channel": {
                    "kind": "ffn",
                    "hidden": config["intermediate_size"],
                    "activation": config.activation("hidden_act"),
                },
            }
        ],
        "head": {"kind": "pooled", "pool": pool, "width": width},
    }


def hf_config(ours: ModelTree) -> Tree:
    end = ours.get("end")
    return {
        "projection_dim": ours["width"],
        "architectures": ["CLIPModel"],
        "text_config": _tower_fields(ours, "text")
        | {
            "model_type": "clip_text_model",
            "vocab_size": ours["text.vocab"],
            "max_position_embeddings": ours["text.embed.positions.length"],
            **({} if end == DEFAULT_END else {"eos_token_id": FIRST_END if end == "largest" else end}),
        },
        "vision_config": _tower_fields(ours, "image")
        | {
            "model_type": "clip_vision_model",
            "image_size": ours["image.embed.image"],
            "patch_size": ours["image.embed.patch"],
            "num_channels": ours["image.embed.channels"],
        },
    }


def _tower_fields(ours: ModelTree, tower: str) -> Tree:
    return {
        "hidden_size": ours[f"{tower}.width"],
        "num_hidden_layers": ours.depth(f"{tower}.encoder"),
        "num_attention_heads": ours[f"{tower}.encoder.mixer.heads"],
        "intermediate_size": ours[f"{tower}.encoder.channel.hidden"],
        "hidden_act": ours.activation(f"{tower}.encoder.channel.activation"),
        "layer_norm_eps": ours[f"{tower}.norm.eps"],
        "attention_dropout": ours.get(f"{tower}.encoder.mixer.dropout", 0.0),
        "projection_dim": ours["width"],
    }


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
    vision = IMAGE_DEFAULTS | config["vision_config"]
    return vision["num_channels"], vision["patch_size"], vision["patch_size"]


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


FAMILY = Family(
    "clip",
    tree,
    LINES + IMAGE + TEXT,
    IGNORED_WEIGHTS,
    TRANSFORMS,
    hf_config=hf_config,
    equivalent=EquivalentModel(config_with_end, model_with_end),
)
