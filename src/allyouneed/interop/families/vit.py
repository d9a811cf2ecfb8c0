"""ViT (Dosovitskiy et al. 2021), and what DeiT shares with it. The pooler of the headless class is dropped: it is
untrained."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, is_headless
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree
from allyouneed.interop.hf.transforms import ROW
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform, Weights

FIELDS = """
kind: encoder
width = hidden_size ?? 768
dropout = hidden_dropout_prob ?? 0.0
norm: {kind: layer}
norm.eps = layer_norm_eps ?? 1.0e-12
embed.kind: patches
embed.positions: {kind: learned}
embed = image_size, patch_size |patches
embed.channels = num_channels ?? 3
embed.distillation_token: false
encoder.repeat = num_hidden_layers ?? 12
encoder.wiring: pre-norm
encoder.mixer: {kind: attention}
encoder.mixer.heads = num_attention_heads ?? 12
encoder.mixer.bias = qkv_bias ?? true |{true: true, false: {q: false, k: false, v: false}}
encoder.mixer.dropout = attention_probs_dropout_prob ?? 0.0
encoder.channel: {kind: ffn}
encoder.channel.hidden = intermediate_size ?? 3072
encoder.channel.activation = hidden_act ?? gelu |activation
head.kind = classes |classes
head -> architectures |architecture
head<classes>: {dropout: 0.0}
head<classes>.labels <- classes
head<classes>.labels -> id2label, label2id |labels
?? {image_size: 224, patch_size: 16}
ignore encoder_stride, pooler_*
"""


def _sides(value: int | list[int]) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    return height, width


def read_patches(config: ConfigReader, line: Line) -> Tree:
    """One position for each patch, and for each token that is learned: the class token, and DeiT's."""
    (height, width), (down, across) = _sides(config["image_size"]), _sides(config["patch_size"])
    return {
        "image": [height, width] if height != width else height,
        "patch": [down, across] if down != across else down,
        "positions": {"length": (height // down) * (width // across) + (line.argument or 1)},
    }


def read_classes(config: ConfigReader, line: Line) -> str:
    """Only the weights tell the number of classes, if any: see `prepare`."""
    config.require_architecture("ForImageClassification", "Model", *(line.argument or ()))
    return "none" if config.get(line.key) is None else "classes"


def write_architecture(ours: ModelTree, line: Line) -> list[str]:
    return ["ViTModel" if ours.get("head.labels") is None else "ViTForImageClassification"]


CONVERSIONS = {
    "architecture": Conversion(lambda config, line: None, write_architecture),
    "classes": Conversion(read_classes, lambda ours, line: ours.get("head.labels", OMITTED)),
    "patches": Conversion(
        read_patches, lambda ours, line: {"image_size": ours["embed.image"], "patch_size": ours["embed.patch"]}
    ),
}


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Files of the headless model omit `vit.`; only the weights tell the number of classes, if any."""
    if "embeddings.cls_token" in weights:
        weights = {f"{config['model_type']}.{name}": tensor for name, tensor in weights.items()}
    found = [weights[name] for name in ("classifier.weight", "cls_classifier.weight") if name in weights]
    return {**config, "classes": len(found[0]) if found else None}, weights


def finish(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """The headless class requires a pooler; ours has none, so it is written as zeros."""
    body = f"{config['model_type']}."
    found, width = {**weights}, config.get("hidden_size", 768)
    if is_headless(config):
        size = config.get("pooler_output_size") or width
        like = next(iter(weights.values()))
        pooler = {"weight": like.new_zeros(size, width), "bias": like.new_zeros(size)}
        found = {f"{body}pooler.dense.{kind}": tensor for kind, tensor in pooler.items()} | found
        found = {name.removeprefix(body): tensor for name, tensor in found.items()}
    return {key: value for key, value in config.items() if key != "classes"}, found


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
    return (config.get("num_channels", 3), *_sides(config.get("patch_size", 16)))


FLAT = TensorTransform(
    lambda tensor, config: tensor.flatten(1), lambda tensor, config: tensor.unflatten(1, patch_shape(config))
)
TRANSFORMS = {"flat": FLAT, "row": ROW}
PRESERVED_WEIGHTS = ("*.pooler.*",)
FAMILY = Family("vit", ConfigTable(FIELDS, CONVERSIONS), LINES, (), TRANSFORMS, prepare, PRESERVED_WEIGHTS, finish)
