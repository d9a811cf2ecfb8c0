"""How a folder of theirs wants its images: preprocessor_config.json, or the part of processor_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError

FILES = ("preprocessor_config.json", "processor_config.json")
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
BICUBIC, BILINEAR = FILTERS.index("bicubic"), FILTERS.index("bilinear")
HALF = [0.5, 0.5, 0.5]
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# what each kind takes where its file says nothing
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}, "resample": BILINEAR, "image_mean": HALF, "image_std": HALF},
    "DeiT": {
        "size": {"height": 256, "width": 256},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "image_mean": HALF,
        "image_std": HALF,
    },
    "CLIP": {
        "size": {"shortest_edge": 224},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
}
KNOWN = {
    "do_resize",
    "do_rescale",
    "do_normalize",
    "rescale_factor",
    *(key for tree in DEFAULTS.values() for key in tree),
}
# how the file was made, where arrays lie and come from, which channel comes first in what was given
HARMLESS = {"feature_extractor_type", "image_processor_type", "processor_class", "do_convert_rgb", "default_to_square",
            "device", "data_format", "input_data_format", "return_tensors", "auto_map", "image_seq_length",
            "disable_grouping", "_valid_processor_keys", "use_fast"}  # fmt: skip


def read(path: Path, family: str, channels: int = 3) -> dict[str, Any]:
    """The keys of `data.image.Pixels`. Where the folder has no such file, or one that asks for what is not known here,
    only `lacks`, which says so: the model can be given pixels, but no images."""
    said = raw(path)
    if not said:
        return {"lacks": f"it does not say how images are prepared ({FILES[0]} is missing)"}
    try:
        return tree(said, family, channels)
    except UserError as error:
        return {"lacks": str(error)}


def raw(path: Path) -> dict[str, Any]:
    """Their words; processor_config.json holds those of several processors."""
    for name in FILES:
        file = path / name
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{file}: cannot be read: {error}") from None
            found = found.get("image_processor", found) if isinstance(found, dict) else None
            if not isinstance(found, dict):
                raise UserError(f"{file}: not a config (an object of keys)")
            if name == FILES[0] or "image_mean" in found or "size" in found:
                return found
    return {}


def tree(said: Mapping[str, Any], family: str, channels: int = 3) -> dict[str, Any]:
    """Of a family: vit, deit or clip, unless the file itself says which kind it is."""
    kinds = {kind.lower(): kind for kind in DEFAULTS}
    named = str(said.get("image_processor_type") or said.get("feature_extractor_type") or "")
    kind = next((word for word in ("DeiT", "CLIP", "ViT") if named.startswith(word)), kinds.get(family))
    if kind is None:
        raise UserError(f"preprocessor_config.json: images of {named or family} are not known here")
    told = DEFAULTS[kind] | {key: value for key, value in said.items() if value is not None}
    strange = [key for key, value in said.items() if value and key not in KNOWN | HARMLESS]
    if strange:
        raise UserError(f"preprocessor_config.json: {', '.join(strange)}: not known here, and may change the image")
    found: dict[str, Any] = {"channels": channels}
    if told.get("do_resize", True):
        found |= {"size": _size(told["size"], kind), "filter": _filter(told["resample"])}
    if told.get("do_center_crop", False):
        found["crop"] = _sides(told["crop_size"])
    found["scale"] = told.get("rescale_factor", 1 / 255) if told.get("do_rescale", True) else None
    if told.get("do_normalize", True):
        found |= {name: _each(told[f"image_{name}"], channels) for name in ("mean", "std")}
    return found


def _size(said: Any, kind: str) -> int | list[int]:
    """A number is the shorter side in CLIP and a square in the others."""
    if isinstance(said, Mapping) and set(said) == {"shortest_edge"}:
        return int(said["shortest_edge"])
    if isinstance(said, int) and kind == "CLIP":
        return said
    return _sides(said)


def _sides(said: Any) -> list[int]:
    if isinstance(said, int):
        return [said, said]
    if isinstance(said, Mapping) and set(said) == {"height", "width"}:
        return [int(said["height"]), int(said["width"])]
    if isinstance(said, list | tuple) and len(said) == 2:
        return [int(side) for side in said]
    raise UserError(f"preprocessor_config.json: a size of {said!r} is not known here")


def _filter(said: Any) -> str:
    if isinstance(said, int) and 0 <= said < len(FILTERS):
        return FILTERS[said]
    raise UserError(f"preprocessor_config.json: resample: {said!r} is not known here (0 to {len(FILTERS) - 1} are)")


def _each(said: Any, channels: int) -> list[float]:
    values = [float(said)] * channels if isinstance(said, int | float) else [float(value) for value in said]
    if len(values) != channels:
        raise UserError(
            f"preprocessor_config.json: {len(values)} means or deviations for images of {channels} channels"
        )
    return values
