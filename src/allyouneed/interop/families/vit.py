"""ViT (Dosovitskiy et al. 2021). The pooler that comes with the bare model is left out: nothing was trained with it."""

from __future__ import annotations

from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family, Theirs, Weights

HARMLESS = ("encoder_stride", "pooler_*")
DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    (height, width), (down, across) = _sides(config["image_size"]), _sides(config["patch_size"])
    classes = config.get("classes")
    return {
        "kind": "encoder",
        "width": config["hidden_size"],
        "dropout": config["hidden_dropout_prob"],
        "norm": {"kind": "layer", "eps": config["layer_norm_eps"]},
        "embed": {
            "kind": "patches",
            "image": [height, width] if height != width else height,
            "patch": [down, across] if down != across else down,
            "channels": config["num_channels"],
            "positions": {"kind": "learned", "length": (height // down) * (width // across) + 1},
        },
        "encoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": "pre-norm",
                "mixer": {
                    "kind": "attention",
                    "heads": config["num_attention_heads"],
                    "bias": config.choose("qkv_bias", {True: True, False: {"q": False, "k": False, "v": False}}),
                    "dropout": config["attention_probs_dropout_prob"],
                },
                "channel": {
                    "kind": "ffn",
                    "hidden": config["intermediate_size"],
                    "activation": config.activation("hidden_act"),
                },
            }
        ],
        "head": "none" if classes is None else {"kind": "classes", "labels": classes, "dropout": 0.0},
    }


def _sides(value: int | list[int]) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    return height, width


def completed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Files of the bare model leave `vit.` out; only the weights tell whether, and into how many classes, it sorts."""
    if "embeddings.cls_token" in weights:
        weights = {f"vit.{name}": tensor for name, tensor in weights.items()}
    classifier = weights.get("classifier.weight")
    return {**config, "classes": None if classifier is None else len(classifier)}, weights


LINES = """
embed.project.weight = vit.embeddings.patch_embeddings.projection.weight |flat
embed.project.bias = vit.embeddings.patch_embeddings.projection.bias
embed.class_token.weight = vit.embeddings.cls_token |row
embed.positions.weight = vit.embeddings.position_embeddings |row
encoder.blocks.{n}.sublayers.mixer.qkv.* = LAYER.query.* + LAYER.key.* + LAYER.value.*
encoder.blocks.{n}.sublayers.mixer.out.* = vit.encoder.layer.{n}.attention.output.dense.*
encoder.blocks.{n}.sublayers.channel.up.* = vit.encoder.layer.{n}.intermediate.dense.*
encoder.blocks.{n}.sublayers.channel.down.* = vit.encoder.layer.{n}.output.dense.*
encoder.blocks.{n}.wiring.norms.0.* = vit.encoder.layer.{n}.layernorm_before.*
encoder.blocks.{n}.wiring.norms.1.* = vit.encoder.layer.{n}.layernorm_after.*
encoder.end.* = vit.layernorm.*
head.classes.* = classifier.*
""".replace("LAYER", "vit.encoder.layer.{n}.attention.attention")
CHANGES = {"flat": lambda tensor, config: tensor.flatten(1), "row": lambda tensor, config: tensor[0]}

FAMILY = Family("vit", tree, LINES, ("vit.pooler.*",), CHANGES, completed)
