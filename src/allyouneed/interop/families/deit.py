"""DeiT (Touvron et al. 2021): ViT with a distillation token. The class without a teacher reads the class token only;
the other averages the predictions of both tokens."""

from __future__ import annotations

from allyouneed.interop.families.vit import (
    DEFAULTS,
    IGNORED_KEYS,
    LINES,
    PRESERVED_WEIGHTS,
    TRANSFORMS,
    build_tree,
    config_fields,
    finish,
    prepare,
)
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig

TEACHER_CLASS = "ForImageClassificationWithTeacher"


def has_teacher(config: HfConfig) -> bool:
    return bool((config.get("architectures") or [""])[0].endswith(TEACHER_CLASS))


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    found = build_tree(config, learned=2)
    return found | {"head": found["head"] | {"distilled": True}} if has_teacher(config) else found


def hf_config(ours: ModelTree) -> Tree:
    return config_fields(ours, "DeiT", TEACHER_CLASS if ours.get("head.distilled") else "ForImageClassification")


TEACHER = """
head.classes.* = cls_classifier.*
head.distilled.* = distillation_classifier.*
"""


def lines(config: HfConfig) -> str:
    found = (
        LINES.replace("vit.", "deit.") + "embed.distillation_token.weight = deit.embeddings.distillation_token |row\n"
    )
    return found.replace("head.classes.* = classifier.*", TEACHER) if has_teacher(config) else found


FAMILY = Family("deit", tree, lines, (), TRANSFORMS, prepare, PRESERVED_WEIGHTS, hf_config, finish)
