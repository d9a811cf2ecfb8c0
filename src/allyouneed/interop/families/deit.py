"""DeiT (Touvron et al. 2021): ViT with a second learned token, which learned from a teacher. Their class without a
teacher reads the class token only; the other takes the mean of what both tokens say."""

from __future__ import annotations

from allyouneed.interop.families.vit import (
    CHANGES,
    DEFAULTS,
    HARMLESS,
    LINES,
    SPARE,
    completed,
    tree_with,
    undone,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs

TAUGHT = "ForImageClassificationWithTeacher"


def is_taught(config: Theirs) -> bool:
    return bool((config.get("architectures") or [""])[0].endswith(TAUGHT))


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    found = tree_with(config, learned=2)
    return found | {"head": found["head"] | {"distilled": True}} if is_taught(config) else found


def back(said: Said) -> Tree:
    return words(said, "DeiT", TAUGHT if said.get("head.distilled") else "ForImageClassification")


TEACHER = """
head.classes.* = cls_classifier.*
head.distilled.* = distillation_classifier.*
"""


def lines(config: Theirs) -> str:
    found = (
        LINES.replace("vit.", "deit.") + "embed.distillation_token.weight = deit.embeddings.distillation_token |row\n"
    )
    return found.replace("head.classes.* = classifier.*", TEACHER) if is_taught(config) else found


FAMILY = Family("deit", tree, lines, (), CHANGES, completed, SPARE, back, undone)
