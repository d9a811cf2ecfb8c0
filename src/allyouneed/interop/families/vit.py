"""ViT (Dosovitskiy et al. 2021), and what DeiT shares with it. The pooler of the headless class is dropped: it is
untrained."""

from __future__ import annotations

from allyouneed.interop.families.bert import label_fields
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import ROW, is_headless
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform, Weights

IGNORED_KEYS = ("encoder_stride", "pooler_*")
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


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    return build_tree(config, learned=1)


def build_tree(config: ConfigReader, learned: int) -> Tree:
    """An encoder of patches after `learned` learned tokens: the class token, and the distillation token."""
    config.require_architecture(
        "ForImageClassification", "Model", *(["ForImageClassificationWithTeacher"] if learned > 1 else [])
    )
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
            "distillation_token": learned > 1,
            "positions": {"kind": "learned", "length": (height // down) * (width // across) + learned},
        },
        "encoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": "pre-norm",
                "mixer": {
                    "kind": "attention",
                    "heads": config["num_attention_heads"],
                    "bias": config.map_value("qkv_bias", {True: True, False: {"q": False, "k": False, "v": False}}),
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


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Files of the headless model omit `vit.`; only the weights tell the number of classes, if any."""
    if "embeddings.cls_token" in weights:
        weights = {f"{config['model_type']}.{name}": tensor for name, tensor in weights.items()}
    found = [weights[name] for name in ("classifier.weight", "cls_classifier.weight") if name in weights]
    return {**config, "classes": len(found[0]) if found else None}, weights


def finish(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """The headless class requires a pooler; ours has none, so it is written as zeros."""
    body = f"{config['model_type']}."
    found, width = {**weights}, config.get("hidden_size", DEFAULTS["hidden_size"])
    if is_headless(config):
        size = config.get("pooler_output_size") or width
        like = next(iter(weights.values()))
        pooler = {"weight": like.new_zeros(size, width), "bias": like.new_zeros(size)}
        found = {f"{body}pooler.dense.{kind}": tensor for kind, tensor in pooler.items()} | found
        found = {name.removeprefix(body): tensor for name, tensor in found.items()}
    return {key: value for key, value in config.items() if key != "classes"}, found


def config_fields(ours: ModelTree, name: str, end: str) -> Tree:
    """ViT's config for our encoder; `name`: the prefix of its classes, `end`: the suffix of the one with a head."""
    labels, bias = ours.get("head.labels"), ours.get("encoder.mixer.bias")
    found = {
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("encoder"),
        "num_attention_heads": ours["encoder.mixer.heads"],
        "intermediate_size": ours["encoder.channel.hidden"],
        "hidden_act": ours.activation("encoder.channel.activation"),
        "hidden_dropout_prob": ours.get("dropout", 0.0),
        "attention_probs_dropout_prob": ours.get("encoder.mixer.dropout", 0.0),
        "layer_norm_eps": ours["norm.eps"],
        "image_size": ours["embed.image"],
        "patch_size": ours["embed.patch"],
        "num_channels": ours["embed.channels"],
        "qkv_bias": bias["q"] if isinstance(bias, dict) else bool(bias),
        "architectures": [f"{name}Model" if labels is None else f"{name}{end}"],
    }
    return found if labels is None else found | label_fields(labels) | {"classes": labels}


def hf_config(ours: ModelTree) -> Tree:
    return config_fields(ours, "ViT", "ForImageClassification")


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


def patch_shape(config: HfConfig) -> tuple[int, int, int]:
    """(channels, height, width) of a patch; ours is flat."""
    return (
        config.get("num_channels", DEFAULTS["num_channels"]),
        *_sides(config.get("patch_size", DEFAULTS["patch_size"])),
    )


FLAT = TensorTransform(
    lambda tensor, config: tensor.flatten(1), lambda tensor, config: tensor.unflatten(1, patch_shape(config))
)
TRANSFORMS = {"flat": FLAT, "row": ROW}
PRESERVED_WEIGHTS = ("*.pooler.*",)

FAMILY = Family("vit", tree, LINES, (), TRANSFORMS, prepare, PRESERVED_WEIGHTS, hf_config, finish)
