"""DeiT (Touvron et al. 2021): ViT with a distillation token. The class without a teacher reads the class token only;
the other averages the predictions of both tokens."""

from __future__ import annotations

from allyouneed.interop.families import vit
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig

TEACHER_CLASS = "ForImageClassificationWithTeacher"
FIELDS = vit.FIELDS + f"""
embed = image_size, patch_size |patches 2
embed.distillation_token: true
head.kind = classes |classes [{TEACHER_CLASS}]
head<classes>.distilled <- architectures |distilled
"""  # fmt: skip


def has_teacher(config: HfConfig) -> bool:
    return bool((config.get("architectures") or [""])[0].endswith(TEACHER_CLASS))


def write_architecture(ours: ModelTree, line: Line) -> list[str]:
    if ours.get("head.labels") is None:
        return ["DeiTModel"]
    return [f"DeiT{TEACHER_CLASS if ours.get('head.distilled') else 'ForImageClassification'}"]


CONVERSIONS = vit.CONVERSIONS | {
    "architecture": Conversion(lambda config, line: None, write_architecture),
    "distilled": Conversion(lambda config, line: has_teacher(config)),
}
TEACHER = """
head.classes.* = cls_classifier.*
head.distilled.* = distillation_classifier.*
"""


def lines(config: HfConfig) -> str:
    found = vit.LINES.replace("vit.", "deit.")
    found += "embed.distillation_token.weight = deit.embeddings.distillation_token |row\n"
    return found.replace("head.classes.* = classifier.*", TEACHER) if has_teacher(config) else found


FAMILY = Family(
    "deit", ConfigTable(FIELDS, CONVERSIONS), lines, (), vit.TRANSFORMS, vit.prepare, vit.PRESERVED_WEIGHTS, vit.finish
)
